"""Which versions of Python, torch and transformers this code is for, and a plain word where others are found."""

import sys
from importlib.metadata import PackageNotFoundError, version

#: Lowest Python.
PYTHON = (3, 11)
#: Package -> lowest version, and the first that is too new (None: newer ones are let through). As in setup.cfg; of
#: tokenizers, safetensors and huggingface_hub transformers itself refuses, when imported, what it is not made for.
SUPPORTED: dict[str, tuple[str, str | None]] = {"torch": ("2.13", None), "transformers": ("5.24", "5.25")}


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version: "2.13.0+cpu" -> (2, 13, 0); what follows them is left out."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def check_versions() -> None:
    """Compare what is installed with what is supported. Reads metadata only and imports nothing.

    Raises:
        ImportError: Python, torch or transformers is missing or of another version; says which and what to do.
    """
    if sys.version_info < PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        low = ".".join(map(str, PYTHON))
        hint = f"an environment with it: python{low} -m venv .venv"
        raise ImportError(f"modeling_k3 needs Python {low} or newer and runs in {found}; {hint}")
    for name, (low, high) in SUPPORTED.items():
        wanted = f"{name}>={low}" + (f",<{high}" if high else "")
        try:
            found = version(name)
        except PackageNotFoundError:
            raise ImportError(f"modeling_k3 needs {wanted}, which is not installed: pip install '{wanted}'") from None
        if release(found) < release(low) or (high is not None and release(found) >= release(high)):
            raise ImportError(f"modeling_k3 needs {wanted} and found {name} {found}: pip install '{wanted}'")
