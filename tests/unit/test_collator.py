"""The packing collator: what comes out, and what it refuses."""

from typing import Any

import pytest
import torch

from modeling_k3.training.collator import PackingCollator

DOCUMENTS = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": torch.tensor([9, 10]), "labels": [-100, 2]}]


def lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def test_one_row() -> None:
    assert lists(PackingCollator()(DOCUMENTS)) == {
        "input_ids": [[5, 6, 7, 8, 9, 10]],
        "labels": [[-100, 6, 7, -100, -100, 2]],
        "position_ids": [[0, 1, 2, 0, 0, 1]],
    }


def test_one_row_with_lengths() -> None:
    batch = lists(PackingCollator(with_lengths=True)(DOCUMENTS))
    assert batch["cu_seq_lens_q"] == batch["cu_seq_lens_k"] == [0, 3, 4, 6]
    assert batch["max_length_q"] == batch["max_length_k"] == 3


def test_rows_of_equal_length() -> None:
    batch = lists(PackingCollator(4, pad_token_id=1)(DOCUMENTS))
    assert batch == {
        "input_ids": [[5, 6, 7, 8], [9, 10, 1, 1]],
        "labels": [[-100, 6, 7, -100], [-100, 2, -100, -100]],
        "position_ids": [[0, 1, 2, 0], [0, 1, 0, 0]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
    }


def test_full_rows_need_no_mask() -> None:
    batch = PackingCollator(3, pad_token_id=1)([DOCUMENTS[0], DOCUMENTS[2], DOCUMENTS[1]])
    assert "attention_mask" not in batch
    assert batch["input_ids"].tolist() == [[5, 6, 7], [9, 10, 8]]


def test_the_features_are_left_alone() -> None:
    feature = {"input_ids": torch.tensor([3, 4]), "labels": torch.tensor([3, 4])}
    PackingCollator()([feature])
    assert feature["labels"].tolist() == [3, 4]


@pytest.mark.parametrize(
    "options",
    [{"length": 0, "pad_token_id": 0}, {"length": 4}, {"length": 4, "pad_token_id": 0, "with_lengths": True}],
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"length=\d"):
        PackingCollator(**options)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([], "features is empty"),
        ([{"input_ids": []}], "document 0 has shape"),
        ([DOCUMENTS[1], {"input_ids": [1, 2, 3, 4, 5]}], "document 1 has 5 tokens; allowed are at most length=4"),
        ([{"input_ids": [1, 2], "labels": [1]}], "labels of document 0"),
        ([{"input_ids": [1, 2], "labels": None}], "labels of document 0 is None"),
        ([DOCUMENTS[0], {"ids": [1, 2]}], r"input_ids of document 1 is missing or None; it has \['ids'\]"),
        ([{"input_ids": [1, 2], "attention_mask": [0, 1]}], "attention_mask of document 0 has zeros"),
    ],
)
def test_documents_that_make_no_sense(features: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackingCollator(4, pad_token_id=0)(features)
