"""peft's LoRA with what K3 adds: adapters on experts in every storage form, and refusals before anything is changed."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from modeling_k3.adapters.expert_config import check_expert_config
from modeling_k3.adapters.expert_lora import K3ExpertsLora
from modeling_k3.adapters.expert_product import MATRICES

try:
    from peft import PeftType
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.lora import LoraModel
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import check_target_module_exists
except ImportError as error:
    raise ImportError("adapters need peft: pip install peft") from error


def is_experts(module: nn.Module) -> bool:
    """Whether a module is a `K3Experts`, of whichever copy of this code."""
    return hasattr(module, "use_storage") and hasattr(module, "stack_shapes")


class K3LoraModel(LoraModel):
    """peft's `LoraModel`, which puts a `K3ExpertsLora` around targeted experts; other models are left to peft."""

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Check an adapter against a K3 model, then inject it as peft does.

        Raises:
            ValueError: an adapter name or an option that would fail later, or have no effect.
        """
        if _is_k3(model):
            check_adapter(self.peft_config[adapter_name], adapter_name, model)
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    @staticmethod
    def _create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        if is_experts(target) and kwargs.get("parameter_name") is None:
            return K3ExpertsLora(target, adapter_name, lora_config, **kwargs)
        return LoraModel._create_new_module(lora_config, adapter_name, target, **kwargs)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        if isinstance(new_module, K3ExpertsLora):
            # The factors are where they belong, and mapped experts have no parameter to ask for a device.
            setattr(parent, child_name, new_module)
        else:
            super()._replace_module(parent, child_name, new_module, child)

    def _check_merge_allowed(self) -> None:
        super()._check_merge_allowed()
        for layer in expert_layers(self.model):
            layer.check_merge()

    def add_weighted_adapter(self, adapters: Sequence[str], *args: Any, **kwargs: Any) -> None:
        """Mix adapters into a new one, as peft does; not where experts are adapted.

        Raises:
            ValueError: one of them adapts experts.
        """
        if any(name in layer.lora_A for layer in expert_layers(self.model) for name in adapters):
            raise ValueError(
                f"adapters={list(adapters)!r}: mixing is not supported by LoRA on experts; several active adapters "
                "(set_adapter with a list on the base model) add up"
            )
        super().add_weighted_adapter(adapters, *args, **kwargs)


def expert_layers(model: nn.Module) -> list[K3ExpertsLora]:
    """All adapted expert modules of a model."""
    return [module for module in model.modules() if isinstance(module, K3ExpertsLora)]


def _is_k3(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) == "k3"


def check_adapter(config: Any, adapter_name: str, model: nn.Module) -> None:
    """Refuse what peft would let fail half-way, or accept without effect.

    Args:
        config: peft's LoraConfig.
        adapter_name: becomes part of parameter names.
        model: a K3 model, with or without adapters.

    Raises:
        ValueError: naming option, value and what is allowed.
    """
    if not adapter_name or "." in adapter_name:
        raise ValueError(f"adapter_name={adapter_name!r} is not allowed: it becomes part of a name; leave dots out")
    if config.bias != "none":
        raise ValueError(
            f"bias={config.bias!r} would mark decay and routing biases as trainable, and the latter get no gradient; "
            "allowed is 'none' (name modules in modules_to_save to train them whole)"
        )
    if config.layer_replication:
        raise ValueError(f"layer_replication={config.layer_replication!r}: K3 layers know their place; allowed is None")
    experts = {name: module for name, module in model.named_modules() if is_experts(module)}
    _check_parameters(config, experts, model)
    for name in config.modules_to_save or ():
        for path, module in experts.items():
            if module.storage != "dense" and f"{path}.".find(f".{name}.") >= 0:
                raise ValueError(
                    f"modules_to_save has {name!r}, but {path} holds {module.storage} 4-bit experts, which get no "
                    "gradients; load with expert_storage='dense', or adapt them through target_modules"
                )
    _check_targets(config, experts, model)


def _check_targets(config: Any, experts: dict[str, nn.Module], model: nn.Module) -> None:
    targets = config.target_modules
    single = set() if isinstance(targets, str) else {t for t in targets or () if t.rpartition(".")[2] in MATRICES}
    if single and experts:
        raise ValueError(
            f"target_modules has {sorted(single)}: experts are stacked here, no linear layers of their own; for a "
            "saved adapter of that form see modeling_k3.adapters.stack_experts, for a new one lora_config('experts', "
            "matrices=...)"
        )
    paths = [name.split(".base_layer")[0] for name in experts]
    is_targeted = any(check_target_module_exists(config, path) for path in paths)
    by_parameter = any(isinstance(module, ParamWrapper) for module in model.modules()) or any(
        p.rpartition(".")[2] in ("gate_up_proj", "down_proj") for p in config.target_parameters or ()
    )
    if by_parameter and (is_targeted or expert_layers(model)):
        raise ValueError(
            "experts are adapted through target_parameters here and through target_modules there; allowed is one of "
            "the two, in all adapters of a model"
        )
    if is_targeted:
        # Before the first layer is replaced: peft builds layer after layer.
        check_expert_config(config)


def _check_parameters(config: Any, experts: dict[str, nn.Module], model: nn.Module) -> None:
    wanted = config.target_parameters or ()
    if not wanted:
        return
    names = [name.replace(".base_layer", "") for name, _ in model.named_parameters()]
    for parameter in wanted:
        leaf = parameter.rpartition(".")[2]
        packed = [path for path, module in experts.items() if module.storage != "dense"]
        if packed and leaf.removesuffix("_packed").removesuffix("_scale") in ("gate_up_proj", "down_proj"):
            raise ValueError(
                f"target_parameters has {parameter!r}, but {packed[0]} holds {experts[packed[0]].storage} 4-bit "
                "experts; use target_modules=['experts'], which adapts experts in every form"
            )
        if not any(name == parameter or name.endswith(f".{parameter}") for name in names):
            raise ValueError(f"target_parameters has {parameter!r}, and no parameter of the model is called that")


def install() -> None:
    """Make peft use `K3LoraModel` for LoRA. Idempotent."""
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = K3LoraModel
