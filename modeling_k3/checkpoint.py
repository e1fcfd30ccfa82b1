"""Names on disk <-> parameters, and what a checkpoint directory holds.

Everything is saved under the released names; only the exceptions stand here.

language_model.X                         X                                  (the prefix, if the file had it)
...experts.E.w1.weight, ...w3.weight     ...experts.gate_up_proj            stacked over E, w1 above w3
...experts.E.w2.weight                   ...experts.down_proj               stacked over E
...experts.E.wM.weight_packed, _scale    ...experts.<stack>_packed, _scale  MXFP4: stacked, or left in the file
...self_attn.A_log [padded]              ...self_attn.A_log [H]             zeros beyond H, put back when saving
"""

import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, PrefixChange, WeightConverter

from .config_layout import FLAT_MODEL_TYPE
from .tensor_files import INDEX_NAME, SINGLE_NAME, Entry, TensorFile, read_index
from .tensor_writer import STAGING

#: What the text tensors of the released layout start with.
TEXT_PREFIX = "language_model."
#: Tensors of the release that the text model does not read.
VISION_TENSORS = (r"^(model\.)?vision_tower\.", r"^(model\.)?mm_projector\.")
_VISION = re.compile("|".join(VISION_TENSORS))
_DECODER = re.compile(r"model\.(?=layers\.|embed_tokens\.|norm\.|output_attn_res_)")
_LAYER = re.compile(r"layers\.(\d+)\.")
#: An expert's tensor by its canonical name: layer, expert, matrix, ending.
EXPERT = re.compile(
    r"layers\.(0|[1-9]\d*)\.block_sparse_moe\.experts\.(0|[1-9]\d*)\.(w[123])\.(weight|weight_packed|weight_scale)"
)


def register_conversions() -> None:
    """Tell the library how checkpoint names become parameters, and back. Idempotent.

    Directories are loaded and saved by our own code; the library's routes (state dicts, adapters, quantisation while
    loading, tensor parallelism) go by this list.
    """
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


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision tower or its projector."""
    return _VISION.match(name) is not None


def canonical(name: str) -> str:
    """The name of a tensor without the prefixes that files and model classes differ in: `layers.0....`."""
    name = name.removeprefix(TEXT_PREFIX)
    return name[len("model.") :] if _DECODER.match(name) else name


def layer_of(canonical_name: str) -> int | None:
    """The layer that a canonical name belongs to; None for embedding, norm and heads."""
    found = _LAYER.match(canonical_name)
    return int(found[1]) if found else None


class Checkpoint:
    """The tensors of one directory, by name. Only the index is read at first; files are opened when asked for.

    Args:
        where: tensor name -> file it stands in, as the index says; None to take what the files hold.
        files: the files, in the order of their names.

    Raises:
        ValueError: without an index, a tensor stands in two files.
    """

    def __init__(self, where: dict[str, TensorFile] | None, files: Sequence[TensorFile]) -> None:
        self.files = list(files)
        if where is None:
            where = {}
            for file in self.files:
                twice = next((name for name in file.entries if name in where), None)
                if twice is not None:
                    raise ValueError(f"tensor {twice!r} stands in both {where[twice].path} and {file.path}")
                where.update(dict.fromkeys(file.entries, file))
        self.where = where

    @classmethod
    def from_directory(cls, directory: str | PathLike, subfolder: str = "", variant: str | None = None) -> "Checkpoint":
        """Open what the library would load from a local directory: one file, or an index.

        Raises:
            FileNotFoundError: neither is there.
            ValueError: a broken index, see `read_index`.
        """
        base = Path(directory) / (subfolder or "")
        single, index = base / add_variant(SINGLE_NAME, variant), base / add_variant(INDEX_NAME, variant)
        if single.is_file():
            return cls(None, [TensorFile(single)])
        if not index.is_file():
            hint = "; a save into it was cut short or is under way" if any(base.glob(STAGING + "*")) else ""
            raise FileNotFoundError(
                f"{base} has neither {single.name} nor {index.name}; weights are read from safetensors files only{hint}"
            )
        return cls._from_index(index)

    @classmethod
    def from_files(cls, paths: Sequence[str | PathLike]) -> "Checkpoint":
        """Open resolved files; several need the index that stands beside them, and are opened through it."""
        if len(paths) > 1:
            names = {os.path.basename(path) for path in paths}
            for index in sorted(Path(paths[0]).parent.glob("*.safetensors.index.json")):
                if {os.path.basename(file) for file in read_index(index).values()} == names:
                    return cls._from_index(index)
        return cls(None, [TensorFile(path) for path in paths])

    @classmethod
    def _from_index(cls, index: Path) -> "Checkpoint":
        weight_map = read_index(index)
        files = {name: TensorFile(index.parent / name) for name in sorted(set(weight_map.values()))}
        return cls({name: files[file] for name, file in weight_map.items()}, list(files.values()))

    @cached_property
    def packed_layers(self) -> frozenset[int]:
        """The layers with experts stored as MXFP4."""
        found = (EXPERT.fullmatch(canonical(name)) for name in self.where if name.endswith(".weight_packed"))
        return frozenset(int(match[1]) for match in found if match)

    def locate(self, names: Iterable[str]) -> tuple[dict[str, tuple[TensorFile, Entry]], list[str], list[str]]:
        """Open the files that the named tensors stand in, and no others.

        Returns:
            name -> file and entry; names that the index lists but the file lacks; names that an opened file has but
            the index does not list.
        """
        names = list(names)
        found: dict[str, tuple[TensorFile, Entry]] = {}
        absent: list[str] = []
        for name in names:
            file = self.where[name]
            entry = file.entries.get(name)
            if entry is None:
                absent.append(name)
            else:
                found[name] = (file, entry)
        opened = dict.fromkeys(self.where[name] for name in names)
        unlisted = [name for file in opened for name in file.entries if self.where.get(name) is not file]
        return found, absent, unlisted


def check_loaded(info: dict[str, Any], model: nn.Module, path: str | PathLike | None) -> None:
    """Refuse a load that left parameters without data or data without parameters.

    Args:
        info: the library's `loading_info`.
        model: what was loaded; its class and depth decide what may be missing or left over.
        path: named in the message.

    Raises:
        ValueError: naming the first few tensors of each kind.
    """
    missing = info["missing_keys"]
    depth, has_head = model.config.num_hidden_layers, model.can_generate()
    unexpected = [key for key in info["unexpected_keys"] if not is_excused(key, depth, has_head)]
    mismatched = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    complain(
        path,
        missing=[key for key in missing if not may_be_new(key, model)],
        unknown=unexpected,
        shape=[key for key in mismatched if not may_be_new(key, model)],
    )


def is_excused(key: str, depth: int, has_head: bool) -> bool:
    """Whether a checkpoint may hold this tensor although a model of `depth` layers has no place for it."""
    name = canonical(key)
    layer = layer_of(name)
    is_too_deep = layer is not None and layer >= depth
    return is_too_deep or is_vision(key) or (name.startswith("lm_head.") and not has_head)


def may_be_new(key: str, model: nn.Module) -> bool:
    """Whether a model may start this parameter afresh: a new head on a pretrained decoder, as in fine-tuning.

    A head of another shape needs the library's `ignore_mismatched_sizes=True` as well.
    """
    has_own_head = model.base_model is not model and not model.can_generate()
    return has_own_head and not key.startswith(f"{model.base_model_prefix}.")


def complain(
    path: str | PathLike | None,
    *,
    missing: Iterable[str] = (),
    unknown: Iterable[str] = (),
    shape: Iterable[str] = (),
    unlisted: Iterable[str] = (),
    way_out: str = "strict=False keeps the library's behaviour (random values for what is missing, the rest ignored)",
) -> None:
    """Raise ValueError that names the first few tensors of every kind of trouble; do nothing if there is none."""
    kinds = {"missing": missing, "unknown": unknown, "of another shape": shape, "not in the index": unlisted}
    problems = []
    for what, keys in kinds.items():
        names = sorted(set(keys))
        if names:
            problems.append(f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}")
    if problems:
        raise ValueError(f"checkpoint {str(path)!r} does not fit the model; tensors {'; '.join(problems)}. {way_out}")


def add_variant(name: str, variant: str | None) -> str:
    """`model.safetensors` -> `model.<variant>.safetensors`, the library's way."""
    return name if variant is None else name.replace("model.", f"model.{variant}.", 1)
