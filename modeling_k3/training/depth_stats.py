"""What AttnRes listens to while a model trains: how wide each mix looks over depth, and how large its query is."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .watch import TrainingWatch


class DepthWatch(TrainingWatch):
    """Averages the weights over depth of every mix with at least two sources, since the last `take`; padding left out.

    Args:
        model: any model with AttnRes; without any nothing is reported.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        modules = dict(model.named_modules())
        self.queries = {n: m for n, m in modules.items() if n.endswith("_res_proj")}
        self._gains = {name: modules[name.removesuffix("_proj") + "_norm"] for name in self.queries}
        #: Of the last `take`, by mix: the mean weight of each source, the earliest block first, the running sum last.
        self.weights: dict[str, list[float]] = {}
        self._sums: dict[str, list[float | Tensor]] = {}
        for name, query in self.queries.items():
            hook = query.register_forward_hook(lambda module, args, output, name=name: self._after_mix(name, output))
            self._handles.append(hook)

    def take(self) -> dict[str, dict[str, float]]:
        """Report by mix and start anew.

        Returns:
            By name: `entropy` of the weights over log L (1: all sources alike, 0: one), `largest` weight, both as means
            over tokens, and `query_norm`, the length of query times key gain.
        """
        report, self.weights = {}, {}
        for name, (tokens, entropy, largest, weights) in self._sums.items():
            self.weights[name] = (weights / tokens).tolist()
            length = (self.queries[name].weight[0].detach() * self._gains[name].weight.detach()).float().norm()
            figures = {"entropy": entropy / tokens, "largest": largest / tokens, "query_norm": length}
            report[name] = {key: float(value) for key, value in figures.items()}
        self._sums.clear()
        return report

    @torch.no_grad()
    def _after_mix(self, name: str, output: tuple[Tensor, Tensor]) -> None:
        p = output[1].detach().flatten(0, -2)
        if not self.is_open or p.shape[-1] < 2:
            return
        if self.real is not None:
            p = p[self.real]
        entropy = torch.special.entr(p).sum() / math.log(p.shape[-1])
        new: list[Any] = [len(p), entropy, p.amax(dim=-1).sum(), p.sum(dim=0)]
        old = self._sums.get(name, [0, 0.0, 0.0, 0.0])
        self._sums[name] = [a + b for a, b in zip(old, new, strict=True)]


def summarise_depth(report: dict[str, dict[str, float]]) -> dict[str, float]:
    """What a log has room for: mean entropy, mean largest weight, and the longest query."""
    if not report:
        return {}
    rows = list(report.values())
    return {
        "depth_entropy": sum(row["entropy"] for row in rows) / len(rows),
        "depth_largest_weight": sum(row["largest"] for row in rows) / len(rows),
        "depth_query_norm": max(row["query_norm"] for row in rows),
    }
