"""What Triton's interpreter lacks for fla's kernels, filled in before they are imported.

Each shim stands for one thing the interpreter does not do and a GPU does; none touches the arithmetic.
"""

import builtins
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Before triton is imported: it decides by this whether kernels are compiled.
os.environ["TRITON_INTERPRET"] = "1"


class _TritonInt(int):
    """An index with the method kernels call on one."""

    def to(self, *args: Any, **kwargs: Any) -> "_TritonInt":
        return self

    def __mul__(self, other: Any) -> Any:
        return _TritonInt(int(self) * int(other)) if isinstance(other, int) else int(self) * other

    __rmul__ = __mul__


def _range(*bounds: Any) -> Iterator[_TritonInt]:
    return (_TritonInt(i) for i in builtins.range(*[int(bound) for bound in bounds]))


def install() -> None:
    """Fill the gaps. Raises ImportError where fla or triton is missing: this test is not to be skipped."""
    language = importlib.import_module("triton.language")
    autotuner = importlib.import_module("triton.runtime.autotuner")
    # There is nothing to time: take the first configuration.
    autotuner.Autotuner._bench = lambda self, *args, config, **kwargs: [0.0, 0.0, 0.0]
    for name in ("fla.ops.common.chunk_delta_h", "fla.ops.attnres.fused"):
        importlib.import_module(name).range = _range
    intra = importlib.import_module("fla.ops.kda.chunk_intra")
    # Bound early, to what the interpreter replaces later.
    intra.gather = lambda *args, **kwargs: language.gather(*args, **kwargs)
    # The interpreter knows no split into bfloat16 parts; plain float32 is what that approximates.
    intra.SAFE_GATE_DOT_PRECISION = language.constexpr("ieee")


@contextmanager
def cpu_passes_for_cuda(patch: Any) -> Iterator[None]:
    """Inside, CPU tensors answer `is_cuda` as a kernel's guard wants it."""
    import torch

    with patch.context() as inside:
        inside.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
        yield
