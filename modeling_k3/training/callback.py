"""Balancing and figures of routers and depth for the library's Trainer, and for TRL's, which are built on it.

    trainer = Trainer(model, arguments, train_dataset=...)
    K3TrainingCallback(plot="training.png").attach(trainer)

Every entry of the log then has, beside the loss: `router_entropy`, `router_mean_violation`, `router_max_violation`,
`router_peak_violation`, `router_dropped` (`router_stats.summarise` defines them), `depth_entropy`,
`depth_largest_weight`, `depth_query_norm`. TensorBoard and other reporters (`report_to`) get them too.
The load of every single expert is no scalar for a log: it is in `routers` of the callback, and in the picture.
With `callbacks=[K3TrainingCallback()]` instead, the reporters come first and only see what the Trainer itself logs.
"""

import time
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from .balancing import RouterBalancer, check_balancing
from .depth_stats import DepthWatch, summarise_depth
from .plot import draw_training
from .reporting import ReportingCallback
from .router_stats import summarise

logger = logging.get_logger(__name__)
# Drawing takes a third of a second, which must not add up where steps are short.
_DRAWING_SHARE = 0.05


class K3TrainingCallback(ReportingCallback):
    """Moves the routers' biases after every optimizer step, and logs how routing and depth develop.

    The bias moves once for all micro-batches of a step. Nothing is moved or counted while evaluating.

    Args:
        method: how to balance, see `RouterBalancer`; None: what the model's config says.
        memory: share of the old bias that a step keeps.
        plot: PNG that is drawn anew at the entries of the log, as often as 5 % of the time allow, and at the end, also
            of a run that logged nothing; None: none.

    Raises:
        ValueError: an unknown method, or a memory outside 0 to below 1.
    """

    def __init__(self, method: str | None = None, *, memory: float = 0.0, plot: str | Path | None = None) -> None:
        check_balancing(method, memory)
        self.method, self.memory, self.plot = method, memory, None if plot is None else Path(plot)
        self.balancer: RouterBalancer | None = None
        self.depth: DepthWatch | None = None
        #: What the last entry of the log summarises, by router and by mix.
        self.routers: dict[str, dict[str, Any]] = {}
        self.mixes: dict[str, dict[str, float]] = {}
        self._drawn_until, self._drawing_took = 0.0, 0.0
        self._is_drawn, self._has_logged = True, False

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
        self._has_logged = False
        if args.report_to and not self.is_attached:
            logger.warning(
                f"report_to={args.report_to}: reporters do not see the routers' and depth's figures; "
                "K3TrainingCallback(...).attach(trainer) lets them"
            )
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
        self._take()
        self.report(logs, state, {**summarise(self.routers), **summarise_depth(self.mixes)})
        if time.perf_counter() - self._drawn_until >= self._drawing_took * (1 / _DRAWING_SHARE - 1):
            self._draw(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draw what came last, and stop watching."""
        if self.plot is not None and self.balancer is not None and not self._has_logged:
            self._take()
        self._draw(args, state)
        self._close()

    def _take(self) -> None:
        self.routers, self.mixes = self.balancer.take(), self.depth.take()
        self._is_drawn, self._has_logged = False, True

    def _draw(self, args: TrainingArguments, state: TrainerState) -> None:
        if self.plot is None or self._is_drawn or not state.is_world_process_zero:
            return
        began = time.perf_counter()
        loads = {name: row["load"] for name, row in self.routers.items()}
        draw_training(self.plot, state.log_history, loads, self.depth.weights, title=Path(args.output_dir).name)
        self._is_drawn, self._drawn_until = True, time.perf_counter()
        self._drawing_took = self._drawn_until - began

    def _close(self) -> None:
        for watch in (self.balancer, self.depth):
            if watch is not None:
                watch.close()
        self.balancer = self.depth = None
