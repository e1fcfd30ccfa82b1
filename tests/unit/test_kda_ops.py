"""The KDA recurrence against scalar loops, its gate in closed form, its normalisation at every magnitude."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from modeling_k3.kda_ops import chunk_kda, decay_gate, exact_kda, l2_normalize, recurrent_kda
from tests.models import max_diff
from tests.tolerances import bound
from tests.unit.helpers import kda_inputs, tensor

Path = Callable[..., tuple[Tensor, Tensor]]
PATHS = pytest.mark.parametrize("path", [recurrent_kda, chunk_kda, exact_kda], ids=["recurrent", "chunk", "exact"])
BOUNDED = pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "softplus"])


def truth(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Decay, predict from the decayed state, correct, read the corrected state: number by number.

    The state is kept as in the specification, value channel first.
    """
    (batch, length, heads, key_dim), value_dim = q.shape, v.shape[-1]
    o = torch.zeros(batch, length, heads, value_dim, dtype=torch.float64)
    final = torch.zeros(batch, heads, key_dim, value_dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            m = [[0.0] * key_dim for _ in range(value_dim)]
            if state is not None:
                m = state[b, h].double().T.tolist()
            for t in range(length):
                decay = [math.exp(x) for x in log_decay[b, t, h].tolist()]
                qt, kt, vt, strength = q[b, t, h].tolist(), k[b, t, h].tolist(), v[b, t, h].tolist(), beta[b, t, h]
                m = [[x * d for x, d in zip(row, decay, strict=True)] for row in m]
                for i in range(value_dim):
                    error = vt[i] - sum(x * y for x, y in zip(m[i], kt, strict=True))
                    m[i] = [x + strength.item() * error * y for x, y in zip(m[i], kt, strict=True)]
                    o[b, t, h, i] = sum(x * y for x, y in zip(m[i], qt, strict=True)) * key_dim**-0.5
            final[b, h] = torch.tensor(m, dtype=torch.float64).T
    return o, final


@PATHS
@BOUNDED
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("length", [1, 2, 5, 19])
def test_every_path_follows_the_scalar_loops(path: Path, bounded: bool, state: bool, length: int) -> None:
    inputs = kda_inputs(2, length, 2, 3, 4, bounded=bounded, state=state)
    o, final = path(*inputs)
    expected_o, expected = truth(*inputs, *([] if state else [None]))
    assert o.shape == (2, length, 2, 4) and final.shape == (2, 2, 3, 4)
    assert max_diff(o, expected_o) < bound("unit_f64_max_abs")
    assert max_diff(final, expected) < bound("unit_f64_max_abs")


@PATHS
@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_results_are_at_least_float32(path: Path, dtype: torch.dtype, wide: torch.dtype) -> None:
    o, state = path(*kda_inputs(1, 20, 2, 3, 4, dtype=dtype, state=False))
    assert o.dtype == state.dtype == wide


@PATHS
def test_inputs_are_never_written_to(path: Path) -> None:
    """A state is shared between requests that branch; a second run must see the first one's inputs."""
    inputs = kda_inputs(2, 20, 2, 3, 4)
    kept = [x.clone() for x in inputs]
    first, second = path(*inputs), path(*inputs)
    assert all(torch.equal(*pair) for pair in zip(inputs, kept, strict=True))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert first[1].data_ptr() != inputs[5].data_ptr()


@PATHS
def test_no_tokens_leave_the_state_as_it_is(path: Path) -> None:
    inputs = kda_inputs(2, 4, 2, 3, 4)
    o, state = path(*(x[:, :0] for x in inputs[:5]), inputs[5])
    assert o.shape == (2, 0, 2, 4) and torch.equal(state, inputs[5])


@PATHS
@BOUNDED
def test_packed_sequences_equal_separate_ones(path: Path, bounded: bool) -> None:
    lengths, states = (1, 3, 7, 64, 1, 17), tensor(6, 2, 3, 4)
    inputs = kda_inputs(1, sum(lengths), 2, 3, 4, bounded=bounded, state=False)
    borders = torch.tensor([0, *lengths]).cumsum(0)
    o, final = path(*inputs, states, cu_seqlens=borders)
    fresh_o, _ = path(*inputs, cu_seqlens=borders)
    for i, (start, stop) in enumerate(zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)):
        piece = [x[:, start:stop] for x in inputs]
        expected_o, expected = recurrent_kda(*piece, states[i : i + 1])
        assert max_diff(o[:, start:stop], expected_o) < bound("f64_paths_max_abs")
        assert max_diff(final[i : i + 1], expected) < bound("f64_paths_max_abs")
        assert max_diff(fresh_o[:, start:stop], recurrent_kda(*piece)[0]) < bound("f64_paths_max_abs")
    changed = [x.clone() for x in inputs]
    changed[2][:, :4] += 1  # the values of the first two documents
    assert torch.equal(path(*changed, states, cu_seqlens=borders)[0][:, 4:], o[:, 4:])


@PATHS
@pytest.mark.parametrize("borders", [[0, 5], [1, 9], [0, 5, 3, 9], [0, 4, 4, 9], [0, 10]])
def test_borders_that_do_not_cover_the_row_are_refused(path: Path, borders: list[int]) -> None:
    inputs = kda_inputs(1, 9, 2, 3, 4, state=False)
    with pytest.raises(ValueError, match=r"cu_seqlens=.*row length 9"):
        path(*inputs, cu_seqlens=torch.tensor(borders))


@PATHS
def test_packing_refuses_a_batch_and_a_wrong_number_of_states(path: Path) -> None:
    with pytest.raises(ValueError, match="batch of 2"):
        path(*kda_inputs(2, 9, 2, 3, 4, state=False), cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match=r"state holds 1 .* names 2"):
        path(*kda_inputs(1, 9, 2, 3, 4), cu_seqlens=torch.tensor([0, 4, 9]))


@PATHS
def test_without_decay_and_correction_it_is_linear_attention(path: Path) -> None:
    """Orthonormal keys: no write is predicted by the state, so the delta rule only adds. o_t = sum_s beta (q.k) v."""
    length = 24
    keys = torch.linalg.qr(tensor(length, length))[0].view(1, length, 1, length)
    q, v, beta = tensor(1, length, 1, length, seed=1), tensor(1, length, 1, 5, seed=2), tensor(1, length, 1).sigmoid()
    o, state = path(q, keys, v, torch.zeros_like(q), beta)
    written = beta[0, :, :, None] * v[0]
    scores = torch.einsum("thk,shk->ts", q[0], keys[0]).tril() / math.sqrt(length)
    assert max_diff(o[0, :, 0], scores @ written[:, 0]) < bound("unit_f64_max_abs")
    assert max_diff(state[0, 0], keys[0, :, 0].T @ written[:, 0]) < bound("unit_f64_max_abs")


@PATHS
def test_full_strength_without_decay_stores_and_overwrites(path: Path) -> None:
    """beta = 1: reading back a key returns the value written last under it, exactly one association per key."""
    k = torch.eye(4, dtype=torch.float64)[[0, 1, 2, 1, 0]].view(1, 5, 1, 4)
    v = tensor(1, 5, 1, 3)
    _, state = path(k, k, v, torch.zeros_like(k), torch.ones(1, 5, 1, dtype=torch.float64))
    expected = torch.stack([v[0, 4, 0], v[0, 3, 0], v[0, 2, 0], torch.zeros(3, dtype=torch.float64)])
    assert max_diff(state[0, 0], expected) < bound("unit_f64_max_abs")


@PATHS
def test_autocast_does_not_reach_the_recurrence(path: Path) -> None:
    inputs = kda_inputs(1, 40, 2, 8, 12, dtype=torch.float32)
    o, state = path(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside_o, inside = path(*inputs)
    assert inside_o.dtype == inside.dtype == torch.float32
    assert torch.equal(inside_o, o) and torch.equal(inside, state)


GATE_INPUTS = (-20.0, -1.0, 0.0, 1.0, 20.0)


@pytest.mark.parametrize("a_log", [-1.0, 0.0, 1.5])
def test_both_gates_in_closed_form(a_log: float) -> None:
    z, bias, rate = torch.tensor(GATE_INPUTS, dtype=torch.float64), 0.25, math.exp(a_log)
    arguments = (z.view(1, -1, 1), torch.tensor([a_log]).double(), torch.tensor([bias]).double())
    bounded = decay_gate(*arguments, lower_bound=-5.0).flatten()
    softplus = decay_gate(*arguments, lower_bound=None).flatten()
    for i, x in enumerate(GATE_INPUTS):
        r = x + bias
        assert abs(bounded[i].item() + 5 / (1 + math.exp(-rate * r))) < bound("unit_f64_max_abs")
        assert abs(softplus[i].item() + rate * math.log1p(math.exp(r))) < bound("unit_softplus_max_abs")


def test_gate_channels_are_head_major() -> None:
    z, bias = tensor(2, 3, 6), tensor(6, seed=1)
    a_log = torch.tensor([0.0, 1.0], dtype=torch.float64)
    gate = decay_gate(z, a_log, bias, lower_bound=-5.0)
    assert gate.shape == (2, 3, 2, 3)
    for channel in range(6):
        head = channel // 3
        expected = -5 * torch.sigmoid(math.exp(head) * (z[..., channel] + bias[channel]))
        assert max_diff(gate[:, :, head, channel % 3], expected) < bound("unit_f64_max_abs")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_bound_is_approached_and_never_passed(dtype: torch.dtype) -> None:
    z = torch.linspace(-200, 200, 4001).to(dtype).view(1, -1, 1)
    gate = decay_gate(z, torch.tensor([1.0]), torch.zeros(1), lower_bound=-5.0)
    assert gate.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gate.min() == -5 and gate.max() <= 0 and gate.isfinite().all()
    unbounded = decay_gate(z, torch.tensor([1.0]), torch.zeros(1), lower_bound=None)
    assert unbounded.min() < -500 and unbounded.max() <= 0 and unbounded.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1.0, 1e-2, 1e-4])
def test_l2_norm_has_its_epsilon_under_the_root(magnitude: float, dtype: torch.dtype) -> None:
    """x / sqrt(sum(x^2) + 1e-6): a sum, not a mean; at 1e-4 the epsilon outweighs the squares of 16 channels."""
    x = tensor(8, 16, scale=magnitude, dtype=dtype)
    expected = torch.tensor(
        [[value / math.sqrt(sum(y * y for y in row) + 1e-6) for value in row] for row in x.double().tolist()]
    )
    y = l2_normalize(x)
    assert y.dtype == torch.float32 and max_diff(y, expected) < bound("unit_fp32_max_abs")


def test_l2_norm_of_zero_is_zero_with_a_finite_gradient() -> None:
    x = torch.zeros(2, 16, requires_grad=True)
    l2_normalize(x).sum().backward()
    assert (l2_normalize(x) == 0).all() and x.grad.isfinite().all()
    assert l2_normalize(torch.ones(1, 4, dtype=torch.float64)).dtype == torch.float64


# -- one pass over the state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3])
def test_in_place_writes_the_final_state_into_the_given_one(length: int) -> None:
    inputs = kda_inputs(2, length, 2, 3, 4)
    o, final = recurrent_kda(*inputs)
    state = inputs[5].clone()
    place = state.data_ptr()
    found_o, found = recurrent_kda(*inputs[:5], state, in_place=True)
    assert found is state or found.data_ptr() == place
    assert torch.equal(found_o, o) and torch.equal(state, final)


def test_in_place_is_refused_where_it_would_not_work() -> None:
    inputs = kda_inputs(1, 2, 2, 3, 4, dtype=torch.float32)
    for state in (None, inputs[5].double(), inputs[5][..., :3], inputs[5].mT.contiguous().mT):
        with pytest.raises(ValueError, match=r"in_place=True with state .* must be contiguous \[1, 2, 3, 4\]"):
            recurrent_kda(*inputs[:5], state, in_place=True)
    with pytest.raises(ValueError, match="with gradients"):
        recurrent_kda(inputs[0].requires_grad_(), *inputs[1:], in_place=True)
    with torch.no_grad(), pytest.raises(ValueError, match="with cu_seqlens"):
        recurrent_kda(*inputs, in_place=True, cu_seqlens=torch.tensor([0, 2]))


# -- relations to simpler operators --------------------------------------------------------------------------------


def test_without_the_delta_rule_and_decay_it_is_linear_attention() -> None:
    q, k, v, log_decay, beta, _ = kda_inputs(2, 30, 2, 5, 4)
    o, state = recurrent_kda(q, k, v, torch.zeros_like(log_decay), beta, use_delta_rule=False)
    scores = torch.einsum("bthk,bshk->bhts", q, k).tril() / math.sqrt(5)
    written = beta.unsqueeze(-1) * v
    assert max_diff(o, torch.einsum("bhts,bshv->bthv", scores, written)) < bound("unit_f64_max_abs")
    assert max_diff(state, torch.einsum("bshk,bshv->bhkv", k, written)) < bound("unit_f64_max_abs")


@PATHS
def test_one_decay_per_head_is_the_gated_delta_rule(path: Path) -> None:
    """S <- a (I - beta k k^T) S + beta k v^T with a scalar a: decay and correction then commute."""
    inputs = kda_inputs(1, 30, 2, 5, 4)
    inputs[3] = inputs[3][..., :1].expand_as(inputs[3]).contiguous()
    o, _ = path(*inputs)
    q, k, v, log_decay, beta, s = inputs
    for t in range(30):
        a, b = log_decay[:, t, :, 0].exp()[..., None, None], beta[:, t][..., None, None]
        key = k[:, t].unsqueeze(-1)
        s = a * (s - b * key @ (key.mT @ s)) + b * key @ v[:, t].unsqueeze(-2)
        expected = (q[:, t].unsqueeze(-2) @ s).squeeze(-2) / math.sqrt(5)
        assert max_diff(o[:, t], expected) < bound("f64_paths_max_abs")
