"""What a model is to be used for, and what each part of that takes: the table behind a plan."""

from dataclasses import dataclass, replace
from typing import Any

from modeling_k3.planning.activations import Call, forward_peak
from modeling_k3.planning.components import DENSE_FORMS, EXPERT_FORMS, weight_bytes
from modeling_k3.planning.shape import Shape
from modeling_k3.planning.sizes import itemsize
from modeling_k3.planning.state import prefix_block_bytes, state_sizes
from modeling_k3.planning.training import OPTIMIZERS, Training, training_peak

MODES = ("infer", "lora", "train")
#: What Python, torch and transformers take before a model is there, and what they keep for themselves.
PROCESS = 600 * 2**20
#: What the index of a mapped checkpoint takes for one tensor.
INDEX_ENTRY = 1600


@dataclass(frozen=True)
class Workload:
    """A use of a model.

    Args:
        dtype: what it is computed in.
        dense: how linear layers outside the experts are held, one of `components.DENSE_FORMS`.
        experts: how routed experts are held, one of `components.EXPERT_FORMS`.
        context: tokens of one row in all, prompt and answer; when training, the length of a row.
        batch: rows.
        prefill_chunk: tokens of a row that go through the model at once; not read when training.
        mode: one of `MODES`.
        lora_rank, optimizer, checkpointing: see `training.Training`.
        rollback_tokens: tokens that can be taken back; 0: none.
        prefix_tokens, prefix_block: tokens held by a prefix cache, in blocks of so many.

    Raises:
        ValueError: a value that is not allowed.
    """

    dtype: str = "bfloat16"
    dense: str = "full"
    experts: str = "full"
    context: int = 4096
    batch: int = 1
    prefill_chunk: int = 2048
    mode: str = "infer"
    lora_rank: int = 16
    optimizer: str = "adamw"
    checkpointing: bool = False
    rollback_tokens: int = 0
    prefix_tokens: int = 0
    prefix_block: int = 512

    def __post_init__(self) -> None:
        itemsize(self.dtype)
        choices = {"dense": DENSE_FORMS, "experts": EXPERT_FORMS, "mode": MODES, "optimizer": tuple(OPTIMIZERS)}
        for name, allowed in choices.items():
            if vars(self)[name] not in allowed:
                raise ValueError(f"{name}={vars(self)[name]!r} is unknown; allowed are {list(allowed)}")
        least = {"context": 1, "batch": 1, "prefill_chunk": 1, "lora_rank": 1, "prefix_block": 1}
        for name, lowest in {**least, "rollback_tokens": 0, "prefix_tokens": 0}.items():
            value = vars(self)[name]
            if type(value) is not int or value < lowest:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {lowest}")
        if self.mode == "train" and (self.experts != "full" or self.dense != "full"):
            raise ValueError(f"mode='train' with dense={self.dense!r}, experts={self.experts!r}: codes have no "
                             "gradient; allowed is mode='lora'")  # fmt: skip

    def change(self, **changes: Any) -> "Workload":
        """The same with other values."""
        return replace(self, **changes)


def memory_table(shape: Shape, use: Workload) -> dict[str, dict[str, int]]:
    """Bytes of everything at the worst moment, in groups.

    Returns:
        `weights` by component; `state` (inference): KDA state, conv windows, MLA latent, rollback, prefix cache;
        `working`: AttnRes sources and either prefill and decode peaks with logits, or what training keeps;
        `training`: gradients and optimizer (zero at inference).
    """
    if use.mode == "infer":
        return {"weights": weights(shape, use), "state": state(shape, use), "working": working(shape, use)}
    item = itemsize(use.dtype)
    call = Call(use.batch, use.context, 0, item, False, use.context, use.experts)
    recipe = Training(use.lora_rank if use.mode == "lora" else None, use.optimizer, use.checkpointing)
    peak = training_peak(shape, call, recipe)
    table = weights(shape, use)
    if peak["adapters"]:
        table["adapters of attention"] = peak["adapters"]
    gradients = min(peak["gradients"], peak["peak"])
    active = peak["peak"] - gradients
    sources = min(peak["AttnRes sources"], active)
    rest = {"AttnRes sources": sources, "activations and logits": active - sources}
    return {"weights": table, "working": rest, "training": {"gradients": gradients, "optimizer": peak["optimizer"]}}


def weights(shape: Shape, use: Workload) -> dict[str, int]:
    """Bytes of the weights by component."""
    return weight_bytes(shape, itemsize(use.dtype), use.dense, use.experts)


def state(shape: Shape, use: Workload) -> dict[str, int]:
    """Bytes that live from call to call at the end of the context."""
    item = itemsize(use.dtype)
    sizes = state_sizes(shape, use.batch, item)
    blocks = -(-use.prefix_tokens // use.prefix_block)
    return {
        "KDA state": sizes.state,
        "conv windows": sizes.window,
        "MLA latent": use.context * sizes.latent_per_token,
        "rollback": sizes.rollback(use.rollback_tokens),
        "prefix cache": blocks * prefix_block_bytes(shape, use.prefix_block, item),
    }


def working(shape: Shape, use: Workload) -> dict[str, int]:
    """Bytes of the worst moment of a prefill in pieces or of a decode step, beside weights and state.

    A call leaves the cache as it was if it fails, so the states before and after it exist side by side.
    """
    item = itemsize(use.dtype)
    sizes = state_sizes(shape, use.batch, item)
    chunk = min(use.prefill_chunk, use.context)
    calls = [
        Call(use.batch, chunk, 0, item, experts=use.experts),
        Call(use.batch, 1, use.context - 1, item, experts=use.experts),
    ]
    if chunk < use.context:
        calls.append(Call(use.batch, chunk, use.context - chunk, item, experts=use.experts))
    peaks = [forward_peak(shape, call) for call in calls]
    worst = max(peaks, key=lambda peak: peak["peak"])
    # Drawing a token reads the last logits in float32, with two copies.
    logits = use.batch * shape.vocab * (item + 3 * 4)
    return {
        "AttnRes sources": worst["AttnRes sources"],
        "prefill peak": max(worst["peak"] - worst["AttnRes sources"], 0),
        "logits peak": max(0, logits - worst["peak"]),
        "states in flight": sizes.state + sizes.window if use.context > 1 else 0,
    }


def total(table: dict[str, dict[str, int]]) -> int:
    """Sum over all groups."""
    return sum(sum(group.values()) for group in table.values())
