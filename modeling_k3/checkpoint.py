"""Names on disk <-> parameters. Everything is saved under the released names; only the exceptions stand here.

language_model.X                         X                              (the prefix, if the file had it)
...experts.E.w1.weight, ...w3.weight     ...experts.gate_up_proj        stacked over E, w1 above w3
...experts.E.w2.weight                   ...experts.down_proj           stacked over E
"""

import re
from os import PathLike
from typing import Any

from torch import nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, PrefixChange, WeightConverter

from .config_layout import FLAT_MODEL_TYPE

#: Tensors of the release that the text model does not read.
VISION_TENSORS = (r"^(model\.)?vision_tower\.", r"^(model\.)?mm_projector\.")


def register_conversions() -> None:
    """Tell the library how checkpoint names become parameters, and back. Idempotent."""
    # Targets become patterns when saving: an unescaped dot would also match `shared_experts.down_proj`.
    register_checkpoint_conversion_mapping(
        FLAT_MODEL_TYPE,
        [
            PrefixChange(prefix_to_remove="language_model"),
            WeightConverter(
                [r"\.experts.*.w1.weight", r"\.experts.*.w3.weight"],
                r"\.experts.gate_up_proj",
                [MergeModulelist(dim=0), Concatenate(dim=1)],
            ),
            WeightConverter(r"\.experts.*.w2.weight", r"\.experts.down_proj", [MergeModulelist(dim=0)]),
        ],
        overwrite=True,
    )


def check_loaded(info: dict[str, Any], model: nn.Module, path: str | PathLike | None) -> None:
    """Refuse a load that left parameters without data or data without parameters.

    Args:
        info: the library's `loading_info`.
        model: what was loaded; its class and depth decide what may be missing or left over.
        path: named in the message.

    Raises:
        ValueError: naming the first few tensors of each kind.
    """
    prefix = model.base_model_prefix
    is_language_model = model.can_generate()
    depth = model.config.num_hidden_layers

    def is_excused(key: str) -> bool:
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", key)
        return (layer is not None and int(layer[1]) >= depth) or (
            not is_language_model and re.search(r"(?:^|\.)lm_head\.", key) is not None
        )

    missing = sorted(info["missing_keys"])
    if not is_language_model and model.base_model is not model:
        # A new head on a pretrained decoder is what fine-tuning starts from.
        missing = [key for key in missing if key.startswith(f"{prefix}.")]
    unexpected = sorted(key for key in info["unexpected_keys"] if not is_excused(key))
    mismatched = sorted(str(key) for key in info["mismatched_keys"])
    problems = [
        f"{len(keys)} {what}: {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}"
        for what, keys in (("missing", missing), ("unknown", unexpected), ("of another shape", mismatched))
        if keys
    ]
    if problems:
        raise ValueError(
            f"checkpoint {str(path)!r} does not fit the model; tensors {'; '.join(problems)}. "
            "strict=False keeps the library's behaviour (random values for what is missing, the rest ignored)"
        )
