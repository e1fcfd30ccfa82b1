"""Balancing: after every optimizer step the routers' biases are moved so that all experts get an equal share of tokens.

    balancer = RouterBalancer(model)                # the way the config names, `router_balancing`
    ...                                             # any number of micro-batches, forward and backward
    optimizer.step()
    balancer.step()                                 # or once: balancer.follow(optimizer)

In the library's Trainer and in TRL's trainers `callback.K3TrainingCallback` does the same. Where `router_balancing` is
"aux_loss" the model adds the loss itself, and nothing is moved here.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from modeling_k3.config_checks import ROUTER_BALANCING

from .router_stats import RouterWatch, is_router, world_size
from .rules import HistogramRule, QuantileRule, Rule, SignRule


class RouterBalancer(RouterWatch):
    """Watches the routers of a model while it trains, and moves their biases when asked.

    Only training counts: nothing is learned from evaluation, from padding, or twice from a token whose layers are
    repeated by gradient checkpointing. A router whose weight is frozen keeps its bias as well, since an adapter that is
    saved without it could not bring it back. With several processes the counts of all are added by one all-reduce for
    each step, and "quantile" is computed as "histogram"; every process has to take every step.

    Args:
        model: any model with K3 routers; one without is left alone.
        method: "quantile", "histogram", "sign", "aux_loss" or "none"; None: what the model's config says.
        rate: step of the sign rule; None: what the config says.
        memory: share of the old bias that a step keeps, which smooths over the noise of small batches; 0 to below 1.
        bins: of the histogram.
        group: the processes that train together; None: all.

    Raises:
        ValueError: an unknown method, a number outside its range, no config to ask, "aux_loss" where the config says
            otherwise, or a method that cannot balance group-limited routing.
    """

    def __init__(
        self,
        model: nn.Module,
        method: str | None = None,
        *,
        rate: float | None = None,
        memory: float = 0.0,
        bins: int = 1000,
        group: Any = None,
    ) -> None:
        check_balancing(method, memory)
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"rate={rate!r}; allowed are numbers above 0")
        if type(bins) is not int or bins < 2:
            raise ValueError(f"bins={bins!r} must be a whole number of at least 2")
        has_routers = any(is_router(module) for module in model.modules())
        if has_routers and method == "aux_loss" and (configured := _config_of(model).router_balancing) != method:
            raise ValueError(
                f"method='aux_loss' with config.router_balancing={configured!r}: the model adds the loss, and does so "
                "only where its config says 'aux_loss'; set it there"
            )
        if has_routers and (method is None or (method == "sign" and rate is None)):
            config = _config_of(model)
            method = config.router_balancing if method is None else method
            rate = config.router_bias_update_rate if rate is None else rate
        super().__init__(model, group)
        if method == "quantile" and world_size(group) > 1:
            method = "histogram"
        self.method, self.memory = method, memory
        self.rules: dict[str, Rule] = {}
        for name, router in self.routers.items():
            # With all experts chosen there is nothing to balance.
            if router.weight.requires_grad and router.top_k < router.num_experts:
                rule = _make_rule(method, router, rate, bins)
                if rule is not None:
                    self.rules[name] = rule

    def see(self, name: str, router: nn.Module, scores: Tensor, chosen: Tensor) -> None:
        """Take in what a router has seen of one micro-batch."""
        if name in self.rules:
            self.rules[name].add(scores, chosen)

    @torch.no_grad()
    def step(self) -> None:
        """Move every bias by what all micro-batches since the last step ask for; nothing seen, nothing moved."""
        counts = [rule.counts() for rule in self.rules.values()]
        self.end_step(*(count for count in counts if count is not None))
        for name, rule in self.rules.items():
            wanted = rule.bias()
            if wanted is not None:
                self.routers[name].e_score_correction_bias.data.lerp_(wanted, 1 - self.memory)

    def follow(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Take a step after every step of `optimizer`, until `close` or the handle's `remove`."""
        handle = optimizer.register_step_post_hook(lambda *_: self.step())
        self._handles.append(handle)
        return handle


def check_balancing(method: str | None, memory: float) -> None:
    """Refuse a method or a memory that no model could have, as `RouterBalancer` describes them."""
    if method is not None and method not in ROUTER_BALANCING:
        raise ValueError(f"method={method!r} is unknown; allowed are {list(ROUTER_BALANCING)}")
    if not 0 <= memory < 1:
        raise ValueError(f"memory={memory!r} must be at least 0 and below 1")


def _config_of(model: nn.Module) -> Any:
    for module in model.modules():
        config = module.__dict__.get("config")
        if hasattr(config, "router_balancing"):
            return config
    raise ValueError(f"{type(model).__name__} has no K3Config to read router_balancing from; give method (and rate)")


def _make_rule(method: str, router: nn.Module, rate: float, bins: int) -> Rule | None:
    if method == "sign":
        return SignRule(router, rate)
    if method not in ("quantile", "histogram"):
        return None
    if router.num_groups > router.top_k_groups:
        raise ValueError(
            f"router_balancing={method!r} with topk_group={router.top_k_groups} of num_expert_group="
            f"{router.num_groups}: quantiles know no groups; allowed are 'sign', 'aux_loss' and 'none'"
        )
    return QuantileRule(router) if method == "quantile" else HistogramRule(router, bins)
