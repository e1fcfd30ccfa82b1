"""AttnRes: attention over depth in the place of the identity residual.

A sub-layer does not read the running sum of all earlier outputs; it reads a softmax mixture of the finished block
sums and the running sum of the open block. Nothing of this is cached from token to token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .precision import at_least_fp32


def depth_weights(sources: Sequence[Tensor], query: Tensor, *, eps: float) -> Tensor:
    """Score every source by how well it answers `query`, and normalise over depth.

        p = softmax_l( query . v_l / sqrt(mean(v_l^2) + eps) )

    Args:
        sources: L tensors [..., D], same shape.
        query: [D], pseudo-query times key gain, in at least float32.
        eps: the model's `rms_norm_eps`.

    Returns:
        [..., L] in the dtype of `query`. There is no 1/sqrt(D): the keys are normalised.
    """
    scores = []
    for source in sources:
        v = source.to(query.dtype)
        # The root mean square only scales the dot product, so the normalised key need not be formed.
        scores.append((v @ query) * torch.rsqrt(v.pow(2).mean(-1) + eps))
    return torch.stack(scores, dim=-1).softmax(dim=-1)


def mix_residuals(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Attend over depth: average `sources`, each weighted by how well it answers `query`.

        h = sum_l p_l v_l        p = softmax_l( query . (key_gain * v_l / rms(v_l)) )

    Keys are normalised so that a sub-layer with large outputs does not win by size; values are taken raw.

    Args:
        sources: L tensors [..., D]: the finished blocks in order, then the running sum.
        query: [D], the learned pseudo-query of this sub-layer.
        key_gain: [D], the weight of the key norm.
        eps: epsilon under the root, the model's `rms_norm_eps`.

    Returns:
        h [..., D] in the dtype of the sources, and p [..., L] in at least float32.

    Source: arXiv 2603.15031 section 3, arXiv 2607.24653 eq. 8-10; released `*_res_norm`, `*_res_proj`.
    """
    wide = at_least_fp32(sources[-1].dtype)
    p = depth_weights(sources, query.to(wide) * key_gain.to(wide), eps=eps)
    h = sources[0].to(wide) * p[..., :1]
    for index in range(1, len(sources)):
        h = torch.addcmul(h, sources[index].to(wide), p[..., index : index + 1])
    return h.to(sources[-1].dtype), p


class K3KeyRMSNorm(nn.Module):
    """Gain [D] of the key norm. The root mean square itself is taken inside `depth_weights`.

    Called instead of read, so that hooks which bring offloaded weights back see the use.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self) -> Tensor:
        """Return the gain [D]."""
        return self.weight

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}"


class K3PseudoQuery(nn.Module):
    """One learned query over depth, `weight` [1, D]. Zero at the start: every source weighs the same.

    Not an `nn.Linear`, so that quantisation and LoRA helpers, which collect linear layers, leave it alone.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))

    def forward(self, sources: Sequence[Tensor], key_gain: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        """Mix `sources` (L tensors [..., D]); returns the mixture and the weights, see `mix_residuals`."""
        return mix_residuals(sources, self.weight[0], key_gain, eps=eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}"
