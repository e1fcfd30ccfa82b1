"""Two checkpoints, tensor by tensor and by logits: what differs, and whether it is the route or the arithmetic."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from modeling_k3 import K3ForCausalLM
from modeling_k3.checkpoint import Checkpoint, canonical, is_vision
from modeling_k3.mxfp4 import decode
from modeling_k3.placement import available_memory
from modeling_k3.tensor_files import Entry, TensorFile

Place = tuple[TensorFile, Entry]
#: Values compared at a time, in float64.
_PIECE = 1 << 22
#: Activations of a short prompt, and the experts in use.
_WORKSPACE = 512 << 20

logger = logging.get_logger(__name__)


@dataclass
class Difference:
    """One parameter that is not the same on both sides.

    Args:
        name: canonical, without prefixes.
        max_abs: largest absolute difference of the values; infinite where NaN or shapes are in the way.
        count: how many values differ.
        what: in words.
    """

    name: str
    max_abs: float
    count: int
    what: str


@dataclass
class Report:
    """What `verify` found.

    Args:
        identical: parameters with the same bytes in the same number format.
        equal: parameters with the same values in different number formats.
        different: the rest of those that both have.
        only_first, only_second: names that one side lacks.
        vision_first, vision_second: vision and projector tensors of a side whose other side has none at all; no
            difference of the text models.
        logits_max_abs: with the routes of the first checkpoint forced on the second; None if not run.
        without_logits: why they were not run although they were asked for.
        routes_changed, routes: choices of experts the second would have made differently, and how many there are.
    """

    identical: int = 0
    equal: int = 0
    different: list[Difference] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    vision_first: int = 0
    vision_second: int = 0
    logits_max_abs: float | None = None
    without_logits: str | None = None
    routes_changed: int = 0
    routes: int = 0

    @property
    def is_same(self) -> bool:
        """Whether both checkpoints are the same model, value for value."""
        return not (self.different or self.only_first or self.only_second) and not self.logits_max_abs

    def lines(self, most: int = 10) -> Iterator[str]:
        """The report in words, the first `most` names of each kind."""
        yield f"{self.identical} tensors identical, {self.equal} equal in value, {len(self.different)} different"
        for difference in sorted(self.different, key=lambda each: -each.max_abs)[:most]:
            yield f"  {difference.name}: {difference.what}"
        for side, names in (("first", self.only_first), ("second", self.only_second)):
            if names:
                yield f"{len(names)} only in the {side}: {', '.join(names[:most])}"
        for side, count in (("first", self.vision_first), ("second", self.vision_second)):
            if count:
                yield f"{count} vision and projector tensors only in the {side}: the other is text-only"
        if self.logits_max_abs is not None:
            yield f"logits with the first one's routes: largest difference {self.logits_max_abs:.3g}"
            yield f"routes that the second would choose otherwise: {self.routes_changed} of {self.routes}"
        if self.without_logits is not None:
            yield self.without_logits


def verify(
    first: Path,
    second: Path,
    *,
    tokens: int = 16,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Compare two checkpoint directories, in whatever layout and number format each is.

    Packed experts are compared by their decoded values with plain ones, byte by byte with packed ones; padding of
    `A_log` is no difference, and neither are vision tensors where one side has none of them.

    Args:
        first, second: the directories.
        tokens: length of a random prompt for the logits, computed in float32 with experts left in their files; 0
            compares tensors only, and so does a model that would not fit in memory.
        seed: of the prompt.
        progress: called with (bytes of the first one's tensors done, in all).
    """
    report = Report()
    ours, theirs = _places(Checkpoint.from_directory(first)), _places(Checkpoint.from_directory(second))
    both = [name for name in ours if name in theirs]
    needed, room = max(_memory(ours), _memory(theirs)), available_memory()
    if tokens and needed > room:
        report.without_logits = (
            f"logits are not compared: they need {needed:,} bytes of memory, in float32 with the experts left in their "
            f"files, and {room:,} bytes are available"
        )
        # Before hours of comparing tensors, not only after them.
        logger.warning(report.without_logits)
    report.only_first, report.vision_first = _one_sided(ours, theirs)
    report.only_second, report.vision_second = _one_sided(theirs, ours)
    done, total = 0, sum(_nbytes(ours[name]) for name in both)
    for name in both:
        _compare(report, name, ours[name], theirs[name])
        done += _nbytes(ours[name])
        if progress is not None:
            progress(done, total)
    if tokens and report.without_logits is None:
        _compare_logits(report, first, second, tokens, seed)
    return report


def _one_sided(ours: dict[str, list[Place]], theirs: dict[str, list[Place]]) -> tuple[list[str], int]:
    """Names that only one side has; and how many vision tensors, if the other side has no vision part to compare."""
    names = [name for name in ours if name not in theirs]
    if any(is_vision(name) for name in theirs):
        return names, 0
    return [name for name in names if not is_vision(name)], sum(is_vision(name) for name in names)


def _nbytes(places: list[Place]) -> int:
    return sum(entry.nbytes for _, entry in places)


def _memory(places: dict[str, list[Place]]) -> int:
    return float32_memory((name, stored[0][1].shape) for name, stored in places.items())


def float32_memory(shapes: Iterable[tuple[str, Sequence[int]]]) -> int:
    """Bytes of memory that a short forward in float32 takes while the experts stay in their files.

    Args:
        shapes: canonical name and shape of every tensor of the checkpoint.
    """
    held = (shape for name, shape in shapes if not is_vision(name) and ".block_sparse_moe.experts." not in name)
    return 4 * sum(math.prod(shape) for shape in held) + _WORKSPACE


def _places(checkpoint: Checkpoint) -> dict[str, list[Place]]:
    """Parameter -> what stores it: one plain tensor, or codes and scales."""
    found, absent, _ = checkpoint.locate(checkpoint.where)
    if absent:
        raise ValueError(f"{len(absent)} tensors of the index are in no file: {', '.join(absent[:5])}")
    places: dict[str, list[Place]] = {}
    for name in sorted(found):
        short = name if is_vision(name) else canonical(name)
        places.setdefault(short.removesuffix("_packed").removesuffix("_scale"), []).append(found[name])
    return places


def _compare(report: Report, name: str, first: list[Place], second: list[Place]) -> None:
    kinds = [[(entry.dtype, entry.shape) for _, entry in places] for places in (first, second)]
    if kinds[0] == kinds[1] and all(
        torch.equal(a[0].read(a[1]).view(torch.uint8), b[0].read(b[1]).view(torch.uint8))
        for a, b in zip(first, second, strict=True)
        if a[1].nbytes
    ):
        report.identical += 1
        return
    a, b = _values(first), _values(second)
    if name.endswith("A_log") and a.shape != b.shape and a.ndim == b.ndim == 1:
        length = min(len(a), len(b))
        a, b = (x[:length] if not x[length:].any() else x for x in (a, b))
    if a.shape != b.shape:
        report.different.append(Difference(name, float("inf"), 0, f"shape {tuple(a.shape)} and {tuple(b.shape)}"))
        return
    count, worst = 0, 0.0
    for x, y in zip(a.reshape(-1).split(_PIECE), b.reshape(-1).split(_PIECE), strict=True):
        x, y = x.double(), y.double()
        # One side's NaN is a difference, NaN on both sides is none.
        delta = torch.where(x.isnan() & y.isnan() | (x == y), 0.0, (x - y).abs().nan_to_num(nan=float("inf")))
        count += int(delta.count_nonzero())
        worst = max(worst, delta.max().item()) if len(delta) else worst
    if not count:
        report.equal += 1
        return
    report.different.append(Difference(name, worst, count, f"{count} of {a.numel()} values, at most {worst:.3g} apart"))


def _values(places: list[Place]) -> Tensor:
    tensors = [file.read(entry) for file, entry in places]
    return decode(*tensors, dtype=torch.float32) if len(tensors) == 2 else tensors[0]


@torch.no_grad()
def _compare_logits(report: Report, first: Path, second: Path, tokens: int, seed: int) -> None:
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "expert_storage": "mapped",
        "experts_implementation": "eager",
    }
    model = K3ForCausalLM.from_pretrained(first, **options)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator)
    with recorded_routes(model) as routes:
        expected = model(ids).logits
    del model
    model = K3ForCausalLM.from_pretrained(second, **options)
    with forced_routes(model, routes) as changed:
        found = model(ids).logits
    report.logits_max_abs = (found - expected).abs().nan_to_num(nan=float("inf")).max().item()
    report.routes_changed, report.routes = sum(changed), tokens * len(routes)


def _routers(model: K3ForCausalLM) -> list[torch.nn.Module]:
    return [layer.block_sparse_moe.gate for layer in model.model.layers if layer.is_sparse]


@contextmanager
def recorded_routes(model: K3ForCausalLM) -> Iterator[list[Tensor]]:
    """Collect the chosen experts [tokens, R] of every router call, in the order of computation."""
    chosen: list[Tensor] = []
    handles = [gate.register_forward_hook(lambda _, args, out: chosen.append(out[2])) for gate in _routers(model)]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def forced_routes(model: K3ForCausalLM, routes: list[Tensor]) -> Iterator[list[int]]:
    """Make the routers choose `routes`, in the order of computation; yields how many choices each would have changed.

    Weights of the chosen experts are still computed from the model's own scores.
    """
    changed: list[int] = []
    pending = iter(routes)
    gates = _routers(model)

    def choose(own: Callable[[Tensor], Tensor], choice: Tensor) -> Tensor:
        forced = next(pending)
        mine = own(choice).sort(-1).values
        changed.append(int((mine != forced.sort(-1).values).any(-1).sum()))
        return forced

    for gate in gates:
        gate._choose = lambda choice, own=gate._choose: choose(own, choice)
    try:
        yield changed
    finally:
        for gate in gates:
            del gate._choose
