"""Documents packed into one row: each equals the document alone, whatever says where they begin; masks per pair."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_k3 import K3Cache
from modeling_k3.attention_span import read_pair_mask
from modeling_k3.masks import check_positions, read_documents
from modeling_k3.packing import Packing, documents_from_lengths
from tests.models import build, max_diff, tiny_config, token_ids
from tests.tolerances import bound

SIZES = [5, 1, 17, 2, 9, 6]
TOTAL = sum(SIZES)
LAYERS = pytest.mark.parametrize("layers", ["KMK", "KK", "MM"])


def positions(sizes: list[int] = SIZES) -> Tensor:
    return torch.cat([torch.arange(size) for size in sizes])[None]


def borders(sizes: list[int] = SIZES) -> Tensor:
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)


def model_of(layers: str) -> Any:
    return build(tiny_config(layers), dtype=torch.float64)


def alone(model: Any, ids: Tensor, sizes: list[int] = SIZES) -> Tensor:
    return torch.cat([model(piece).logits for piece in ids.split(sizes, dim=1)], dim=1)


@LAYERS
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_document_is_as_if_alone(layers: str, implementation: str) -> None:
    model = model_of(layers).requires_grad_(False)
    model.set_attn_implementation(implementation)
    ids = token_ids(1, TOTAL)
    expected = alone(model, ids)
    index = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))[None]
    lengths = {"cu_seq_lens_q": borders(), "cu_seq_lens_k": borders(), "max_length_q": 17, "max_length_k": 17}
    for given in ({"position_ids": positions()}, lengths, {"seq_idx": index.int()}, {**lengths, "seq_idx": index}):
        output = model(ids, **given)
        assert output.cache is None
        assert max_diff(output.logits, expected) < bound("f64_paths_max_abs")


@LAYERS
def test_gradients_are_those_of_the_documents_alone(layers: str) -> None:
    model, ids = model_of(layers), token_ids(1, TOTAL)
    gradients = []
    for compute in (lambda: model(ids, position_ids=positions()).logits, lambda: alone(model, ids)):
        embeds = model.get_input_embeddings().weight
        loss = (compute() * torch.linspace(-1, 1, 160, dtype=torch.float64)).pow(2).sum()
        used = [p for p in model.parameters() if p.requires_grad and p is not embeds]
        gradients.append(torch.autograd.grad(loss, used, allow_unused=True))
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None)
        assert a is None or max_diff(a, b) < bound("f64_paths_max_abs") * max(1, b.abs().max().item())


@LAYERS
def test_rows_with_other_documents_and_padding(layers: str) -> None:
    """Two rows that are packed differently; padding between documents, inside one, and at the end."""
    model, ids = model_of(layers).requires_grad_(False), token_ids(2, 12)
    position = torch.tensor([[0, 1, 2, 9, 0, 1, 0, 9, 1, 2, 3, 9], [0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2, 3]])
    mask = (position != 9).long()
    logits = model(ids, attention_mask=mask, position_ids=position, use_cache=False).logits
    documents = {0: [[0, 1, 2], [4, 5], [6, 8, 9, 10]], 1: [list(range(7)), [7], [8, 9, 10, 11]]}
    for row, places in documents.items():
        for place in places:
            expected = model(ids[row : row + 1, place]).logits[0]
            assert max_diff(logits[row, place], expected) < bound("f64_paths_max_abs")
    assert logits.isfinite().all()


def test_one_document_is_no_packing() -> None:
    model, ids = model_of("KMK").requires_grad_(False), token_ids(1, 9)
    output = model(ids, cu_seq_lens_q=torch.tensor([0, 9]), use_cache=True)
    assert output.cache is not None and torch.equal(output.logits, model(ids).logits)


@pytest.mark.parametrize("filled", [False, True])
def test_packed_documents_and_a_cache_are_refused(filled: bool) -> None:
    model, cache = build(tiny_config("KMK")).requires_grad_(False), K3Cache(tiny_config("KMK"))
    if filled:
        model(token_ids(1, 3), cache=cache)
    seen = cache.get_seq_length()
    for given in ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, {"cu_seq_lens_q": torch.tensor([0, 2, 4])}):
        with pytest.raises(ValueError, match="packed sequences cannot be cached"):
            model(token_ids(1, 4), cache=cache, **given)
    assert cache.get_seq_length() == seen


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "borders from 1": ({"cu_seq_lens_q": torch.tensor([1, 4])}, "cu_seq_lens_q.*rise from 0 to 4"),
    "borders too far": ({"cu_seq_lens_q": torch.tensor([0, 5])}, "cu_seq_lens_q.*rise from 0 to 4"),
    "borders that fall": ({"cu_seq_lens_q": torch.tensor([0, 3, 2, 4])}, "cu_seq_lens_q"),
    "an empty document": ({"cu_seq_lens_q": torch.tensor([0, 2, 2, 4])}, "cu_seq_lens_q"),
    "index of another shape": ({"seq_idx": torch.zeros(1, 3)}, "seq_idx has shape"),
    "two descriptions": (
        {"cu_seq_lens_q": torch.tensor([0, 2, 4]), "seq_idx": torch.tensor([[0, 1, 1, 1]])},
        "different packed sequences",
    ),
    "positions that jump": ({"position_ids": torch.tensor([[0, 1, 7, 8]])}, "not consecutive.*restart at 0"),
    "positions of another length": ({"position_ids": torch.arange(9)[None]}, "position_ids has shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_descriptions_that_make_no_sense(name: str) -> None:
    given, message = WRONG[name]
    model = build(tiny_config("KMK")).requires_grad_(False)
    with pytest.raises(ValueError, match=message):
        model(token_ids(1, 4), use_cache=False, **given)


def test_a_document_does_not_span_two_rows() -> None:
    assert documents_from_lengths(torch.tensor([0, 2, 4, 8]), 2, 4, "x").tolist() == [[0, 0, 1, 1], [2, 2, 2, 2]]
    with pytest.raises(ValueError, match="end of every row"):
        documents_from_lengths(torch.tensor([0, 3, 8]), 2, 4, "x")


def test_buckets_hold_every_real_token_once() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        documents = (torch.rand(3, 40, generator=generator) < 0.2).cumsum(1)
        padding = torch.rand(3, 40, generator=generator) < 0.8
        packing = Packing(documents, padding)
        places = torch.cat([i.flatten() if m is None else i[m] for i, m in packing.buckets])
        assert places.sort().values.tolist() == padding.flatten().nonzero().squeeze(1).tolist()
        rows = sum(i.numel() for i, _ in packing.buckets)
        assert rows <= 2 * padding.sum(), "rows in a bucket are at least half full"


def test_positions_count_over_padding() -> None:
    """`generate` counts real tokens only, others count all: both are one document; a restart after padding is not."""
    real = torch.tensor([[True, True, False, False, True, True]])
    assert check_positions(torch.tensor([[0, 1, 1, 1, 2, 3]]), real) is None
    assert check_positions(torch.arange(6)[None], real) is None
    assert check_positions(torch.tensor([[0, 1, 0, 0, 0, 1]]), real).tolist() == [[0, 0, 0, 0, 1, 1]]
    assert read_documents(None, None, 1, 6, {}) is None


# -- masks per pair of tokens -------------------------------------------------------------------------------------


def pair_mask(real: Tensor, past: int) -> Tensor:
    total = real.shape[1]
    rule = torch.arange(total) <= torch.arange(past, total)[:, None]
    return (rule & real[:, None])[:, None]


@pytest.mark.parametrize("past", [0, 3])
def test_a_pair_mask_that_says_causal_and_padding_is_read(past: int) -> None:
    real = torch.tensor([[False, True, True, True, False, True], [True] * 6])
    rule, known = pair_mask(real, past), real[:, :past] if past else None
    additive = torch.zeros(rule.shape).masked_fill(~rule, torch.finfo(torch.float32).min)
    for mask in (rule, rule.long(), additive, additive.masked_fill(~rule, float("-inf"))):
        assert torch.equal(read_pair_mask(mask, past, known), real[:, past:])
    free = rule.clone()
    free[0, 0, 4 - past] = True
    assert torch.equal(read_pair_mask(free, past, known), real[:, past:]), "a row of padding may say anything"


def test_a_pair_mask_that_says_more_is_not_read() -> None:
    real = torch.ones(1, 6, dtype=torch.bool)
    window = pair_mask(real, 0) & (torch.arange(6) > torch.arange(6)[:, None] - 3)
    ahead = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    for mask in (
        window,
        ahead,
        pair_mask(real, 0).float(),
        pair_mask(real, 0).long() * 2,
        torch.full((1, 1, 6, 6), -3.0),
    ):
        assert read_pair_mask(mask, 0, None) is None
    assert read_pair_mask(pair_mask(real, 3), 3, torch.tensor([[True, False, True]])) is None


def test_a_model_takes_pair_masks() -> None:
    model, ids = model_of("KMK").requires_grad_(False), token_ids(2, 6)
    real = torch.tensor([[False, True, True, True, True, False], [True] * 6])
    expected = model(ids, attention_mask=real).logits
    for past in (0, 3):
        cache = K3Cache(model.config)
        if past:
            model(ids[:, :past], attention_mask=pair_mask(real[:, :past], 0), cache=cache)
        logits = model(ids[:, past:], attention_mask=pair_mask(real, past), cache=cache).logits
        assert max_diff(logits[real[:, past:]], expected[:, past:][real[:, past:]]) < bound("f64_paths_max_abs")
