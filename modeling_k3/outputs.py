"""What the K3 models return: the library's outputs plus the weights over depth."""

from dataclasses import dataclass

from torch import Tensor, nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast


class K3LayerWeights(nn.Module):
    """Where `output_attentions` looks: hands on what one layer's attention gave, None included.

    The library leaves out a None beside other outputs, so that the place of an entry would no longer tell its layer; a
    module that returns nothing else is recorded as it is.
    """

    def forward(self, weights: Tensor | None) -> Tensor | None:
        """Return `weights`."""
        return weights


@dataclass
class K3ModelOutput(MoeModelOutputWithPast):
    """Output of K3Model.

    The library's fields, as this model fills them: `last_hidden_state` [B, T, D]; `cache`; `hidden_states`, the
    embedding and then the running sum after each layer (which restarts in each AttnRes block), the last one replaced by
    `last_hidden_state`; `attentions`, one entry per layer: [B, H, T, S] of an MLA layer with eager attention or of a
    KDA layer evaluated as "exact", None where a layer forms no weights; `router_logits` [tokens, N] of the MoE layers.
    Beside them:

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
