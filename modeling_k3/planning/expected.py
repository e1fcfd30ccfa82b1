"""How long a plan should take on a machine whose disk and memory were measured. Nothing here needs torch.

    step = layers * call + dense bytes / where they are + (latents + 2 states) / memory + for each layer with experts:
           max(compute, reading) + first expert
    compute = U (expert call + expert bytes / packed) + flops / rate + read * read cost
    read    = share missing * U * bytes                                    reading = read / disk

U experts of a layer are used: R of them by one token, nearly all by a piece of a prompt. Reading runs beside the
products of the same layer, but takes processor time from them where no core is spare; the first expert is waited for.
The share missing is that of uniform routing, which is the worst case of a trained router and close to it.
"""

from dataclasses import dataclass

from modeling_k3.planning.components import iter_weights, one_expert_bytes, weight_bytes
from modeling_k3.planning.plan import MemoryPlan
from modeling_k3.planning.shape import Shape
from modeling_k3.planning.sizes import format_bytes, itemsize
from modeling_k3.planning.state import state_sizes


@dataclass(frozen=True)
class Machine:
    """What was measured.

    Args:
        disk: bytes per second of a file that is not in memory, in pieces the size of an expert.
        memory: bytes per second of a bfloat16 matrix times one vector, from memory.
        packed: bytes per second of packed experts expanded and multiplied with one vector.
        expert_call: seconds that an expert of no size takes.
        layer_call: seconds that a decoder layer of no size takes.
        flops: operations per second of a bfloat16 matrix times many vectors.
        read_cost: processor seconds that reading takes from the products for each byte; 0 where a core is spare.
    """

    disk: float
    memory: float
    packed: float
    expert_call: float
    layer_call: float
    flops: float
    read_cost: float


@dataclass(frozen=True)
class Expected:
    """Seconds that a plan should take.

    Args:
        step: of one decoded token of each row, with a full context.
        prefill: of a prompt as long as the context, without what its KDA and its norms take.
        step_bytes, prefill_bytes: read from the disk meanwhile.
        machine: what they were computed from.
    """

    step: float
    prefill: float
    step_bytes: int
    prefill_bytes: int
    machine: Machine

    def lines(self) -> list[str]:
        """For people."""
        read = [f", {format_bytes(count)} read" if count else "" for count in (self.step_bytes, self.prefill_bytes)]
        rates = f"disk {self.machine.disk / 1e9:.2f} GB/s, memory {self.machine.memory / 1e9:.1f} GB/s"
        return [
            f"  expected         {self.step:.3g} s for a token with a full context{read[0]}",
            f"                   {self.prefill:.3g} s or more for a prompt that fills it{read[1]}",
            f"                   ({rates}, as measured)",
        ]


def expert_layer(
    machine: Machine, used: float, size: float, missing: float, rate: float, work: float = 0.0
) -> tuple[float, float, float]:
    """Seconds of one layer's experts: in all, of computing, of reading.

    Args:
        used: experts that some token wants.
        size: bytes of one.
        missing: share of them that must be read.
        rate: bytes per second at which they are multiplied.
        work: operations of all tokens.
    """
    reading = missing * used * size
    compute = used * (machine.expert_call + size / rate) + work / machine.flops + reading * machine.read_cost
    return max(compute, reading / machine.disk) + missing * size / machine.disk, compute, reading / machine.disk


def expected_of(plan: MemoryPlan, shape: Shape, machine: Machine) -> Expected:
    """What a plan should take; `shape` is the config's it was made for."""
    use, item = plan.use, itemsize(plan.use.dtype)
    sizes = state_sizes(shape, use.batch, item)
    held = weight_bytes(shape, item, use.dense, use.experts)
    dense = sum(held.values()) - held["routed experts"] - held["embedding"] * (not shape.tied)
    rate = machine.disk if plan.dense_place == "mapped" else machine.memory
    missing = 1 - plan.expert_bytes / plan.expert_total if plan.expert_place == "mapped" else 0.0
    weights = sum(weight.numel * count for weight, count in iter_weights(shape) if weight.is_linear)
    size, read = one_expert_bytes(shape, item, use.experts), [0, 0]

    def forward(tokens: int, past: int) -> tuple[float, float]:
        used = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens) if shape.experts else 0.0
        work = 2 * tokens * shape.top_k * 3 * shape.expert_width * shape.expert_inner if tokens > use.batch else 0
        by = machine.memory if use.experts == "full" else machine.packed
        experts = shape.num_moe * expert_layer(machine, used, size, missing, by, work)[0] if shape.experts else 0.0
        pairs = tokens * (past + tokens / use.batch / 2) * shape.num_mla
        flops = 2 * tokens * weights + 2 * pairs * shape.mla_heads * (shape.nope + shape.rope + shape.value)
        fixed = len(shape.layers) * machine.layer_call + dense / rate + experts
        held_state = past * sizes.latent_per_token + 2 * sizes.state
        many = flops / machine.flops if tokens > use.batch else 0.0
        return fixed + held_state / machine.memory + many, (
            missing * used * size * shape.num_moe + dense * (plan.dense_place == "mapped")
        )

    step, step_read = forward(use.batch, use.context - 1)
    chunk = min(use.prefill_chunk, use.context)
    pieces = [forward(use.batch * min(chunk, use.context - past), past) for past in range(0, use.context, chunk)]
    prefill, read = (sum(column) for column in zip(*pieces, strict=True))
    return Expected(step, prefill, int(step_read), int(read), machine)
