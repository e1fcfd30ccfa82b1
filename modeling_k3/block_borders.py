"""Layers over several accelerators: cuts that the library computed move back to AttnRes block borders.

At a border the running sum has just become a block. Inside a block it would be one more tensor to carry to the next
device, in the forward and, as a gradient, on the way back.
"""

import re
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import nn

_LAYER = re.compile(r"(?:.+\.)?layers\.(\d+)")
#: A cut moves if no accelerator then holds more than so many times what the fullest one holds anyway.
_MOST = 1.15


def prefer_block_borders(model: nn.Module, device_map: dict[str, Any], limits: Mapping[Any, int]) -> None:
    """Move the layers of an unfinished block from the end of one accelerator to the beginning of the next.

    Args:
        model: in the form it is loaded in, on the meta device.
        device_map: module name -> device, layer by layer; changed. Maps with fewer layers stay as they are, and so do
            cuts next to "cpu" and "disk": what stands there is computed on an accelerator.
        limits: bytes that each device may hold.
    """
    size = model.config.attn_res_block_size
    layers = {int(match[1]): key for key in device_map if (match := _LAYER.fullmatch(key))}
    if size is None or len(layers) < model.config.num_hidden_layers:
        return
    nbytes = {key: _nbytes(model, key) for key in device_map}
    loads = Counter[Any]()
    for key, device in device_map.items():
        loads[device] += nbytes[key]
    starts: dict[Any, int] = {}
    for layer in sorted(layers):
        starts.setdefault(device_map[layers[layer]], layer)
    accelerators = [device for device in starts if str(device) not in ("cpu", "disk", "meta")]
    most = _MOST * max((loads[device] for device in accelerators), default=0)
    # The last cut first: what it takes from a device is room for the cut before.
    for before, after in reversed(list(pairwise(accelerators))):
        border = starts[after] // size * size
        moved = [layers[layer] for layer in range(border, starts[after])]
        count = sum(nbytes[key] for key in moved)
        if border > starts[before] and loads[after] + count <= min(most, limits.get(after, most)):
            device_map.update(dict.fromkeys(moved, after))
            loads[before], loads[after], starts[after] = loads[before] - count, loads[after] + count, border


def _nbytes(model: nn.Module, key: str) -> int:
    return sum(
        parameter.nbytes for name, parameter in model.named_parameters() if name == key or name.startswith(f"{key}.")
    )
