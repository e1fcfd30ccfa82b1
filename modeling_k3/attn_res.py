"""AttnRes: attention over depth in the place of the identity residual.

A sub-layer does not read the running sum of all earlier outputs; it reads a softmax mixture of the finished block
sums and the running sum of the open block. Nothing of this is cached from token to token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from .attn_res_fla import try_fused_mix
from .precision import at_least_fp32, no_autocast, row_blocks


class _MixResiduals(torch.autograd.Function):
    """The mixture with a backward of its own: it keeps the sources, which exist anyway, and L numbers per token.

    With s_l = r_l (q . v_l), r_l = 1 / sqrt(mean(v_l^2) + eps), p = softmax(s), h = sum_l p_l v_l:

        ds_l = p_l (dp_l + dh . v_l - sum_m p_m (dp_m + dh . v_m))
        dv_l = p_l dh + ds_l (r_l q - s_l r_l^2 v_l / D)          dq = sum_l,tokens ds_l r_l v_l
    """

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        h, p, s, r = _mix(query, eps, sources)
        ctx.save_for_backward(query, s, r, p, *sources)
        return h, p

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dh: Tensor, dp: Tensor) -> tuple[Tensor | None, ...]:
        query, s, r, p, *sources = ctx.saved_tensors
        d_query = torch.zeros_like(query)
        d_sources = [torch.empty_like(source, memory_format=torch.contiguous_format) for source in sources]
        with no_autocast(dh.device.type):
            for d, dp_, p_, s_, r_, *rest in row_blocks(dh, dp, p, s, r, *sources, *d_sources):
                values = [source.to(query.dtype) for source in rest[: len(sources)]]
                _mix_backward(query, (d.to(query.dtype), dp_), (p_, s_, r_), values, d_query, rest[len(sources) :])
        return d_query, None, *d_sources


def _mix_backward(
    query: Tensor,
    grads: tuple[Tensor, Tensor],
    kept: tuple[Tensor, Tensor, Tensor],
    values: Sequence[Tensor],
    d_query: Tensor,
    d_values: Sequence[Tensor],
) -> None:
    """One block of tokens, all of it wide: adds to `d_query` [D], fills `d_values` (L tensors [tokens, D])."""
    (dh, dp), (p, s, r) = grads, kept
    gain = dp + torch.stack([torch.linalg.vecdot(dh, v) for v in values], dim=-1)
    ds = p * (gain - (p * gain).sum(dim=-1, keepdim=True))
    along_query, along_value = ds * r, ds * s * r.pow(2) / -len(query)
    for index, (v, into) in enumerate(zip(values, d_values, strict=True)):
        at = slice(index, index + 1)
        d_query.addmv_(v.mT, along_query[:, index])
        into.copy_((dh * p[:, at]).addcmul_(along_query[:, at], query).addcmul_(v, along_value[:, at]))


def _mix(query: Tensor, eps: float, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mixture h, its weights p, the scores s and the scales r."""
    wide = query.dtype
    scores, scales = [], []
    for source in sources:
        v = source.to(wide)
        scales.append(torch.rsqrt(torch.linalg.vecdot(v, v) / v.shape[-1] + eps))
        scores.append((v @ query) * scales[-1])
    s, r = torch.stack(scores, dim=-1), torch.stack(scales, dim=-1)
    p = s.softmax(dim=-1)
    h = sources[0].to(wide) * p[..., :1]
    for index in range(1, len(sources)):
        h.addcmul_(sources[index].to(wide), p[..., index : index + 1])
    return h.to(sources[-1].dtype), p, s, r


def mix_residuals(sources: Sequence[Tensor], query: Tensor, key_gain: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Attend over depth: average `sources`, each weighted by how well it answers `query`.

        h = sum_l p_l v_l        p = softmax_l( query . (key_gain * v_l / rms(v_l)) )

    Keys are normalised so that a sub-layer with large outputs does not win by size; values are taken raw. There is no
    1/sqrt(D). Only the product of `query` and `key_gain` acts.

    Args:
        sources: L tensors [..., D], same shape: the finished blocks in order, then the running sum.
        query: [D], the learned pseudo-query of this sub-layer.
        key_gain: [D], the weight of the key norm.
        eps: epsilon under the root, the model's `rms_norm_eps`.

    Returns:
        h [..., D] in the dtype of the sources, and p [..., L] in at least float32. Differentiable once, in both.

    Source: arXiv 2603.15031 section 3, arXiv 2607.24653 eq. 8-10; released `*_res_norm`, `*_res_proj`.
    """
    fused = try_fused_mix(sources, query, key_gain, eps=eps)
    if fused is not None:
        return fused
    wide = at_least_fp32(sources[-1].dtype)
    with no_autocast(query.device.type):
        gained = query.to(wide) * key_gain.to(wide)
        if not torch.is_grad_enabled():
            # Without the function around it the mixture can be compiled into one graph with its surroundings.
            return _mix(gained, eps, sources)[:2]
        return _MixResiduals.apply(gained, eps, *sources)


class K3KeyRMSNorm(nn.Module):
    """Gain [D] of the key norm. The root mean square itself is taken inside `mix_residuals`.

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
