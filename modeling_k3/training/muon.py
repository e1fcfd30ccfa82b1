"""Muon for what a K3 model is made of: single matrices, stacks of experts, projections cut into heads."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix is replaced by the nearest orthogonal one before it is applied.

        M = mu M + (1 - mu) G     U = orthogonalise((1 - mu) G + mu M)     W = (1 - lr wd) W - lr 0.2 sqrt(max(m, n)) U

    The factor gives every matrix the same root mean square per update, so AdamW's learning rates carry over. On a
    single matrix this is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`. That one serves wherever a model has
    nothing else; it does not take stacks [N, m, n], cannot cut rows into heads, rounds the iteration to bfloat16 on
    every device, and does one matrix at a time, where here all blocks of one shape go through one batched product.
    Whole parameters only: a shard is not the matrix, and distributed tensors are refused.

    Args:
        params: groups; each may set `blocks`, the heights of the blocks its rows are made of, repeated (None: whole).
        lr: learning rate.
        momentum: mu, in [0, 1).
        weight_decay: decoupled, per unit of learning rate.

    Raises:
        ValueError: an option out of range, a vector, rows that `blocks` do not divide, or a distributed tensor.

    Source: Muon as scaled in arXiv 2502.16982; per-head blocks: arXiv 2607.24653 section 2.5.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum!r} is out of range; allowed is [0, 1)")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "blocks": None})
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                names = group.get("param_names")
                which = f"parameter {place} of group {number}" if names is None else f"parameter {names[place]}"
                if hasattr(parameter, "full_tensor"):
                    raise ValueError(f"{which} is a distributed tensor; allowed are whole ones, or muon_lr=None")
                if parameter.ndim < 2 or (group["blocks"] and parameter.shape[-2] % sum(group["blocks"])):
                    raise ValueError(
                        f"{which} has shape {tuple(parameter.shape)}; allowed are matrices and stacks of them, "
                        f"with rows that blocks={group['blocks']!r} divide"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_shape: dict[tuple[Any, ...], list[tuple[Tensor, Tensor, float]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = self._direction(parameter, group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                heights = group["blocks"] or (parameter.shape[-2],)
                for target, part in zip(_cut(parameter, heights), _cut(direction, heights), strict=True):
                    key = (*part.shape[1:], part.dtype, part.device)
                    by_shape.setdefault(key, []).append((target, part, group["lr"]))
        for (rows, columns, *_), members in by_shape.items():
            updates = orthogonalise(torch.cat([part for _, part, _ in members]))
            size = 0.2 * math.sqrt(max(rows, columns))
            for (target, part, lr), update in zip(members, updates.split([len(m[1]) for m in members]), strict=True):
                target.add_(update.view_as(part), alpha=-lr * size)
        return loss

    def _direction(self, parameter: Tensor, momentum: float) -> Tensor:
        """Take the gradient into the momentum; returns the Nesterov direction."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum)


def _cut(tensor: Tensor, heights: tuple[int, ...]) -> Iterator[Tensor]:
    """Views [n, height, columns] of the blocks of [..., rows, columns], one for each of `heights`."""
    stacked = tensor.view(-1, sum(heights), tensor.shape[-1])
    yield from stacked.split(list(heights), dim=1)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push all singular values of each matrix to about one, by a Newton-Schulz iteration of degree five.

    Args:
        matrices: [n, rows, columns].
        steps: iterations; five bring the singular values to roughly 0.7 .. 1.2, which is all Muon needs.

    Returns:
        [n, rows, columns], the same dtype.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, poly, x, beta=3.4445)
    return x.mT if tall else x
