"""LatentMoE: route on the full width, compute experts in a narrow latent, add shared experts at full width."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_k3 import K3Config
from .experts import K3Experts
from .mlp import K3MLP
from .norms import K3RMSNorm
from .precision import Float32Parameters, no_autocast, storage_fp32, upcast


class K3Router(Float32Parameters):
    """Choose R of N experts per token and weigh them.

        scores = sigmoid(W x) or softmax(W x)             at least float32, whatever the model's dtype
        chosen = Top-R of scores + bias                   within the best groups, if there are groups
        p      = scores[chosen] / (sum + 1e-20) * scale   the bias selects and never weighs

    A group's value is the sum of its two best biased scores. The bias, `e_score_correction_bias` [N], is moved by
    balancing and gets no gradient. Source: arXiv 2607.24653 eq. 11, released `KimiMoEGate`.
    """

    float32_parameters = ("e_score_correction_bias",)

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.top_k, self.num_experts = config.num_experts_per_token, config.num_experts
        self.num_groups, self.top_k_groups = config.num_expert_group, config.topk_group
        self.scoring = config.moe_router_activation_func
        self.renormalize, self.scale = config.moe_renormalize, config.routed_scaling_factor
        reads_latent = config.router_input == "latent"
        width = config.routed_expert_hidden_size if reads_latent else config.hidden_size
        self.weight = nn.Parameter(torch.empty(self.num_experts, width))
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(self.num_experts, dtype=storage_fp32()), requires_grad=False
        )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route.

        Args:
            hidden_states: [tokens, width], the width that `router_input` names.

        Returns:
            logits [tokens, N], weights p [tokens, R] and expert numbers [tokens, R]; the first two in at least
            float32.
        """
        with no_autocast(hidden_states.device.type):
            logits = F.linear(upcast(hidden_states), upcast(self.weight))
        scores = logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(dim=-1)
        chosen = self._choose(scores + self.e_score_correction_bias)
        weights = scores.gather(1, chosen)
        if self.renormalize and self.top_k > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights * self.scale, chosen

    def _choose(self, choice: Tensor) -> Tensor:
        """Return the expert numbers [tokens, R] with the best biased scores [tokens, N], group by group."""
        if self.num_groups > self.top_k_groups:
            grouped = choice.unflatten(-1, (self.num_groups, -1))
            value = grouped.topk(2, dim=-1).values.sum(dim=-1)
            best = value.topk(self.top_k_groups, dim=-1).indices
            dropped = torch.ones_like(value, dtype=torch.bool).scatter(1, best, False)
            choice = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
        return choice.topk(self.top_k, dim=-1).indices

    def extra_repr(self) -> str:
        return f"top {self.top_k} of {self.num_experts}, {self.scoring}"


class K3LatentMoE(nn.Module):
    """Mixture of experts whose routed part lives in a latent of width E.

        p, chosen = router(x)                   or router(z) with router_input="latent"
        z = W_down x                            once per token, not once per expert
        s = sum_e p_e expert_e(z)
        y = W_up RMSNorm(s) + shared(x)         the norm acts on the combined sum

    Without `routed_expert_hidden_size` z = x and there is no projection; the norm is optional; shared experts are one
    MLP of their joint width. Source: arXiv 2607.24653 section 2.3, arXiv 2601.18089.
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.gate = K3Router(config)
        self.experts = K3Experts(config)
        self.routes_on_latent = config.router_input == "latent"
        self.has_latent = config.routed_expert_hidden_size is not None
        self.has_latent_norm = self.has_latent and config.latent_moe_use_norm
        if self.has_latent:
            width = config.routed_expert_hidden_size
            self.routed_expert_down_proj = nn.Linear(config.hidden_size, width, bias=False)
            self.routed_expert_up_proj = nn.Linear(width, config.hidden_size, bias=False)
            if self.has_latent_norm:
                self.routed_expert_norm = K3RMSNorm(width, eps=config.rms_norm_eps)
        self.has_shared = config.num_shared_experts is not None
        if self.has_shared:
            self.shared_experts = K3MLP(config, config.num_shared_experts * config.moe_intermediate_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        x = hidden_states.flatten(0, -2)
        z = self.routed_expert_down_proj(x) if self.has_latent else x
        _, weights, chosen = self.gate(z if self.routes_on_latent else x)
        s = self.experts(z, chosen, weights)
        if self.has_latent_norm:
            s = self.routed_expert_norm(s)
        if self.has_latent:
            s = self.routed_expert_up_proj(s)
        y = s + self.shared_experts(x) if self.has_shared else s
        return y.view_as(hidden_states)
