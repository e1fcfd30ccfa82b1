"""K3 with a classification head, per sequence or per token, through the library's generic mixins."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg

from .cache import K3Cache
from .modeling_k3 import K3Model, K3PreTrainedModel


class _KnownConfig:
    """Makes AutoModel, which builds the decoder of the library's mixins, know the config's class."""

    def __init__(self, config: Any) -> None:
        # Code from a hub is registered by nobody, and a folder's config and model come from two copies of it.
        if type(config) not in AutoModel._model_mapping:
            AutoModel.register(type(config), K3Model)
        super().__init__(config)


class K3ForSequenceClassification(_KnownConfig, GenericForSequenceClassification, K3PreTrainedModel):
    """One label per sequence, read at its last real token.

    With an `attention_mask` the mask says which token that is, on whichever side the padding stands and whatever fills
    it; without one it is the last token that is not `pad_token_id`.
    """

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: K3Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Classify; `labels` [B] gives a loss. Other arguments as in `K3Model.forward`."""
        arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "cache": cache,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            **kwargs,
        }
        if attention_mask is None or attention_mask.ndim != 2:
            return super().forward(labels=labels, **arguments)
        outputs = self.model(**arguments)
        hidden = outputs.last_hidden_state
        real = attention_mask[:, -hidden.shape[1] :].to(hidden.device, torch.bool)
        places = torch.arange(hidden.shape[1], device=hidden.device)
        last = places.masked_fill(~real, -1).argmax(dim=-1)
        logits = self.score(hidden[torch.arange(len(hidden), device=hidden.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class K3ForTokenClassification(_KnownConfig, GenericForTokenClassification, K3PreTrainedModel):
    """One label per token."""
