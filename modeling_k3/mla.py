"""Gated multi-head latent attention without positions (NoPE), cached as its latent."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_span import FLEX, OWN_FORMS, AttentionSpan, is_flash
from .cache import K3Cache
from .configuration_k3 import K3Config
from .mla_forms import latent_attention, prefers_absorbed
from .norms import K3RMSNorm
from .packing import Packing
from .precision import at_least_fp32, upcast


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """Attend by forming the weights: softmax(q k^T * scaling + mask) v, softmax in at least float32.

    Args:
        query, key: [B, H, T, N + R], [B, H, S, N + R]; value: [B, H, S, Vd].
        attention_mask: [B, 1, T, S] added to the scores, or None for none.

    Returns:
        [B, T, H, Vd] and the weights [B, H, T, S].
    """
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=at_least_fp32(scores.dtype)).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _to_one_width(*states: Tensor) -> tuple[Tensor, ...]:
    """Append zeros to queries and keys, or to values, until all are equally wide.

    The fused kernel of a CPU serves nothing else, and without it torch forms the scores of all pairs of tokens; nor do
    flash and flex attention on every machine. Zeros add nothing to a score, and what they add to the result is cut off.
    """
    width = max(x.shape[-1] for x in states)
    return tuple(x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in states)


class K3MLAttention(nn.Module):
    """Full attention through a small latent, with an output gate.

        q       = W_qb RMSNorm(W_qa x)                    or W_q x; N + R channels per head
        [c | r] = W_kva x      c <- RMSNorm(c)            c and r are what the cache keeps
        [k | v] = W_kvb c                                 per head; key = [k | r], r shared by all heads
        y       = W_o [ softmax(q key^T / sqrt(N + R)) v * sigmoid(W_g x) ]

    The R "rope" channels take part in the dot product and are never rotated. The two inner norms have an epsilon of
    their own (`mla_norm_eps`). Source: arXiv 2607.24653 section 2.1.2.
    """

    def __init__(self, config: K3Config, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads, self.v_head_dim = config.num_attention_heads, config.v_head_dim
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.kv_lora_rank = config.kv_lora_rank
        self.scaling = (self.nope_dim + self.rope_dim) ** -0.5
        self.is_causal, self.num_key_value_groups, self.attention_dropout = True, 1, 0.0
        hidden, query_width = config.hidden_size, self.num_heads * (self.nope_dim + self.rope_dim)
        self.q_lora_rank = config.q_lora_rank
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
            self.q_a_layernorm = K3RMSNorm(config.q_lora_rank, eps=config.mla_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.kv_lora_rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = K3RMSNorm(self.kv_lora_rank, eps=config.mla_norm_eps)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, self.num_heads * (self.nope_dim + self.v_head_dim), bias=False)
        self.use_output_gate = config.mla_use_output_gate
        if self.use_output_gate:
            self.g_proj = nn.Linear(hidden, self.num_heads * self.v_head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, hidden, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: K3Cache | None = None,
        padding_mask: Tensor | None = None,
        span: AttentionSpan | None = None,
        packing: Packing | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: x [B, T, D], zero at padding.
            attention_mask: what the attention implementation in use expects: [B, 1, T, S] (eager, sdpa), a block mask
                (flex), [B, S] (flash), or None (causal).
            cache: continued and updated; None starts from nothing.
            padding_mask: [B, T] bool, False at padding; None: no padding.
            span: what may be read, in the place of `attention_mask`: then the forms of `mla_forms` are used, absorbed
                for few new tokens.
            packing: documents to keep apart, for flash attention; the others find them in their masks.

        Returns:
            [B, T, D], zero at padding, and the weights [B, H, T, S] where the implementation forms them.
        """
        query = self._query(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.rope_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        if cache is not None:
            latent, shared = cache.update(latent.unsqueeze(1), shared.unsqueeze(1), self.layer_idx)
            latent, shared = latent.squeeze(1), shared.squeeze(1)
        if span is not None and self._has_plain_weight():
            o, weights = self._attend_to_latents(query, latent, shared, span)
        else:
            states = (query, *self._expand(latent, shared))
            o, weights = self._attend_to_all(states, attention_mask, span, packing, kwargs)
            o = o[..., : self.v_head_dim]
        o = o.flatten(-2)
        if self.use_output_gate:
            o = (upcast(o) * upcast(self.g_proj(hidden_states)).sigmoid()).to(o.dtype)
        out = self.o_proj(o)
        if padding_mask is not None:
            # A padded query may see nothing at all; whatever came out of its softmax is dropped by selection.
            out = out.masked_fill(~padding_mask.unsqueeze(-1), 0)
        return out, weights

    def _query(self, hidden_states: Tensor) -> Tensor:
        if self.q_lora_rank is None:
            return self.q_proj(hidden_states)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))

    def _expand(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Latent [B, S, kv_lora] and shared part [B, S, R] -> keys [B, H, S, N + R] and values [B, H, S, Vd]."""
        expanded = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key, value = expanded.split([self.nope_dim, self.v_head_dim], dim=-1)
        shared = shared.unsqueeze(1).expand(-1, self.num_heads, -1, -1)
        return torch.cat([key, shared], dim=-1), value

    def _has_plain_weight(self) -> bool:
        """Whether W_kvb can be read as a matrix: not quantised, not wrapped by an adapter."""
        weight = self.kv_b_proj.weight if type(self.kv_b_proj) is nn.Linear else None
        is_there = weight is not None and (not weight.is_meta or hasattr(self.kv_b_proj, "_hf_hook"))
        return is_there and weight.is_floating_point() and weight.itemsize > 1

    # What is offloaded is brought by the hook of the module that owns it, whose forward is not called here.
    @force_accelerate_hooks("kv_b_proj")
    def _attend_to_latents(
        self, query: Tensor, latent: Tensor, shared: Tensor, span: AttentionSpan
    ) -> tuple[Tensor, Tensor | None]:
        return latent_attention(
            query,
            latent,
            shared,
            self.kv_b_proj.weight,
            span,
            scaling=self.scaling,
            absorb=prefers_absorbed(query.shape[2], self.kv_lora_rank, self.nope_dim, self.v_head_dim),
            output_weights=self.config._attn_implementation == "eager",
        )

    def _attend_to_all(
        self,
        states: tuple[Tensor, ...],
        attention_mask: Any,
        span: AttentionSpan | None,
        packing: Packing | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to expanded keys and values through the implementation in use."""
        implementation = self.config._attn_implementation
        if span is not None:
            attention_mask = self._pair_mask(span, states[0])
            # The others take no mask per pair of tokens.
            implementation = implementation if implementation in OWN_FORMS else "sdpa"
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        common = {"dropout": 0.0, "scaling": self.scaling, **kwargs}
        is_fused = implementation == FLEX or is_flash(implementation)
        if is_fused or (implementation == "sdpa" and states[0].device.type == "cpu"):
            states = _to_one_width(*states)
        if packing is not None and is_flash(implementation):
            return packing.run_flat(states, lambda *x, **told: attend(self, *x, None, **{**common, **told})[0]), None
        o, weights = attend(self, *states, attention_mask, **common)
        # What flex returns beside the result are sums of exponentials, no weights.
        return o, None if is_fused else weights

    def _pair_mask(self, span: AttentionSpan, query: Tensor) -> Tensor | None:
        """The mask per pair of tokens, as the implementation in use adds or selects it."""
        length = query.shape[2]
        allowed = span.allowed(slice(0, length), slice(0, span.past + length), query.device)
        if allowed is None:
            return None
        allowed = allowed.expand(query.shape[0], 1, length, -1)
        if self.config._attn_implementation != "eager":
            return allowed
        return query.new_zeros(allowed.shape).masked_fill(~allowed, torch.finfo(query.dtype).min)
