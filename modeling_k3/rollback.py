"""What a KDA layer keeps so that tokens can be taken back: an earlier state and the inputs of the tokens after it.

A state per token would cost 6 MiB per layer and token at the released dimensions. The inputs of one token, the three
projections before their convolution, the low-rank half of the decay and beta's logits, cost 72.4 KiB in bfloat16; one
state is worth 85 of them. So one state (the base) is kept, and behind it the inputs of the last tokens:

    base ---- log: W to 2W tokens ----> now          crop(n) shortens the log; the next call runs it again from the base

Nothing is computed in `crop` itself.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class KDAInputs(NamedTuple):
    """What the recurrence of one KDA layer reads, T tokens of it.

    Args:
        q, k, v: [B, T, H * K], the projections before convolution.
        decay: [B, T, K], the low-rank half of the decay logits.
        beta: [B, T, H], logits of the write strength.
        mask: [B, T] bool, False at padding; None: no padding.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    mask: Tensor | None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.q.shape[1]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "KDAInputs":
        """Apply `fn` to every tensor."""
        return KDAInputs(*(None if x is None else fn(x) for x in self))

    def span(self, start: int, stop: int) -> "KDAInputs":
        """The tokens from `start` to before `stop`."""
        return self.map(lambda x: x[:, start:stop])


#: Runs a KDA layer over tokens from (windows, state); returns (o, windows, state).
Advance = Callable[[KDAInputs, list[Tensor] | None, Tensor | None], tuple[Tensor, Sequence[Tensor], Tensor]]


def join_inputs(pieces: Sequence[KDAInputs]) -> KDAInputs:
    """Put pieces behind each other along the tokens."""
    if len(pieces) == 1:
        return pieces[0]
    mask = None
    if any(piece.mask is not None for piece in pieces):
        masks = [p.q.new_ones(p.q.shape[:2], dtype=torch.bool) if p.mask is None else p.mask for p in pieces]
        mask = torch.cat(masks, dim=1)
    return KDAInputs(*(torch.cat(parts, dim=1) for parts in list(zip(*pieces, strict=True))[:-1]), mask)


class RollbackLog:
    """The base state of one layer and the inputs since then.

    Args:
        window: W, at least so many of the latest tokens can be taken back, fewer only if fewer were logged.
        windows, state: where the log begins, None for the beginning of the sequence.
    """

    def __init__(self, window: int, windows: list[Tensor] | None, state: Tensor | None) -> None:
        self.window, self.windows, self.state = window, windows, state
        self.pieces: list[KDAInputs] = []
        #: Set by `crop`: the layer's current state is no longer the one behind the log.
        self.is_behind = False

    @property
    def num_tokens(self) -> int:
        """Tokens in the log: so many can be taken back."""
        return sum(piece.num_tokens for piece in self.pieces)

    def nbytes(self) -> int:
        """Bytes of the base and of the logged inputs."""
        held = [*(self.windows or []), self.state, *(x for piece in self.pieces for x in piece)]
        return sum(x.nbytes for x in held if x is not None)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `fn` of it."""
        self.windows = None if self.windows is None else [fn(x) for x in self.windows]
        self.state = None if self.state is None else fn(self.state)
        self.pieces = [piece.map(fn) for piece in self.pieces]

    def copy(self) -> "RollbackLog":
        """A log of its own over the same tensors, which are never written to."""
        twin = RollbackLog(self.window, self.windows, self.state)
        twin.pieces, twin.is_behind = list(self.pieces), self.is_behind
        return twin

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens, which must be in the log."""
        while count:
            last = self.pieces.pop()
            if last.num_tokens > count:
                # A copy, so that the forgotten tokens' memory is free.
                self.pieces.append(last.span(0, last.num_tokens - count).map(torch.clone))
            count -= min(count, last.num_tokens)
        self.is_behind = True

    def run(
        self, inputs: KDAInputs, windows: list[Tensor] | None, state: Tensor | None, advance: Advance
    ) -> tuple[Tensor, Sequence[Tensor], Tensor]:
        """Run a layer over new tokens and log them; move the base so that the log stays short.

        Args:
            inputs: the new tokens.
            windows, state: where the layer stands; not read after a `crop`, when the logged tokens are run again.
            advance: the layer.

        Returns:
            As `advance`, for the new tokens.
        """
        count, outputs = inputs.num_tokens, []
        if self.is_behind:
            inputs, windows, state = join_inputs([*self.pieces, inputs]), self.windows, self.state
            self.pieces, self.is_behind = [], False
        logged = self.num_tokens
        cut = logged + inputs.num_tokens - self.window
        if self.window < cut <= logged:
            joined = join_inputs(self.pieces)
            _, base_windows, self.state = advance(joined.span(0, cut), self.windows, self.state)
            self.windows, self.pieces = list(base_windows), [joined.span(cut, logged).map(torch.clone)]
        elif cut > max(self.window, logged):
            at = cut - logged
            first, windows, state = advance(inputs.span(0, at), windows, state)
            self.windows, self.state, self.pieces = list(windows), state, []
            inputs = inputs.span(at, inputs.num_tokens).map(torch.clone)
            outputs.append(first)
        o, windows, state = advance(inputs, windows, state)
        self.pieces.append(inputs)
        return torch.cat([*outputs, o], dim=1)[:, -count:], windows, state
