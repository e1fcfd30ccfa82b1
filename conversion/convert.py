"""From one checkpoint directory to another: layout, number format of the experts, vision tensors, shards.

Tensors are read, changed and written one at a time, file by file; what is not changed is copied byte for byte. Padding
of `A_log` is kept in the flat layout too, so that the way back restores every byte.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from modeling_k3 import K3Config
from modeling_k3.byte_sizes import parse_size
from modeling_k3.checkpoint import EXPERT, TEXT_PREFIX, Checkpoint, canonical, is_vision
from modeling_k3.config_layout import is_released
from modeling_k3.conversion.job import Job, identify, run_job
from modeling_k3.mxfp4 import GROUP, decode, encode
from modeling_k3.quantizer import RELEASED_BLOCK
from modeling_k3.tensor_files import Entry, TensorFile
from modeling_k3.tensor_writer import Item, split_items

LAYOUTS = ("flat", "released")
EXPERTS = ("bf16", "mxfp4")
#: Fields that two configs of one model agree on.
_DIMENSIONS = (
    "vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads q_lora_rank kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim num_experts num_experts_per_token moe_intermediate_size "
    "routed_expert_hidden_size num_shared_experts linear_attn_config"
).split()
#: What a wrapper says when there is no released directory to take it from.
_WRAPPER = {
    "outer": {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16"},
    "text_config": {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]},
}


@dataclass(frozen=True)
class Options:
    """What a conversion changes; None keeps what the source has.

    Args:
        layout: "flat" or "released".
        experts: "bf16" or "mxfp4".
        vision: False drops vision and projector tensors. The flat layout never has them.
        max_shard_size: of one file, such as "5GB"; None keeps the source's division.
        like: a released directory whose wrapper (outer config) and vision tensors a flat source gets back.
    """

    layout: str | None = None
    experts: str | None = None
    vision: bool = True
    max_shard_size: int | str | None = None
    like: Path | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("layout", LAYOUTS), ("experts", EXPERTS)):
            if getattr(self, name) not in (None, *allowed):
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; allowed are {[None, *allowed]}")
        if self.max_shard_size is not None:
            parse_size(self.max_shard_size, "max_shard_size")
        if self.like is not None and self.layout != "released":
            raise ValueError(f"like={str(self.like)!r} is a wrapper for layout='released', got layout={self.layout!r}")


def convert(source: Path, target: Path, options: Options, progress: Callable[[int, int], None] | None = None) -> Path:
    """Convert a directory; see `Options`. Killed at any moment it can be run again, and the result is the same.

    Args:
        source: a checkpoint in either layout; only read.
        target: the folder that will appear when everything is written.
        options: what to change.
        progress: called with (bytes done, bytes in all).

    Returns:
        `target`.

    Raises:
        ValueError: options that do not fit the source.
        FileExistsError, OSError: see `run_job`.
    """
    return run_job(plan_conversion(source, target, options), progress)


def plan_conversion(source: Path, target: Path, options: Options) -> Job:
    """Plan a conversion without writing anything; `job.nbytes` is the room it needs."""
    source, target = Path(source).resolve(), Path(target).resolve()
    if source == target or source in target.parents:
        raise ValueError(f"target={str(target)!r} lies in the source, which is never changed")
    config = _read_config(source)
    checkpoint = Checkpoint.from_directory(source)
    layout = options.layout or ("released" if is_released(config) else "flat")
    if options.like is not None:
        _check_like(K3Config.from_dict(config), options.like)
    changed = _config(config, layout, options)
    is_nested = layout == "released"
    _check_complete(checkpoint)
    _check_padding(checkpoint, K3Config.from_dict(config).kda_num_heads)
    shards = [
        [
            item
            for name, entry in file.entries.items()
            for item in _items(checkpoint, file, name, entry, layout, options)
        ]
        for file in checkpoint.files
    ]
    files = [file.path for file in checkpoint.files]
    if options.like is not None and options.vision:
        other = Checkpoint.from_directory(options.like)
        found = other.locate(name for name in other.where if is_vision(name))[0]
        shards.append([_plain(name, file, entry) for name, (file, entry) in found.items()])
        files += [file.path for file in other.files]
    shards = [shard for shard in shards if shard]
    if options.max_shard_size is not None:
        shards = split_items((item for shard in shards for item in shard), parse_size(options.max_shard_size))
    _check_unique(shards)
    skipped = {"config.json", "conversion.json"}
    copies = {
        path.name: path
        for path in sorted(source.iterdir())
        if path.is_file()
        and path.name not in skipped
        and not _is_weights(path.name)
        # The released code belongs to the released layout.
        and (is_nested == is_released(config) or path.suffix != ".py")
    }
    return Job(
        target=target,
        shards=shards,
        texts={"config.json": json.dumps(changed, indent=2) + "\n"},
        copies=copies,
        identity={"files": identify(files), "copies": identify(list(copies.values()))},
        digits=6 if is_nested else 5,
    )


def _items(
    checkpoint: Checkpoint, file: TensorFile, name: str, entry: Entry, layout: str, options: Options
) -> Iterator[Item]:
    """What one tensor of the source becomes."""
    if is_vision(name):
        if options.vision and layout == "released" and options.like is None:
            yield _plain(name, file, entry)
        return
    short = canonical(name)
    spelled = short if short.startswith(("lm_head.", "score.")) else f"model.{short}"
    spelled = (TEXT_PREFIX if layout == "released" else "") + spelled
    expert = EXPERT.fullmatch(short)
    if expert is None or options.experts is None:
        yield _plain(spelled, file, entry)
    elif options.experts == "bf16" and expert[4] != "weight":
        if expert[4] == "weight_packed":
            partner = name.removesuffix("packed") + "scale"
            stem = spelled.removesuffix("_packed")
            shape = (entry.shape[0], 2 * entry.shape[1])
            yield Item(stem, "BF16", shape, lambda: decode(*_read_both(checkpoint, name, partner)))
    elif options.experts == "mxfp4" and expert[4] == "weight":
        rows, width = entry.shape
        if width % GROUP:
            raise ValueError(f"{name} has {width} columns; MXFP4 needs a multiple of {GROUP}")
        yield Item(f"{spelled}_packed", "U8", (rows, width // 2), lambda: _encoded(file, entry)[0])
        yield Item(f"{spelled}_scale", "U8", (rows, width // GROUP), lambda: _encoded(file, entry)[1])
    else:
        yield _plain(spelled, file, entry)


def _plain(name: str, file: TensorFile, entry: Entry) -> Item:
    return Item(name, entry.dtype, entry.shape, lambda: file.read(entry))


@lru_cache(maxsize=1)
def _encoded(file: TensorFile, entry: Entry) -> tuple[Tensor, Tensor]:
    """Codes and scales stand one after the other in a file: the matrix is read and encoded once for both."""
    return encode(file.read(entry))


def _read_both(checkpoint: Checkpoint, packed: str, scale: str) -> tuple[Tensor, Tensor]:
    places = checkpoint.locate((packed, scale))[0]
    return tuple(file.read(entry) for file, entry in (places[packed], places[scale]))


def _config(config: dict[str, Any], layout: str, options: Options) -> dict[str, Any]:
    """The target's config.json: the source's, with the layout and the quantisation block that it needs."""
    if (layout == "released") != is_released(config):
        own = K3Config.from_dict(config)
        if layout == "released":
            config = wrapped(own, options.like)
        else:
            own.released_config = None
            config = json.loads(own.to_json_string())
    return config if options.experts is None else with_experts(config, options.experts)


def wrapped(config: K3Config, like: Path | None = None) -> dict[str, Any]:
    """The released dictionary of a config.

    Args:
        config: flat, or one that has a wrapper already.
        like: a released directory whose wrapper a flat one gets; None for a plain one.
    """
    if config.released_config is None:
        config = deepcopy(config)
        config.released_config = deepcopy(_WRAPPER) if like is None else _wrapper_of(like)
    return json.loads(config.to_json_string())


def with_experts(config: dict[str, Any], experts: str) -> dict[str, Any]:
    """The config of a checkpoint whose experts are "bf16" or "mxfp4": without or with the quantisation block."""
    config = deepcopy(config)
    owner = config if "quantization_config" in config or not is_released(config) else config["text_config"]
    if experts == "bf16":
        config.pop("quantization_config", None)
        config.get("text_config", {}).pop("quantization_config", None)
    else:
        owner.setdefault("quantization_config", deepcopy(RELEASED_BLOCK))
    return config


def _read_config(folder: Path) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no config.json; expected is a folder of save_pretrained, or a release")
    return json.loads(path.read_text(encoding="utf-8"))


def _check_like(config: K3Config, like: Path) -> None:
    """The wrapper and the vision tensors of another model would make a release that nothing fits together in."""
    other = K3Config.from_dict(_read_config(like))
    differ = [name for name in _DIMENSIONS if getattr(other, name) != getattr(config, name)]
    if differ:
        each = ", ".join(f"{name}={getattr(other, name)!r} (source: {getattr(config, name)!r})" for name in differ[:3])
        raise ValueError(f"like={str(like)!r} is another model: {each}; allowed is one of the source's dimensions")


def _wrapper_of(like: Path) -> dict[str, Any]:
    released = K3Config.from_dict(_read_config(like)).released_config
    if released is None:
        raise ValueError(f"like={str(like)!r} is not in the released layout: it has no wrapper to take")
    # Where the block stood is the other directory's affair.
    return {**released, "outer": {k: v for k, v in released["outer"].items() if k != "quantization_config"}}


def _check_complete(checkpoint: Checkpoint) -> None:
    """Index and files agree, and codes and scales come in pairs."""
    _, absent, unlisted = checkpoint.locate(checkpoint.where)
    lone = [
        name
        for name in checkpoint.where
        if name.endswith(".weight_packed") and name.removesuffix("packed") + "scale" not in checkpoint.where
    ]
    lone += [
        name
        for name in checkpoint.where
        if name.endswith(".weight_scale") and name.removesuffix("scale") + "packed" not in checkpoint.where
    ]
    for what, names in (("in the index only", absent), ("in a file only", unlisted), ("of half a pair", lone)):
        if names:
            raise ValueError(f"the source has {len(names)} tensors {what}: {', '.join(names[:5])}")


def _check_padding(checkpoint: Checkpoint, heads: int) -> None:
    """`A_log` has zeros beyond its heads: loading refuses anything else, and nobody should find out after a day."""
    names = [name for name in checkpoint.where if name.endswith(".self_attn.A_log") and not is_vision(name)]
    for name, (file, entry) in checkpoint.locate(names)[0].items():
        if len(entry.shape) == 1 and file.read(entry)[heads:].any():
            raise ValueError(
                f"{file.path}: {name} has {entry.shape[0]} entries for {heads} heads, and not all of the rest are zero"
            )


def _check_unique(shards: list[list[Item]]) -> None:
    seen: set[str] = set()
    for shard in shards:
        for item in shard:
            if item.name in seen:
                raise ValueError(f"two tensors of the source become {item.name!r}")
            seen.add(item.name)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".partial"))


def describe(job: Job) -> str:
    """One line: how many tensors, bytes and files a job writes, and what room there is."""
    count, files = sum(len(shard) for shard in job.shards), len(job.shards)
    folder = next(folder for folder in job.target.parents if folder.exists())
    free = shutil.disk_usage(folder).free
    return (
        f"{count} tensors in {files} file{'s'[: files > 1]}, {_size(job.nbytes)} of {_size(free)} free -> {job.target}"
    )


def _size(count: float) -> str:
    """Bytes in words of three digits."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
