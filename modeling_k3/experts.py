"""Routed experts, stacked: one tensor per projection over all N experts."""

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .configuration_k3 import K3Config
from .mlp import gated_activation
from .precision import at_least_fp32


class K3Experts(nn.Module):
    """N gated MLPs of width F on the latent (or hidden) width E.

        s = sum over the chosen experts e of  p_e W2_e act(W1_e z, W3_e z)

    `gate_up_proj` [N, 2F, E] stacks the released w1 (gate) over w3 (up), `down_proj` [N, E, F] is w2. `eager` is
    the definition; `experts_implementation` selects batched or grouped products of the library instead. Weights p are
    at least float32, hence so is the sum over experts; one cast at the end.
    """

    # What the library's implementations ask about the layout of the weights.
    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_concatenated, is_transposed = True, False

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.config = config
        self._is_expert_parallel = False
        self.num_experts = config.num_experts
        self.hidden_dim = config.routed_expert_hidden_size or config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.hidden_act = config.hidden_act
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Combine the chosen experts by the implementation in use.

        Args:
            hidden_states: z [tokens, E].
            top_k_index: [tokens, R] expert numbers.
            top_k_weights: [tokens, R] in at least float32.

        Returns:
            [tokens, E] in z's dtype.
        """
        implementation = self.config._experts_implementation
        if implementation in ("eager", None) or hidden_states.dtype == torch.float64:
            # The grouped kernels know no float64; the definition does.
            return self.eager(hidden_states, top_k_index, top_k_weights)
        combine = ALL_EXPERTS_FUNCTIONS.get_interface(implementation, None)
        return combine(self, hidden_states, top_k_index, top_k_weights)

    def eager(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Combine the chosen experts, expert by expert: the definition. Arguments as in `forward`."""
        total = hidden_states.new_zeros(hidden_states.shape, dtype=at_least_fp32(hidden_states.dtype))
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            gate_up = nn.functional.linear(hidden_states[token], self.gate_up_proj[expert])
            y = nn.functional.linear(self._apply_gate(gate_up), self.down_proj[expert])
            total = total.index_add(0, token, (y * top_k_weights[token, place, None]).to(total.dtype))
        return total.to(hidden_states.dtype)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """[S, 2F] -> [S, F]; the hook through which the library's implementations apply the activation."""
        gate, up = gate_up.chunk(2, dim=-1)
        return gated_activation(gate, up, kind=self.hidden_act, beta=self.beta, linear_beta=self.linear_beta)

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, {self.hidden_dim} -> {self.intermediate_dim} -> {self.hidden_dim}"
