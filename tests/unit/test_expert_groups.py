"""Experts group by group against the definition: values, gradients, what is kept, and memory of its own."""

from functools import partial

import pytest
import torch
from torch import Tensor

from modeling_k3 import expert_groups, gradient_memory
from modeling_k3.expert_groups import combine_groups
from modeling_k3.mlp import gated_activation
from tests.models import max_diff
from tests.unit.helpers import tensor

TOKENS, EXPERTS, WIDTH, INNER = 9, 6, 8, 4


def activate(gate_up: Tensor) -> Tensor:
    return gated_activation(*gate_up.chunk(2, dim=-1), beta=4.0, linear_beta=25.0)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """z, weights and both stacks as leaves; expert numbers, where 2 is never chosen and 6 is another rank's."""
    chosen = torch.tensor([[0, 1], [1, 6], [3, 0], [5, 4], [6, 6], [1, 3], [0, 5], [5, 1], [3, 1]])
    leaves = [tensor(TOKENS, WIDTH, dtype=dtype), tensor(TOKENS, 2, seed=1).abs()]
    leaves += [
        tensor(EXPERTS, 2 * INNER, WIDTH, seed=2, dtype=dtype),
        tensor(EXPERTS, WIDTH, INNER, seed=3, dtype=dtype),
    ]
    leaves[1] = leaves[1].to(torch.promote_types(dtype, torch.float32))
    return [x.requires_grad_() for x in leaves], chosen


def definition(z: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    rows = []
    for t in range(len(z)):
        own = [(e, p) for e, p in zip(chosen[t].tolist(), weights[t], strict=True) if e < EXPERTS]
        rows.append(sum((p * (down[e] @ activate(gate_up[e] @ z[t])) for e, p in own), torch.zeros_like(z[t])))
    return torch.stack(rows)


def run(leaves: list[Tensor], chosen: Tensor) -> Tensor:
    z, weights, gate_up, down = leaves
    return combine_groups(z, chosen, weights, gate_up, down, activate)


def test_values_and_gradients_of_the_definition() -> None:
    leaves, chosen = inputs()
    y, expected = run(leaves, chosen), definition(leaves[0], chosen, *leaves[1:])
    assert max_diff(y, expected) < 1e-12
    assert (y[4] == 0).all(), "a token of another rank"
    weight = tensor(*y.shape, seed=7)
    for mine, true in zip(*(torch.autograd.grad(x, leaves, weight) for x in (y, expected)), strict=True):
        assert max_diff(mine, true) < 1e-12


def test_finite_differences() -> None:
    leaves, chosen = inputs()
    assert torch.autograd.gradcheck(lambda *x: run(list(x), chosen), leaves)


@pytest.mark.parametrize("frozen", range(4))
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(frozen: int) -> None:
    leaves, chosen = inputs()
    run(leaves, chosen).sum().backward()
    expected = [x.grad for x in leaves]
    leaves, chosen = inputs()
    leaves[frozen].requires_grad_(False)
    run(leaves, chosen).sum().backward()
    for index, (leaf, true) in enumerate(zip(leaves, expected, strict=True)):
        assert leaf.grad is None if index == frozen else torch.equal(leaf.grad, true)


def test_no_token_at_all() -> None:
    leaves, chosen = inputs()
    leaves[0], leaves[1] = (x.detach()[:0].requires_grad_() for x in leaves[:2])
    y = run(leaves, chosen[:0])
    y.sum().backward()
    assert y.shape == (0, WIDTH) and all((x.grad == 0).all() for x in leaves)


def test_neither_sorted_tokens_nor_outputs_are_kept() -> None:
    """Beside the inputs: a row's activation and its two halves, for each of the 15 rows of this rank."""
    leaves, chosen = inputs(torch.float32)
    given, kept = {x.data_ptr() for x in leaves}, {}

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.data_ptr() not in given:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = run(leaves, chosen)
    rows = int((chosen < EXPERTS).sum())
    assert y.requires_grad and sum(kept.values()) == rows * (3 * INNER + 1) * 4


def test_autocast_multiplies_in_its_dtype_and_returns_gradients_in_the_stacks_own() -> None:
    leaves, chosen = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run(leaves, chosen)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in leaves)
    true = definition(leaves[0], chosen, *leaves[1:])
    assert max_diff(y.float(), true) < 0.05 * true.abs().max().item()


def test_gradients_in_huge_pages_are_ordinary_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken over, not copied, add up, and outlive the step."""
    monkeypatch.setattr(gradient_memory, "_LARGE", 0)
    made: list[int] = []
    plain = gradient_memory.gradient_like
    monkeypatch.setattr(expert_groups, "gradient_like", lambda like: _note(made, plain(like)))
    leaves, chosen = inputs(torch.float32)
    step = partial(run, leaves, chosen)
    step().sum().backward()
    assert {x.grad.data_ptr() for x in leaves[2:]} == set(made)
    once = [x.grad.clone() for x in leaves]
    step().sum().backward()
    assert all(torch.equal(x.grad, 2 * first) for x, first in zip(leaves, once, strict=True))


def _note(made: list[int], x: Tensor) -> Tensor:
    made.append(x.data_ptr())
    return x
