"""What callbacks share that add figures of their own to the Trainer's log."""

from typing import Any, Self

from transformers import Trainer, TrainerCallback, TrainerState


class ReportingCallback(TrainerCallback):
    """A callback whose figures stand in the entries of the log."""

    is_attached = False

    def attach(self, trainer: Trainer) -> Self:
        """Join `trainer`, or move to its front, so that its reporters (TensorBoard, ...) see the figures as well."""
        others = [callback for callback in trainer.callback_handler.callbacks if callback is not self]
        trainer.callback_handler.callbacks = [self, *others]
        self.is_attached = True
        return self

    def report(self, logs: dict[str, Any], state: TrainerState, figures: dict[str, float]) -> None:
        """Add figures to an entry: to what reporters are handed, and to the history that was written before."""
        for entry in (logs, state.log_history[-1]):
            entry.update(figures)
