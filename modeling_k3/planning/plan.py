"""From a budget in bytes to a plan: every knob that competes for the same memory, set together.

    budget = process + weights held + states + latents + working set + expert residency

The last term is what is left: it shrinks as the latents grow (`MemoryPlan.expert_bytes_at`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from modeling_k3.byte_sizes import parse_size
from modeling_k3.planning.components import largest_layer_bytes, one_expert_bytes
from modeling_k3.planning.kernels import kernel_bytes
from modeling_k3.planning.shape import Shape, Source, read_shape
from modeling_k3.planning.sizes import format_bytes, itemsize
from modeling_k3.planning.state import state_sizes
from modeling_k3.planning.workload import INDEX_ENTRY, PROCESS, Workload, memory_table, total

#: Lengths of a prompt's pieces that are tried.
CHUNKS = (2048, 1024, 512, 256, 128, 64, 32, 16)
#: Share of the budget that a prefill's working set may take while a smaller piece would do.
WORKING_SHARE = 0.25
#: How bitsandbytes is asked for a form of the dense part.
_BITSANDBYTES: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
}
#: Tensors of one packed expert in a checkpoint's files.
TENSORS_PER_EXPERT = 6


class MemoryPlanError(ValueError):
    """What was asked for does not fit. `nearest` is a plan that does, or None."""

    def __init__(self, message: str, nearest: "MemoryPlan | None" = None) -> None:
        super().__init__(message)
        self.nearest = nearest


@dataclass(frozen=True)
class MemoryPlan:
    """What goes where, and how large each knob is.

    Args:
        name: of the config.
        budget: bytes of main memory for this process.
        use: dtype, forms, context, batch, prefill chunk, rollback window, prefix cache.
        dense_place: "memory", or "mapped": read from the files again by each forward, through the page cache.
        expert_place: "memory", "mapped" with `expert_bytes` of them resident, or "none".
        expert_bytes: for routed experts at the end of the context.
        expert_total: of all of them.
        latent_per_token: what a token takes from `expert_bytes`.
        table: bytes by group and name; sums to `used`.
        notes: what is worth knowing.
        max_memory: bytes for weights in each memory, where there are accelerators.
    """

    name: str
    budget: int
    use: Workload
    dense_place: str
    expert_place: str
    expert_bytes: int
    expert_total: int
    latent_per_token: int
    table: dict[str, dict[str, int]] = field(hash=False)
    notes: tuple[str, ...] = ()
    max_memory: dict[Any, int] | None = field(default=None, hash=False)

    @property
    def used(self) -> int:
        """Bytes the plan takes, at most the budget."""
        return total(self.table)

    def expert_bytes_at(self, tokens: int) -> int:
        """Bytes for resident experts once the cache has seen `tokens`: what the latents do not need yet is theirs.

        Raises:
            ValueError: more tokens than the plan is for.
        """
        if not 0 <= tokens <= self.use.context:
            raise ValueError(f"tokens={tokens} lies outside the plan's context: allowed are 0 to {self.use.context}")
        return min(self.expert_total, self.expert_bytes + (self.use.context - tokens) * self.latent_per_token)

    def load_options(self) -> dict[str, Any]:
        """Arguments for `from_pretrained`.

        Raises:
            ValueError: experts in a form that can be counted and not be loaded.
        """
        if self.use.experts not in ("full", "mxfp4"):
            raise ValueError(
                f"experts={self.use.experts!r} is not what from_pretrained can load: 'full' or 'mxfp4'. Load with "
                "expert_storage='mapped', which takes no memory for them, then low_bits.quantize_experts"
            )
        forms = {"memory": "packed" if self.use.experts == "mxfp4" else "dense", "mapped": "mapped", "none": None}
        options: dict[str, Any] = {"dtype": self.use.dtype, "expert_storage": forms[self.expert_place]}
        if self.expert_place == "mapped":
            # One budget for experts and the cache of the calls: what latents do not need yet is the experts'.
            state = self.table["state"]
            options["expert_memory"] = self.expert_bytes + sum(state.values()) - state["prefix cache"]
        if self.max_memory is not None:
            options |= {"device_map": "auto", "max_memory": dict(self.max_memory)}
        if self.use.dense != "full":
            options["quantization_config"] = {"quant_method": "bitsandbytes", **_BITSANDBYTES[self.use.dense]}
            if self.use.dense != "int8":
                options["quantization_config"]["bnb_4bit_compute_dtype"] = self.use.dtype
        return options

    def generate_options(self) -> dict[str, Any]:
        """Arguments for `generate`."""
        return {"prefill_chunk_size": min(self.use.prefill_chunk, self.use.context)}

    def cache_options(self) -> dict[str, Any]:
        """Arguments for `K3Cache` beside the config; then `cache.reserve(plan.use.context)` keeps it from copying."""
        return {"rollback_tokens": self.use.rollback_tokens or None}

    def prefix_cache_options(self) -> dict[str, Any] | None:
        """Arguments for `PrefixCache`, or None for no such cache."""
        held = self.table["state"]["prefix cache"]
        return {"block_size": self.use.prefix_block, "max_bytes": held} if held else None

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "name": self.name,
            "budget_bytes": self.budget,
            "used_bytes": self.used,
            "workload": vars(self.use),
            "dense_place": self.dense_place,
            "expert_place": self.expert_place,
            "expert_bytes": self.expert_bytes,
            "expert_total_bytes": self.expert_total,
            "latent_bytes_per_token": self.latent_per_token,
            "bytes": self.table,
            "load_options": self.load_options() if self.use.experts in ("full", "mxfp4") else None,
            "generate_options": self.generate_options(),
            "cache_options": self.cache_options(),
            "prefix_cache_options": self.prefix_cache_options(),
            "notes": list(self.notes),
        }


def plan_memory(
    source: Source, budget: int | str, *, experts: str = "auto", prefill_chunk: int | None = None, **use: Any
) -> MemoryPlan:
    """Find how a model runs inside a budget of main memory, without changing its numbers.

    Tried in this order: everything in memory; experts mapped from the files; the dense part mapped as well. In each the
    prefill chunk is the largest whose working set stays below a quarter of the budget, else the largest that fits.

    Args:
        source: see `read_shape`.
        budget: bytes, or e.g. "24GiB", for the whole process.
        experts: how they are stored, "auto": MXFP4 where the config (or the released size) says so.
        prefill_chunk: tokens; None lets the plan choose.
        use: fields of `Workload`; the mode must be "infer".

    Raises:
        MemoryPlanError: nothing fits; names what would.
        ValueError, TypeError: an argument that is not allowed; MXFP4 for experts that the files hold plain.
    """
    shape, limit = read_shape(source), parse_size(budget, "budget")
    if limit < 1:
        raise ValueError(f"budget={budget!r} must be above 0")
    base = base_workload(shape, experts=experts, **use)
    if base.mode != "infer":
        raise ValueError(f"mode={base.mode!r}: a budget is planned for inference; `memory_table` counts training")
    check_forms(source, shape, base)
    chunks = CHUNKS if prefill_chunk is None else (prefill_chunk,)
    found = _first_fit(shape, limit, base, chunks)
    if found is None:
        raise _too_little(shape, limit, base, chunks)
    return found


def base_workload(shape: Shape, *, experts: str = "auto", **use: Any) -> Workload:
    """A workload with what the config says filled in: its dtype, and MXFP4 experts where its checkpoint has them."""
    if use.get("dtype") is None:
        use["dtype"] = shape.stored_as or "bfloat16"
    if experts == "auto":
        is_counted = shape.packed or use.get("mode", "infer") != "train"
        experts = "mxfp4" if _is_packed(shape) and is_counted else "full"
    return Workload(experts=experts, **use)


def _is_packed(shape: Shape) -> bool:
    return shape.experts > 0 and (shape.packed or shape.experts >= 896)


def check_forms(source: Source, shape: Shape, use: Workload) -> None:
    """Refuse MXFP4 experts where a folder's files hold plain ones: loading packs them only beside a dense part in bits.

    Raises:
        ValueError: says what makes them.
    """
    if use.experts != "mxfp4" or use.dense != "full" or _is_packed(shape) or not isinstance(source, str | PathLike):
        return
    if Path(source).is_dir() and any(Path(source).glob("*.safetensors")):
        raise ValueError(
            f"experts='mxfp4', but by its config.json {str(source)!r} holds plain ones, and loading packs nothing; "
            "allowed are 'auto' and 'full', or convert it first: k3 convert"
        )


def _first_fit(shape: Shape, limit: int, base: Workload, chunks: tuple[int, ...]) -> MemoryPlan | None:
    places = [("memory", "memory"), ("memory", "mapped"), ("mapped", "mapped")]
    if not shape.experts:
        places = [("memory", "none"), ("mapped", "none")]
    if base.dense != "full" or shape.stored_as not in (None, base.dtype):
        # Quantised or cast while loading: what the files hold cannot be used in place.
        places = [place for place in places if place[0] == "memory"]
    if base.experts.startswith("hqq"):
        # Made while loading, and no file has a form of them that can be mapped.
        places = [place for place in places if place[1] != "mapped"]
    for dense, experts in places:
        fitting = []
        for chunk in chunks:
            plan = _arrange(shape, limit, base.change(prefill_chunk=chunk), dense, experts)
            if plan is not None and sum(plan.table["working"].values()) <= WORKING_SHARE * limit:
                return plan
            fitting += [plan] if plan is not None else []
        if fitting:
            return fitting[0]
    return None


def _arrange(shape: Shape, limit: int, use: Workload, dense: str, experts: str) -> MemoryPlan | None:
    """The plan with these places, or None if it needs more than `limit`."""
    item = itemsize(use.dtype)
    table = memory_table(shape, use)
    stored = table["weights"]
    expert_total = stored.pop("routed experts")
    dense_total = sum(stored.values())
    notes = []
    mapped_experts = experts == "mapped"
    index = TENSORS_PER_EXPERT * shape.experts * shape.num_moe * INDEX_ENTRY if mapped_experts else 0
    table["process"] = {"Python and torch": PROCESS, "compiled kernels": kernel_bytes(shape, use)}
    table["process"]["index of the files"] = index
    if use.experts.startswith("hqq"):
        # A layer's matrices are there one by one and stacked when it is rounded.
        table["process"]["a layer while it is rounded"] = expert_total // max(1, shape.num_moe)
    if dense == "mapped":
        # What one layer reads must be in memory together; the rest of the pages come and go.
        table["weights"] = {"dense layer at work": largest_layer_bytes(shape, item, use.dense)}
        notes.append(f"{format_bytes(dense_total)} of dense weights are read from the files by each forward")
    floor = expert_total if experts == "memory" else expert_floor(shape, item, use)
    left = limit - total(table)
    if left < floor:
        return None
    held = min(left, expert_total)
    if shape.experts:
        table["weights"]["routed experts"] = held
    if mapped_experts:
        share = held / expert_total
        notes.append(f"{format_bytes(held)} of {format_bytes(expert_total)} of experts are resident ({share:.1%})")
    place = "memory" if mapped_experts and held == expert_total else experts
    latent = state_sizes(shape, use.batch, item).latent_per_token
    return MemoryPlan(
        shape.name, limit, use, dense, place, held, expert_total, latent if mapped_experts else 0, table, tuple(notes)
    )


def expert_floor(shape: Shape, item: int, use: Workload) -> int:
    """Bytes for the experts that one layer's step needs together: those of one token, twice, to read ahead."""
    return 2 * use.batch * shape.top_k * one_expert_bytes(shape, item, use.experts) if shape.experts else 0


def _too_little(shape: Shape, limit: int, base: Workload, chunks: tuple[int, ...]) -> MemoryPlanError:
    """Say what is missing, and the nearest plan that fits: the same with less context, or with the least budget."""
    low, high = limit, 2 * limit
    while _first_fit(shape, high, base, chunks[-1:]) is None:
        low, high = high, 2 * high
    while high - low > max(2**20, high // 200):
        middle = (low + high) // 2
        low, high = (low, middle) if _first_fit(shape, middle, base, chunks[-1:]) else (middle, high)
    least = _first_fit(shape, high, base, chunks[-1:])
    smaller = shorter(base, lambda use: _first_fit(shape, limit, use, chunks))
    message = (
        f"{shape.name} with {base.context} tokens of context and batch {base.batch} does not fit in "
        f"{format_bytes(limit)}: it needs {format_bytes(high)}"
    )
    if smaller is not None:
        message += f"; in {format_bytes(limit)} fit {smaller.use.context} tokens of context"
    elif base.batch > 1:
        message += "; a smaller batch needs less"
    return MemoryPlanError(message, smaller or least)


def shorter(base: Workload, fit: Callable[[Workload], MemoryPlan | None]) -> MemoryPlan | None:
    """The plan with about the most context below `base`'s that `fit` finds one for; None where it finds none."""
    found, short, tall = None, 0, base.context
    while tall - short > max(1, tall // 50):
        middle = (short + tall) // 2
        plan = fit(base.change(context=middle)) if middle else None
        found, short, tall = (plan, middle, tall) if plan else (found, short, middle)
    return found


def with_context(plan: MemoryPlan, source: Source, context: int) -> MemoryPlan:
    """The same budget, forms and prefill chunk for another context.

    Raises:
        MemoryPlanError: it does not fit.
    """
    use = replace(plan.use, context=context)
    options = {name: value for name, value in vars(use).items() if name not in ("experts", "prefill_chunk")}
    return plan_memory(source, plan.budget, experts=use.experts, prefill_chunk=use.prefill_chunk, **options)
