"""Packing: documents of any length in rows without padding between them, kept apart by the model itself.

trainer = Trainer(model, arguments, train_dataset=documents, data_collator=PackingCollator(4096, pad_token_id=0))
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

IGNORED = -100


class PackingCollator:
    """Puts documents behind each other; `position_ids` restart where one begins, so that nothing leaks between them.

    The first label of a document is always -100: nothing predicts it, neither inside a row, where the token before it
    belongs to another document, nor at the start of one. So the labels that count, which the Trainer divides by
    (`num_items_in_batch`), are the same however the documents are packed.

    Args:
        length: tokens in a row. Documents are put, longest first, into the first row with room for them; short rows
            are padded on the right. None: one row as long as all documents together, without padding.
        pad_token_id: fills rows; needed with `length`. It is masked out and never a label.
        with_lengths: with `length=None`, add `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`, which
            say the same as the positions, for code that reads them.

    Raises:
        ValueError: a length below 1, no `pad_token_id` for it, or lengths asked for beside padding.
    """

    def __init__(
        self, length: int | None = None, *, pad_token_id: int | None = None, with_lengths: bool = False
    ) -> None:
        if length is not None and (type(length) is not int or length < 1):
            raise ValueError(f"length={length!r} must be a whole number of at least 1, or None")
        if length is not None and pad_token_id is None:
            raise ValueError(f"pad_token_id=None with length={length}: short rows have to be filled with something")
        if length is not None and with_lengths:
            raise ValueError(f"with_lengths=True with length={length}: padding belongs to no document; use length=None")
        self.length, self.pad_token_id, self.with_lengths = length, pad_token_id, with_lengths

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Pack a batch.

        Args:
            features: one for each document: `input_ids`, and `labels` of the same length where they differ from the
                ids; lists or 1-D tensors. `attention_mask`, if there is one, must be 1 everywhere.

        Returns:
            `input_ids`, `labels`, `position_ids` [rows, length], with padding also `attention_mask`.

        Raises:
            ValueError: no document, an empty one, one without ids, one longer than a row, labels of another length,
                or padding inside.
        """
        documents = [_read(feature, number) for number, feature in enumerate(features)]
        if not documents:
            raise ValueError("features is empty; at least one document is needed")
        if self.length is None:
            batch = {name: row.unsqueeze(0) for name, row in _join(documents).items()}
            return {**batch, **_lengths(documents)} if self.with_lengths else batch
        rows = [_join([documents[number] for number in row]) for row in self._fill([len(ids) for ids, _ in documents])]
        fillers = {"input_ids": self.pad_token_id, "labels": IGNORED, "position_ids": 0}
        batch = {name: torch.stack([self._pad(row[name], filler) for row in rows]) for name, filler in fillers.items()}
        sizes = torch.tensor([len(row["input_ids"]) for row in rows])
        if (sizes < self.length).any():
            batch["attention_mask"] = (torch.arange(self.length) < sizes.unsqueeze(1)).long()
        return batch

    def _fill(self, sizes: list[int]) -> list[list[int]]:
        """Numbers of the documents in each row: first fit, longest first, in their own order inside a row."""
        rows: list[list[int]] = []
        room: list[int] = []
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
            if sizes[number] > self.length:
                raise ValueError(
                    f"document {number} has {sizes[number]} tokens; allowed are at most length={self.length}: cut it "
                    "before, its parts then are documents of their own"
                )
            place = next((row for row, left in enumerate(room) if left >= sizes[number]), len(rows))
            if place == len(rows):
                rows.append([])
                room.append(self.length)
            rows[place].append(number)
            room[place] -= sizes[number]
        return [sorted(row) for row in rows]

    def _pad(self, row: Tensor, filler: int) -> Tensor:
        return torch.nn.functional.pad(row, (0, self.length - len(row)), value=filler)


def _read(feature: Mapping[str, Any], number: int) -> tuple[Tensor, Tensor]:
    """The ids and the labels of one document."""
    if feature.get("input_ids") is None:
        raise ValueError(f"input_ids of document {number} is missing or None; it has {sorted(feature)}")
    if feature.get("labels", ()) is None:
        raise ValueError(f"labels of document {number} is None; leave it out where the ids are the labels")
    ids = torch.as_tensor(feature["input_ids"], dtype=torch.long)
    labels = torch.as_tensor(feature.get("labels", ids), dtype=torch.long).clone()
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"input_ids of document {number} has shape {tuple(ids.shape)}; allowed is [at least 1]")
    if labels.shape != ids.shape:
        raise ValueError(f"labels of document {number} has shape {tuple(labels.shape)}; allowed is {tuple(ids.shape)}")
    mask = feature.get("attention_mask")
    if mask is not None and not torch.as_tensor(mask).bool().all():
        raise ValueError(f"attention_mask of document {number} has zeros; allowed are documents without padding")
    labels[0] = IGNORED
    return ids, labels


def _join(documents: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    ids, labels = (torch.cat(parts) for parts in zip(*documents, strict=True))
    positions = torch.cat([torch.arange(len(each)) for each, _ in documents])
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _lengths(documents: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    sizes = torch.tensor([0, *(len(ids) for ids, _ in documents)])
    borders, longest = sizes.cumsum(0).int(), int(sizes.max())
    return {
        "cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip
