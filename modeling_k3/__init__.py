"""Kimi K3 for transformers. `import modeling_k3` registers the architecture with the library's Auto classes.

Dimension legend, used in docstrings, einsum strings, comments and test ids:

    B batch          T tokens           S cached tokens     D hidden           H heads
    K key dim        V value dim        C chunk             L sources in depth
    N experts        E latent width     F expert width      R experts per token (top-k)

(Where logits are meant, V is the vocabulary.)
"""

import importlib
import importlib.util
import sys

__version__ = "0.1.0"

_HOME = {
    "K3Config": "configuration_k3",
    "K3Cache": "cache",
    "K3StaticCache": "static_cache",
    "K3Signals": "signals",
    "PrefixCache": "prefix_cache",
    "K3Mxfp4Config": "quantizer",
    "quantize_experts": "low_bits",
    "K3Model": "modeling_k3",
    "K3PreTrainedModel": "modeling_k3",
    "K3ForCausalLM": "modeling_k3",
    "K3ForSequenceClassification": "classification",
    "K3ForTokenClassification": "classification",
    "chunk_kda": "kda_ops",
    "recurrent_kda": "kda_ops",
    "exact_kda": "kda_ops",
    "KDAGuard": "kda_guard",
    "set_kda_guard": "kda_guard",
    "mix_residuals": "attn_res",
    "K3Tokenizer": "tokenization_k3",
    "register": "registration",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _is_k3_command() -> bool:
    """Whether this process is the `k3` command, whose --help should not wait for torch: it registers when needed."""
    try:
        with open(sys.argv[0], "rb") as script:
            return b"modeling_k3.cli" in script.read(1000)
    except (OSError, IndexError, ValueError):
        return False


try:
    importlib.import_module(f"{__name__}.versions").check_versions()
except ImportError as error:
    if _is_k3_command():
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    raise
if not _is_k3_command():
    __getattr__("register")()
    # A copy of the flat files alone, as a hub repository holds it, has no adapters.
    if importlib.util.find_spec(f"{__name__}.adapters") is not None:
        importlib.import_module(f"{__name__}.adapters.wiring").wire_peft()
