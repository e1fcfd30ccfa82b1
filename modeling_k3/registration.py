"""Makes the library's Auto classes know K3."""

from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.models.auto import tokenization_auto

from .classification import K3ForSequenceClassification, K3ForTokenClassification
from .config_layout import RELEASED_MODEL_TYPE
from .configuration_k3 import K3Config
from .modeling_k3 import K3ForCausalLM, K3Model
from .tokenization_k3 import K3Tokenizer

#: Class that the release's `tokenizer_config.json` names; its code is the release's own, and is never needed.
_RELEASED_TOKENIZER = "TikTokenTokenizer"


class _ReleasedTokenizer(K3Tokenizer):
    """K3Tokenizer under the name that the release gives to its own class."""

    # Other models of the family name their remote class alike. Only a class of the library leaves them the choice of
    # theirs with `trust_remote_code`, so this one says that it is one.
    __module__ = "transformers.modeling_k3"

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> K3Tokenizer:
        """Load as `K3Tokenizer`."""
        return K3Tokenizer.from_pretrained(*args, **kwargs)


def register() -> None:
    """Register config types "k3" and "kimi_k3", the model classes and the tokenizer. Idempotent.

    Should the installed library bring a `kimi_k3` of its own, importing this package is the user's choice for ours.
    """
    AutoConfig.register(K3Config.model_type, K3Config, exist_ok=True)
    # AutoConfig.register insists on one type per class; the released outer type is a second name for ours.
    CONFIG_MAPPING.register(RELEASED_MODEL_TYPE, K3Config, exist_ok=True)
    AutoModel.register(K3Config, K3Model, exist_ok=True)
    AutoModelForCausalLM.register(K3Config, K3ForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(K3Config, K3ForSequenceClassification, exist_ok=True)
    AutoModelForTokenClassification.register(K3Config, K3ForTokenClassification, exist_ok=True)
    AutoTokenizer.register(K3Config, K3Tokenizer, exist_ok=True)
    tokenization_auto.REGISTERED_TOKENIZER_CLASSES.setdefault(_RELEASED_TOKENIZER, _ReleasedTokenizer)
