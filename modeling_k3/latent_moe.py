"""LatentMoE: route on the full width, compute experts in a narrow latent, add shared experts at full width."""

from collections.abc import Sequence

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

    A group's value is the sum of its two best biased scores. Among exactly equal values the lower number comes first.
    The bias, `e_score_correction_bias` [N], is moved by balancing (`modeling_k3.training`) and gets no gradient.
    Source: arXiv 2607.24653 eq. 11, released `KimiMoEGate`; the order of ties is ours.
    """

    float32_parameters = ("e_score_correction_bias",)

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.top_k, self.num_experts = config.num_experts_per_token, config.num_experts
        self.num_groups, self.top_k_groups = config.num_expert_group, config.topk_group
        self.scoring = config.moe_router_activation_func
        self.renormalize, self.scale = config.moe_renormalize, config.routed_scaling_factor
        self.capacity_factor = config.moe_expert_capacity_factor
        reads_latent = config.router_input == "latent"
        width = config.routed_expert_hidden_size if reads_latent else config.hidden_size
        self.weight = nn.Parameter(torch.empty(self.num_experts, width))
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(self.num_experts, dtype=storage_fp32()), requires_grad=False
        )

    def forward(self, hidden_states: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Route.

        Args:
            hidden_states: [tokens, width], the width that `router_input` names.
            real: [tokens] bool, False at padding, which takes nobody's place; None: no padding.

        Returns:
            logits [tokens, N], weights p [tokens, R] and expert numbers [tokens, R]; the first two in at least
            float32.
        """
        with no_autocast(hidden_states.device.type):
            logits = F.linear(upcast(hidden_states), upcast(self.weight))
        scores = self.scores(logits)
        chosen = self._choose(scores + self.e_score_correction_bias)
        weights = scores.gather(1, chosen)
        if self.renormalize and self.top_k > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if self.training and self.capacity_factor is not None:
            weights = weights.masked_fill(self.overflow(chosen, real), 0)
        return logits, weights * self.scale, chosen

    @torch.no_grad()
    def guess(self, hidden_states: Tensor) -> list[int]:
        """Expert numbers that `forward` would about choose, in the weights' own precision: for reading ahead only."""
        if hidden_states.device != self.weight.device:
            return []
        logits = F.linear(hidden_states.to(self.weight.dtype), self.weight).float()
        return self._choose(self.scores(logits) + self.e_score_correction_bias).flatten().unique().tolist()

    def scores(self, logits: Tensor) -> Tensor:
        """Turn logits [tokens, N] into scores s, without the bias."""
        return logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(dim=-1)

    def overflow(self, chosen: Tensor, real: Tensor | None = None) -> Tensor:
        """Mark the places beyond an expert's capacity, ceil(factor * tokens * R / N), first come, first served.

        The order is that of the tokens, so that nothing depends on later ones. It is that of the whole batch: rows, and
        documents packed into them, compete with those before them.

        Args:
            chosen: [tokens, R] expert numbers.
            real: [tokens] bool, False at padding, which neither counts nor is marked; None: no padding.

        Returns:
            [tokens, R] bool; all False without a capacity factor.
        """
        if self.capacity_factor is None:
            return torch.zeros_like(chosen, dtype=torch.bool)
        if real is not None:
            chosen = chosen.masked_fill(~real.unsqueeze(1), self.num_experts)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        load = torch.bincount(flat, minlength=self.num_experts + 1)
        begin = load.cumsum(0) - load
        place = torch.empty_like(order)
        place[order] = torch.arange(len(flat), device=flat.device) - begin[flat[order]]
        capacity = (load[:-1].sum() * (self.capacity_factor / self.num_experts)).ceil()
        return ((place >= capacity) & (flat < self.num_experts)).view_as(chosen)

    def balance_loss(self, logits: Tensor, real: Tensor | None = None) -> Tensor:
        """How much likelihood the router gives to the experts it loads: 1 when even, up to N / R.

            L = sum_e f_e P_e        f_e = N / (tokens R) * tokens of e        P_e = mean over tokens of s_e / sum s

        Args:
            logits: [tokens, N] as `forward` returned them.
            real: [tokens] bool, False at padding; None: no padding.

        Source: arXiv 2101.03961 eq. 4 for one expert; arXiv 2412.19437 eq. 17-20 for several.
        """
        scores = self.scores(upcast(logits))
        chosen = self._choose(scores.detach() + self.e_score_correction_bias)
        if real is not None:
            scores, chosen = scores[real], chosen[real]
        load = torch.bincount(chosen.flatten(), minlength=self.num_experts).to(scores.dtype) / max(chosen.numel(), 1)
        share = (scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)).sum(dim=0) / max(len(scores), 1)
        return self.num_experts * (load * share).sum()

    def _choose(self, choice: Tensor) -> Tensor:
        """Return the expert numbers [tokens, R] with the best biased scores [tokens, N], group by group."""
        if self.num_groups > self.top_k_groups:
            grouped = choice.unflatten(-1, (self.num_groups, -1))
            value = grouped.topk(2, dim=-1).values.sum(dim=-1)
            best = _best(value, self.top_k_groups)
            dropped = torch.ones_like(value, dtype=torch.bool).scatter(1, best, False)
            choice = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
        return _best(choice, self.top_k)

    def extra_repr(self) -> str:
        return f"top {self.top_k} of {self.num_experts}, {self.scoring}"


def _best(values: Tensor, count: int) -> Tensor:
    """Numbers [tokens, count] of the largest values [tokens, n], best first, the lower number first among equals."""
    if values.dtype != torch.float32:
        return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    # `topk` leaves the order of equals open. As whole numbers that end in the place, no two values are equal, at a
    # third of the time of a stable sort over many experts. Adding zero makes -0 into 0.
    bits = (values + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    places = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return ((ordered << 32) | places).topk(count, dim=-1).indices


def active_router(gate: nn.Module) -> K3Router:
    """Find the router that computes where an adapter stands in its place: of its copies the one that is passed on."""
    return next(module.scores.__self__ for module in gate.modules() if hasattr(module, "scores"))


def balance_loss(routers: Sequence[K3Router], logits: Sequence[Tensor], padding_mask: Tensor | None = None) -> Tensor:
    """The mean of `K3Router.balance_loss` over the layers.

    Args:
        routers: those of the layers, in order.
        logits: what each of them returned, [B * T, N].
        padding_mask: [B, T], 0 or False at padding; None: no padding.

    Raises:
        ValueError: the logits were recorded without a gradient, as under reentrant gradient checkpointing; or a mask
            of pairs of tokens.
    """
    wanting = [each for router, each in zip(routers, logits, strict=True) if router.weight.requires_grad]
    if torch.is_grad_enabled() and not all(each.requires_grad for each in wanting):
        raise ValueError(
            "router_balancing='aux_loss' gets no gradient under reentrant gradient checkpointing; allowed is "
            "gradient_checkpointing_kwargs={'use_reentrant': False}, or another router_balancing"
        )
    if padding_mask is not None and padding_mask.numel() != len(logits[0]):
        raise ValueError(
            f"attention_mask has shape {tuple(padding_mask.shape)}; allowed with router_balancing='aux_loss' is "
            "[batch, tokens]"
        )
    real = None if padding_mask is None else padding_mask.flatten().bool()
    losses = [router.balance_loss(each, real) for router, each in zip(routers, logits, strict=True)]
    return torch.stack(losses).mean()


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

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """x [B, T, D] -> [B, T, D]; `padding_mask` [B, T] bool, False at padding."""
        x = hidden_states.flatten(0, -2)
        z = self.routed_expert_down_proj(x) if self.has_latent else x
        real = None if padding_mask is None else padding_mask.flatten()
        _, weights, chosen = self.gate(z if self.routes_on_latent else x, real)
        # What adapters put around the experts may have no pages.
        pages = getattr(self.experts, "pages", None)
        if pages is not None:
            pages.note(x)
        s = self.experts(z, chosen, weights)
        if self.has_latent_norm:
            s = self.routed_expert_norm(s)
        if self.has_latent:
            s = self.routed_expert_up_proj(s)
        y = s + self.shared_experts(x) if self.has_shared else s
        return y.view_as(hidden_states)
