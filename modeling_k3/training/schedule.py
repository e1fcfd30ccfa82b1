"""The learning rate over a run: one percent of linear warm-up, then a cosine, as K3 was trained."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def rate_at(progress: float, *, warmup: float = 0.01, floor: float = 0.0) -> float:
    """Share of the peak rate: linear warm-up, then a cosine down to `floor`.

    Args:
        progress: share of the run that is done, 0 to 1.
        warmup: share of the run spent on the rise.
        floor: share of the peak that is left at the end.

    Source: arXiv 2607.24653 sections 3.2 and 3.3.
    """
    if progress < warmup:
        return max(progress / warmup, 0.02)
    fall = min((progress - warmup) / max(1 - warmup, 1e-9), 1.0)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * fall))


def cosine_schedule(
    optimizer: Optimizer, num_training_steps: int, *, warmup: float = 0.01, floor: float = 0.0
) -> LambdaLR:
    """`rate_at` as a torch scheduler, for `Trainer(optimizers=(optimizer, scheduler))` or a loop of one's own.

    Args:
        optimizer: each group's rate is its peak.
        num_training_steps: length of the run; later steps stay at the floor.
        warmup, floor: see `rate_at`.

    Raises:
        ValueError: no steps, or a share outside 0 to 1.
    """
    if num_training_steps < 1:
        raise ValueError(f"num_training_steps={num_training_steps!r}; allowed are numbers from 1 up")
    for name, value in (("warmup", warmup), ("floor", floor)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value!r}; allowed are shares from 0 to 1")
    return LambdaLR(optimizer, lambda step: rate_at(step / num_training_steps, warmup=warmup, floor=floor))


def set_progress(optimizer: Optimizer, share: float) -> None:
    """Set every group's learning rate to `share` of its peak, for runs whose length is not known in steps.

    The peak is what the rate was at the first call; it is kept in the group as `initial_lr`, as torch's schedulers do.
    """
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * share
