"""Which of peft's LoRA options mean something for routed experts; every other one is refused, none is ignored."""

import re
from typing import Any, NamedTuple

from modeling_k3.adapters.expert_product import MATRICES

#: Options that change what is computed or stored, in ways that stacked experts do not know, and their neutral values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "use_qalora": (False,),
    "init_lora_weights": (True, False, "gaussian"),
    **dict.fromkeys(
        "loftq_config eva_config corda_config lora_ga_config velora_config alora_invocation_tokens "
        "monteclora_config use_bdlora arrow_config kasa_config megatron_config".split(),
        (None, {}),
    ),
}
#: Options that peft itself carries out on whole modules, or that are honoured here.
_KNOWN = frozenset(
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules "
    "exclude_modules lora_alpha lora_dropout use_rslora modules_to_save layers_to_transform layers_pattern "
    "rank_pattern alpha_pattern megatron_core trainable_token_indices qalora_group_size runtime_config "
    "target_parameters bias layer_replication ensure_weight_tying".split()
)

# What may follow "experts" in a pattern: nothing, or a matrix of all experts.
_TAIL = re.compile(r"(\\?\.(w[123]|\w+_proj))?\$?")


class Rank(NamedTuple):
    """What one matrix of every expert gets: rank r (0: nothing) and alpha."""

    r: int
    alpha: float


def check_expert_config(config: Any) -> None:
    """Refuse options that experts cannot honour.

    Raises:
        ValueError: naming option, value and what is allowed.
    """
    for name, value in vars(config).items():
        if name.startswith("_") or name in _KNOWN:
            continue
        allowed = _NEUTRAL.get(name)
        if allowed is None and value:
            raise ValueError(f"{name}={value!r} is not known to LoRA on experts; leave experts out of target_modules")
        if allowed is not None and not any(value == good and type(value) is type(good) for good in allowed):
            raise ValueError(
                f"{name}={value!r} is not supported by LoRA on experts; allowed is "
                f"{' or '.join(map(repr, allowed))}. Leave experts out of target_modules to use it elsewhere"
            )
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, name) or {}:
            _, found, tail = pattern.rpartition("experts")
            if found and not _TAIL.fullmatch(tail):
                raise ValueError(
                    f"{name} has {pattern!r}: all experts of a layer have one rank; allowed are patterns of a layer's "
                    "experts, or of one of their matrices, as 'layers.3.block_sparse_moe.experts.w2'"
                )


def matrix_ranks(config: Any, module_name: str) -> dict[str, Rank]:
    """Rank and alpha of each matrix, from `rank_pattern` and `alpha_pattern`.

    A pattern may name the experts of a layer (`experts`), or their matrices as if they were modules (`experts.w2`),
    which goes before. Rank 0 leaves a matrix alone.

    Raises:
        ValueError: a negative rank, or none at all.
    """
    ranks = {}
    for matrix in MATRICES:
        r, alpha = config.r, config.lora_alpha
        for name in (module_name, f"{module_name}.{matrix}"):
            r = _lookup(config.rank_pattern, name, r)
            alpha = _lookup(config.alpha_pattern, name, alpha)
        if not isinstance(r, int) or r < 0:
            raise ValueError(f"the rank of {module_name}.{matrix} is {r!r}; allowed are integers from 0 on")
        ranks[matrix] = Rank(r, alpha)
    if not any(rank.r for rank in ranks.values()):
        raise ValueError(f"all ranks of {module_name} are 0; leave it out of target_modules")
    return ranks


def _lookup(patterns: dict[str, Any] | None, name: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a name, as peft looks it up."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default
