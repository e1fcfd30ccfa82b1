"""What an adapter will train, counted on a model without memory before anything is allocated."""

import copy
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from modeling_k3.adapters.presets import lora_config

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


@dataclass(frozen=True)
class LoraPlan:
    """What an adapter will train.

    Args:
        targets: name of every adapted or copied module -> trainable parameters it gets.
        total: parameters of the model without the adapter.
    """

    targets: dict[str, int]
    total: int

    @property
    def trainable(self) -> int:
        """Parameters that are trained."""
        return sum(self.targets.values())

    def __str__(self) -> str:
        modules, parameters = Counter[str](), Counter[str]()
        for name, count in self.targets.items():
            kind = re.sub(r"\.\d+\.", ".*.", name)
            modules[kind] += 1
            parameters[kind] += count
        width = max(map(len, modules), default=0)
        lines = [f"{kind:{width}}  x{modules[kind]:<4}{parameters[kind]:>16,}" for kind in modules]
        share = self.trainable / max(self.total, 1)
        return "\n".join([*lines, f"trainable: {self.trainable:,} of {self.total:,} ({share:.3%})"])


def plan_lora(model: Any, lora: "LoraConfig") -> LoraPlan:
    """Count what `lora` would train on a model; nothing is allocated and nothing is changed.

    Args:
        model: a K3 model in any form, or a K3Config, which stands for `K3ForCausalLM`.
        lora: peft's config, such as `lora_config` makes.

    Raises:
        ValueError: what peft or K3 refuse of the config.
    """
    from peft import get_peft_model

    twin = _twin(model)
    total = sum(parameter.numel() for parameter in twin.parameters())
    with torch.device("meta"):
        adapted = get_peft_model(twin, copy.deepcopy(lora))
    targets: Counter[str] = Counter()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            stem = re.split(r"\.(?:lora_|modules_to_save\.|token_adapter\.)", name)[0]
            targets[stem.removeprefix("base_model.model.")] += parameter.numel()
    return LoraPlan(dict(targets), total)


def _twin(model: Any) -> nn.Module:
    """A model of the same shape, of the class or K3ForCausalLM, without memory."""
    from modeling_k3 import K3ForCausalLM

    is_model = isinstance(model, nn.Module)
    made = type(model) if is_model else K3ForCausalLM
    config = copy.deepcopy(model.config if is_model else model)
    if not hasattr(config, "model_type") or config.model_type != "k3":
        raise ValueError(f"model is a {type(model).__name__}; allowed are K3 models without an adapter, and a K3Config")
    with torch.device("meta"):
        return made(config)


def k3_lora(
    model: nn.Module, preset: str | Sequence[str], r: int = 8, *, adapter_name: str = "default", **options: Any
) -> "PeftModel":
    """Print what a preset will train, then put the adapter on the model.

    Args:
        model: a K3 model; changed.
        preset, r, options: see `lora_config`.
        adapter_name: of the adapter.

    Returns:
        peft's model around `model`.
    """
    from peft import get_peft_model

    lora = lora_config(preset, r, **options)
    print(plan_lora(model, lora), flush=True)
    return get_peft_model(model, lora, adapter_name=adapter_name)
