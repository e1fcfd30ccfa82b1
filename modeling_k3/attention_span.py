"""What new tokens may attend to, in a form that costs no memory per pair of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils.generic import is_flash_attention_requested

#: Implementations whose place `mla_forms` takes where there is a history or a packed row.
OWN_FORMS = ("eager", "sdpa")
FLEX = "flex_attention"


def is_flash(implementation: str) -> bool:
    """Whether the name is one of flash attention's, which reads lengths and no mask per pair of tokens."""
    return is_flash_attention_requested(requested_attention_implementation=implementation)


@dataclass(frozen=True)
class AttentionSpan:
    """Causal attention over S = past + T tokens, without padding, inside one document.

        allowed[i, j] = (j <= past + i) and real[j] and documents[past + i] = documents[j]

    Args:
        past: tokens in the cache, before the new ones.
        real: [B, S] bool, False at padding; None: no padding.
        documents: [B, S] whole numbers, neighbours of one document share theirs; None: one document.
        position: tokens before the new ones as a tensor of no dimension, in the place of `past`, where the keys are a
            buffer of S tokens of which the last ones are not filled; None: `past` says it.
    """

    past: int
    real: Tensor | None = None
    documents: Tensor | None = None
    position: Tensor | None = None

    def allowed(self, rows: slice, keys: slice, device: torch.device) -> Tensor | None:
        """The rule for some new tokens and some keys, [B or 1, 1, rows, keys] bool, or None where all are allowed."""
        rule = None
        if self.position is not None:
            row = self.position.to(device) + torch.arange(rows.start, rows.stop, device=device)
            rule = (torch.arange(keys.start, keys.stop, device=device) <= row.unsqueeze(1))[None, None]
        elif keys.stop - 1 > self.past + rows.start:
            row = torch.arange(self.past + rows.start, self.past + rows.stop, device=device)
            rule = (torch.arange(keys.start, keys.stop, device=device) <= row.unsqueeze(1))[None, None]
        if self.real is not None:
            real = self.real[:, None, None, keys]
            rule = real if rule is None else rule & real
        if self.documents is not None:
            own = self.documents[:, self.past + rows.start : self.past + rows.stop]
            same = (own.unsqueeze(2) == self.documents[:, keys].unsqueeze(1)).unsqueeze(1)
            rule = same if rule is None else rule & same
        return rule


def read_pair_mask(mask: Tensor, past: int, known: Tensor | None) -> Tensor | None:
    """Read a mask per pair of tokens as padding, if it says no more than that.

    Args:
        mask: [B, 1, T, S], True, 1 or (in a mask of floating point) 0 where a token may attend; False, 0, or at most
            -1e4 where not.
        past: S - T tokens in the cache.
        known: [B, past] bool, False at padding; None: no padding in the cache.

    Returns:
        [B, T] bool, False at padding, or None if the mask says anything else than causal attention to real tokens.
        Rows of padding may say anything.
    """
    if mask.is_floating_point():
        allowed = mask == 0
        if not (allowed | (mask <= -1e4)).all():
            return None
    else:
        allowed = mask.to(torch.bool)
        if not torch.equal(allowed.to(mask.dtype), mask):
            return None
    allowed = allowed[:, 0]
    batch, length, total = allowed.shape
    step = torch.arange(length, device=mask.device)
    ahead = torch.arange(total, device=mask.device) > past + step.unsqueeze(1)
    real = allowed[:, step, past + step] & ~(allowed & ahead).any(-1)
    before = torch.ones(batch, past, dtype=torch.bool, device=mask.device) if known is None else known.to(mask.device)
    rule = ~ahead & torch.cat([before, real], dim=1).unsqueeze(1)
    return real if torch.equal(allowed & real.unsqueeze(2), rule & real.unsqueeze(2)) else None
