"""The chunk form against the recurrence: values, state, causality, strong and weak decays, long rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from modeling_k3 import kda_chunk
from modeling_k3.kda_ops import chunk_kda, recurrent_kda
from tests.models import max_diff
from tests.tolerances import bound
from tests.unit.helpers import kda_inputs, tensor

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130, 300)
GATES = pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "softplus"])


def check(inputs: list[Tensor], lower_bound: float | None, single_bound: str = "unit_kda_fp32_max_abs") -> None:
    """Outputs and state agree with the recurrence in fp64, and those of fp32 with it too."""
    o, state = recurrent_kda(*inputs)
    fast_o, fast_state = chunk_kda(*inputs, lower_bound=lower_bound)
    assert max_diff(fast_o, o) < bound("f64_paths_max_abs") and max_diff(fast_state, state) < bound("f64_paths_max_abs")
    single_o, single = chunk_kda(*(x.float() for x in inputs), lower_bound=lower_bound)
    assert single_o.dtype == single.dtype == torch.float32
    assert max_diff(single_o, o) < bound(single_bound)
    assert max_diff(single, state) < bound(single_bound)


@GATES
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_equal_the_recurrence(length: int, lower_bound: float | None) -> None:
    check(kda_inputs(2, length, 2, 16, 12, bounded=lower_bound is not None), lower_bound)


@pytest.mark.parametrize("length", [17, 130])
def test_nothing_needs_to_be_promised(length: int) -> None:
    """Bounded gates through the form for unbounded ones, a bound that promises too little, and no state."""
    check(kda_inputs(2, length, 2, 16, 12), None)
    check(kda_inputs(2, length, 2, 16, 12), -20.0)
    check(kda_inputs(2, length, 2, 16, 12, state=False), -5.0)


@GATES
@pytest.mark.parametrize("shape", [(1, 40, 1, 3, 7), (3, 40, 1, 8, 1), (1, 40, 3, 1, 8)])
def test_odd_shapes(shape: tuple[int, ...], lower_bound: float | None) -> None:
    check(kda_inputs(*shape, bounded=lower_bound is not None), lower_bound)


@GATES
@pytest.mark.parametrize("slab", [1, 2**9, 2**11])
def test_work_split_into_slabs(slab: int, lower_bound: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and tokens are cut into pieces that fit a cache; tiny pieces bring every border into a short row."""
    monkeypatch.setattr(kda_chunk, "_SLAB", slab)
    check(kda_inputs(3, 50, 3, 8, 6, bounded=lower_bound is not None), lower_bound)


@GATES
def test_noncontiguous_inputs(lower_bound: float | None) -> None:
    inputs = kda_inputs(2, 40, 3, 8, 6, bounded=lower_bound is not None)
    awkward = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    assert not awkward[0].is_contiguous()
    for fast, plain in zip(
        chunk_kda(*awkward, lower_bound=lower_bound), chunk_kda(*inputs, lower_bound=lower_bound), strict=True
    ):
        assert torch.equal(fast, plain)
    check([x.flip(1) for x in inputs[:5]] + inputs[5:], lower_bound)


# -- decays at their limits ---------------------------------------------------------------------------------------

Pattern = Callable[[Tensor], Tensor]
DECAYS: dict[str, tuple[float | None, Pattern]] = {
    "none at all": (-5.0, torch.zeros_like),
    "all at the bound": (-5.0, lambda x: torch.full_like(x, -5.0)),
    "bound and none by turns": (-5.0, lambda x: torch.where(_odd(x), torch.full_like(x, -5.0), torch.zeros_like(x))),
    "all very strong": (None, lambda x: torch.full_like(x, -60.0)),
    "very strong among weak": (None, lambda x: torch.where(_every(x, 16), torch.full_like(x, -60.0), x * 1e-3)),
    "no promise, none at all": (None, torch.zeros_like),
}


def _tokens(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]).view(1, -1, 1, 1).expand_as(x)


def _odd(x: Tensor) -> Tensor:
    return _tokens(x) % 2 == 1


def _every(x: Tensor, period: int) -> Tensor:
    return (_tokens(x) + 3) % period == 0


@pytest.mark.parametrize("name", DECAYS)
def test_strong_and_weak_decays(name: str) -> None:
    lower_bound, pattern = DECAYS[name]
    inputs = kda_inputs(2, 130, 2, 16, 12)
    inputs[3] = pattern(inputs[3])
    check(inputs, lower_bound)


@pytest.mark.parametrize("log_decay", [-60.0, -160.0, -300.0, -1e4])
def test_one_huge_decay_leaves_its_neighbours_alone(log_decay: float) -> None:
    """Softplus gates know no bound. A sum of log decays that passes through -1e4 loses the small ones beside it."""
    inputs = kda_inputs(1, 48, 1, 8, 6)
    inputs[3] = (inputs[3] * 1e-3).float().double()
    inputs[3][:, 5::16] = log_decay
    check(inputs, None, "unit_kda_strong_decay_fp32_max_abs")


@GATES
@pytest.mark.parametrize("beta", [0.999, 1.0])
def test_nearly_parallel_keys_written_at_full_strength(beta: float, lower_bound: float | None) -> None:
    """Each write almost erases the one before: the triangular system is as far from the identity as it gets."""
    inputs = kda_inputs(2, 130, 2, 16, 12)
    k = tensor(2, 1, 2, 16, seed=9) + tensor(2, 130, 2, 16, seed=8, scale=0.01)
    inputs[1] = (k / k.norm(dim=-1, keepdim=True)).float().double()
    inputs[3], inputs[4] = inputs[3] * 1e-3, torch.full_like(inputs[4], beta).float().double()
    check([x.float().double() for x in inputs], lower_bound)


@GATES
def test_tokens_that_write_nothing_do_not_matter(lower_bound: float | None) -> None:
    """Padding: no decay, no strength, whatever k and v hold. The rest equals the row without them."""
    inputs = kda_inputs(1, 70, 2, 8, 6, bounded=lower_bound is not None)
    padding = torch.arange(70) % 3 == 1
    inputs[3][:, padding], inputs[4][:, padding] = 0.0, 0.0
    inputs[1][:, padding], inputs[2][:, padding] = 1.0, 1e3
    o, state = chunk_kda(*inputs, lower_bound=lower_bound)
    kept = [x[:, ~padding] for x in inputs[:5]]
    expected_o, expected = recurrent_kda(*kept, inputs[5])
    assert max_diff(o[:, ~padding], expected_o) < bound("f64_paths_max_abs")
    assert max_diff(state, expected) < bound("f64_paths_max_abs")


# -- order --------------------------------------------------------------------------------------------------------


@GATES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t", [0, 3, 15, 16, 63, 64])
def test_the_past_is_bit_equal_whatever_follows(t: int, dtype: torch.dtype, lower_bound: float | None) -> None:
    inputs = kda_inputs(1, 80, 2, 16, 12, bounded=lower_bound is not None, dtype=dtype)
    other = kda_inputs(1, 80, 2, 16, 12, bounded=lower_bound is not None, dtype=dtype, seed=100)
    changed = [torch.cat([x[:, : t + 1], y[:, t + 1 :]], dim=1) for x, y in zip(inputs[:5], other[:5], strict=True)]
    o, _ = chunk_kda(*inputs, lower_bound=lower_bound)
    changed_o, _ = chunk_kda(*changed, inputs[5], lower_bound=lower_bound)
    assert torch.equal(o[:, : t + 1], changed_o[:, : t + 1])
    assert not torch.equal(o[:, t + 1], changed_o[:, t + 1])


@GATES
@pytest.mark.parametrize("cut", [1, 15, 16, 17, 64, 99])
def test_a_split_row_equals_the_whole(cut: int, lower_bound: float | None) -> None:
    inputs = kda_inputs(2, 100, 2, 8, 6, bounded=lower_bound is not None)
    o, final = chunk_kda(*inputs, lower_bound=lower_bound)
    first, state = chunk_kda(*(x[:, :cut] for x in inputs[:5]), inputs[5], lower_bound=lower_bound)
    second, state = chunk_kda(*(x[:, cut:] for x in inputs[:5]), state, lower_bound=lower_bound)
    assert max_diff(torch.cat([first, second], dim=1), o) < bound("f64_paths_max_abs")
    assert max_diff(state, final) < bound("f64_paths_max_abs")


def test_a_long_row_keeps_slow_memories() -> None:
    """4096 tokens at decay 0.99992: rounding the decay to bf16 would forget nothing, or too much."""
    inputs = kda_inputs(1, 4096, 1, 8, 6, dtype=torch.float32)
    inputs[3].fill_(torch.tensor(0.99992).log().item())
    _, state = recurrent_kda(*(x.double() for x in inputs))

    def error(log_decay: Tensor, beta: Tensor) -> float:
        _, fast = chunk_kda(*inputs[:3], log_decay, beta, inputs[5], lower_bound=-5.0)
        return ((fast - state).norm() / state.norm()).item()

    log_decay, beta = inputs[3:5]
    assert error(log_decay, beta) < bound("unit_long_state_relative")
    assert error(log_decay.exp().bfloat16().float().log(), beta) > 10 * bound("unit_long_state_relative")
    assert error(log_decay, beta.bfloat16().float()) > 10 * bound("unit_long_state_relative")


# -- snapshots ----------------------------------------------------------------------------------------------------


@GATES
@pytest.mark.parametrize("slab", [1, 2**17])
@pytest.mark.parametrize(("length", "every"), [(100, 16), (100, 48), (64, 64), (40, 64)])
def test_snapshots_are_the_states_at_their_borders(
    length: int, every: int, slab: int, lower_bound: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kda_chunk, "_SLAB", slab)
    inputs = kda_inputs(2, length, 3, 8, 6, bounded=lower_bound is not None)
    o, final, snapshots = chunk_kda(*inputs, lower_bound=lower_bound, snapshot_every=every)
    plain_o, plain = chunk_kda(*inputs, lower_bound=lower_bound)
    assert max_diff(o, plain_o) < bound("f64_paths_max_abs") and max_diff(final, plain) < bound("f64_paths_max_abs")
    assert snapshots.shape == (2, length // every, 3, 8, 6)
    for i in range(length // every):
        _, state = recurrent_kda(*(x[:, : (i + 1) * every] for x in inputs[:5]), inputs[5])
        assert max_diff(snapshots[:, i], state) < bound("f64_paths_max_abs")


def test_snapshots_send_no_gradient_and_disturb_none() -> None:
    grads = []
    for every in (None, 16):
        leaves = [x.requires_grad_() for x in kda_inputs(1, 50, 2, 8, 6)]
        o, state, *rest = chunk_kda(*leaves, lower_bound=-5.0, snapshot_every=every)
        assert not any(x.requires_grad for x in rest)
        grads.append(torch.autograd.grad(o.pow(2).sum() + state.sum(), leaves))
    assert all(max_diff(x, y) < bound("f64_paths_max_abs") for x, y in zip(*grads, strict=True))


@pytest.mark.parametrize("every", [0, -16, 8, 20])
def test_snapshots_between_chunks_are_refused(every: int) -> None:
    with pytest.raises(ValueError, match=f"snapshot_every={every} is not allowed: a positive multiple of 16"):
        chunk_kda(*kda_inputs(1, 40, 1, 4, 3), snapshot_every=every)


def test_snapshots_of_packed_rows_are_refused() -> None:
    inputs = kda_inputs(1, 40, 1, 4, 3, state=False)
    with pytest.raises(ValueError, match="snapshot_every=16 with cu_seqlens is not allowed"):
        chunk_kda(*inputs, snapshot_every=16, cu_seqlens=torch.tensor([0, 40]))


# -- the slab -----------------------------------------------------------------------------------------------------


def test_memory_beyond_the_outputs_does_not_grow_with_the_tokens() -> None:
    """Buffers are taken once: twice the tokens, the same buffers."""
    sizes = []
    for length in (512, 1024):
        taken: dict[str, int] = {}

        class Watched(kda_chunk.Buffers):
            def take(self, name: str, *shape: int) -> Tensor:
                found = super().take(name, *shape)
                taken[name] = self._held[name].numel()  # noqa: B023
                return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kda_chunk, "Buffers", Watched)
            chunk_kda(*kda_inputs(1, length, 8, 64, 64, dtype=torch.float32), lower_bound=-5.0)
        sizes.append(sum(taken.values()))
    assert sizes[0] == sizes[1] > 0


@GATES
def test_what_memory_held_before_does_not_matter(lower_bound: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers and fresh memory come with NaN in them: whatever is read was written first."""
    inputs = [x.requires_grad_() for x in kda_inputs(2, 70, 2, 8, 6, bounded=lower_bound is not None)]

    def run() -> list[Tensor]:
        o, state = chunk_kda(*inputs, lower_bound=lower_bound)
        return [o, state, *torch.autograd.grad(o.pow(2).sum() + state.pow(2).sum(), inputs)]

    expected = run()
    take, empty = kda_chunk.Buffers.take, Tensor.new_empty
    monkeypatch.setattr(kda_chunk.Buffers, "take", lambda *args: take(*args).fill_(float("nan")))
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **options: empty(*args, **options).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: torch.full_like(x, float("nan"), **options))
    assert all(torch.equal(x, y) for x, y in zip(run(), expected, strict=True))
