"""Where the experts of one layer stand in the checkpoint's files: zero-copy views, and reading ahead."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from .expert_shelf import Item
from .residency import ExpertResidency
from .tensor_files import Entry, TensorFile

#: The released names of an expert's three matrices: gate, up, down.
MATRICES = ("w1", "w3", "w2")
#: What a matrix is stored as, in the order of use.
ENDINGS = {"packed": ("weight_packed", "weight_scale"), "dense": ("weight",)}


class ExpertPages:
    """Places of N experts in files, a few numbers for each tensor; views are made when they are asked for.

    Args:
        kind: "packed" (codes and scales) or "dense" (plain weights in the file).
        num_experts: N.
        places: (expert, matrix, ending) -> file and entry, for every expert, matrix and ending of the kind.
    """

    #: Number of the layer, and what decides which experts are in memory; None: the system.
    layer: int = -1
    residency: ExpertResidency | None = None
    _seen: Tensor | None = None

    def __init__(
        self, kind: str, num_experts: int, places: dict[tuple[int, str, str], tuple[TensorFile, Entry]]
    ) -> None:
        self.kind, self.num_experts, self.endings = kind, num_experts, ENDINGS[kind]
        self.files = list(dict.fromkeys(file for file, _ in places.values()))
        number = {file: index for index, file in enumerate(self.files)}
        self.shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        self.dtypes: dict[tuple[str, str], str] = {}
        # [N, 3, endings, (file, start, stop)]: half a million tensors of the release take 12 MB this way.
        self.places = torch.empty(num_experts, len(MATRICES), len(self.endings), 3, dtype=torch.int64, device="cpu")
        rows = []
        for expert in range(num_experts):
            for matrix in MATRICES:
                for ending in self.endings:
                    file, entry = places[expert, matrix, ending]
                    self.shapes[matrix, ending], self.dtypes[matrix, ending] = entry.shape, entry.dtype
                    rows.append((number[file], entry.start, entry.stop))
        self.places.copy_(torch.tensor(rows, dtype=torch.int64).view_as(self.places))

    @property
    def nbytes(self) -> int:
        """Bytes of all experts in the files."""
        return int((self.places[..., 2] - self.places[..., 1]).sum())

    def parts(self, expert: int, matrices: Sequence[str]) -> tuple[Tensor, ...]:
        """Views of the matrices of one expert: codes and scales in turn, or plain weights. Read-only."""
        if self.residency is not None:
            self.residency.wait(self, expert)
        places = self.places[expert].tolist()
        return tuple(
            self._view(places[MATRICES.index(matrix)][index], matrix, ending)
            for matrix in matrices
            for index, ending in enumerate(self.endings)
        )

    def _view(self, place: Sequence[int], matrix: str, ending: str) -> Tensor:
        file, start, stop = place
        entry = Entry(self.dtypes[matrix, ending], self.shapes[matrix, ending], start, stop)
        return self.files[file].fixed_view(entry)

    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all experts under their released names, from `0.w1.weight_packed` on."""
        for file in self.files:
            file.check_unchanged()
        for expert, places in enumerate(self.places.tolist()):
            for matrix, rows in zip(MATRICES, places, strict=True):
                for ending, place in zip(self.endings, rows, strict=True):
                    yield f"{expert}.{matrix}.{ending}", self._view(place, matrix, ending)

    def prefetch(self, experts: Sequence[int]) -> None:
        """Read experts ahead, in the background: they are about to be used one after the other.

        Raises:
            ValueError: a file that they stand in was changed.
        """
        ranges = self._ranges(experts)
        if self.residency is None:
            for file, spans in ranges.items():
                file.prefetch(spans)
            return
        for file in ranges:
            file.check_unchanged()
        seen, self._seen = self._seen, None
        # Where most experts are used, the next layer's are read soon enough as they come.
        is_few = 2 * len(experts) <= self.num_experts
        self.residency.announce(self, experts, partial(self._guess, seen) if is_few and seen is not None else None)

    def note(self, seen: Tensor) -> None:
        """What this layer's router saw: from it the next layer's experts are guessed.

        Args:
            seen: [tokens, width].
        """
        if self.residency is not None and self.layer in self.residency.following:
            self._seen = seen.detach()

    def _guess(self, seen: Tensor) -> list[Item]:
        """Experts of the next layer that its router would choose from what this layer's saw."""
        router, pages = self.residency.following[self.layer]
        return [Item(pages, expert) for expert in router.guess(seen)]

    def _ranges(self, experts: Sequence[int]) -> dict[TensorFile, list[tuple[int, int]]]:
        """Byte ranges of experts by file, neighbours joined."""
        ranges: dict[TensorFile, list[tuple[int, int]]] = {}
        for file, start, stop in self.places[list(experts)].flatten(0, -2).tolist():
            known = ranges.setdefault(self.files[file], [])
            if known and known[-1][1] == start:
                known[-1] = (known[-1][0], stop)
            else:
                known.append((start, stop))
        return ranges

    # What a residency asks for; several threads.

    def expert_nbytes(self, expert: int) -> int:
        """Bytes of one expert in the files."""
        places = self.places[expert]
        return int((places[..., 2] - places[..., 1]).sum())

    def advise(self, expert: int) -> None:
        """Ask the system to start reading one expert."""
        for file, spans in self._ranges([expert]).items():
            file.prefetch(spans)

    def load(self, expert: int) -> None:
        """Bring one expert into the page cache.

        Raises:
            ValueError, OSError: the file was changed or cannot be read.
        """
        for file, spans in self._ranges([expert]).items():
            file.load(spans)

    def drop(self, expert: int) -> None:
        """Take one expert out of memory, its views stay good."""
        for file, spans in self._ranges([expert]).items():
            file.drop(spans)
