"""Makes the library's Auto classes know K3."""

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .classification import K3ForSequenceClassification, K3ForTokenClassification
from .config_layout import RELEASED_MODEL_TYPE
from .configuration_k3 import K3Config
from .modeling_k3 import K3ForCausalLM, K3Model


def register() -> None:
    """Register config types "k3" and "kimi_k3" and the model classes. Idempotent.

    Should the installed library bring a `kimi_k3` of its own, importing this package is the user's choice for ours.
    """
    AutoConfig.register(K3Config.model_type, K3Config, exist_ok=True)
    # AutoConfig.register insists on one type per class; the released outer type is a second name for ours.
    CONFIG_MAPPING.register(RELEASED_MODEL_TYPE, K3Config, exist_ok=True)
    AutoModel.register(K3Config, K3Model, exist_ok=True)
    AutoModelForCausalLM.register(K3Config, K3ForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(K3Config, K3ForSequenceClassification, exist_ok=True)
    AutoModelForTokenClassification.register(K3Config, K3ForTokenClassification, exist_ok=True)
