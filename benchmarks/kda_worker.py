"""One contender of `benchmarks/kda.py` in a process of its own: reads cases as JSON lines, answers with JSON lines.

What breaks a peer is blocked before it is imported: transformers' Kimi Linear takes fla's kernels when triton can be
imported, and dies on a CPU.
"""

import contextlib
import ctypes
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

KEY_DIM = 128
Run = Callable[..., tuple[Tensor, Tensor]]


def ours(name: str) -> Run:
    """A path of this package, with the bound of the released gate where it is used."""
    from modeling_k3 import kda_ops

    if name != "chunk":
        return getattr(kda_ops, f"{name}_kda")
    return lambda *inputs: kda_ops.chunk_kda(*inputs, lower_bound=-5.0)


def transformers_native() -> Run:
    """The plain torch fallback of transformers' Kimi Linear."""
    for blocked in ("triton", "fla", "kernels"):
        sys.modules[blocked] = None
    from transformers.models.kimi_linear import modeling_kimi_linear

    function = modeling_kimi_linear.chunk_kimi_delta_attention
    # The decorator that looks for a kernel keeps the function itself here.
    function = getattr(function, "__wrapped__", function)
    return lambda q, k, v, g, beta: function(q, k, v, g, beta, output_final_state=True)


def fla_naive() -> Run:
    """fla's naive chunk form, taken from its file: the package around it does not import without triton."""
    package = importlib.util.find_spec("fla")
    if package is None or package.origin is None:
        raise ImportError("flash-linear-attention is not installed")
    path = Path(package.origin).parent / "ops" / "kda" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_kda", path)
    if spec is None or spec.loader is None:
        raise ImportError("this version of fla has no ops/kda/naive.py")
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *inputs: module.naive_chunk_kda(*inputs, output_final_state=True)


CONTENDERS: dict[str, Callable[[], Run]] = {
    "chunk": lambda: ours("chunk"),
    "recurrent": lambda: ours("recurrent"),
    "exact": lambda: ours("exact"),
    "native": transformers_native,
    "fla naive": fla_naive,
}


def case_inputs(length: int, heads: int, backward: bool) -> list[Tensor]:
    """Seeded inputs of one row: unit keys, gates spread over (-5, 0), beta in (0, 1)."""
    generator = torch.Generator().manual_seed(length * 31 + heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v, gate = (normal(1, length, heads, KEY_DIM) for _ in range(4))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    inputs = [q, k, v, -5 * torch.sigmoid(3 * gate), normal(1, length, heads).sigmoid()]
    return [x.requires_grad_() for x in inputs] if backward else inputs


def once(run: Run, inputs: list[Tensor], backward: bool) -> float:
    """Seconds of one forward, or of one forward and backward."""
    start = time.perf_counter()
    if backward:
        o, state = run(*inputs)
        torch.autograd.grad(o.sum() + state.sum(), inputs)
    else:
        with torch.no_grad():
            run(*inputs)
    return time.perf_counter() - start


def matmul_rate(size: int = 1024, repeats: int = 5) -> float:
    """FLOP/s of a plain fp32 matrix product of this machine, now."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds)


def _memory(field: str) -> int:
    """Bytes of a line of this process's status, 0 where the system has none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def _reset_peak() -> None:
    """Give freed memory back, so that a run cannot hide in it, and start a new high-water mark."""
    # Without glibc what earlier cases freed counts as if it were still in use.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    # Without this file the peak is that of the whole process, an upper bound.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def main() -> None:
    """Answer cases until the input ends. The first run of a case is for warming up and for its peak memory."""
    try:
        run = CONTENDERS[sys.argv[1]]()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    held: tuple[object, list[Tensor]] | None = None
    for line in sys.stdin:
        case = json.loads(line)
        key = (case["length"], case["heads"], case["backward"])
        answer: dict[str, float] = {}
        if held is None or held[0] != key:
            held = None
            held = (key, case_inputs(*key))
            _reset_peak()
            before = _memory("VmRSS")
            once(run, held[1], case["backward"])
            answer["peak_extra_bytes"] = max(0, _memory("VmHWM") - before)
        rate = matmul_rate()
        answer["seconds"] = once(run, held[1], case["backward"])
        answer["matmul_flops"] = (rate + matmul_rate()) / 2
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
