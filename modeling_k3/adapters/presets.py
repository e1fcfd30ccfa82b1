"""LoRA presets that name exactly what is adapted."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from modeling_k3.adapters.expert_product import MATRICES

if TYPE_CHECKING:
    from peft import LoraConfig

#: Preset -> endings of the names of adapted modules. Routers, convolutions, norms, depth queries and the head are in
#: none of them. Names that a config's layers do not have (another gate, no query latent) match nothing.
PRESETS: dict[str, tuple[str, ...]] = {
    "attention": (
        *(f"self_attn.{name}_proj" for name in "q k v f_a f_b b g g_a g_b o q_a q_b kv_b".split()),
        "self_attn.kv_a_proj_with_mqa",
    ),
    "latent": ("routed_expert_down_proj", "routed_expert_up_proj"),
    "shared": tuple(f"shared_experts.{name}_proj" for name in ("gate", "up", "down")),
    "experts": ("block_sparse_moe.experts",),
}
PRESETS["all"] = (
    *(name for names in PRESETS.values() for name in names),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def lora_config(
    preset: str | Sequence[str],
    r: int = 8,
    *,
    lora_alpha: float | None = None,
    matrices: Sequence[str] = MATRICES,
    expert_r: int | None = None,
    **options: Any,
) -> "LoraConfig":
    """Make peft's config of a preset.

        attention   all projections of KDA and MLA, their gates and decays
        latent      the projections into and out of the experts' latent
        shared      the shared experts
        experts     the routed experts, dense, packed or mapped
        all         all of these and the dense MLPs

    Args:
        preset: one of them, or several.
        r: rank.
        lora_alpha: the change is scaled by lora_alpha / r; None: twice the rank.
        matrices: which of an expert's matrices: "w1" (gate), "w3" (up), "w2" (down).
        expert_r: rank of every expert; None: `r`. The scaling stays lora_alpha / r.
        options: further fields of `peft.LoraConfig`.

    Returns:
        A `peft.LoraConfig` with task type CAUSAL_LM unless `options` says otherwise.

    Raises:
        ValueError: an unknown preset or matrix; a rank below 1.
        ImportError: without peft.
    """
    names = [preset] if isinstance(preset, str) else list(preset)
    for name in names:
        if name not in PRESETS:
            raise ValueError(f"preset={name!r} is unknown; allowed are {list(PRESETS)}, or several of them")
    unknown = [matrix for matrix in matrices if matrix not in MATRICES]
    if not names or unknown or not matrices:
        raise ValueError(f"preset={preset!r}, matrices={list(matrices)!r}: allowed matrices are {list(MATRICES)}")
    for name, rank in (("r", r), ("expert_r", expert_r)):
        if rank is not None and (not isinstance(rank, int) or rank < 1):
            raise ValueError(f"{name}={rank!r} is no rank; allowed are integers from 1 on")
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("LoRA needs peft: pip install peft") from error
    targets = list(dict.fromkeys(target for name in names for target in PRESETS[name]))
    alpha = 2 * r if lora_alpha is None else lora_alpha
    ranks, alphas = dict(options.pop("rank_pattern", {})), dict(options.pop("alpha_pattern", {}))
    if PRESETS["experts"][0] in targets:
        for matrix in MATRICES:
            if matrix not in matrices:
                ranks.setdefault(f"experts.{matrix}", 0)
        if expert_r is not None:
            ranks.setdefault("experts", expert_r)
            alphas.setdefault("experts", alpha * expert_r / r)
    elif expert_r is not None or tuple(matrices) != MATRICES:
        raise ValueError(f"expert_r and matrices are about experts, which preset={preset!r} does not adapt")
    task = options.pop("task_type", "CAUSAL_LM")
    return LoraConfig(
        r=r, lora_alpha=alpha, target_modules=targets, task_type=task, rank_pattern=ranks, alpha_pattern=alphas,
        **options,
    )  # fmt: skip
