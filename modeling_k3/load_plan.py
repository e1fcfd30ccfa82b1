"""Which tensors of a checkpoint make which parameter, accounted for before the first byte of data is read.

A missing, unknown, truncated or wrongly shaped tensor is an error while nothing has changed.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.utils.loading_report import LoadStateDictInfo

from .checkpoint import (
    EXPERT,
    TEXT_PREFIX,
    Checkpoint,
    canonical,
    complain,
    is_excused,
    layer_of,
    may_be_new,
)
from .expert_pages import ENDINGS, MATRICES
from .experts import PROJECTIONS, iter_experts
from .mxfp4 import GROUP
from .placement import LoadState
from .stored_bits import take_stored
from .tensor_files import Entry, TensorFile

Place = tuple[TensorFile, Entry]
#: The library's Kimi Linear saves the dense layers' MLP under the name of the experts' part.
_SWAPPED = re.compile(r"^(layers\.\d+\.)block_sparse_moe\.((?:gate|up|down)_proj\.weight)$")


@dataclass
class Layout:
    """How the files that were read spell their tensors, so that a save can write them the same way.

    Args:
        prefix: "language_model." or "".
        decoder: "model." or "", what follows the prefix for tensors of the decoder.
        odd: canonical name -> stored name, for tensors spelled unlike the others.
        padded: canonical name -> stored shape, for tensors stored with zeros at the end or with axes of length 1.
        tied: canonical names of parameters that the file has under another one's name only; None if nothing was read.
        recast: canonical name -> place and the number format it was loaded in, where the file has another one.
        keeps_dtypes: whether a tensor of `recast` goes back as it is stored; not where the user chose a dtype.
        checkpoint: where they came from (for the vision tensors).
        is_nested: whether config.json was in the released layout.
    """

    prefix: str = ""
    decoder: str = "model."
    odd: dict[str, str] = field(default_factory=dict)
    padded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tied: frozenset[str] | None = None
    recast: dict[str, tuple[Place, torch.dtype]] = field(default_factory=dict)
    keeps_dtypes: bool = True
    checkpoint: Checkpoint | None = None
    is_nested: bool = False

    def spell(self, short: str) -> str:
        """The name on disk of a tensor by its canonical name."""
        if short in self.odd:
            return self.odd[short]
        is_decoder = canonical(f"model.{short}") == short
        return self.prefix + (self.decoder if is_decoder else "") + short


@dataclass
class Plan:
    """Which tensors of a checkpoint make which parameter.

    Args:
        places: canonical name -> file and entry, for plain tensors.
        experts: layer -> (expert, matrix, ending) -> file and entry.
        bits: canonical name of a linear layer stored in 4 or 8 bits -> what a tensor is called in it -> file and entry.
        layout: how the names are spelled.
        tied: parameters without tensors that share another one's.
        missing, unknown, shape, unlisted: what does not fit; parameter names, names in files, in the index.
        formats: name -> stored and needed number format, for tensors of `shape` whose format is wrong.
    """

    places: dict[str, Place] = field(default_factory=dict)
    experts: dict[int, dict[tuple[int, str, str], Place]] = field(default_factory=lambda: defaultdict(dict))
    bits: dict[str, dict[str, Place]] = field(default_factory=dict)
    layout: Layout = field(default_factory=Layout)
    tied: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    shape: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    formats: dict[str, str] = field(default_factory=dict)


def has_stacks(checkpoint: Checkpoint) -> bool:
    """Whether experts are stored as the stacks of our modules, as `save_original_format=False` writes them."""
    endings = tuple(f".experts.{stack}" for stack in PROJECTIONS)
    return any(name.endswith(endings) for name in checkpoint.where)


def make_plan(model: nn.Module, checkpoint: Checkpoint) -> Plan:
    """Sort a checkpoint's tensors, open the files that are needed, and compare names and shapes with the model.

    Raises:
        ValueError: a broken file; two tensors for one parameter; a padded tensor whose tail is not zero; numbers of 8
            bits that lack their scale.
    """
    plan = Plan()
    plan.layout.checkpoint = checkpoint
    depth, has_head = model.config.num_hidden_layers, model.can_generate()
    wanted = [name for name in checkpoint.where if not is_excused(name, depth, has_head)]
    found, absent, unlisted = checkpoint.locate(wanted)
    plan.unlisted += [name for name in unlisted if not is_excused(name, depth, has_head)]
    seen: dict[str, str] = {}
    for name, place in found.items():
        short = _SWAPPED.sub(r"\1mlp.\2", canonical(name))
        if seen.setdefault(short, name) != name:
            raise ValueError(f"{seen[short]!r} and {name!r} are the same parameter; a checkpoint may have one of them")
        expert = EXPERT.fullmatch(short)
        if expert:
            plan.experts[int(expert[1])][int(expert[2]), expert[3], expert[4]] = place
        else:
            plan.places[short] = place
    plan.bits = take_stored(plan.places)
    _find_spelling(plan.layout, seen)
    _compare_experts(model, plan)
    _compare_plain(model, plan)
    plan.layout.tied = frozenset(map(canonical, plan.tied))
    known = {canonical(name) for name in plan.missing}
    plan.missing += [name for name in absent if canonical(name) not in known]
    return plan


def _find_spelling(layout: Layout, names: dict[str, str]) -> None:
    """Take the prefixes of most tensors of layers for the layout's, and remember the names that have others."""
    heads = Counter(name[: -len(short)] for short, name in names.items() if short.startswith("layers."))
    if not heads:
        return
    head = heads.most_common(1)[0][0]
    layout.prefix = TEXT_PREFIX if head.startswith(TEXT_PREFIX) else ""
    layout.decoder = head[len(layout.prefix) :]
    # Of half a million names nearly all pass the first look.
    others = ((short, name) for short, name in names.items() if name != head + short)
    layout.odd = {short: name for short, name in others if layout.spell(short) != name}


def holds_heads(shape: Sequence[int], num_heads: int) -> bool:
    """Whether a stored decay has a place for every head: [n >= H] as in K3, or [1, 1, H, 1] as in Kimi Linear."""
    return (len(shape) == 1 and shape[0] >= num_heads) or tuple(shape) == (1, 1, num_heads, 1)


def _compare_plain(model: nn.Module, plan: Plan) -> None:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    twins = {**tied, **{source: target for target, source in tied.items()}}
    stacks = {f"{name}." for name, module in iter_experts(model) if not hasattr(module, "bits")}
    known = set()
    for name, parameter in model.state_dict().items():
        if any(name.startswith(stack) for stack in stacks):
            continue
        short = canonical(name)
        known.add(short)
        if short.endswith(".weight") and short.removesuffix(".weight") in plan.bits:
            continue
        place = plan.places.get(short)
        if place is None:
            has_twin = name in twins and canonical(twins[name]) in plan.places
            (plan.tied if has_twin else plan.missing).append(name)
            continue
        stored, needed = place[1].shape, tuple(parameter.shape)
        if not place[1].torch_dtype.is_floating_point and parameter.is_floating_point():
            raise ValueError(f"{place[0].path}: {short} is stored as {place[1].dtype}; allowed are floating formats")
        check_is_plain(short, place)
        if short.endswith("self_attn.A_log") and stored != needed and holds_heads(stored, needed[0]):
            tail = place[0].read(place[1]).reshape(-1)[needed[0] :]
            if tail.any():
                raise ValueError(
                    f"{place[0].path}: {short} has {max(stored)} entries for {needed[0]} heads, and not all of "
                    "the rest are zero: allowed is padding with zeros"
                )
            plan.layout.padded[short] = stored
        elif stored != needed:
            plan.shape.append((name, stored, needed))
    plan.unknown += [name for name in plan.places if name not in known]
    lost = [name for name in plan.bits if f"{name}.weight" not in known]
    plan.unknown += [f"{name}.{part}" for name in lost for part in plan.bits[name]]


def _compare_experts(model: nn.Module, plan: Plan) -> None:
    """Every expert of every layer complete, in one kind of storage, of the right shapes; and no others."""
    layers = {layer_of(canonical(name) + "."): (name, module) for name, module in iter_experts(model)}
    for layer, places in plan.experts.items():
        if layer not in layers:
            plan.unknown += [expert_name(layer, key) for key in places]
    for layer, (name, module) in layers.items():
        if hasattr(module, "bits"):
            # Stacks under names of their own, compared like any parameter.
            plan.unknown += [expert_name(layer, key) for key in plan.experts.get(layer, {})]
            continue
        places = plan.experts.get(layer, {})
        kind = stored_kind(places)
        keys = {(e, m, ending) for e in range(module.num_experts) for m in MATRICES for ending in ENDINGS[kind]}
        plan.unknown += [expert_name(layer, key) for key in places.keys() - keys]
        if not places and module.storage == "dense":
            plan.missing += [f"{name}.{stack}" for stack in PROJECTIONS]
            continue
        plan.missing += [expert_name(layer, key) for key in keys - places.keys()]
        for key in keys & places.keys():
            check_is_plain(expert_name(layer, key), places[key])
            entry, needed = places[key][1], expert_shape(module, key[1], key[2])
            fits = entry.dtype == "U8" if kind == "packed" else entry.torch_dtype.is_floating_point
            if entry.shape != needed or not fits:
                plan.shape.append((expert_name(layer, key), entry.shape, needed))
            if not fits:
                wanted = "U8" if kind == "packed" else "a floating format"
                plan.formats[expert_name(layer, key)] = f" stored as {entry.dtype} instead of {wanted}"


def check_is_plain(name: str, place: Place) -> None:
    """Refuse 8-bit floating numbers: they stand for weights only together with a scale, which no layout here has.

    Raises:
        ValueError: names the tensor and its file.
    """
    if place[1].dtype.startswith("F8"):
        raise ValueError(
            f"{place[0].path}: {name} is stored as {place[1].dtype}, which means nothing without its scale; allowed "
            "are F64, F32, F16 and BF16, and MXFP4 for routed experts: convert the checkpoint with the tool it is from"
        )


def stored_kind(places: Iterable[tuple[int, str, str]]) -> str:
    """Whether a layer's experts are stored "packed" (any tensor of them is) or "dense"."""
    return "packed" if any(ending != "weight" for _, _, ending in places) else "dense"


def expert_shape(module: Any, matrix: str, ending: str) -> tuple[int, int]:
    """The stored shape of one tensor of one expert."""
    out, width = module.intermediate_dim, module.hidden_dim
    if matrix == "w2":
        out, width = width, out
    return out, {"weight": width, "weight_packed": width // 2, "weight_scale": width // GROUP}[ending]


def expert_name(layer: int, key: tuple[int, str, str]) -> str:
    """The canonical name of one tensor of one expert."""
    return f"layers.{layer}.block_sparse_moe.experts.{key[0]}.{key[1]}.{key[2]}"


def largest_expert(plan: Plan) -> int:
    """Bytes of the largest first expert of a layer in the files; 0 where there are none."""
    firsts = [
        [places.get((0, matrix, ending)) for matrix in MATRICES for ending in ENDINGS[stored_kind(places)]]
        for places in plan.experts.values()
    ]
    return max((sum(place[1].nbytes for place in first if place) for first in firsts), default=0)


def check_plan(plan: Plan, model: nn.Module, state: LoadState) -> LoadStateDictInfo:
    """Refuse what does not fit; in the lenient mode turn it into the library's report instead.

    Raises:
        ValueError: strict, and something does not fit; or experts that are partly there, or packed and not
            complete, for which there is no lenient reading; a budget for mapped experts below two of them.
    """
    missing = [name for name in plan.missing if not may_be_new(name, model)]
    halves = [name for name in plan.missing if EXPERT.fullmatch(canonical(name))]
    if state.strict:
        shapes = [
            name
            + (f" {list(stored)} instead of {list(needed)}" if stored != needed else "")
            + plan.formats.get(name, "")
            for name, stored, needed in plan.shape
            if not may_be_new(name, model)
        ]
        more = {"way_out": "Experts must be there as a whole, strict or not"} if halves else {}
        complain(state.path, missing=missing, unknown=plan.unknown, shape=shapes, unlisted=plan.unlisted, **more)
    elif halves or any(EXPERT.fullmatch(canonical(name)) for name, _, _ in plan.shape):
        way_out = "Experts that are partly there are refused with strict=False as well"
        complain(state.path, missing=halves, shape=[name for name, _, _ in plan.shape], way_out=way_out)
    if state.expert_memory is not None and state.expert_memory < (least := 2 * largest_expert(plan)):
        raise ValueError(
            f"expert_memory={state.expert_memory} bytes; allowed are {least}, which is two experts, and more"
        )
    return LoadStateDictInfo(
        missing_keys={*plan.missing, *plan.tied},
        unexpected_keys={*plan.unknown, *plan.unlisted},
        mismatched_keys=set(plan.shape),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
