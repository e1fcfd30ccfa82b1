"""Adapters on experts between our stacks and one LoRA per expert, as peft has it on linear layers.

The names of the second form are those that engines read adapters of unstacked experts by; no engine was tried here.

ours        ...experts.lora_A.w1                    [N, r, in]      one tensor per layer and matrix
others      ...experts.E.w1.lora_A.weight           [r, in]         as if every matrix were a linear layer
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modeling_k3.adapters.expert_product import MATRICES

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_STACK = re.compile(r"(.*\.experts)\.(lora_[AB])\.(w1|w2|w3)")
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(w1|w2|w3)\.(lora_[AB])\.weight")
_ROOT = "base_model.model."


def split_experts(source: str | Path, target: str | Path, *, text_prefix: str = "") -> None:
    """Write a saved adapter with one LoRA per expert.

    Args:
        source: directory that peft saved.
        target: directory to make.
        text_prefix: what the names of the served model begin with, "language_model." for the released layout.

    Raises:
        ValueError: `source` is no adapter, or its targets are a pattern that names experts.
    """

    def rename(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
        single: dict[str, Tensor] = {}
        used = set()
        for name, tensor in tensors.items():
            found = _STACK.fullmatch(name)
            if not found:
                single[name] = tensor
                continue
            used.add(found[3])
            single |= {f"{found[1]}.{e}.{found[3]}.{found[2]}.weight": t.clone() for e, t in enumerate(tensor)}
        targets = config.get("target_modules")
        if used and isinstance(targets, str):
            raise ValueError(f"target_modules={targets!r} is a pattern; allowed for adapters on experts is a list")
        if used:
            rest = [t for t in targets if t.rpartition(".")[2] != "experts"]
            config["target_modules"] = sorted(rest) + [m for m in MATRICES if m in used]
        for field in ("rank_pattern", "alpha_pattern"):
            config[field] = _split_pattern(config.get(field) or {})
        names = {name: f"{_ROOT}{text_prefix}{name.removeprefix(_ROOT)}" for name in single}
        return {names[name]: tensor for name, tensor in single.items()}

    _convert(Path(source), Path(target), rename)


def _split_pattern(patterns: dict[str, Any]) -> dict[str, Any]:
    """`experts` and `experts.w2` become patterns of single experts' matrices; what names a matrix goes first."""
    result, wider = {}, {}
    for pattern, value in patterns.items():
        stem, _, matrix = pattern.rpartition(".")
        if matrix in MATRICES and stem.endswith("experts"):
            if value:
                result[rf"{stem}\.\d+\.{matrix}"] = value
        elif pattern.endswith("experts") and not pattern.endswith("shared_experts"):
            wider[rf"{pattern}\.\d+\.w[123]"] = value
        else:
            result[pattern] = value
    return result | wider


def stack_experts(source: str | Path, target: str | Path, *, num_experts: int | None = None) -> None:
    """Write an adapter with one LoRA per expert as ours; the inverse of `split_experts`.

    Args:
        source: directory of an adapter for linear layers `experts.E.w1`, ...
        target: directory to make.
        num_experts: N; None: as many as the adapter has. Experts it does not have are left unchanged.

    Raises:
        ValueError: `source` is no adapter; its experts differ in rank; it has an expert beyond N.
    """

    def rename(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
        stacked: dict[str, Tensor] = {}
        groups: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            name = _ROOT + name.removeprefix(_ROOT).removeprefix("language_model.")
            found = _SINGLE.fullmatch(name)
            if found:
                groups[f"{found[1]}.{found[4]}.{found[3]}"][int(found[2])] = tensor
            else:
                stacked[name] = tensor
        highest = max((expert for group in groups.values() for expert in group), default=-1)
        count = highest + 1 if num_experts is None else num_experts
        if highest >= count:
            raise ValueError(f"num_experts={count}, but the adapter has expert {highest}")
        for name, group in groups.items():
            shapes = {tuple(tensor.shape) for tensor in group.values()}
            if len(shapes) > 1:
                raise ValueError(f"{name}: experts have shapes {sorted(shapes)}; all experts of a layer have one rank")
            first = next(iter(group.values()))
            stacked[name] = torch.stack([group.get(e, torch.zeros_like(first)) for e in range(count)])
        _stack_config(config, {name.rpartition(".")[2] for name in groups})
        return stacked

    _convert(Path(source), Path(target), rename)


def _stack_config(config: dict[str, Any], used: set[str]) -> None:
    if not used:
        return
    targets = config.get("target_modules")
    rest = [] if isinstance(targets, str) else [t for t in targets or () if t.rpartition(".")[2] not in MATRICES]
    if isinstance(targets, str):
        raise ValueError(f"target_modules={targets!r} is a pattern; allowed for adapters on experts is a list")
    config["target_modules"] = [*rest, "block_sparse_moe.experts"]
    ranks = {}
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = {}
        for pattern, value in (config.get(field) or {}).items():
            plain = pattern.replace(r"\.\d+\.w[123]", "")
            patterns[re.sub(r"experts\\\.\\d\+\\\.(w[123])$", r"experts.\1", plain)] = value
        ranks[field] = patterns
    ranks["rank_pattern"] |= {f"experts.{matrix}": 0 for matrix in MATRICES if matrix not in used}
    config.update(ranks)


def _convert(
    source: Path, target: Path, rename: Callable[[dict[str, Tensor], dict[str, Any]], dict[str, Tensor]]
) -> None:
    for name in (_WEIGHTS, _CONFIG):
        if not (source / name).is_file():
            raise ValueError(f"{str(source)!r} is no saved adapter: it has no {name}")
    if source.resolve() == target.resolve():
        raise ValueError(f"target={str(target)!r} is the source; allowed is another directory")
    config = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
    tensors = rename(load_file(source / _WEIGHTS), config)
    target.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / _WEIGHTS, {"format": "pt"})
    (target / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
