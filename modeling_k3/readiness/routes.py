"""Record which experts a run chooses, and make another run choose the same ones.

Rounding flips near-ties of a router, and another expert is another function: a difference of logits then says nothing
about arithmetic. So a fast path is judged with the routes of the exact one, and route changes are counted apart.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Routes = dict[str, Tensor]


def _routers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "e_score_correction_bias")}


@contextmanager
def record_routes(model: nn.Module) -> Iterator[Routes]:
    """Inside, the choices [tokens, R] of each router are kept under the router's name."""
    found: Routes = {}

    def keep(name: str) -> object:
        def hook(module: nn.Module, args: tuple[object, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
            found[name] = output[2].detach()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in _routers(model).items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def force_routes(model: nn.Module, routes: Routes) -> Iterator[None]:
    """Inside, every router chooses as in `routes` and weighs its choice by its own scores."""

    def force(chosen: Tensor) -> object:
        def hook(
            module: nn.Module, args: tuple[object, ...], output: tuple[Tensor, Tensor, Tensor]
        ) -> tuple[Tensor, Tensor, Tensor]:
            logits = output[0]
            scores = logits.sigmoid() if module.scoring == "sigmoid" else logits.softmax(dim=-1)
            weights = scores.gather(1, chosen)
            if module.renormalize and module.top_k > 1:
                weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
            return logits, weights * module.scale, chosen

        return hook

    routers = _routers(model)
    handles = [routers[name].register_forward_hook(force(chosen)) for name, chosen in routes.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def changed_share(a: Routes, b: Routes) -> float:
    """Share of (token, layer) whose set of experts differs; 0 without routers."""
    changed = [(a[name].sort(-1).values != b[name].sort(-1).values).any(-1) for name in a]
    return torch.cat(changed).double().mean().item() if changed else 0.0
