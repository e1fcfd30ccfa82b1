"""KDA as attention: the precise form, row block by row block, with the weights it amounts to.

The recurrence is a linear map from values to outputs. With D_ij the decay between tokens j and i, i >= j, per channel:

    L_ij = beta_i sum_d k_id D_ijd k_jd    (j < i)          A_ij = K^-1/2 sum_d q_id D_ijd k_jd    (j <= i)
    o    = A (I + L)^-1 Diag(beta) v  =  W v                W: the effective attention weights, [T, T] per head

"Exact" means: nothing but rounding separates this from the definition, and the rounding is as small as the dtype
allows (log decays are summed in float64; every exponent is a difference that is never positive). Cost grows with T^2.
"""

import torch
from torch import Tensor

#: Rows formed at a time; a pair of tokens inside one block is decayed by its own difference.
BLOCK = 16
#: Weights beyond this are refused: nobody looks at them, and they fill the memory.
MAX_WEIGHT_BYTES = 2**31


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, *, output_weights: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Evaluate KDA in its attention form. Tensors of one dtype, float32 or float64, as in `kda_ops`.

    Returns:
        o [B, T, H, V], the final state [B, H, K, V], and W [B, H, T, T] if `output_weights` (what the state that
        entered adds to o is not part of W).

    Raises:
        ValueError: weights larger than 2 GiB were asked for.
    """
    batch, length, heads, _ = q.shape
    if output_weights:
        needed = batch * heads * length * length * q.element_size()
        if needed > MAX_WEIGHT_BYTES:
            raise ValueError(
                f"weights of {length} tokens, {heads} heads and a batch of {batch} take {needed} bytes; allowed are "
                f"{MAX_WEIGHT_BYTES}"
            )
    q = q * q.shape[-1] ** -0.5
    q, k, v, log_decay, beta = (x.transpose(1, 2) for x in (q, k, v, log_decay, beta.unsqueeze(-1)))
    cum, k_write = log_decay.double().cumsum(dim=-2), beta * k
    pseudo, outputs, reads, writes = [], [], [], []
    for start in range(0, length, BLOCK):
        rows = slice(start, min(start + BLOCK, length))
        read, write = (_block(x[:, :, rows], k, cum, rows) for x in (q, k_write))
        earlier = cum[:, :, rows].exp().to(q.dtype)
        r = beta[:, :, rows] * (v[:, :, rows] - (earlier * k[:, :, rows]) @ state)
        o = (earlier * q[:, :, rows]) @ state
        if pseudo:
            past = torch.cat(pseudo, dim=-2)
            r = r - write[..., :start] @ past
            o = o + read[..., :start] @ past
        own = write[..., start:]
        w = torch.linalg.solve_triangular(own.tril(-1), r, upper=False, unitriangular=True)
        pseudo.append(w)
        outputs.append(o + read[..., start:] @ w)
        if output_weights:
            reads.append(torch.nn.functional.pad(read, (0, length - rows.stop)))
            writes.append(torch.nn.functional.pad(write, (0, length - rows.stop)))
    to_end = (cum[..., -1:, :] - cum).exp().to(k.dtype)
    final = cum[..., -1, :, None].exp().to(k.dtype) * state + (k * to_end).mT @ torch.cat(pseudo, dim=-2)
    weights = _weights(torch.cat(reads, dim=-2), torch.cat(writes, dim=-2), beta) if output_weights else None
    return torch.cat(outputs, dim=-2).transpose(1, 2), final, weights


def _block(x: Tensor, k: Tensor, cum: Tensor, rows: slice) -> Tensor:
    """Return sum_d x_id D_ijd k_jd for the rows of a block and all tokens up to its end, 0 above the diagonal."""
    own = cum[:, :, rows]
    gap = own.unsqueeze(-2) - own.unsqueeze(-3)
    above = torch.ones(gap.shape[-3], gap.shape[-2], dtype=torch.bool, device=x.device).triu(1)
    decay = gap.masked_fill(above.unsqueeze(-1), float("-inf")).exp().to(x.dtype)
    inside = torch.einsum("bhik,bhjk,bhijk->bhij", x, k[:, :, rows], decay)
    if rows.start == 0:
        return inside
    border = cum[:, :, rows.start - 1 : rows.start]
    left = x * (own - border).exp().to(x.dtype)
    right = k[:, :, : rows.start] * (border - cum[:, :, : rows.start]).exp().to(x.dtype)
    return torch.cat([left @ right.mT, inside], dim=-1)


def _weights(reads: Tensor, writes: Tensor, beta: Tensor) -> Tensor:
    """W = A (I + L)^-1 Diag(beta)."""
    solved = torch.linalg.solve_triangular(writes.tril(-1), reads, upper=False, left=False, unitriangular=True)
    return solved * beta.mT
