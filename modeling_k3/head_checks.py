"""What the head of a language model accepts, checked before anything is computed: labels, and which logits to keep."""

import torch
from torch import Tensor

from .configuration_k3 import K3Config
from .masks import is_tracing


def check_labels(labels: Tensor, inputs: Tensor | None, logits_to_keep: int | Tensor, config: K3Config) -> None:
    """Refuse labels that do not stand beside the inputs.

    Raises:
        ValueError: another shape, some logits left out, or (eager mode only) a label outside the vocabulary.
    """
    if inputs is not None and labels.shape != inputs.shape[:2]:
        raise ValueError(f"labels has shape {tuple(labels.shape)}; allowed is {tuple(inputs.shape[:2])}")
    if isinstance(logits_to_keep, Tensor) or logits_to_keep:
        raise ValueError(f"logits_to_keep={logits_to_keep!r} with labels is not allowed: the loss needs all logits")
    if not is_tracing() and labels.numel() and not labels.is_meta:
        low, high = torch.stack(labels.masked_fill(labels == -100, 0).aminmax()).tolist()
        if low < 0 or high >= config.vocab_size:
            raise ValueError(
                f"labels contains {low if low < 0 else high}; allowed are -100 and 0 to {config.vocab_size - 1} "
                f"(vocab_size={config.vocab_size})"
            )


def check_logits_to_keep(logits_to_keep: int | Tensor, shape: tuple[int, int]) -> None:
    """Refuse positions that the input does not have, before a cache has read it.

    Args:
        logits_to_keep: the last n, 0 for all; positions [n] or [B, n]; or a mask [T] or [B, T].
        shape: B and T of the input.

    Raises:
        TypeError: neither a number nor a tensor of int64 or bool.
        ValueError: a negative number, another shape, or (eager mode only) positions outside the input.
    """
    if isinstance(logits_to_keep, int):
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep={logits_to_keep}; allowed are 0 for all, and how many of the last")
        return
    kinds = (torch.int64, torch.int32, torch.bool)
    if not isinstance(logits_to_keep, Tensor) or logits_to_keep.dtype not in kinds:
        found = getattr(logits_to_keep, "dtype", type(logits_to_keep).__name__)
        raise TypeError(f"logits_to_keep is a {found}; allowed are a number, positions (int64) and a mask (bool)")
    batch, length = shape
    found, is_mask = tuple(logits_to_keep.shape), logits_to_keep.dtype == torch.bool
    allowed = [(length,), (batch, length)] if is_mask else [found[-1:], (batch, *found[-1:])]
    if not found or found not in allowed:
        what = f"[{length}] or [{batch}, {length}]" if is_mask else f"[n] or [{batch}, n]"
        raise ValueError(f"logits_to_keep has shape {found}; allowed is {what}")
    if is_mask or is_tracing() or logits_to_keep.is_meta or not logits_to_keep.numel():
        return
    low, high = torch.stack(logits_to_keep.aminmax()).tolist()
    lowest = -length if len(found) == 1 else 0
    if low < lowest or high >= length:
        raise ValueError(
            f"logits_to_keep contains {low if low < lowest else high}; allowed are {lowest} to {length - 1}, positions "
            "of the input"
        )
