"""Where the gradients of large stacks stand: the same place in each step, and never two gradients in one."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from modeling_k3 import gradient_memory
from modeling_k3.gradient_memory import _kept, forget_gradient, gradient_like
from tests.models import build, tiny_config, token_ids

pytestmark = pytest.mark.skipif(gradient_memory._HUGE_PAGES is None, reason="no huge pages on request on this system")


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _kept.clear()
    monkeypatch.setattr(gradient_memory, "_LARGE", 0)
    yield
    _kept.clear()


def stack() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 64, 32, dtype=torch.bfloat16))


def test_the_next_gradient_stands_where_the_last_one_stood() -> None:
    owner = stack()
    first = gradient_like(owner)
    assert first.shape == owner.shape and first.dtype == owner.dtype and first.is_contiguous()
    place = first.data_ptr()
    del first
    assert gradient_like(owner).data_ptr() == place


def test_a_gradient_in_use_is_left_alone_by_whatever_still_reads_it() -> None:
    owner = stack()
    view = gradient_like(owner).fill_(3)[1:].detach()
    second = gradient_like(owner).fill_(5)
    del second
    gradient_like(owner).fill_(7)
    assert (view == 3).all()
    place = view.data_ptr()
    del view
    assert gradient_like(owner)[1:].data_ptr() == place


def test_a_place_is_not_offered_to_the_system_once_somebody_entered() -> None:
    """The note that the first gradient is gone may come late, from another thread."""
    owner = stack()
    offered: list[int] = []
    first = gradient_like(owner)
    late, place = _kept[owner].user, _kept[owner]
    del first
    second = gradient_like(owner).fill_(2)

    class Memory:
        def madvise(self, advice: int) -> None:
            offered.append(advice)

    place.memory, memory = Memory(), place.memory
    place._offer(late)
    assert not offered and (second == 2).all()
    place._offer(place.user)
    assert offered == [gradient_memory._TAKE_IF_NEEDED]
    place.memory = memory


def test_places_end_with_their_stack_or_when_told_to() -> None:
    owner, other = stack(), stack()
    gradient_like(owner), gradient_like(other)
    assert len(_kept) == 2
    held = gradient_like(other).fill_(1)
    forget_gradient(other)
    assert len(_kept) == 1 and (held == 1).all()
    del owner
    gc.collect()
    assert len(_kept) == 0


def test_what_is_no_leaf_has_no_place() -> None:
    gradient_like(stack() * 2)
    assert len(_kept) == 0


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_training_steps_accumulation_and_evaluation() -> None:
    """Gradients are those of a model without kept memory, step after step; a call for evaluation keeps nothing."""
    model, ids = build(tiny_config("KM")).train(), token_ids(1, 12)
    expected = gradients(model, ids)
    places = {name: p.grad.data_ptr() for name, p in model.named_parameters() if ".experts." in name}
    twice = gradients(model, ids)
    assert all(torch.equal(twice[name], 2 * grad) for name, grad in expected.items())
    model.zero_grad(set_to_none=True)
    again = gradients(model, ids)
    assert all(torch.equal(again[name], grad) for name, grad in expected.items())
    assert places and all(model.get_parameter(name).grad.data_ptr() == place for name, place in places.items())
    assert len(_kept) == len(places)
    model.eval()(ids)
    assert len(_kept) == 0 and all(torch.equal(model.get_parameter(n).grad, again[n]) for n in places)
