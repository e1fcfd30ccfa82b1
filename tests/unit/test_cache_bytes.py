"""Memory of a cache: what it reports is what it holds, and what was taken back is given back."""

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch

from modeling_k3 import K3Cache
from tests.integration.test_cache_programs import held_bytes
from tests.models import build, max_diff, tiny_config, token_ids
from tests.tolerances import bound


@pytest.fixture(scope="module", params=["KMK", "KK", "MM"])
def model(request: pytest.FixtureRequest) -> Any:
    return build(tiny_config(request.param)).requires_grad_(False)


@torch.no_grad()
def filled(model: Any, tokens: int = 200, window: int | None = 300) -> K3Cache:
    """A cache after a prefill and a decode step, with its reserve."""
    cache = K3Cache(model.config, rollback_tokens=window)
    model(token_ids(1, tokens), cache=cache)
    model(token_ids(1, 1), cache=cache)
    return cache


@pytest.mark.parametrize("count", [0, 3, 150, 200])
def test_bytes_are_those_of_the_memory_behind(model: Any, count: int) -> None:
    cache = filled(model)
    cache.crop(-count)
    assert cache.nbytes()["total"] == held_bytes(cache)
    seen = cache.get_seq_length()
    sizes = cache.nbytes()
    assert sizes["latent"] == 24 * 4 * seen * model.config.layer_types.count("full_attention")
    if count > 100:
        assert sizes["reserved"] <= sizes["latent"]


@pytest.mark.parametrize("count", [0, 3])
def test_a_pickle_has_no_reserve(model: Any, count: int) -> None:
    cache = filled(model, 1000, 10)
    cache.crop(-count)
    sizes = cache.nbytes()
    assert len(pickle.dumps(cache)) < 1.02 * (sizes["total"] - sizes["reserved"]) + 20_000
    for twin in (deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert twin.nbytes()["reserved"] == 0
        assert twin.nbytes()["latent"] == sizes["latent"]


def test_nothing_is_left_after_a_crop_to_nothing(model: Any) -> None:
    """Not even the number of rows: any batch may begin, and batch operations have nothing to do."""
    cache = K3Cache(model.config, rollback_tokens=16)
    ids, mask = token_ids(2, 5), torch.ones(2, 5).long()
    mask[0, :2] = 0
    for rows in (3, 2, 1):
        model(ids, attention_mask=mask, cache=cache)
        cache.crop(-5)
        assert cache.held_batch_size is None and cache.nbytes()["total"] == 0 and not cache.has_padding
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        new = token_ids(rows, 7, seed=rows)
        found = model(new[:, :4], cache=cache).logits, model(new[:, 4:], cache=cache).logits
        expected = model(new, use_cache=False).logits
        assert max_diff(torch.cat(found, 1), expected) < bound("unit_model_fp32_max_abs")
        cache.crop(-2)
        assert cache.get_seq_length() == 5 and cache.rollback_limit == 5
        cache.crop(-5)
    assert cache.counters == {"rollbacks": 9, "rolled_back_tokens": 36}


def test_a_mask_belongs_to_the_caller_again(model: Any) -> None:
    """What is run again after a crop is run with the mask of then, whatever the caller did to it."""
    ids, mask = token_ids(1, 8), torch.ones(1, 8, dtype=torch.bool)
    mask[0, 1] = False
    kept, cache = mask.clone(), K3Cache(model.config, rollback_tokens=16)
    model(ids[:, :6], attention_mask=mask[:, :6], cache=cache)
    mask.fill_(True)
    cache.crop(-2)
    found = model(ids[:, 4:], attention_mask=kept, cache=cache).logits
    expected = model(ids, attention_mask=kept, use_cache=False).logits[:, 4:]
    assert max_diff(found, expected) < bound("unit_model_fp32_max_abs")
