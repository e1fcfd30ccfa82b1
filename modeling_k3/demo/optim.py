"""Which parameter is updated how: Muon for the matrices, AdamW for everything else, one schedule for both."""

import math
import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Rows of these are looked up, not multiplied as a whole, or decide about routing: their updates stay coordinate-wise.
_NO_MUON = re.compile(r"embed_tokens|lm_head|\.gate\.weight|_res_proj")

# Query, key and value projections are orthogonalised head by head, as in K3's training: a head with large momentum
# cannot drown the others, and short blocks are cheaper.
_PER_HEAD = re.compile(r"\.self_attn\.[qkv]_proj\.weight$")

_DECAYED = re.compile(r"(embed_tokens|lm_head|\.gate)\.weight$")

_MIN_SIDE = 8


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix is replaced by the nearest orthogonal one before it is applied.

        M = mu M + G        U = orthogonalise(G + mu M)        W = (1 - lr wd) W - lr 0.2 sqrt(max(m, n)) U

    The factor gives every matrix the same root mean square per update, so AdamW's learning rates carry over.
    Differs from `torch.optim.Muon` in that a parameter may be a stack of matrices [..., m, n] (experts), or be cut into
    blocks of rows (heads), and in that equal shapes go through one batched product.

    Args:
        params: groups; each may set `block_rows`, the height of the blocks a matrix is cut into (None: whole).
        lr: learning rate.
        momentum: mu, in [0, 1).
        weight_decay: decoupled, per unit of learning rate.

    Source: Muon as scaled in arXiv 2502.16982; per-head blocks as in K3.
    """

    def __init__(
        self, params: Iterable[dict], lr: float = 1e-2, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "block_rows": None})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        blocks: dict[tuple[int, int], list[tuple[Tensor, Tensor, float]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                direction = torch.add(parameter.grad, state["momentum"], alpha=group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                rows = group["block_rows"] or parameter.shape[-2]
                shape = (-1, rows, parameter.shape[-1])
                blocks.setdefault((rows, parameter.shape[-1]), []).append(
                    (parameter.view(shape), direction.reshape(shape), group["lr"])
                )
        for (rows, columns), members in blocks.items():
            updates = orthogonalise(torch.cat([direction for _, direction, _ in members]))
            parts = updates.split([len(parameter) for parameter, _, _ in members])
            for (parameter, _, lr), part in zip(members, parts, strict=True):
                parameter.add_(part, alpha=-lr * 0.2 * math.sqrt(max(rows, columns)))


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push all singular values of each matrix to about one, by a Newton-Schulz iteration of degree five.

    Args:
        matrices: [..., m, n].
        steps: iterations; five bring the singular values to roughly 0.7 .. 1.2, which is all Muon needs.

    Returns:
        [..., m, n], the same dtype.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, poly, x, beta=3.4445)
    return x.mT if tall else x


def build_optimizers(
    model: nn.Module, *, lr: float, muon_lr: float, weight_decay: float, head_dims: dict[str, int]
) -> list[torch.optim.Optimizer]:
    """Split the parameters into Muon's and AdamW's.

    Vectors, gate constants (`A_log`, `dt_bias`), norms, short convolutions and AttnRes queries get no weight decay.

    Args:
        model: any causal LM with the usual names.
        lr: peak rate of AdamW.
        muon_lr: peak rate of Muon.
        weight_decay: for matrices, embedding, head and router.
        head_dims: full parameter name to rows per head, for projections that are orthogonalised head by head.

    Returns:
        [Muon, AdamW], each with `initial_lr` in its groups; `set_progress` scales them.
    """
    muon: dict[int | None, list[nn.Parameter]] = {}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if _is_matrix(name, parameter):
            muon.setdefault(head_dims.get(name), []).append(parameter)
        elif _DECAYED.search(name):
            decayed.append(parameter)
        else:
            plain.append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    if muon:
        groups = [{"params": params, "block_rows": rows} for rows, params in muon.items()]
        optimizers.append(Muon(groups, lr=muon_lr, weight_decay=weight_decay))
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizers.append(torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-10, fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    # The smaller side rules out convolution kernels [C, 1, 4] and queries [1, D].
    return parameter.ndim >= 2 and min(parameter.shape[-2:]) >= _MIN_SIDE and not _NO_MUON.search(name)


def head_rows(model: nn.Module) -> dict[str, int]:
    """Rows per head of the query, key and value projections, found from the attention modules' own attributes."""
    rows = {}
    for name, module in model.named_modules():
        heads = getattr(module, "num_heads", None)
        if not name.endswith("self_attn") or not heads:
            continue
        for child, parameter in module.named_parameters(prefix=name):
            if _PER_HEAD.search(child) and parameter.shape[0] % heads == 0:
                rows[child] = parameter.shape[0] // heads
    return rows


def rate_at(progress: float, *, warmup: float, floor: float) -> float:
    """Share of the peak rate: linear warm-up, then a cosine down to `floor`.

    Args:
        progress: share of the run that is done, 0 to 1.
        warmup: share of the run spent on the rise.
        floor: share of the peak that is left at the end.
    """
    if progress < warmup:
        return max(progress / warmup, 0.02)
    fall = min((progress - warmup) / max(1 - warmup, 1e-9), 1.0)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * fall))


def set_progress(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    """Set every group's learning rate to `share` of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
