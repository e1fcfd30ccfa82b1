"""Two checkpoints, tensor by tensor and by logits: what differs, and whether it is the route or the arithmetic."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modeling_k3 import K3ForCausalLM
from modeling_k3.checkpoint import Checkpoint, canonical, is_vision
from modeling_k3.mxfp4 import decode
from modeling_k3.tensor_files import Entry, TensorFile

Place = tuple[TensorFile, Entry]


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
        logits_max_abs: with the routes of the first checkpoint forced on the second; None if not run.
        routes_changed, routes: choices of experts the second would have made differently, and how many there are.
    """

    identical: int = 0
    equal: int = 0
    different: list[Difference] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    logits_max_abs: float | None = None
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
        if self.logits_max_abs is not None:
            yield f"logits with the first one's routes: largest difference {self.logits_max_abs:.3g}"
            yield f"routes that the second would choose otherwise: {self.routes_changed} of {self.routes}"


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
    `A_log` is no difference, vision tensors are compared where both have them.

    Args:
        first, second: the directories.
        tokens: length of a random prompt for the logits, computed in float32; 0 compares tensors only.
        seed: of the prompt.
        progress: called with (parameters done, parameters in all).
    """
    report = Report()
    ours, theirs = _places(Checkpoint.from_directory(first)), _places(Checkpoint.from_directory(second))
    both = [name for name in ours if name in theirs]
    report.only_first = [name for name in ours if name not in theirs and not is_vision(name)]
    report.only_second = [name for name in theirs if name not in ours and not is_vision(name)]
    for done, name in enumerate(both):
        _compare(report, name, ours[name], theirs[name])
        if progress is not None:
            progress(done + 1, len(both))
    if tokens:
        _compare_logits(report, first, second, tokens, seed)
    return report


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
    # One side's NaN is a difference, NaN on both sides is none.
    delta = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, (a - b).abs().nan_to_num(nan=float("inf")))
    count = int(delta.count_nonzero())
    if not count:
        report.equal += 1
        return
    worst = delta.max().item()
    report.different.append(Difference(name, worst, count, f"{count} of {a.numel()} values, at most {worst:.3g} apart"))


def _values(places: list[Place]) -> Tensor:
    tensors = [file.read(entry) for file, entry in places]
    return decode(*tensors, dtype=torch.float32).double() if len(tensors) == 2 else tensors[0].double()


@torch.no_grad()
def _compare_logits(report: Report, first: Path, second: Path, tokens: int, seed: int) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}
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
