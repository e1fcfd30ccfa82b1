"""The rules by which a router's bias is moved: from all scores of a step, from counts of them, or by the sign.

    alpha_i = (R + 1)-th largest of s_i + b            what a token's scores had to beat to be chosen
    b_j     = quantile_{R/N} over tokens of (alpha_i - s_ij),     then minus the mean over j

With the cutoffs alpha held fixed, exactly the share R/N of all tokens stays above an expert's quantile. The bias takes
part in choosing only, and what is learned from one step is used for the next.
Source: arXiv 2607.24653 section 2.3.3 and appendices C, D.
"""

import torch
from torch import Tensor, nn


class QuantileRule:
    """The definition: keeps [tokens, N] numbers until the step, of one process."""

    def __init__(self, router: nn.Module) -> None:
        self.router = router
        self._deficits: list[Tensor] = []

    def add(self, scores: Tensor, chosen: Tensor) -> None:
        """Take in a micro-batch: s [tokens, N] without the bias, chosen [tokens, R]."""
        self._deficits.append(deficits(scores, self.router.e_score_correction_bias, self.router.top_k))

    def counts(self) -> Tensor | None:
        """What adds up over processes: nothing, this rule is for one."""
        return None

    def bias(self) -> Tensor | None:
        """The bias wanted after this step, [N] with mean zero; None without a token. Starts anew."""
        seen = torch.cat(self._deficits) if self._deficits else None
        self._deficits.clear()
        if seen is None or not len(seen):
            return None
        return _quantile(seen, self.router.top_k / seen.shape[-1])


class HistogramRule:
    """The same within one bin's width: counts by expert and bin, which add up over micro-batches and processes.

    A token's deficit alpha - s lies in (min b - 1, max b + 1), which is cut into equal bins anew for each step,
    by the bias that its first micro-batch was routed with.

    Args:
        router: whose bias it is about.
        bins: B; the error is at most (max b - min b + 2) / B.
    """

    def __init__(self, router: nn.Module, bins: int = 1000) -> None:
        self.router, self.bins = router, bins
        size = (router.num_experts, bins)
        self._counts = torch.zeros(size, dtype=torch.int64, device=router.weight.device)
        self._cut: tuple[Tensor, Tensor] | None = None

    def add(self, scores: Tensor, chosen: Tensor) -> None:
        """Take in a micro-batch: s [tokens, N] without the bias, chosen [tokens, R]."""
        low, width = self._cut = self._cut or self._range()
        deficit = deficits(scores, self.router.e_score_correction_bias, self.router.top_k)
        at = ((deficit - low) / width).long().clamp_(0, self.bins - 1)
        at += torch.arange(deficit.shape[-1], device=at.device) * self.bins
        found = torch.bincount(at.flatten(), minlength=self._counts.numel())
        self._counts = self._counts.to(found.device).add_(found.view_as(self._counts))

    def counts(self) -> Tensor | None:
        """What adds up over processes: [N, B] int64, to be changed in place."""
        return self._counts

    def bias(self) -> Tensor | None:
        """The bias wanted after this step, [N] with mean zero; None without a token. Starts anew."""
        counts, (low, width) = self._counts, self._cut or self._range()
        self._cut = None
        tokens = int(counts[0].sum())
        if not tokens:
            return None
        wanted = tokens * self.router.top_k / len(counts)
        above = counts.cumsum(dim=1)
        place = (above >= wanted).int().argmax(dim=1, keepdim=True)
        inside = counts.gather(1, place).clamp(min=1)
        before = above.gather(1, place) - inside
        share = ((wanted - before) / inside).clamp(0, 1)
        bias = low + (place + share) * width
        counts.zero_()
        bias = bias[:, 0].to(self.router.e_score_correction_bias.dtype)
        return bias - bias.mean()

    def _range(self) -> tuple[Tensor, Tensor]:
        low, high = self.router.e_score_correction_bias.detach().aminmax()
        return low - 1, (high - low + 2) / self.bins


class SignRule:
    """Raise the bias of experts below the mean load and lower that of those above it, by a fixed step.

        b_j = b_j + rate * sign(mean load - load_j)

    Source: arXiv 2408.15664.
    """

    def __init__(self, router: nn.Module, rate: float) -> None:
        self.router, self.rate = router, rate
        self._load = torch.zeros(router.num_experts, dtype=torch.int64, device=router.weight.device)

    def add(self, scores: Tensor, chosen: Tensor) -> None:
        """Take in a micro-batch: s [tokens, N] without the bias, chosen [tokens, R]."""
        load = torch.bincount(chosen.flatten(), minlength=len(self._load))
        self._load = self._load.to(load.device).add_(load)

    def counts(self) -> Tensor | None:
        """What adds up over processes: [N] int64, to be changed in place."""
        return self._load

    def bias(self) -> Tensor | None:
        """The bias wanted after this step, [N]; None without a token. Starts anew."""
        load, old = self._load.double(), self.router.e_score_correction_bias.detach()
        if not load.sum():
            return None
        wanted = old + self.rate * (load.mean() - load).sign().to(old.dtype)
        self._load.zero_()
        return wanted


Rule = QuantileRule | HistogramRule | SignRule


def deficits(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """What each expert lacks for each token, alpha - s [tokens, N], see the head of this file."""
    return (scores + bias.detach()).topk(top_k + 1, dim=-1).values[:, -1:] - scores


def balanced_bias(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The bias under which every expert would be chosen equally often.

    Args:
        scores: s [tokens, N], without the bias.
        bias: b [N], the one the tokens were routed with.
        top_k: R, below N.

    Returns:
        [N], with mean zero.
    """
    return _quantile(deficits(scores, bias, top_k), top_k / scores.shape[-1])


def _quantile(deficit: Tensor, share: float) -> Tensor:
    """The quantile of each column [tokens, N], between neighbours by straight line, minus the mean.

    By selection: `torch.quantile` sorts, and refuses more than 2^24 numbers.
    """
    columns = deficit.mT.contiguous()
    place = share * (columns.shape[1] - 1)
    below = int(place)
    low = columns.kthvalue(below + 1, dim=1).values
    high = columns.kthvalue(min(below + 2, columns.shape[1]), dim=1).values
    bias = torch.lerp(low, high, place - below)
    return bias - bias.mean()
