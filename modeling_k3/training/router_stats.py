"""How evenly the routers load their experts while a model trains."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modeling_k3.signals import evenness

from .watch import TrainingWatch


class RouterWatch(TrainingWatch):
    """Counts what the routers choose, over all forward passes of training since the last `take`.

    Padding never counts, and of a router's copies (adapters' `modules_to_save`) only the active one does. `loads[name]`
    [N + 1] int64 holds tokens by expert and, last, the places dropped beyond the capacity.

    Args:
        model: any model with K3 routers; without any nothing is counted.
        group: the processes whose counts belong together; None: all of them, where there are several.
    """

    def __init__(self, model: nn.Module, group: Any = None) -> None:
        super().__init__(model)
        self.group = group
        self.routers = {name: module for name, module in model.named_modules() if is_router(module)}
        self.loads = {name: self._zeros(router) for name, router in self.routers.items()}
        for name, router in self.routers.items():
            hook = router.register_forward_hook(
                lambda module, args, output, name=name: self._after_router(name, module, args, output)
            )
            self._handles.append(hook)

    def see(self, name: str, router: nn.Module, scores: Tensor, chosen: Tensor) -> None:
        """Called for every batch a router has seen; for subclasses.

        Args:
            name: of the router in the model.
            router: itself.
            scores: [tokens, N] of the real tokens, without the bias.
            chosen: [tokens, R].
        """

    def take(self) -> dict[str, dict[str, Any]]:
        """Report by router and start anew; a collective where there are several processes.

        Returns:
            By name: `load` (tokens by expert), `entropy` and `max_over_mean` as in `K3Signals`, `dropped`: the share of
            places beyond the capacity. Routers without a token are left out.
        """
        counts = list(self.loads.values())
        add_up(counts, self.group)
        report = {}
        for name, count in zip(self.loads, counts, strict=True):
            if count[:-1].sum() > 0:
                share = (count[-1] / count[:-1].sum()).item()
                report[name] = {**evenness(count[:-1]), "dropped": share}
            count.zero_()
        return report

    @torch.no_grad()
    def _after_router(self, name: str, router: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        if not (self.is_open and router.training):
            return
        logits, _, chosen = output
        real = args[1] if len(args) > 1 else None
        scores, overflow = router.scores(logits.detach()), router.overflow(chosen, real)
        if real is not None:
            scores, chosen = scores[real], chosen[real]
        load = self.loads[name].to(chosen.device)
        load[:-1] += torch.bincount(chosen.flatten(), minlength=router.num_experts)
        load[-1] += overflow.sum()
        self.loads[name] = load
        self.see(name, router, scores, chosen)

    @staticmethod
    def _zeros(router: nn.Module) -> Tensor:
        return torch.zeros(router.num_experts + 1, dtype=torch.int64, device=router.weight.device)


def is_router(module: nn.Module) -> bool:
    """Whether a module is a router itself, not a wrapper that passes on the attributes of one."""
    return "e_score_correction_bias" in module._parameters


def world_size(group: Any = None) -> int:
    """Number of processes that train together."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def add_up(counts: list[Tensor], group: Any = None) -> None:
    """Add whole numbers over the processes, in place, with one all-reduce; nothing happens in a single process."""
    if world_size(group) == 1 or not counts:
        return
    flat = torch.cat([count.flatten() for count in counts])
    dist.all_reduce(flat, group=group)
    for count, total in zip(counts, flat.split([count.numel() for count in counts]), strict=True):
        count.copy_(total.view_as(count))


def summarise(report: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What a log has room for, of `RouterWatch.take`: the layers' mean entropy and drops, the worst violation.

    `router_max_violation` = max / mean - 1 of the experts' load, 0 when even.
    """
    if not report:
        return {}
    rows = list(report.values())
    return {
        "router_entropy": sum(row["entropy"] for row in rows) / len(rows),
        "router_max_violation": max(row["max_over_mean"] for row in rows) - 1,
        "router_dropped": sum(row["dropped"] for row in rows) / len(rows),
    }
