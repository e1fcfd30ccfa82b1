"""Balancing and figures of routers and depth for the library's Trainer, and for TRL's, which are built on it.

    trainer = Trainer(model, arguments, train_dataset=..., callbacks=[K3TrainingCallback(plot="training.png")])

Every entry of the log then has, beside the loss: `router_entropy`, `router_max_violation`, `router_dropped`,
`depth_entropy`, `depth_largest_weight`, `depth_query_norm`.
"""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .balancing import RouterBalancer
from .depth_stats import DepthWatch, summarise_depth
from .plot import draw_training
from .router_stats import summarise


class K3TrainingCallback(TrainerCallback):
    """Moves the routers' biases after every optimizer step, and logs how routing and depth develop.

    The bias moves once for all micro-batches of a step. Nothing is moved or counted while evaluating.

    Args:
        method: how to balance, see `RouterBalancer`; None: what the model's config says.
        memory: share of the old bias that a step keeps.
        plot: PNG that is drawn anew at every entry of the log; None: none.
    """

    def __init__(self, method: str | None = None, *, memory: float = 0.0, plot: str | Path | None = None) -> None:
        self.method, self.memory, self.plot = method, memory, None if plot is None else Path(plot)
        self.balancer: RouterBalancer | None = None
        self.depth: DepthWatch | None = None
        #: What the last entry of the log summarises, by router and by mix.
        self.routers: dict[str, dict[str, Any]] = {}
        self.mixes: dict[str, dict[str, float]] = {}

    def attach(self, trainer: Trainer) -> "K3TrainingCallback":
        """Join `trainer`, or move to its front, so that its reporters (TensorBoard, ...) see the figures as well."""
        others = [callback for callback in trainer.callback_handler.callbacks if callback is not self]
        trainer.callback_handler.callbacks = [self, *others]
        return self

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Begin to watch."""
        self._close()
        self.balancer = RouterBalancer(model, self.method, memory=self.memory)
        self.depth = DepthWatch(model)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the biases."""
        self.balancer.step()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the figures since the last entry to an entry about training."""
        if self.balancer is None or logs is None or "loss" not in logs:
            return
        self.routers, self.mixes = self.balancer.take(), self.depth.take()
        figures = {**summarise(self.routers), **summarise_depth(self.mixes)}
        for entry in (logs, state.log_history[-1]):
            entry.update(figures)
        if self.plot is not None and state.is_world_process_zero:
            draw_training(self.plot, state.log_history, [row["load"] for row in self.routers.values()])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop watching."""
        self._close()

    def _close(self) -> None:
        for watch in (self.balancer, self.depth):
            if watch is not None:
                watch.close()
        self.balancer = self.depth = None
