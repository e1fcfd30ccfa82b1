"""Layers over several accelerators: contiguous pieces, cut at AttnRes block borders where that costs little."""

from dataclasses import dataclass

from modeling_k3.planning.components import layer_weights, outer_weights
from modeling_k3.planning.shape import Shape
from modeling_k3.planning.sizes import itemsize
from modeling_k3.planning.workload import Workload

#: A cut at a block border is taken if the fullest device gets at most so much more than with free cuts.
_BORDER_COST = 1.15


@dataclass(frozen=True)
class Split:
    """Which layers stand on which device.

    Args:
        starts: first layer of each device.
        weight_bytes: of each device, experts included; the embedding on the first, norm and head on the last.
        at_borders: all cuts are AttnRes block borders, so that the running sum is empty where it travels.
    """

    starts: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    at_borders: bool

    def device_map(self, shape: Shape) -> dict[str, int]:
        """The same for `from_pretrained(device_map=...)`."""
        last = len(self.starts) - 1
        found = {"model.embed_tokens": 0}
        for layer in range(len(shape.layers)):
            found[f"model.layers.{layer}"] = max(d for d, start in enumerate(self.starts) if start <= layer)
        if shape.block is not None:
            found |= {"model.output_attn_res_norm": last, "model.output_attn_res_proj": last}
        return found | {"model.norm": last, "lm_head": last}


def split_layers(shape: Shape, use: Workload, devices: int) -> Split:
    """Spread layers so that the fullest device holds as little as possible.

    Raises:
        ValueError: no device, or more devices than layers.
    """
    if not 1 <= devices <= len(shape.layers):
        raise ValueError(f"world={devices} must be 1 to {len(shape.layers)}: whole layers are spread")
    item = itemsize(use.dtype)
    costs = [sum(w.nbytes(item, use.dense, use.experts) for w in layer_weights(shape, la)) for la in shape.layers]
    first, *rest = (w.nbytes(item) for w in outer_weights(shape))
    costs[0] += first
    costs[-1] += sum(rest)
    free = _cut(costs, list(range(1, len(costs))), devices)
    borders = [layer.index for layer in shape.layers if layer.starts_block and layer.index]
    if len(borders) + 1 >= devices:
        tidy = _cut(costs, borders, devices)
        if max(tidy[1]) <= _BORDER_COST * max(free[1]):
            return Split(*tidy, at_borders=True)
    return Split(*free, at_borders=set(free[0][1:]) <= set(borders))


def _cut(costs: list[int], allowed: list[int], pieces: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cut a row of costs into pieces with the least maximum; returns starts and sums."""
    borders = [0, *allowed, len(costs)]
    before = [0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[b]: least maximum for everything before border b, and the cuts that reach it.
    best: list[tuple[int, tuple[int, ...]]] = [(before[border], (0,)) for border in borders]
    for piece in range(1, pieces):
        best = [
            min((max(best[a][0], before[borders[b]] - before[borders[a]]), (*best[a][1], borders[a])) for a in range(b))
            if b >= piece + 1
            else (before[-1] + 1, ())
            for b in range(len(borders))
        ]
    starts = best[-1][1]
    return starts, tuple(before[b] - before[a] for a, b in zip(starts, (*starts[1:], len(costs)), strict=True))
