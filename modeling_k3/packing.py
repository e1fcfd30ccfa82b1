"""Several documents in one row, kept apart: where they begin and end, and how the recurrence runs over each alone."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Bucket(NamedTuple):
    """Documents of similar length as rows.

    Args:
        index: [n, L], positions in the flattened [B * T] tokens; the last ones of a short document repeat its end.
        mask: [n, L] bool, False where a row repeats; None if all are as long as the longest.
    """

    index: Tensor
    mask: Tensor | None


class Packing:
    """Documents of a packed batch, as rows in a few buckets so that padding at most doubles the work.

    Args:
        documents: [B, T] whole numbers, the same for neighbouring tokens of one document.
        padding: [B, T] bool, False at padding, which belongs to no document; None: no padding.
    """

    def __init__(self, documents: Tensor, padding: Tensor | None) -> None:
        self.documents, self.shape = documents, tuple(documents.shape)
        #: Real tokens as positions in the flattened [B * T].
        self.places, starts, sizes = _find_documents(documents, padding)
        self.buckets = _fill_buckets(self.places, starts, sizes)
        #: Where among them documents begin and the last one ends, [documents + 1] int32, and the longest one's length.
        self.borders = torch.cat([starts, starts.new_tensor([len(self.places)])]).to(torch.int32)
        self.longest = max(sizes.tolist(), default=0)

    def run_flat(self, x: tuple[Tensor, ...], run: Callable[..., Tensor]) -> Tensor:
        """Apply `run` to all documents behind each other in one row, as kernels take them that know their borders.

        Args:
            x: tensors [B, H, T, d].
            run: takes them as [1, H, n, d], and by name `cu_seq_lens_q` and `cu_seq_lens_k` (the borders),
                `max_length_q` and `max_length_k`; returns [1, n, H, d].

        Returns:
            [B, T, H, d], zero at padding.
        """
        rows = [each.transpose(1, 2).flatten(0, 1)[self.places].transpose(0, 1).unsqueeze(0) for each in x]
        told = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), self.borders)
        found = run(*rows, **told, **dict.fromkeys(("max_length_q", "max_length_k"), self.longest))[0]
        result = found.new_zeros(self.shape[0] * self.shape[1], *found.shape[1:])
        return result.index_copy(0, self.places, found).unflatten(0, self.shape)

    def run(self, x: tuple[Tensor | None, ...], run: Callable[..., Tensor]) -> Tensor:
        """Apply `run` to the documents as rows and put the results back in their places.

        Args:
            x: tensors [B, T, ...] or None.
            run: takes them as [n, L, ...] followed by the mask [n, L] or None; returns [n, L, ...].

        Returns:
            [B, T, ...], zero at padding.
        """
        flat = [None if each is None else each.flatten(0, 1) for each in x]
        result = None
        for index, mask in self.buckets:
            rows = run(*(None if each is None else each[index] for each in flat), mask)
            if result is None:
                result = rows.new_zeros(self.shape[0] * self.shape[1], *rows.shape[2:])
            at, values = (index.flatten(), rows.flatten(0, 1)) if mask is None else (index[mask], rows[mask])
            result = result.index_copy(0, at, values)
        return result.unflatten(0, self.shape)


def _find_documents(documents: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    batch, length = documents.shape
    row = torch.arange(batch, device=documents.device).unsqueeze(1).expand(batch, length)
    real = torch.ones_like(documents, dtype=torch.bool) if padding is None else padding
    places = real.flatten().nonzero().squeeze(1)
    names = torch.stack([row.flatten()[places], documents.flatten()[places]])
    begins = torch.cat([torch.ones_like(places[:1], dtype=torch.bool), (names[:, 1:] != names[:, :-1]).any(0)])
    starts = begins.nonzero().squeeze(1)
    return places, starts, torch.diff(torch.cat([starts, starts.new_tensor([len(places)])]))


def _fill_buckets(places: Tensor, starts: Tensor, sizes: Tensor) -> list[Bucket]:
    buckets = []
    for power in sorted({int(size - 1).bit_length() for size in sizes.tolist()}):
        chosen = (sizes > 2 ** (power - 1)) & (sizes <= 2**power) if power else sizes == 1
        begin, size = starts[chosen], sizes[chosen]
        step = torch.arange(int(size.max()), device=places.device)
        mask = step < size.unsqueeze(1)
        index = places[begin.unsqueeze(1) + torch.minimum(step, size.unsqueeze(1) - 1)]
        buckets.append(Bucket(index, None if mask.all() else mask))
    return buckets


def documents_from_lengths(borders: Tensor, batch: int, length: int, name: str) -> Tensor:
    """Turn cumulative lengths over the flattened batch into document numbers [batch, length].

    Raises:
        ValueError: borders that do not rise from 0 to batch * length, or a document that spans two rows.
    """
    values = borders.tolist()
    rises = values == sorted(set(values)) and len(values) > 1 and values[0] == 0 and values[-1] == batch * length
    if not rises or not {row * length for row in range(batch)} <= set(values):
        raise ValueError(
            f"{name}={values[:8]} (packed documents); allowed are borders that rise from 0 to {batch * length} and "
            f"meet the end of every row of {length} tokens"
        )
    ends = torch.as_tensor(values[1:], device=borders.device)
    return torch.bucketize(torch.arange(batch * length, device=borders.device), ends, right=True).view(batch, length)
