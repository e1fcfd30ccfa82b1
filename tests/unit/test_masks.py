"""What a forward refuses: the message names it, and neither cache nor anything else has changed."""

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from modeling_k3 import K3Cache
from modeling_k3.masks import check_positions, padding_mask
from tests.models import build, max_diff, tiny_config, token_ids
from tests.tolerances import bound
from tests.unit.helpers import tensor
from tests.unit.test_cache import same, tensors

VOCABULARY = 160


@pytest.fixture(scope="module")
def model() -> Any:
    return build(tiny_config("KMK"))


@torch.no_grad()
def run(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    return model(*args, **kwargs).logits


def refuse(model: Any, error: type[Exception], pattern: str, cache: Any = None, **inputs: Any) -> None:
    """The call raises `error` with all parts of `pattern` in this order, and leaves the cache as it was."""
    held = tensors(cache) if isinstance(cache, K3Cache) else {}
    before = {name: x.clone() for name, x in held.items()}
    lengths = [layer.get_seq_length() for layer in cache.layers] if held else []
    with pytest.raises(error) as caught:
        run(model, cache=cache, **inputs)
    assert type(caught.value) is error
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)
    if held:
        now = tensors(cache)
        assert same(now, before) and all(now[name] is held[name] for name in held)
        assert [layer.get_seq_length() for layer in cache.layers] == lengths
    elif isinstance(cache, K3Cache):
        assert tensors(cache) == {} and cache.get_seq_length() == 0


def prefilled(model: Any, batch: int = 2, length: int = 4, mask: list[list[int]] | None = None) -> K3Cache:
    cache = K3Cache(model.config)
    run(model, token_ids(batch, length), cache=cache, attention_mask=None if mask is None else torch.tensor(mask))
    return cache


IDS = token_ids(2, 3)
INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({}, "exactly one of input_ids and inputs_embeds.*neither"),
    "both": ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 3, 64)}, "exactly one.*both"),
    "rank 1": ({"input_ids": IDS[0]}, r"input_ids has shape \(3,\).*\[batch, tokens\]"),
    "rank 3": ({"input_ids": IDS[None]}, r"input_ids has shape \(1, 2, 3\)"),
    "id too high": ({"input_ids": IDS.masked_fill(IDS > -1, VOCABULARY)}, "contains 160.*0 to 159.*vocab_size=160"),
    "id negative": ({"input_ids": IDS - VOCABULARY}, r"contains -\d+.*0 to 159"),
    "embeds of rank 2": ({"inputs_embeds": torch.zeros(3, 64)}, r"inputs_embeds has shape \(3, 64\).*tokens, 64\]"),
    "embeds too narrow": ({"inputs_embeds": torch.zeros(2, 3, 63)}, r"\(2, 3, 63\).*tokens, 64\]"),
    "packed by cu_seq_lens": (
        {"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 3]), "cu_seq_lens_k": torch.tensor([0, 3])},
        "cu_seq_lens_q, cu_seq_lens_k.*packed sequences",
    ),
    "packed by seq_idx": ({"input_ids": IDS, "seq_idx": torch.zeros(2, 3)}, "seq_idx.*packed sequences"),
    "positions restart": (
        {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2], [0, 1, 0]])},
        "position_ids are not consecutive.*packed",
    ),
    "positions jump": ({"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 5]])}, "not consecutive"),
    "positions stand still": ({"input_ids": IDS, "position_ids": torch.zeros(1, 3).long()}, "not consecutive"),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("continued", [False, True], ids=["empty cache", "filled cache"])
def test_inputs_that_cannot_be_computed(name: str, continued: bool, model: Any) -> None:
    inputs, pattern = INPUTS[name]
    refuse(model, ValueError, pattern, prefilled(model) if continued else K3Cache(model.config), **inputs)


@pytest.mark.parametrize("cache", [DynamicCache(), (), {}, [torch.zeros(1)]], ids=lambda x: type(x).__name__)
def test_foreign_caches(cache: Any, model: Any) -> None:
    pattern = f"cache is a {type(cache).__name__}.*allowed is a K3Cache"
    refuse(model, TypeError, pattern, cache, input_ids=IDS)


def test_caches_of_another_shape(model: Any) -> None:
    refuse(model, ValueError, "made for 5 layers, the model has 3", K3Cache(tiny_config("KKKMM")), input_ids=IDS)
    refuse(model, ValueError, "batch of 1 rows, the input has 2", prefilled(model, batch=1), input_ids=IDS)


@pytest.mark.parametrize("layers", ["KKM", "MKK", "KKK", "MMM"])
def test_a_cache_for_other_kinds_of_layers(layers: str, model: Any) -> None:
    """As many layers, but KDA and MLA elsewhere: found out before the first layer has written to it."""
    refuse(model, ValueError, r"layer", K3Cache(tiny_config(layers)), input_ids=IDS)


def test_a_cache_filled_by_a_model_of_other_widths(model: Any) -> None:
    other = build(tiny_config("KMK", linear={"num_heads": 2}, kv_lora_rank=8))
    refuse(model, ValueError, r"cache", prefilled(other), input_ids=IDS)


MASKS: dict[str, tuple[Tensor, str]] = {
    "only the new tokens": (torch.ones(2, 3), r"shape \(2, 3\).*allowed is \[2, 7\]"),
    "too long": (torch.ones(2, 8), r"shape \(2, 8\).*allowed is \[2, 7\]"),
    "another batch": (torch.ones(1, 7), r"shape \(1, 7\).*allowed is \[2, 7\]"),
    "one row without batch": (torch.ones(7), r"shape \(7,\)"),
    "per pair of tokens": (torch.ones(2, 1, 3, 7), r"shape \(2, 1, 3, 7\).*per pair"),
    "value 2": (torch.full((2, 7), 2), "other values than 0 and 1"),
    "value -1": (torch.full((2, 7), -1), "other values than 0 and 1"),
    "a half": (torch.full((2, 7), 0.5), "other values than 0 and 1"),
    "NaN": (torch.full((2, 7), float("nan")), "other values than 0 and 1"),
    "additive": (torch.zeros(2, 7).masked_fill(torch.arange(7) < 2, float("-inf")), "other values than 0 and 1"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_mean_nothing(name: str, model: Any) -> None:
    mask, pattern = MASKS[name]
    refuse(model, ValueError, f"attention_mask.*{pattern}", prefilled(model), input_ids=IDS, attention_mask=mask)


def test_padding_in_the_cache_needs_a_mask(model: Any) -> None:
    cache = prefilled(model, mask=[[0, 0, 1, 1], [1, 1, 1, 1]])
    assert cache.has_padding
    refuse(model, ValueError, r"attention_mask=None.*cache holds padding.*\[2, 7\]", cache, input_ids=IDS)


def test_a_mask_that_turns_padding_of_the_past_into_tokens(model: Any) -> None:
    """The recurrence skipped those positions and attention would now read them: no recomputation gives that."""
    cache = prefilled(model, mask=[[0, 0, 1, 1], [1, 1, 1, 1]])
    refuse(model, ValueError, "attention_mask", cache, input_ids=IDS, attention_mask=torch.ones(2, 7).long())


def test_a_mask_that_turns_tokens_of_the_past_into_padding(model: Any) -> None:
    """The recurrence holds those tokens for good; attention alone would forget them."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    refuse(model, ValueError, "attention_mask", prefilled(model), input_ids=IDS, attention_mask=mask)
    padded = prefilled(model, mask=[[0, 1, 1, 1], [1, 1, 1, 1]])
    refuse(model, ValueError, "attention_mask", padded, input_ids=IDS, attention_mask=mask)


def test_positions_of_another_length_beside_padding(model: Any) -> None:
    mask, positions = torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.arange(5)[None]
    refuse(model, ValueError, "position_ids", None, input_ids=IDS, attention_mask=mask, position_ids=positions)


def test_a_refused_call_can_be_repeated_correctly(model: Any) -> None:
    cache, ids = K3Cache(model.config), token_ids(2, 7)
    run(model, ids[:, :4], cache=cache)
    with pytest.raises(ValueError):
        run(model, ids[:, 4:], cache=cache, attention_mask=torch.ones(2, 3))
    assert max_diff(run(model, ids[:, 4:], cache=cache), run(model, ids)[:, 4:]) < bound("unit_model_fp32_max_abs")


# -- what is accepted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16, torch.uint8])
def test_a_mask_of_ones_of_any_dtype_is_no_mask(dtype: torch.dtype, model: Any) -> None:
    assert torch.equal(run(model, IDS, attention_mask=torch.ones(2, 3, dtype=dtype)), run(model, IDS))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_a_mask_with_padding_of_any_dtype_is_the_same_mask(dtype: torch.dtype, model: Any) -> None:
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert torch.equal(run(model, IDS, attention_mask=mask.to(dtype)), run(model, IDS, attention_mask=mask))


@pytest.mark.parametrize("positions", [torch.arange(3)[None], torch.arange(1000, 1003).expand(2, 3), torch.arange(3)])
def test_consecutive_positions_change_nothing(positions: Tensor, model: Any) -> None:
    assert torch.equal(run(model, IDS, position_ids=positions), run(model, IDS))


def test_positions_may_do_anything_at_padding(model: Any) -> None:
    """`generate` fills ones there and counts from the first real token."""
    mask, positions = torch.tensor([[0, 0, 1], [0, 1, 1]]), torch.tensor([[1, 1, 0], [1, 0, 1]])
    plain = run(model, IDS, attention_mask=mask)
    assert torch.equal(run(model, IDS, attention_mask=mask, position_ids=positions), plain)
    check_positions(torch.tensor([[7]]), None)
    check_positions(None, None)


def test_embeddings_in_the_place_of_ids(model: Any) -> None:
    embeds = model.get_input_embeddings()(IDS).detach()
    kept = embeds.clone()
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert torch.equal(run(model, inputs_embeds=embeds), run(model, IDS))
    assert torch.equal(run(model, inputs_embeds=embeds, attention_mask=mask), run(model, IDS, attention_mask=mask))
    assert torch.equal(embeds, kept)


@pytest.mark.parametrize("poison", [float("inf"), float("nan"), 1e30])
def test_what_stands_at_padding_has_no_influence(poison: float, model: Any) -> None:
    embeds, mask = tensor(2, 6, 64, dtype=torch.float32), torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 0, 1, 1, 1]])
    real = mask.bool()
    clean = run(model, inputs_embeds=embeds, attention_mask=mask)
    spoiled = run(model, inputs_embeds=embeds.masked_fill(~real[..., None], poison), attention_mask=mask)
    assert torch.equal(clean[real], spoiled[real]) and spoiled.isfinite().all()


def test_masks_reach_the_layers_only_where_something_is_padded(model: Any) -> None:
    assert padding_mask(None, 2, 3, None) is None
    assert padding_mask(torch.ones(2, 3), 2, 3, None) is None
    cache = prefilled(model, mask=[[0, 0, 1, 1], [1, 1, 1, 1]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    assert padding_mask(mask, 2, 3, cache) is None
    mask[1, 6] = 0
    found = padding_mask(mask, 2, 3, cache)
    assert found.dtype == torch.bool and found.tolist() == [[True] * 3, [True, True, False]]


@pytest.mark.parametrize("change", [lambda c: c, deepcopy], ids=["same cache", "copy"])
def test_a_padded_cache_goes_on_with_the_full_mask(change: Callable[[K3Cache], K3Cache], model: Any) -> None:
    ids, mask = token_ids(2, 7), torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 1]])
    whole = run(model, ids, attention_mask=mask)
    cache = K3Cache(model.config)
    run(model, ids[:, :4], cache=cache, attention_mask=mask[:, :4])
    cache = change(cache)
    rest = run(model, ids[:, 4:], cache=cache, attention_mask=mask)
    real = mask[:, 4:].bool()
    assert max_diff(rest[real], whole[:, 4:][real]) < bound("unit_model_fp32_max_abs")


def test_positions_that_begin_again_behind_a_cache_are_refused() -> None:
    """Another document, as inside a row; a row of which the cache holds only padding may begin."""
    model = build(tiny_config("KM")).requires_grad_(False)
    ids, mask = token_ids(2, 8), torch.ones(2, 8).long()
    for length in (1, 3):
        cache = K3Cache(model.config)
        model(ids[:, :5], cache=cache)
        with pytest.raises(ValueError, match=r"position_ids begin at 0 again behind 5 tokens"):
            model(ids[:, 5 : 5 + length], position_ids=torch.arange(length)[None], cache=cache)
        assert cache.get_seq_length() == 5
        model(ids[:, 5 : 5 + length], position_ids=torch.arange(5, 5 + length)[None], cache=cache)
    mask[0, :5] = 0
    cache = K3Cache(model.config)
    model(ids[:, :5], attention_mask=mask[:, :5], cache=cache)
    model(ids[:, 5:], attention_mask=mask, position_ids=torch.tensor([[0, 1, 2], [5, 6, 7]]), cache=cache)
