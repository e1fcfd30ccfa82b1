"""LoRA for K3: presets, a plan before anything is allocated, and adapters on experts in every storage form.

Needs peft, and no registration: after `import modeling_k3`, peft's own `get_peft_model` and `PeftModel` know K3's
experts.
"""

import importlib

_HOME = {
    "lora_config": "presets",
    "PRESETS": "presets",
    "plan_lora": "plan",
    "LoraPlan": "plan",
    "k3_lora": "plan",
    "K3ExpertsLora": "expert_lora",
    "K3LoraModel": "tuner",
    "merge_into_packed": "packed_merge",
    "split_experts": "exchange",
    "stack_experts": "exchange",
    "wire_peft": "wiring",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
