"""What the K3 models return: the library's outputs plus the weights over depth."""

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast


@dataclass
class K3ModelOutput(MoeModelOutputWithPast):
    """Output of K3Model.

    The library's fields, as this model fills them: `last_hidden_state` [B, T, D]; `cache`; `hidden_states`, the
    embedding and then the running sum after each layer (which restarts in each AttnRes block), the last one replaced by
    `last_hidden_state`; `attentions` in the order of the layers that form weights, which are the MLA layers with eager
    attention and the KDA layers evaluated as "exact"; `router_logits` [tokens, N] of the MoE layers. Beside them:

    Args:
        depth_weights: with `output_depth_weights=True` one [B, T, L] per AttnRes mix, in the order of computation
            (attention and feed-forward of each layer, then the output): which depth each sub-layer listens to. L
            counts the finished blocks and, last, the running sum.
    """

    depth_weights: tuple[Tensor, ...] | None = None


@dataclass
class K3CausalLMOutput(MoeCausalLMOutputWithPast):
    """Output of K3ForCausalLM: `loss`, `logits` [B, T, V] and everything in `K3ModelOutput`."""

    depth_weights: tuple[Tensor, ...] | None = None
