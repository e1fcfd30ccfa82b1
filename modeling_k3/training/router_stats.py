"""How evenly the routers load their experts while a model trains."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .watch import TrainingWatch


class RouterWatch(TrainingWatch):
    """Counts what the routers choose in the forward passes of training, step by step, until the next `take`.

    Padding never counts, and of a router's copies (adapters' `modules_to_save`) only the active one does. `loads[name]`
    [N + 1] int64 holds, of the step that is not over yet, tokens by expert and, last, the places dropped beyond the
    capacity.

    Args:
        model: any model with K3 routers; without any nothing is counted.
        group: the processes whose counts belong together; None: all of them, where there are several.
    """

    def __init__(self, model: nn.Module, group: Any = None) -> None:
        super().__init__(model)
        self.group = group
        self.routers = {name: module for name, module in model.named_modules() if is_router(module)}
        self.loads = {name: self._zeros(router) for name, router in self.routers.items()}
        # By router, over the steps since the last `take`: their loads added up, and see `_figures`.
        self._past: dict[str, tuple[Tensor, Tensor]] = {}
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

    @torch.no_grad()
    def end_step(self, *others: Tensor) -> None:
        """Close a training step, whose load counts as one; a collective where there are several processes.

        Args:
            others: further whole numbers that the same all-reduce adds up over the processes, in place.
        """
        add_up([*others, *self.loads.values()], self.group)
        for name, load in self.loads.items():
            figures = _figures(load[:-1])
            if name in self._past:
                total, old = (part.to(load.device) for part in self._past[name])
                load, figures = load + total, _joined(figures, old)
            self._past[name] = load.clone(), figures
            self.loads[name].zero_()

    def take(self) -> dict[str, dict[str, Any]]:
        """Report by router and start anew; a collective where there are several processes.

        What was seen since the last step counts as a step. Steps without a token do not count.

        Returns:
            By name: `load` (tokens by expert); `entropy` and `max_over_mean` as in `K3Signals`, means over the steps;
            `worst_max_over_mean`, that of the worst step; `dropped`: the share of places beyond the capacity. Routers
            without a token are left out.
        """
        self.end_step()
        report = {}
        for name, (load, figures) in self._past.items():
            steps, entropy, ratio, worst = figures.tolist()
            if steps:
                report[name] = {
                    "load": load[:-1].tolist(),
                    "entropy": entropy / steps,
                    "max_over_mean": ratio / steps,
                    "worst_max_over_mean": worst,
                    "dropped": (load[-1] / load[:-1].sum()).item(),
                }
        self._past.clear()
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


def _figures(load: Tensor) -> Tensor:
    """Of one step's load [N]: 1 (one step), entropy over log N, and twice max over mean; zeros without a token."""
    count = load.sum().clamp(min=1).float()
    ratio = (load.max() * len(load)).float() / count
    entropy = torch.special.entr(load.float() / count).sum() / math.log(max(len(load), 2))
    return torch.stack([(ratio > 0).float(), entropy.clamp(max=1), ratio, ratio])


def _joined(new: Tensor, old: Tensor) -> Tensor:
    """Sums of the first three, the larger one of the last."""
    return torch.cat([new[:3] + old[:3], torch.maximum(new[3:], old[3:])])


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
    """What a log has room for, of `RouterWatch.take`: the layers' mean entropy and drops, and the violation of balance.

    A step's violation is max / mean - 1 of the experts' load, 0 when even. `router_mean_violation` is its mean over
    steps and layers, `router_max_violation` the mean over steps in the worst layer: neither depends on how many steps
    lie between two entries of a log. `router_peak_violation` is the largest of all.
    """
    if not report:
        return {}
    rows = list(report.values())
    return {
        "router_entropy": sum(row["entropy"] for row in rows) / len(rows),
        "router_mean_violation": sum(row["max_over_mean"] for row in rows) / len(rows) - 1,
        "router_max_violation": max(row["max_over_mean"] for row in rows) - 1,
        "router_peak_violation": max(row["worst_max_over_mean"] for row in rows) - 1,
        "router_dropped": sum(row["dropped"] for row in rows) / len(rows),
    }
