"""A plan for several memories: accelerators, each with a budget of its own, and main memory."""

from collections.abc import Mapping
from typing import Any

from modeling_k3.byte_sizes import parse_size
from modeling_k3.planning.components import largest_layer_bytes
from modeling_k3.planning.kernels import kernel_bytes
from modeling_k3.planning.plan import (
    CHUNKS,
    TENSORS_PER_EXPERT,
    WORKING_SHARE,
    MemoryPlan,
    MemoryPlanError,
    base_workload,
    check_forms,
    expert_floor,
    plan_memory,
    shorter,
)
from modeling_k3.planning.shape import Shape, Source, read_shape
from modeling_k3.planning.sizes import format_bytes, itemsize
from modeling_k3.planning.state import state_sizes
from modeling_k3.planning.workload import INDEX_ENTRY, PROCESS, Workload, memory_table


def plan_shares(
    source: Source,
    budgets: Mapping[Any, int | str],
    *,
    experts: str = "auto",
    prefill_chunk: int | None = None,
    **use: Any,
) -> MemoryPlan:
    """Find how a model runs within one budget for each memory.

    States and working set are counted once for each accelerator, which is the most they can take there. What is left
    is for weights: all of them on the accelerators, or else the dense part there and in main memory, and experts
    mapped, with the rest of main memory for those that are resident.

    Args:
        source, experts, prefill_chunk, use: see `plan_memory`, which serves "cpu" alone.
        budgets: number of an accelerator, or "cpu" -> bytes, e.g. {0: "80GiB", "cpu": "200GiB"}.

    Raises:
        MemoryPlanError: states and working set, the dense part, or two experts for each token of a layer, do not fit;
            names each memory that lacks something, and budgets or a context that would do.
        ValueError: no "cpu", other keys, no size; see `plan_memory`.
    """
    limits = {key: parse_size(size, f"budget[{key!r}]") for key, size in budgets.items()}
    if "cpu" not in limits or any(type(key) is not int for key in limits.keys() - {"cpu"}):
        raise ValueError(f"budget={dict(budgets)!r} must have 'cpu', and beside it numbers of accelerators only")
    if set(limits) == {"cpu"}:
        return plan_memory(source, limits["cpu"], experts=experts, prefill_chunk=prefill_chunk, **use)
    shape = read_shape(source)
    base = base_workload(shape, experts=experts, **use)
    if base.mode != "infer" or base.dense != "full" or base.experts not in ("full", "mxfp4"):
        raise ValueError(f"mode={base.mode!r}, dense={base.dense!r}, experts={base.experts!r} with accelerators; "
                         "allowed are 'infer', 'full', and 'full' or 'mxfp4'")  # fmt: skip
    check_forms(source, shape, base)
    chunks = CHUNKS if prefill_chunk is None else (prefill_chunk,)
    found = _first_fit(shape, limits, base, chunks)
    if found is None:
        raise _too_little(shape, limits, base, chunks)
    return found


def _first_fit(shape: Shape, limits: dict[Any, int], base: Workload, chunks: tuple[int, ...]) -> MemoryPlan | None:
    """As `plan_memory` chooses: pieces whose working set stays below a share of each accelerator, else what fits."""
    fitting = []
    room = WORKING_SHARE * min(limit for key, limit in limits.items() if key != "cpu") * (len(limits) - 1)
    for chunk in chunks:
        plan = _arrange(shape, limits, base.change(prefill_chunk=chunk))[0]
        if plan is not None and sum(plan.table["working"].values()) <= room:
            return plan
        fitting += [plan] if plan is not None else []
    return fitting[0] if fitting else None


def _arrange(
    shape: Shape, limits: dict[Any, int], use: Workload
) -> tuple[MemoryPlan | None, dict[Any, tuple[int, str]]]:
    """The plan with these pieces, or None and what each memory lacks: bytes, and what for."""
    item, table = itemsize(use.dtype), memory_table(shape, use)
    live = sum(table["state"].values()) + sum(table["working"].values())
    rooms: dict[Any, int] = {key: max(0, limit - live) for key, limit in limits.items() if key != "cpu"}
    lacks = {key: (live - limits[key], "states and the working set") for key in rooms if live > limits[key]}
    own = {"Python and torch": PROCESS, "compiled kernels": kernel_bytes(shape, use)}
    total = table["weights"].pop("routed experts")
    dense, on_devices = sum(table["weights"].values()), sum(rooms.values())
    fits, held, index = dense + total <= on_devices, total, 0
    left = limits["cpu"] - sum(own.values())
    if not fits:
        index = TENSORS_PER_EXPERT * shape.experts * shape.num_moe * INDEX_ENTRY
        # Layers are placed whole, so that the end of each accelerator may stay empty.
        usable = sum(max(0, room - largest_layer_bytes(shape, item, use.dense)) for room in rooms.values())
        held = left = left - index - max(0, dense - usable)
    floor = min(total, expert_floor(shape, item, use)) if not fits else 0
    if left < floor:
        lacks["cpu"] = (floor - left, "the process, weights that accelerators have no room for, and experts at work")
    if lacks:
        return None, lacks
    held = min(held, total)
    for group in ("state", "working"):
        table[group] = {name: size * len(rooms) for name, size in table[group].items()}
    table["weights"]["routed experts"], table["process"] = held, {**own, "index of the files": index}
    place = "none" if not shape.experts else "memory" if fits else "mapped"
    rooms["cpu"] = max(0, limits["cpu"] - sum(own.values()) - index - (0 if fits else held))
    latent = 0 if fits else state_sizes(shape, use.batch, item).latent_per_token
    budget = sum(limits.values())
    return MemoryPlan(shape.name, budget, use, "memory", place, held, total, latent, table, max_memory=rooms), {}


def _too_little(shape: Shape, limits: dict[Any, int], base: Workload, chunks: tuple[int, ...]) -> MemoryPlanError:
    """Say what each memory lacks with the smallest pieces, and the nearest that fits."""
    use = base.change(prefill_chunk=chunks[-1])
    lacks, more, least = _arrange(shape, limits, use)[1], dict(limits), None
    while least is None:
        for key, (short, _) in _arrange(shape, more, use)[1].items():
            more[key] += short
        least = _arrange(shape, more, use)[0]
    smaller = shorter(base, lambda use: _first_fit(shape, limits, use, chunks))
    each = [f"{key!r} lacks {format_bytes(short)} for {what}" for key, (short, what) in lacks.items()]
    message = (
        f"{shape.name} with {base.context} tokens of context and batch {base.batch} does not fit in "
        f"{_written(limits)}: {', '.join(each)}; it fits in {_written(more)}"
    )
    if smaller is not None:
        message += f", and with {smaller.use.context} tokens of context in what there is"
    return MemoryPlanError(message, smaller or least)


def _written(limits: dict[Any, int]) -> str:
    return str({key: format_bytes(limit) for key, limit in limits.items()})
