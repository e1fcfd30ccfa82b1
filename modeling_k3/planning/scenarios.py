"""Typical machines side by side: a laptop, one accelerator with much main memory, eight accelerators."""

from dataclasses import dataclass

from modeling_k3.planning.devices import split_layers
from modeling_k3.planning.plan import MemoryPlanError, base_workload, plan_memory
from modeling_k3.planning.shape import Source, read_shape
from modeling_k3.planning.shares import plan_shares
from modeling_k3.planning.sizes import format_bytes, itemsize
from modeling_k3.planning.state import state_sizes
from modeling_k3.planning.workload import working


@dataclass(frozen=True)
class Scenario:
    """One machine and what lies where on it.

    Args:
        title: the machine.
        memories: name -> (bytes there are, bytes by item).
        verdict: what it means in a sentence.
    """

    title: str
    memories: dict[str, tuple[int, dict[str, int]]]
    verdict: str


def scenarios(source: Source, context: int = 131072) -> list[Scenario]:
    """A laptop with 24 GiB, one 80 GiB accelerator with 512 GiB of main memory, eight with 288 GB each."""
    return [laptop(source, context, 24 << 30), one_gpu(source, context, 80 << 30, 512 << 30),
            eight_gpus(source, context, 8, 288 * 10**9)]  # fmt: skip


def laptop(source: Source, context: int, memory: int) -> Scenario:
    """Everything in main memory or in the files."""
    title = f"laptop, {format_bytes(memory)}, no GPU"
    try:
        plan = plan_memory(source, memory, context=context)
    except MemoryPlanError as error:
        return Scenario(title, {}, str(error))
    items = {name: size for group in plan.table.values() for name, size in group.items()}
    return Scenario(title, {"main memory": (memory, items)}, "; ".join(plan.notes) or "everything in memory")


def one_gpu(source: Source, context: int, device: int, memory: int) -> Scenario:
    """What `load_within(path, {0: device, "cpu": memory})` loads by."""
    title = f"one GPU of {format_bytes(device)}, {format_bytes(memory)} of main memory"
    try:
        plan = plan_shares(source, {0: device, "cpu": memory}, context=context)
    except MemoryPlanError as error:
        return Scenario(title, {}, str(error))
    held = dict(plan.table["weights"])
    resident = held.pop("routed experts")
    dense, is_mapped = sum(held.values()), plan.expert_place == "mapped"
    first = min(dense, plan.max_memory[0])
    on_device = {**plan.table["state"], **plan.table["working"], "dense part": first}
    in_memory = {**plan.table["process"], "dense part": dense - first}
    (in_memory if is_mapped else on_device)["routed experts"] = resident
    verdict = f"of {format_bytes(dense)} of dense weights {format_bytes(first)} on the GPU; "
    verdict += f"of {format_bytes(plan.expert_total)} of experts {format_bytes(resident)} "
    verdict += "in main memory, the rest mapped from the files" if is_mapped else "on the GPU"
    return Scenario(title, {"GPU": (device, on_device), "main memory": (memory, in_memory)}, verdict)


def eight_gpus(source: Source, context: int, count: int, device: int) -> Scenario:
    """Layers spread over accelerators."""
    shape = read_shape(source)
    use = base_workload(shape, context=context)
    count = min(count, len(shape.layers))
    split = split_layers(shape, use, count)
    title = f"{count} GPUs of {format_bytes(device)}"
    fullest = max(range(count), key=split.weight_bytes.__getitem__)
    stop = (*split.starts[1:], len(shape.layers))[fullest]
    piece = shape.layers[split.starts[fullest] : stop]
    sizes = state_sizes(shape, use.batch, itemsize(use.dtype))
    kda = sum(layer.is_kda for layer in piece)
    items = {
        "weights of its layers": split.weight_bytes[fullest],
        "KDA state": 2 * sizes.state * kda // max(1, shape.num_kda),
        "MLA latent": use.context * sizes.latent_per_token * (len(piece) - kda) // max(1, shape.num_mla),
        **working(shape, use),
    }
    fits = sum(items.values()) <= device
    where = "AttnRes block borders" if split.at_borders else "layers"
    verdict = f"cut at {where} {list(split.starts)}; the fullest takes {format_bytes(sum(items.values()))}: "
    verdict += "fits" if fits else "does not fit"
    return Scenario(title, {f"fullest of {count} GPUs": (device, items)}, verdict)
