"""The attention form against the recurrence, its weights against what they must do, its limits."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modeling_k3 import kda_exact
from modeling_k3.kda_ops import exact_kda, recurrent_kda
from tests.models import max_diff
from tests.tolerances import bound
from tests.unit.helpers import kda_inputs

GATES = pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "softplus"])


@GATES
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 65, 130])
@pytest.mark.parametrize("block", [16, 48, 256])
def test_equals_the_recurrence(length: int, block: int, bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda_exact, "BLOCK", block)
    inputs = kda_inputs(2, length, 2, 8, 6, bounded=bounded)
    expected_o, expected = recurrent_kda(*inputs)
    o, state = exact_kda(*inputs)
    assert o.shape == expected_o.shape and state.shape == expected.shape
    if length:
        assert max_diff(o, expected_o) < bound("f64_paths_max_abs")
    assert max_diff(state, expected) < bound("f64_paths_max_abs")
    for arithmetic in (torch.float32, torch.float64):
        single_o, single = exact_kda(*(x.float() for x in inputs), arithmetic=arithmetic)
        assert single_o.dtype == single.dtype == torch.float32
        assert max_diff(single, expected) < bound("unit_kda_fp32_max_abs")
    # Computed in float64 and rounded once: not a bit away from the rounded truth, or one where it lies between.
    ulp = torch.finfo(torch.float32).eps * expected.abs()
    assert ((single.double() - expected).abs() <= ulp).all()


@pytest.mark.parametrize("block", [32, 256])
def test_weights_applied_to_values_are_the_output(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda_exact, "BLOCK", block)
    inputs = kda_inputs(2, 70, 3, 8, 6, state=False)
    o, _, weights = exact_kda(*inputs, output_weights=True)
    assert weights.shape == (2, 3, 70, 70)
    assert (weights.triu(1) == 0).all()
    assert max_diff(torch.einsum("bhts,bshv->bthv", weights, inputs[2]), o) < bound("f64_paths_max_abs")


def test_gradients_equal_those_of_the_recurrence() -> None:
    grads = []
    for path in (recurrent_kda, exact_kda):
        leaves = [x.requires_grad_() for x in kda_inputs(1, 40, 2, 6, 5, bounded=False)]
        o, state = path(*leaves)
        grads.append(torch.autograd.grad(o.pow(2).sum() + state.pow(2).sum(), leaves))
    assert all(max_diff(x, y) < bound("f64_paths_max_abs") for x, y in zip(*grads, strict=True))


def test_a_huge_decay_leaves_its_neighbours_alone() -> None:
    inputs = kda_inputs(1, 48, 1, 8, 6)
    inputs[3] = (inputs[3] * 1e-3).float().double()
    inputs[3][:, 5::16] = -1e4
    o, _ = recurrent_kda(*inputs)
    assert max_diff(exact_kda(*(x.float() for x in inputs))[0], o) < bound("unit_kda_fp32_max_abs")


class LiveBytes(TorchDispatchMode):
    """Counts what the operations inside it allocate and hold at once, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and id(x.untyped_storage()) not in self.known:
                storage = x.untyped_storage()
                self.known.add(id(storage))
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, id(storage), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def test_memory_grows_with_the_tokens_and_not_with_their_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda_exact, "BLOCK", 32)
    peaks = []
    for length, weights in ((256, False), (512, False), (512, True)):
        inputs = kda_inputs(1, length, 2, 8, 8)
        with LiveBytes() as live, torch.no_grad():
            results = exact_kda(*inputs, output_weights=weights)
        assert live.now >= sum(x.nbytes for x in results)
        peaks.append(live.peak)
    pairs = 2 * 512 * 512 * 8
    assert peaks[1] < 2.1 * peaks[0] and peaks[1] < 0.5 * pairs, peaks
    assert peaks[2] > pairs, "the weights themselves are counted"


def test_too_many_weights_are_refused_before_anything_is_computed() -> None:
    huge = torch.empty(1, 1, 1, 1).expand(1, 40000, 96, 1)
    with pytest.raises(ValueError, match=r"40000 tokens, 96 heads .* 1228800000000 bytes; allowed are 2147483648"):
        exact_kda(huge, huge, huge, huge, huge[..., 0], output_weights=True)


def test_other_arithmetic_is_refused() -> None:
    with pytest.raises(ValueError, match=r"arithmetic=torch.bfloat16 is not allowed"):
        exact_kda(*kda_inputs(1, 9, 2, 3, 4), arithmetic=torch.bfloat16)


def test_weights_of_packed_rows_are_refused() -> None:
    inputs = kda_inputs(1, 9, 2, 3, 4, state=False)
    with pytest.raises(ValueError, match="output_weights=True with cu_seqlens"):
        exact_kda(*inputs, cu_seqlens=torch.tensor([0, 4, 9]), output_weights=True)
