"""`logits_to_keep`: what selects logits, and what is refused before the cache has moved."""

from typing import Any

import pytest
import torch

from modeling_k3 import K3Cache
from tests.models import build, max_diff, tiny_config, token_ids


@pytest.fixture(scope="module")
def model() -> Any:
    return build(tiny_config("KMK")).requires_grad_(False)


@pytest.mark.parametrize(
    "keep",
    [
        torch.tensor([6]),
        torch.tensor([-7]),
        torch.tensor([[0, 6], [1, 2]]),
        torch.tensor([[0, -1], [1, 2]]),
        torch.tensor([[0]]),
        torch.tensor(1),
        torch.ones(7, dtype=torch.bool),
        -2,
    ],
    ids=str,
)
def test_bad_positions_are_refused_before_anything_changes(keep: Any, model: Any) -> None:
    cache, ids = K3Cache(model.config), token_ids(2, 10)
    model(ids[:, :4], cache=cache)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(ids[:, 4:], cache=cache, logits_to_keep=keep)
    assert cache.get_seq_length() == 4
    with pytest.raises(TypeError, match="logits_to_keep is a"):
        model(ids[:, 4:], cache=cache, logits_to_keep=[1])
    assert cache.get_seq_length() == 4


def test_good_positions_select(model: Any) -> None:
    ids = token_ids(2, 6)
    whole = model(ids).logits
    mask = torch.tensor([True, False, True, False, False, True])
    for keep, expected in (
        (0, whole),
        (2, whole[:, -2:]),
        (9, whole),
        (torch.tensor([0, -1]), whole[:, [0, -1]]),
        (mask, whole[:, mask]),
        (torch.tensor([[0, 5], [1, 2]]), torch.stack([whole[0, [0, 5]], whole[1, [1, 2]]])),
        (mask.expand(2, 6), whole[mask.expand(2, 6)]),
    ):
        assert max_diff(model(ids, logits_to_keep=keep).logits, expected) < 1e-4
