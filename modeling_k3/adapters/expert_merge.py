"""Adapters put into the weights of experts: exactly into dense ones, with a reported rounding into packed ones."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from modeling_k3.mxfp4 import decode, encode
from modeling_k3.precision import at_least_fp32


class Change(NamedTuple):
    """What one matrix of every expert gains: scaling B A, with A [N, r, in] and B [N, out, r]."""

    a: Tensor
    b: Tensor
    scaling: float

    def of(self, expert: int) -> Tensor:
        """[out, in] in at least float32."""
        wide = at_least_fp32(self.a.dtype)
        return self.b[expert].to(wide) @ self.a[expert].to(wide) * self.scaling

    def is_finite(self) -> bool:
        """Whether every product is."""
        return all(bool(self.of(expert).isfinite().all()) for expert in range(len(self.a)))


def _rows(experts: Any, matrix: str) -> tuple[str, slice]:
    """Which stack holds a matrix, and in which rows."""
    width = experts.intermediate_dim
    if matrix == "w2":
        return "down_proj", slice(None)
    return "gate_up_proj", slice(0, width) if matrix == "w1" else slice(width, None)


@torch.no_grad()
def add_to_dense(experts: Any, changes: dict[str, Change]) -> None:
    """W_e += change, one expert at a time, summed in at least float32."""
    for matrix, change in changes.items():
        stack, rows = _rows(experts, matrix)
        for expert, weight in enumerate(experts.get_parameter(stack).detach()):
            part = weight[rows]
            part.copy_(part.to(at_least_fp32(part.dtype)) + change.of(expert).to(part.device))


@torch.no_grad()
def add_to_packed(experts: Any, changes: dict[str, Change]) -> dict[str, float]:
    """Quantise W_e + change, one expert at a time.

    Returns:
        What the rounding cost, as relative norms over all experts: `of_weights`, against the sums, and `of_change`,
        against the adapter's change. From 1 on in the latter nothing of the adapter may be left.
    """
    lost = kept = changed = 0.0
    for matrix, change in changes.items():
        stack, rows = _rows(experts, matrix)
        codes, scales = (experts.get_parameter(f"{stack}_{kind}").detach() for kind in ("packed", "scale"))
        for expert in range(experts.num_experts):
            packed, scale, delta = codes[expert][rows], scales[expert][rows], change.of(expert)
            delta = delta.to(packed.device)
            wanted = decode(packed, scale, torch.float32) + delta
            new = encode(wanted)
            packed.copy_(new[0])
            scale.copy_(new[1])
            lost += float((decode(packed, scale, torch.float32) - wanted).square().sum())
            kept += float(wanted.square().sum())
            changed += float(delta.square().sum())
    return {"of_weights": (lost / max(kept, 1e-30)) ** 0.5, "of_change": (lost / max(changed, 1e-30)) ** 0.5}
