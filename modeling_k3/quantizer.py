"""The released quantisation block and its quantizer: experts stay packed.

The release labels its experts `compressed-tensors`, format `mxfp4-pack-quantized`. The library's own reader of that
label expands every expert to 16 bits, so the label is replaced by ours while a model is loaded, and written back as it
was read. What is packed is decided by the stored names, never by the block's patterns, which do not name every plain
matrix.
"""

from copy import deepcopy
from typing import Any

from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config

from .checkpoint import Checkpoint
from .dense_bits import check_dense_config, check_not_quantized, is_dense_config, read_dense_config
from .experts import iter_experts
from .low_bits import expert_bits
from .placement import STORAGES, LoadState, apply_storage, current_load

METHOD = "k3_mxfp4"
#: The label and the format of the released block.
RELEASED_METHOD, RELEASED_FORMAT = "compressed-tensors", "mxfp4-pack-quantized"

_WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "scale_dtype": "torch.uint8",
    "strategy": "group",
    "symmetric": True,
    "type": "float",
    "zp_dtype": None,
}
#: What a checkpoint that was packed here says about itself; patterns name every plain matrix beside the experts.
RELEASED_BLOCK: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": RELEASED_FORMAT,
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": _WEIGHTS,
        }
    },
    "format": RELEASED_FORMAT,
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*routed_expert_(down|up)_proj.*",
        "re:.*_res_proj.*",
        "re:.*block_sparse_moe\\.gate.*",
        "re:.*lm_head.*",
        "re:.*embed_tokens.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": RELEASED_METHOD,
    "quantization_status": "compressed",
}


class K3Mxfp4Config(Mxfp4Config):
    """How a checkpoint with MXFP4 experts is loaded, and the block its config.json gets back.

    Args:
        dequantize: expand all experts to the model's dtype while loading.
        expert_storage: "packed", "mapped", "dense" (the same as `dequantize=True`), or None: packed if the checkpoint
            fits in memory, mapped otherwise.
        block: the block as read from a file; None for the released one.
        dense: a BitsAndBytesConfig for the linear layers outside of the experts, carried out while loading; None
            leaves them as they are. A block of a file that was saved with such layers has it as its entry `dense`;
            of experts in HQQ's bits its entry `experts` tells.

    Raises:
        ValueError: an unknown `expert_storage`, or one that contradicts `dequantize`.
    """

    def __init__(
        self,
        dequantize: bool = False,
        expert_storage: str | None = None,
        block: dict[str, Any] | None = None,
        dense: Any = None,
    ) -> None:
        check_storage(expert_storage, dequantize)
        check_dense_config(dense)
        self.expert_storage = "dense" if dequantize else expert_storage
        self.block = deepcopy(RELEASED_BLOCK if block is None else block)
        stored, self.experts = self.block.pop("dense", None), self.block.pop("experts", None)
        self.dense = read_dense_config(stored) if dense is None else dense
        # The library forgets the block of a model whose experts were expanded: with fewer bits elsewhere it is needed.
        super().__init__(dequantize=self.expert_storage == "dense" and self.dense is None)
        self.quant_method = METHOD

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> "K3Mxfp4Config | tuple[K3Mxfp4Config, dict[str, Any]]":
        """Make one from a block of a config file."""
        made = cls(block=config_dict)
        return (made, kwargs) if return_unused_kwargs else made

    def get(self, name: str, default: Any = None) -> Any:
        """Look an option up as in a dictionary, which is how the library asks for `quant_method`."""
        return self.__dict__.get(name, default)

    def get_loading_attributes(self) -> dict[str, Any]:
        """The options that a user's config may set over a checkpoint's."""
        return {"dequantize": self.dequantize, "expert_storage": self.expert_storage}

    def to_dict(self) -> dict[str, Any]:
        """The block of config.json, as it was read; with a dense part in fewer bits under our label, and telling of it.

        Readers of the release's label would take codes for weights.
        """
        block = deepcopy(self.block)
        if self.dense is not None:
            block |= {"quant_method": METHOD, "dense": self.dense.to_dict()}
        if self.experts is not None:
            block |= {"quant_method": METHOD, "experts": dict(self.experts)}
        return block


def check_storage(expert_storage: str | None, dequantize: bool) -> None:
    """Refuse unknown and contradictory options.

    Raises:
        ValueError: naming option, value and what is allowed.
    """
    if expert_storage not in (None, *STORAGES):
        raise ValueError(f"expert_storage={expert_storage!r} is unknown; allowed are {[None, *STORAGES]}")
    if dequantize and expert_storage not in (None, "dense"):
        raise ValueError(f"dequantize=True contradicts expert_storage={expert_storage!r}; allowed is 'dense' or None")


def is_released_block(block: Any) -> bool:
    """Whether a quantisation block describes MXFP4 experts as released."""
    if not isinstance(block, dict):
        return getattr(block, "quant_method", None) == METHOD
    method = block.get("quant_method")
    return method == METHOD or (method == RELEASED_METHOD and block.get("format") == RELEASED_FORMAT)


def own_block(block: Any, state: LoadState) -> K3Mxfp4Config | None:
    """The block of a config under our label, with what this load is asked for.

    Args:
        block: a dictionary, an object, or None.
        state: `state.file_dense` is filled in.

    Returns:
        The block; the argument where it is none of ours, or there is nothing to tell.
    """
    if block is None and state.dense is None:
        return None
    if block is not None and not is_released_block(block):
        return block
    block = block.to_dict() if hasattr(block, "to_dict") else block
    made = K3Mxfp4Config(expert_storage=state.storage, block=block, dense=state.dense)
    state.file_dense = made.dense if state.dense is None else None
    state.file_experts = made.experts
    return made


def block_to_write(model: Any) -> Any:
    """What config.json says about the bits of a model: the config's own block, unless the dense part is in fewer bits.

    A model in which nothing is MXFP4 gets a block without its description.
    """
    block, dense = vars(model.config).get("quantization_config"), model.__dict__.get("_k3_dense_bits")
    experts = expert_bits(model)
    if dense is None and experts is None:
        return block
    is_packed = any(
        module.storage == "packed" or getattr(module.pages, "kind", None) == "packed"
        for _, module in iter_experts(model)
        if hasattr(module, "pages")
    )
    made = K3Mxfp4Config(block=getattr(block, "block", None) if is_packed else {"quant_method": METHOD}, dense=dense)
    made.experts = experts
    return made


def loading_options(given: Any) -> K3Mxfp4Config | None:
    """Read a user's `quantization_config`, an object or its dictionary; None if it is not about MXFP4 as released.

    Raises:
        TypeError: a dictionary with options that K3Mxfp4Config does not have.
        ValueError: see K3Mxfp4Config.
    """
    if not isinstance(given, dict):
        return given if is_released_block(given) else None
    if "format" not in given and given.get("quant_method") == METHOD:
        return K3Mxfp4Config(**{name: value for name, value in given.items() if name != "quant_method"})
    if not is_released_block(given):
        return None
    return K3Mxfp4Config(**{name: given[name] for name in ("dequantize", "expert_storage") if name in given})


def split_dense(given: Any, config: Any) -> tuple[Any, Any]:
    """Read a BitsAndBytesConfig over a checkpoint in plain numbers, or with MXFP4 experts, as one for the dense part.

    Args:
        given: a user's `quantization_config`, an object or its dictionary.
        config: the model's.

    Returns:
        What is for the dense part, and what is left for the library.

    Raises:
        ValueError: the checkpoint is in bits of bitsandbytes already.
    """
    if isinstance(given, dict) and given.get("quant_method") == "bitsandbytes":
        given = read_dense_config(given)
    if config is None or not is_dense_config(given):
        return None, given
    block = vars(config).get("quantization_config")
    check_not_quantized(isinstance(block, dict) and block.get("quant_method") == "bitsandbytes")
    return (given, None) if block is None or is_released_block(block) else (None, given)


class K3Mxfp4Quantizer(HfQuantizer):
    """Gives expert modules the form their bytes are loaded in. There is nothing to quantise and no package to need."""

    requires_calibration = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Every environment will do: the codec is ours."""

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        state = current_load()
        if state.by_library or not checkpoint_files:
            return
        state.checkpoint = state.checkpoint or Checkpoint.from_files(checkpoint_files)
        # Before the device map is inferred, so that it counts the bytes that there will be.
        apply_storage(model, state.checkpoint, state)

    def is_serializable(self) -> bool:
        """Packed and mapped experts are saved as they were read."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Everything but the packed experts can be trained."""
        return True


def register_quantizer() -> None:
    """Tell the library's registries. Idempotent; with two copies of this code the later one serves both."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = K3Mxfp4Config
    AUTO_QUANTIZER_MAPPING[METHOD] = K3Mxfp4Quantizer
