"""Layers of bitsandbytes in a checkpoint, under the names that bitsandbytes and transformers give them.

4 bits    X.weight  X.weight.absmax  X.weight.quant_map  X.weight.quant_state.bitsandbytes__nf4   (or fp4), and
          X.weight.nested_absmax  X.weight.nested_quant_map  where the scales are quantised as well
8 bits    X.weight  X.SCB  X.weight_format
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .dense_bits import empty_layer, finish_layer, form_of, library

_STORED = re.compile(
    r"(.+)\.(weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__(?:nf4|fp4))"
    r"|SCB|weight_format)"
)


def is_stored_in_bits(name: str) -> bool:
    """Whether a tensor of a checkpoint is part of a quantised layer."""
    return _STORED.fullmatch(name) is not None


def take_stored(places: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Take the tensors of quantised layers out of a checkpoint's.

    Args:
        places: canonical name -> anything; changed.

    Returns:
        Canonical name of a layer -> what its tensors are called in it -> that thing.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in list(places):
        match = _STORED.fullmatch(name)
        if match:
            found.setdefault(match[1], {})[match[2]] = places.pop(name)
    for name, parts in found.items():
        if f"{name}.weight" in places:
            parts["weight"] = places.pop(f"{name}.weight")
    return found


def from_stored(name: str, module: nn.Linear, tensors: Mapping[str, Tensor], config: Any, device: Any) -> nn.Module:
    """A layer of bitsandbytes made of what was saved.

    Args:
        name: for messages.
        module: the plain layer whose place it takes.
        tensors: by the names that `take_stored` gives.
        config: the BitsAndBytesConfig they were made with.
        device: where to.

    Raises:
        ValueError: tensors of another form than the config's, of other shapes, or not all of them.
    """
    form, shape = form_of(config), tuple(module.weight.shape)
    needed = {"weight", "SCB"} if form == "int8" else {
        "weight", "weight.absmax", "weight.quant_map", f"weight.quant_state.bitsandbytes__{form}"
    }  # fmt: skip
    if needed - tensors.keys():
        raise ValueError(f"{name} lacks {sorted(needed - tensors.keys())}, which a layer in {form} has")
    made = empty_layer(module, config)
    if form == "int8":
        weight, scales = tensors["weight"].to(device), tensors["SCB"].to(device)
        found = tuple(weight.shape)
        made.weight = library().nn.Int8Params(weight, requires_grad=False, CB=weight, SCB=scales)
        fits = found == shape and tuple(scales.shape) == shape[:1] and tensors["weight"].dtype.itemsize == 1
    else:
        statistics = {key: tensor for key, tensor in tensors.items() if key != "weight"}
        made.weight = library().nn.Params4bit.from_prequantized(
            tensors["weight"], statistics, requires_grad=False, device=device, module=made
        )
        found = tuple(made.weight.quant_state.shape)
        fits = found == shape and 2 * tensors["weight"].nbytes == module.weight.numel()
    if not fits:
        raise ValueError(f"{name} is stored for a shape of {list(found)}; the model has {list(shape)}")
    return finish_layer(made, module)


def stored_bytes(module: Any) -> Counter[str]:
    """Bytes of a layer of bitsandbytes by what they are: its form, and "scales"; nothing for other modules."""
    weight = module._parameters.get("weight") if isinstance(module, nn.Module) else None
    state, counts = getattr(weight, "quant_state", None), Counter[str]()
    if state is not None:
        # On some CPUs two: the scales that a layer computes with, and those that are saved.
        scales = {}
        for each in (state, getattr(module, "_k3_scales", state)):
            nested = [each.state2.absmax, each.state2.code, each.offset] if each.nested else []
            scales |= {id(tensor): tensor for tensor in (each.absmax, each.code, *nested)}
        counts[state.quant_type] = weight.nbytes
        counts["scales"] = sum(tensor.nbytes for tensor in scales.values())
    elif hasattr(weight, "SCB"):
        rows = weight.SCB if weight.SCB is not None else module.state.SCB
        counts["int8"], counts["scales"] = weight.nbytes, 0 if rows is None else rows.nbytes
    return counts
