"""What the disk and the memory of this machine give, and how long a decode step of a loaded model should take there.

The formula is that of `expected`, for a short context.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modeling_k3 import K3Cache, K3Config, K3ForCausalLM
from modeling_k3.experts import K3Experts, iter_experts
from modeling_k3.planning.expected import Machine, expert_layer

_SAMPLE = 96 << 20
_PIECE = 2 << 20


def measure_machine(folder: str | os.PathLike, *, use_known: bool = True) -> Machine:
    """Measure disk and memory, in about two seconds; remembered for this machine, disk and number of threads.

    Args:
        folder: on the disk that will be read; a temporary file is written there.
        use_known: take what was measured earlier.
    """
    key = f"{platform.node()} {os.stat(folder).st_dev} {torch.get_num_threads()} {torch.__version__}"
    store = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "modeling_k3" / "machine.json"
    try:
        known = json.loads(store.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    if use_known and set(known.get(key, ())) == {field.name for field in fields(Machine)}:
        return Machine(**known[key])
    with torch.no_grad():
        packed, expert_call = _experts()
        disk, read_cost = _disk(Path(folder))
        found = Machine(disk, _memory(), packed, expert_call, _layer(), _flops(), read_cost)
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps({**known, key: asdict(found)}, indent=2), encoding="utf-8")
    except OSError:
        # A home that cannot be written to: measured again next time.
        pass
    return found


def expected_step(model: K3ForCausalLM, machine: Machine, *, is_cold: bool = False) -> dict[str, float]:
    """Expected seconds of one decode step of one row with a short context.

    Args:
        model: loaded, experts in their place.
        machine: see `measure_machine`.
        is_cold: no expert is in memory, as at the first step.

    Returns:
        `seconds`, of which `compute` and `reading` overlap; `bytes_read`; `share_missing`.
    """
    own = {id(parameter) for _, module in iter_experts(model) for parameter in module.parameters()}
    table = {id(model.get_input_embeddings().weight)}
    dense = sum(p.nbytes for p in model.parameters() if id(p) not in own | table)
    seconds = compute = reading = read = 0.0
    modules = [module for _, module in iter_experts(model)]
    total = sum(module.mapped_bytes() for module in modules)
    residency = model.expert_residency
    missing = 0.0 if residency is None or not total else max(0.0, 1 - residency.limit / total)
    missing = 1.0 if is_cold else missing
    for module in modules:
        # As they are stored: MXFP4 is expanded before it is multiplied.
        stored = module.mapped_bytes() or sum(parameter.nbytes for parameter in module.parameters())
        size, used = stored / module.num_experts, model.config.num_experts_per_token
        is_packed = 8 * stored < 5 * module.count_weights()
        rate = machine.packed if is_packed else machine.memory
        both, here, there = expert_layer(machine, used, size, missing, rate)
        seconds, compute, reading = seconds + both, compute + here, reading + there
        read += missing * used * size
    fixed = len(model.model.layers) * machine.layer_call + dense / machine.memory
    return {
        "seconds": fixed + seconds,
        "compute": fixed + compute,
        "reading": reading,
        "bytes_read": read,
        "share_missing": missing,
    }


def _best(step: Callable[[], Any], times: int) -> float:
    """The median of a few runs: what the machine gives, not what it could."""
    step()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return sorted(found)[times // 2]


def _disk(folder: Path) -> tuple[float, float]:
    """Bytes per second, and processor seconds per byte that the products lose while all cores are theirs."""
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(_SAMPLE // _PIECE):
            file.write(os.urandom(_PIECE))
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        # Each piece into memory that is new, as that of an expert.
        targets, start, busy = [], time.perf_counter(), time.thread_time()
        # As experts are read: the next one asked for before this one is waited for.
        for first in range(0, _SAMPLE, _PIECE):
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), first + _PIECE, _PIECE, os.POSIX_FADV_WILLNEED)
            for half in (first, first + _PIECE // 2):
                targets.append(bytearray(_PIECE // 2))
                file.seek(half)
                file.readinto(targets[-1])
        rate, cost = _SAMPLE / (time.perf_counter() - start), (time.thread_time() - busy) / _SAMPLE
    return rate, cost if torch.get_num_threads() >= (os.cpu_count() or 1) else 0.0


def _memory() -> float:
    matrices = [torch.zeros(4096, 4096, dtype=torch.bfloat16) for _ in range(3)]
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    seconds = _best(lambda: [nn.functional.linear(x, matrix) for matrix in matrices], 5)
    return sum(matrix.nbytes for matrix in matrices) / seconds


def _flops() -> float:
    matrix, x = (torch.zeros(n, 2048, dtype=torch.bfloat16) for n in (2048, 512))
    return 2 * matrix.numel() * len(x) / _best(lambda: nn.functional.linear(x, matrix), 5)


def _experts() -> tuple[float, float]:
    """Two sizes tell the bytes from the call."""
    (small, short), (large, long) = (_one_expert(width) for width in (128, 1024))
    rate = (large - small) / max(long - short, 1e-9)
    return rate, max(short - small / rate, 0.0)


def _one_expert(width: int) -> tuple[int, float]:
    """Bytes of a packed expert of this width, and seconds that it takes among the 8 of a token."""
    config = K3Config(
        num_experts=32, num_experts_per_token=8, moe_intermediate_size=width, routed_expert_hidden_size=width
    )
    experts = K3Experts(config)
    experts.use_storage("packed")
    for parameter in experts.parameters():
        parameter.fill_(120)
    z, chosen, weights = (
        torch.ones(1, width, dtype=torch.bfloat16),
        torch.arange(0, 32, 4).unsqueeze(0),
        torch.ones(1, 8),
    )
    size = sum(parameter.nbytes for parameter in experts.parameters()) // 32
    return size, _best(lambda: experts(z, chosen, weights), 5) / 8


def _layer() -> float:
    """A decode step of a model whose weights are nothing, by its layers; experts are counted elsewhere."""
    config = K3Config(vocab_size=64, num_hidden_layers=8, num_experts=None, dtype="bfloat16")
    model = K3ForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.zeros(1, 8, dtype=torch.long)
    cache = K3Cache(config)
    model(ids, cache=cache)
    return _best(lambda: model(ids[:, :1], cache=cache), 7) / len(model.model.layers)
