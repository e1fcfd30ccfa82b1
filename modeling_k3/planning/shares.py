"""A plan for several memories: accelerators, each with a budget of its own, and main memory."""

from collections.abc import Mapping
from typing import Any

from modeling_k3.byte_sizes import parse_size
from modeling_k3.planning.kernels import kernel_bytes
from modeling_k3.planning.plan import (
    TENSORS_PER_EXPERT,
    MemoryPlan,
    MemoryPlanError,
    base_workload,
    expert_floor,
    plan_memory,
)
from modeling_k3.planning.shape import Source, read_shape
from modeling_k3.planning.sizes import format_bytes, itemsize
from modeling_k3.planning.state import state_sizes
from modeling_k3.planning.workload import INDEX_ENTRY, PROCESS, memory_table


def plan_shares(
    source: Source, budgets: Mapping[Any, int | str], *, experts: str = "auto", prefill_chunk: int = 2048, **use: Any
) -> MemoryPlan:
    """Find how a model runs within one budget for each memory.

    States and working set are counted once for each accelerator, which is the most they can take there. What is left
    is for weights: all of them on the accelerators, or else the dense part there and in main memory, and experts
    mapped, with the rest of main memory for those that are resident.

    Args:
        source, experts, use: see `plan_memory`, which serves "cpu" alone.
        budgets: number of an accelerator, or "cpu" -> bytes, e.g. {0: "80GiB", "cpu": "200GiB"}.
        prefill_chunk: tokens of a row at once.

    Raises:
        MemoryPlanError: the dense part, or two experts for each token of a layer, do not fit.
        ValueError: no "cpu", other keys, no size; see `plan_memory`.
    """
    limits = {key: parse_size(size, f"budget[{key!r}]") for key, size in budgets.items()}
    if "cpu" not in limits or any(type(key) is not int for key in limits.keys() - {"cpu"}):
        raise ValueError(f"budget={dict(budgets)!r} must have 'cpu', and beside it numbers of accelerators only")
    if set(limits) == {"cpu"}:
        return plan_memory(source, limits["cpu"], experts=experts, prefill_chunk=prefill_chunk, **use)
    shape = read_shape(source)
    base = base_workload(shape, experts=experts, prefill_chunk=prefill_chunk, **use)
    if base.mode != "infer" or base.dense != "full":
        raise ValueError(f"mode={base.mode!r}, dense={base.dense!r} with accelerators; allowed are 'infer' and 'full'")
    item, table = itemsize(base.dtype), memory_table(shape, base)
    live = sum(table["state"].values()) + sum(table["working"].values())
    rooms: dict[Any, int] = {key: max(0, limit - live) for key, limit in limits.items() if key != "cpu"}
    own = {"Python and torch": PROCESS, "compiled kernels": kernel_bytes(shape, base)}
    total = table["weights"].pop("routed experts")
    dense, on_devices = sum(table["weights"].values()), sum(rooms.values())
    fits, held = dense + total <= on_devices, total
    index = 0 if fits else TENSORS_PER_EXPERT * shape.experts * shape.num_moe * INDEX_ENTRY
    if not fits:
        # Layers are placed whole, so that the end of each accelerator may stay empty.
        held = limits["cpu"] - sum(own.values()) - index - max(0, dense - on_devices)
    floor = min(total, expert_floor(shape, item, base))
    if held < floor or limits["cpu"] < sum(own.values()):
        short = max(floor - held, sum(own.values()) - limits["cpu"])
        raise MemoryPlanError(
            f"{shape.name} with {base.context} tokens of context and batch {base.batch} does not fit in "
            f"{ {key: format_bytes(limit) for key, limit in limits.items()} }: 'cpu' lacks {format_bytes(short)}"
        )
    held = min(held, total)
    for group in ("state", "working"):
        table[group] = {name: size * len(rooms) for name, size in table[group].items()}
    table["weights"]["routed experts"], table["process"] = held, {**own, "index of the files": index}
    place = "none" if not shape.experts else "memory" if fits else "mapped"
    rooms["cpu"] = max(0, limits["cpu"] - sum(own.values()) - index - (0 if fits else held))
    latent = 0 if fits else state_sizes(shape, base.batch, item).latent_per_token
    return MemoryPlan(
        shape.name, sum(limits.values()), base, "memory", place, held, total, latent, table, max_memory=rooms
    )
