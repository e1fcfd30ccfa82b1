"""Numbers of bytes as people write them. The one reader of them, and it needs no torch."""

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(size: int | str, name: str = "size") -> int:
    """Turn "5GB", "300 MiB" or a number into bytes.

    Args:
        size: a number with one of the units B, kB to TB, KiB to TiB, in any case of letters; without one, bytes.
        name: of the option, for the message.

    Raises:
        ValueError: anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if isinstance(size, bool) or not found or found[2].upper() not in _UNITS:
        raise ValueError(f"{name}={size!r} is no size; allowed are numbers of bytes, and e.g. '24GiB' or '300MB'")
    return int(float(found[1]) * _UNITS[found[2].upper()])
