"""Numbers of bytes: read, written, and how wide each number format is."""

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
#: Bytes per number of what a model can be computed in.
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Turn "24GiB", "300 MB" or a number into bytes.

    Raises:
        ValueError: anything else, or nothing at all.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if isinstance(size, bool) or not found or found[2].upper() not in _UNITS:
        raise ValueError(f"{name}={size!r} is no size; allowed are numbers of bytes, and e.g. '24GiB' or '300MB'")
    count = int(float(found[1]) * _UNITS[found[2].upper()])
    if count < 1:
        raise ValueError(f"{name}={size!r} must be above 0")
    return count


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
