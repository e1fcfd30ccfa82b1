"""The short convolution, against loops over tokens and taps, with padding anywhere and windows across calls."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from modeling_k3 import precision
from modeling_k3.short_conv import K3ShortConvolution, filter_and_silu
from tests.models import max_diff
from tests.tolerances import bound
from tests.unit.helpers import tensor

CHANNELS = 5
#: 1 where a token is real.
MASKS = {
    "left": [0, 0, 0, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 0, 0, 0],
    "both ends": [0, 1, 1, 1, 1, 1, 0],
    "holes": [1, 0, 1, 1, 0, 0, 1],
    "one real token": [0, 0, 0, 1, 0, 0, 0],
    "last only": [0, 0, 0, 0, 0, 0, 1],
    "all real": [1] * 7,
    "none real": [0] * 7,
}


def make(size: int = 4, dtype: torch.dtype = torch.float64) -> K3ShortConvolution:
    conv = K3ShortConvolution(CHANNELS, size)
    conv.weight.data = tensor(CHANNELS, 1, size, seed=7)
    return conv.to(dtype)


def truth(z: Tensor, weight: Tensor) -> Tensor:
    """c_t = SiLU(sum_j w_j z_{t-(W-1)+j}) for one row [T, channels]; nothing before the first token."""
    size, out = weight.shape[-1], torch.zeros(z.shape, dtype=torch.float64)
    for t in range(z.shape[0]):
        for channel in range(z.shape[1]):
            total = 0.0
            for j in range(size):
                source = t - (size - 1) + j
                if source >= 0:
                    total += weight[channel, 0, j].item() * z[source, channel].item()
            out[t, channel] = total / (1 + math.exp(-total))
    return out


def window_of(z: Tensor, size: int) -> Tensor:
    """The last W rows of [T, channels] as [channels, W], newest last, zeros where there are fewer."""
    window = torch.zeros(z.shape[1], size, dtype=z.dtype)
    for back in range(1, min(size, z.shape[0]) + 1):
        window[:, -back] = z[-back]
    return window


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9])
def test_convolution_follows_the_loops(length: int, size: int) -> None:
    conv, z = make(size), tensor(2, length, CHANNELS)
    c, window = conv(z)
    assert max_diff(c, torch.stack([truth(row, conv.weight) for row in z])) < bound("unit_f64_max_abs")
    assert torch.equal(window, torch.stack([window_of(row, size) for row in z]))


def test_the_last_tap_meets_the_current_token() -> None:
    conv = make()
    conv.weight.data = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64).expand(CHANNELS, 1, 4).clone()
    z = tensor(1, 6, CHANNELS)
    assert max_diff(conv(z)[0], z * z.sigmoid()) < bound("unit_f64_max_abs")


def test_every_split_equals_the_whole() -> None:
    """All 2^5 ways to cut six tokens into pieces, token by token included."""
    conv, z = make(), tensor(2, 6, CHANNELS)
    whole, final = conv(z)
    for cuts in range(2**5):
        borders = [0, *(i + 1 for i in range(5) if cuts >> i & 1), 6]
        window, pieces = None, []
        for start, stop in pairwise(borders):
            c, window = conv(z[:, start:stop], window)
            pieces.append(c)
        assert max_diff(torch.cat(pieces, 1), whole) < bound("unit_f64_max_abs"), borders
        assert torch.equal(window, final), borders


def test_the_window_holds_projections_not_outputs() -> None:
    conv, z = make(), tensor(2, 6, CHANNELS)
    c, window = conv(z)
    assert torch.equal(window, z[:, -4:].mT) and not torch.allclose(window, c[:, -4:].mT)
    _, short = conv(z[:, :2])
    assert torch.equal(short[:, :, 2:], z[:, :2].mT) and (short[:, :, :2] == 0).all()


def test_the_window_given_is_never_written_to() -> None:
    conv, z = make(), tensor(2, 6, CHANNELS)
    _, window = conv(z)
    before = window.clone()
    conv(z, window)
    conv(z, window, torch.tensor([MASKS["holes"][:6]] * 2, dtype=torch.bool))
    assert torch.equal(window, before)


@pytest.mark.parametrize("poison", [0.0, 1e3, float("inf"), float("nan")])
@pytest.mark.parametrize("with_window", [False, True], ids=["fresh", "continued"])
def test_a_padded_row_is_the_row_alone(with_window: bool, poison: float) -> None:
    """Every kind of padding side by side in one batch; what stands at padding has no influence."""
    conv, masks = make(), torch.tensor(list(MASKS.values()), dtype=torch.bool)
    z = tensor(len(MASKS), 7, CHANNELS)
    past = tensor(len(MASKS), 3, CHANNELS, seed=4)
    window = conv(past)[1] if with_window else None
    c, after = conv(z.masked_fill(~masks[..., None], poison), window, masks)
    for row, mask in enumerate(masks):
        real = z[row, mask]
        seen = torch.cat([past[row], real]) if with_window else real
        expected = truth(seen, conv.weight)[seen.shape[0] - real.shape[0] :]
        if real.shape[0]:
            assert max_diff(c[row, mask], expected) < bound("unit_f64_max_abs"), list(MASKS)[row]
        assert torch.equal(after[row], window_of(seen, 4)), list(MASKS)[row]


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
def test_every_split_of_padded_rows_equals_the_whole(kind: str) -> None:
    conv, mask = make(), torch.tensor([MASKS[kind], MASKS["both ends"]], dtype=torch.bool)
    z = tensor(2, 7, CHANNELS)
    whole, final = conv(z, None, mask)
    for cut in range(1, 7):
        first, window = conv(z[:, :cut], None, mask[:, :cut])
        second, window = conv(z[:, cut:], window, mask[:, cut:])
        assert max_diff(torch.cat([first, second], 1)[mask], whole[mask]) < bound("unit_f64_max_abs")
        assert torch.equal(window, final)


def test_a_mask_without_padding_changes_nothing() -> None:
    conv, z = make(), tensor(2, 6, CHANNELS)
    plain, masked = conv(z), conv(z, None, torch.ones(2, 6, dtype=torch.bool))
    assert torch.equal(plain[0], masked[0]) and torch.equal(plain[1], masked[1])


def test_causality() -> None:
    conv, z = make(), tensor(1, 8, CHANNELS)
    for t in range(7):
        changed = z.clone()
        changed[:, t + 1 :] += 1
        assert torch.equal(conv(z)[0][:, : t + 1], conv(changed)[0][:, : t + 1])


@pytest.mark.parametrize("mask", [None, MASKS["holes"]])
def test_gradients(mask: list[int] | None) -> None:
    conv = make()
    z, window = tensor(1, 7, CHANNELS).requires_grad_(), tensor(1, CHANNELS, 4, seed=2).requires_grad_()
    kept = None if mask is None else torch.tensor([mask], dtype=torch.bool)

    def call(z: Tensor, window: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        c, after = torch.func.functional_call(conv, {"weight": weight}, (z, window, kept))
        # Values at padding mean nothing, so nothing is claimed about their gradient.
        return (c if kept is None else c.masked_fill(~kept[..., None], 0)), after

    assert torch.autograd.gradcheck(call, (z, window, conv.weight.detach().clone().requires_grad_()))


@pytest.mark.parametrize("rows", [1, 2, 40, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_filters_own_backward_block_by_block(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks shorter than the filter, and several of them, for two rows of a batch."""
    monkeypatch.setattr(precision, "_BLOCK", rows * CHANNELS)
    x = tensor(2, 103, CHANNELS).to(dtype).requires_grad_()
    taps = tensor(CHANNELS, 4, seed=1).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    dy = tensor(2, 100, CHANNELS, seed=2).to(dtype)
    y = filter_and_silu(x, taps)
    with torch.no_grad():
        assert torch.equal(y, filter_and_silu(x, taps))
    grads = torch.autograd.grad(y, (x, taps), dy)
    wide, w = x.detach().double().requires_grad_(), taps.detach().double().requires_grad_()
    c = torch.nn.functional.conv1d(wide.mT, w.unsqueeze(1), groups=CHANNELS).mT
    true = torch.autograd.grad(torch.nn.functional.silu(c), (wide, w), dy.double())
    for mine, expected, own in zip(grads, true, (x, taps), strict=True):
        assert mine.dtype == own.dtype
        assert (mine.double() - expected).norm() <= 16 * torch.finfo(own.dtype).eps * expected.norm()


def test_the_filter_keeps_its_input_and_nothing_wide_and_leaves_frozen_taps_alone() -> None:
    conv, kept = make(dtype=torch.bfloat16), []
    x, taps = tensor(1, 50, CHANNELS).bfloat16().requires_grad_(), conv.weight[:, 0].detach()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: (kept.append(saved.nbytes), saved)[1], lambda x: x):
        filter_and_silu(x, taps).sum().backward()
    assert sum(kept) == x.nbytes + taps.nbytes and x.grad is not None and taps.grad is None


def test_infinite_padding_sends_no_gradient() -> None:
    conv, mask = make(dtype=torch.float32), torch.tensor([MASKS["holes"]], dtype=torch.bool)
    z = tensor(1, 7, CHANNELS, dtype=torch.float32).masked_fill(~mask[..., None], float("inf")).requires_grad_()
    conv(z, None, mask)[0][mask].sum().backward()
    assert z.grad.isfinite().all() and (z.grad[~mask] == 0).all()
    assert conv.weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_wide_and_rounds_once(dtype: torch.dtype) -> None:
    conv = make(dtype=torch.float32).to(dtype)
    assert conv.weight.dtype == torch.float32
    z = tensor(2, 9, CHANNELS, dtype=dtype)
    c, window = conv(z)
    assert c.dtype == window.dtype == dtype
    expected = torch.stack([truth(row.double(), conv.weight.double()) for row in z])
    assert torch.equal(c, expected.to(dtype))
    assert torch.equal(window, z[:, -4:].mT)


def test_fresh_weights_are_bounded_by_the_kernel_size() -> None:
    weight = K3ShortConvolution(4000, 4).weight
    assert weight.shape == (4000, 1, 4) and 0.49 < weight.abs().max() <= 0.5
