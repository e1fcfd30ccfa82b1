"""The gated MLP: dense layers and shared experts. Its activation is SiTU, or SiLU in older members of the family."""

import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_k3 import K3Config
from .situ import situ


def gated_activation(
    gate: Tensor, up: Tensor, *, kind: str = "situ", beta: float | None = None, linear_beta: float | None = None
) -> Tensor:
    """Combine the two halves of a gated linear unit.

        situ:  b tanh(gate / b) sigmoid(gate) * c tanh(up / c)
        silu:  gate sigmoid(gate) * up

    SiTU is SwiGLU near zero and bounded by b c far from it, so that coincident outliers cannot overflow.

    Args:
        gate, up: [..., F], same shape.
        kind: "situ" or "silu".
        beta: b, bound of the gate; None or 0 means 1. Unused for "silu".
        linear_beta: c, bound of the linear part; None or 0 leaves `up` as it is. Unused for "silu".

    Returns:
        [..., F] in the dtype of `gate`; SiTU is computed in at least float32.

    Raises:
        ValueError: unknown `kind`.

    Source: arXiv 2607.24653 section 2.3.2.
    """
    if kind == "silu":
        return F.silu(gate) * up
    if kind != "situ":
        raise ValueError(f"hidden_act={kind!r} is unknown; allowed are ['situ', 'silu']")
    return situ(gate, up, beta or 1.0, linear_beta or None)


class K3MLP(nn.Module):
    """down(act(gate(x), up(x))), width `intermediate_size`, no biases. [..., D] -> [..., D]."""

    def __init__(self, config: K3Config, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.hidden_act = config.hidden_act
        self.beta = config.activation_situ_beta
        self.linear_beta = config.activation_situ_linear_beta

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        inner = gated_activation(gate, up, kind=self.hidden_act, beta=self.beta, linear_beta=self.linear_beta)
        return self.down_proj(inner)
