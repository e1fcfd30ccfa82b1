"""One decoder layer: KDA or gated MLA, then dense MLP or LatentMoE, each reading a mixture over depth."""

from typing import Any

from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from .attn_res import K3KeyRMSNorm, K3PseudoQuery
from .cache import K3Cache
from .configuration_k3 import K3Config
from .kda import K3DeltaAttention
from .latent_moe import K3LatentMoE
from .mla import K3MLAttention
from .mlp import K3MLP
from .norms import K3RMSNorm
from .outputs import K3LayerWeights


class K3DecoderLayer(GradientCheckpointingLayer):
    """One layer of the AttnRes stream. B = finished block sums, p = running sum of the open block.

        h = mix(B + [p])     a layer that starts a block then appends p to B and restarts the sum
        p = p + attention(input_layernorm(h))
        h = mix(B + [p])
        p = p + feed_forward(post_attention_layernorm(h))

    Without AttnRes h = p everywhere, which is the usual pre-norm residual stream.
    Source: arXiv 2607.24653 section 2.2, released `KimiDecoderLayer`.
    """

    def __init__(self, config: K3Config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.eps = layer_idx, config.rms_norm_eps
        is_linear = config.layer_types[layer_idx] == "linear_attention"
        self.is_linear = is_linear
        self.self_attn = K3DeltaAttention(config, layer_idx) if is_linear else K3MLAttention(config, layer_idx)
        self.layer_weights = K3LayerWeights()
        self.is_sparse = config.mlp_layer_types[layer_idx] == "sparse"
        if self.is_sparse:
            self.block_sparse_moe = K3LatentMoE(config)
        else:
            self.mlp = K3MLP(config, config.intermediate_size)
        self.input_layernorm = K3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = K3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.has_attn_res = config.attn_res_block_size is not None
        self.starts_block = self.has_attn_res and layer_idx % config.attn_res_block_size == 0
        if self.has_attn_res:
            self.self_attention_res_norm = K3KeyRMSNorm(config.hidden_size)
            self.self_attention_res_proj = K3PseudoQuery(config.hidden_size)
            self.mlp_res_norm = K3KeyRMSNorm(config.hidden_size)
            self.mlp_res_proj = K3PseudoQuery(config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        *blocks: Tensor,
        attention_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        cache: K3Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the running sum [B, T, D] after this layer.

        Args:
            hidden_states: p [B, T, D].
            blocks: the finished block sums, each [B, T, D]; positional and flat, so that both kinds of gradient
                checkpointing see them. Never changed here: the model appends p where a block starts.
            attention_mask: for MLA, in the form its implementation expects.
            padding_mask: [B, T] bool, False at padding; None: no padding.
            cache: continued and updated.
        """
        p = hidden_states
        h = p
        if self.has_attn_res:
            h, _ = self.self_attention_res_proj([*blocks, p], self.self_attention_res_norm(), eps=self.eps)
        masks = {"attention_mask": padding_mask if self.is_linear else attention_mask, "padding_mask": padding_mask}
        a, weights = self.self_attn(self.input_layernorm(h), cache=cache, **masks, **kwargs)
        self.layer_weights(weights)
        if self.starts_block:
            blocks, p = (*blocks, p), a
        else:
            p = p + a
        h = p
        if self.has_attn_res:
            h, _ = self.mlp_res_proj([*blocks, p], self.mlp_res_norm(), eps=self.eps)
        x = self.post_attention_layernorm(h)
        return p + (self.block_sparse_moe(x, padding_mask) if self.is_sparse else self.mlp(x))


def brought_to(layer: K3DecoderLayer, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Finished blocks on the device where a layer computes, once for all layers there: hooks move them for each."""
    hook = getattr(layer, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        device = getattr(each, "execution_device", None)
        if device is not None:
            return tuple(source.to(device) for source in sources)
    return sources
