"""K3 with a classification head, per sequence or per token, through the library's generic mixins."""

from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from .modeling_k3 import K3PreTrainedModel


class K3ForSequenceClassification(GenericForSequenceClassification, K3PreTrainedModel):
    """One label per sequence, read at its last real token. Needs `pad_token_id` for batches."""


class K3ForTokenClassification(GenericForTokenClassification, K3PreTrainedModel):
    """One label per token."""
