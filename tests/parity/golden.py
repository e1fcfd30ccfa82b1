"""Golden cases: finding them, reading them, loading their model and comparing tensors by name.

A case is a directory in the format of `tests/golden/README.md`. What is checked follows from the tensors a case
stores, never from its name, so the same code judges a directory of unseen cases (environment variable `K3_GOLDEN`).
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.tolerances import bound

COMMITTED = Path(__file__).resolve().parents[1] / "golden"

# Tensor name -> kind. The first match wins; a name that matches nothing is an error, so that a tensor of an unseen
# case cannot stay unchecked in silence.
_LAYER = r"(gen\.|pieces\.)?layers\.\d+\."
_KINDS: tuple[tuple[str, str], ...] = (
    (r"input_ids|attention_mask|pieces", "input"),
    (r".*_fp32_math|logits_all_bf16|logits_f64|dequant\..*", "reference"),
    (r"logits|logits_pieces", "logits"),
    (r"gen\.logits", "gen_logits"),
    (r"gen\.tokens", "gen_tokens"),
    (r"hidden", "hidden"),
    (r"num_block_residuals", "num_block_residuals"),
    (r"block_residuals", "block_residuals"),
    (_LAYER + r"output", "layer_output"),
    (_LAYER + r"(self_attn|ffn)\.(input|output)", "module_io"),
    (_LAYER + r"router_indices", "router_indices"),
    (_LAYER + r"router_weights", "router_weights"),
    (_LAYER + r"recurrent_state", "recurrent_state"),
    (_LAYER + r"conv_state_[qkv]", "conv_state"),
    (_LAYER + r"(key|value)_cache", "key_value_cache"),
)
_EXACT = ("gen_tokens", "num_block_residuals", "router_indices")
# Kinds whose tensors are indexed by prompt position, and the axis of that index; padded positions carry nothing.
_TOKEN_AXIS = {
    "logits": 1, "hidden": 1, "block_residuals": 1, "layer_output": 1, "module_io": 1, "router_indices": 1,
    "router_weights": 1, "key_value_cache": 2,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """One directory of golden data.

    `stored` replaces the tensors of the file, for comparisons derived from a case (one row, another reference).
    """

    name: str
    directory: Path
    spec: Mapping[str, Any]
    stored: Mapping[str, Tensor] | None = None

    @property
    def is_dense(self) -> bool:
        """True for plain weights, False for a checkpoint in the released layout."""
        return "weights" in self.spec

    @property
    def compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.spec["compute_dtype"])

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.directory / self.spec["config"]).read_text())

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Inputs and expected outputs."""
        return load_file(self.directory / self.spec["io"]) if self.stored is None else self.stored

    @property
    def weights(self) -> dict[str, Tensor]:
        """The stored state dict, which may belong to another case."""
        return load_file(self.directory / self.spec["weights"])

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the stored tensors, from the header alone: cheap enough for test collection."""
        if self.stored is not None:
            return frozenset(self.stored)
        with safe_open(self.directory / self.spec["io"], "pt") as file:
            return frozenset(file.keys())

    @property
    def input_ids(self) -> Tensor:
        return self.tensors["input_ids"]

    @property
    def attention_mask(self) -> Tensor:
        """[B, T] with 0 at padding; all ones where the case has no padding."""
        mask = self.tensors.get("attention_mask")
        return torch.ones_like(self.input_ids) if mask is None else mask

    def bound(self, key: str) -> float:
        """The case's own bound, or the table's where the case states none."""
        return float(self.spec["tolerance"].get(key, bound(key)))

    def alone(self, row: int) -> "Case":
        """The case of one row without its padding: what a user gets who runs that prompt by itself."""
        real = self.attention_mask[row].bool()
        stored = {}
        for name in self.names - {"attention_mask"}:
            tensor, axis = self.tensors[name], _TOKEN_AXIS.get(kind_of(name))
            if kind_of(name) != "num_block_residuals":
                tensor = tensor[row : row + 1]
            if axis is not None or name == "input_ids":
                positions = real.nonzero().squeeze(1)
                tensor = tensor.index_select(1 if axis is None else axis, positions)
            stored[name] = tensor
        return replace(self, name=f"{self.name}[{row}]", stored=stored)

    def against(self, suffix: str) -> "Case":
        """The case whose expected outputs are the tensors stored under an extra `suffix`, and only those."""
        stored = {name.removesuffix(suffix): self.tensors[name] for name in self.names if name.endswith(suffix)}
        inputs = {name: self.tensors[name] for name in self.names if kind_of(name) == "input"}
        return replace(self, name=self.name + suffix, stored=stored | inputs)

    def materialise(self, target: Path, **changes: Any) -> Path:
        """Write a directory that `from_pretrained` reads: the weights linked, the configuration with `changes`.

        A key of `linear_attn_config` is changed as `linear_attn_config={...}`, merged into the stored block.
        """
        if not self.is_dense:
            raise ValueError(f"{self.name} is a released checkpoint: load {self.spec['checkpoint']} itself")
        target.mkdir(parents=True, exist_ok=True)
        config = self.config
        for key, value in changes.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) else value
        (target / "config.json").write_text(json.dumps(config))
        weights = (self.directory / self.spec["weights"]).resolve(strict=True)
        link = target / "model.safetensors"
        if not link.is_symlink():
            link.symlink_to(weights)
        return target


def discover(root: Path | None = None) -> list[Case]:
    """All cases below `root` (default: `K3_GOLDEN` or the committed folder), sorted by name.

    Raises:
        FileNotFoundError: the folder is missing or holds no case. Nothing to compare with must not pass as success.
    """
    root = root or Path(os.environ.get("K3_GOLDEN") or COMMITTED)
    cases = [
        Case(path.parent.name, path.parent, json.loads(path.read_text())) for path in sorted(root.glob("*/case.json"))
    ]
    if not any(case.is_dense for case in cases):
        raise FileNotFoundError(f"no golden case with plain weights in {root}")
    return cases


def kind_of(name: str) -> str:
    """The kind of a stored tensor, which decides how it is compared."""
    for pattern, kind in _KINDS:
        if re.fullmatch(pattern, name):
            return kind
    raise KeyError(f"golden tensor {name!r} is of no known kind: add it to the comparison")


def stage_of(name: str) -> str:
    """Which run produces a tensor: "prompt", "pieces", "gen", or "" for inputs and further references."""
    if kind_of(name) in ("input", "reference"):
        return ""
    if name.startswith("gen."):
        return "gen"
    return "pieces" if "pieces" in name else "prompt"


def names_of(case: Case, stage: str) -> list[str]:
    """The stored tensors that a run of `stage` must reproduce."""
    return sorted(name for name in case.names if stage_of(name) == stage)


def real_positions(case: Case, name: str, value: Tensor) -> Tensor:
    """`value` at real tokens only, flattened over batch and tokens; unchanged if not indexed by token."""
    axis = _TOKEN_AXIS.get(kind_of(name))
    return value if axis is None else value.movedim(axis, 1)[case.attention_mask.bool()]


def difference(case: Case, name: str, actual: Tensor) -> Tensor:
    """|actual - expected| in fp64 at real positions. NaN and infinity count as an infinite difference."""
    delta = (actual.double() - case.tensors[name].double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return real_positions(case, name, delta)


def complaints(case: Case, actual: Mapping[str, Tensor], names: Iterable[str]) -> list[str]:
    """One line per named tensor that is missing, of another shape or out of bounds."""
    lines = []
    for name in names:
        kind = kind_of(name)
        if name not in actual:
            lines.append(f"{name}: not produced")
            continue
        shape, expected_shape = tuple(actual[name].shape), tuple(case.tensors[name].shape)
        if shape != expected_shape:
            lines.append(f"{name}: shape {shape}, not {expected_shape}")
            continue
        delta = difference(case, name, actual[name])
        limit = 0.0 if kind in _EXACT else case.bound(f"{kind}_max_abs")
        worst = delta.max().item()
        if not worst <= limit:
            lines.append(f"{name}: max {worst:.3g} > {limit:g} ({(delta > limit).sum()} of {delta.numel()})")
        rms = delta.square().mean().sqrt().item()
        if kind == "logits" and not rms <= case.bound("logits_rms"):
            lines.append(f"{name}: rms {rms:.3g} > {case.bound('logits_rms'):g}")
    return lines


def check(case: Case, actual: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Raise AssertionError naming every tensor of `names` that `actual` fails to reproduce within the bounds."""
    names = list(names)
    if not names:
        raise AssertionError(f"{case.name}: nothing to compare")
    lines = complaints(case, actual, names)
    if lines:
        raise AssertionError(f"{case.name}: {len(lines)} of {len(names)} tensors differ\n  " + "\n  ".join(lines))
