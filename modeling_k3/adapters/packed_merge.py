"""Merge adapters into packed experts, on request, and say what the rounding to 4 bits cost."""

from typing import Any

from torch import nn

from modeling_k3.adapters.tuner import expert_layers


def merge_into_packed(model: Any, adapter_names: list[str] | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Merge and unload an adapter whose experts are packed: W + scaling B A is quantised anew.

    The step between two 4-bit numbers is large. A change that is small against it is rounded away: look at the
    report, and compare the merged model with the adapted one before relying on it.

    Args:
        model: peft's model; changed. Dense parts are merged exactly.
        adapter_names: which; None: the active ones.

    Returns:
        The model without adapter layers, and module -> adapter -> {"of_weights", "of_change"}: relative norm of the
        rounding error against the merged weights, and against the change. Where `of_change` reaches 1 the merged
        weights are as far from the adapted ones as the old ones were.

    Raises:
        ValueError: experts are mapped.
    """
    layers = {name: layer for name, layer in model.base_model.model.named_modules() if layer in expert_layers(model)}
    for layer in layers.values():
        layer.may_requantize = True
    try:
        merged = model.merge_and_unload(adapter_names=adapter_names)
    finally:
        for layer in layers.values():
            layer.may_requantize = False
    return merged, {name: layer.errors for name, layer in layers.items() if layer.errors}
