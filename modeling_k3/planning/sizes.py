"""Numbers of bytes as they are written, and how wide each number format is."""

#: Bytes per number of what a model can be computed in.
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def format_bytes(count: int | float) -> str:
    """Write bytes with three digits, as "23.4 GiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            value = count / size
            return f"{value:.{max(0, 2 - len(str(int(abs(value)))) + 1)}f} {unit}"
    return f"{int(count)} B"


def itemsize(dtype: str, name: str = "dtype") -> int:
    """Bytes of one number of `dtype`.

    Raises:
        ValueError: no format a model is computed in.
    """
    if dtype not in ITEMSIZE:
        raise ValueError(f"{name}={dtype!r} is unknown; allowed are {sorted(ITEMSIZE)}")
    return ITEMSIZE[dtype]
