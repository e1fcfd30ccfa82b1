"""The KDA layer around its recurrence: projections, order of operations, padding, cache, choice of the path."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_k3 import K3Cache, K3Config
from modeling_k3.kda import K3DeltaAttention
from tests.models import max_diff, randomize, tiny_config
from tests.tolerances import bound
from tests.unit.helpers import tensor

VARIANTS: dict[str, dict[str, Any]] = {
    "released": {},
    "softplus gate": {"gate_lower_bound": None},
    "low-rank output gate": {"use_full_rank_gate": False},
    "one head, two taps": {"num_heads": 1, "short_conv_kernel_size": 2},
    "another bound": {"gate_lower_bound": -0.5},
}
IMPLEMENTATIONS = ("auto", "chunk", "recurrent", "exact")


def make(dtype: torch.dtype = torch.float64, **linear: Any) -> tuple[K3DeltaAttention, K3Config]:
    config = tiny_config("KK", linear=linear, num_experts=None)
    module = K3DeltaAttention(config, 0)
    randomize(module)
    return module.to(dtype), config


def truth(module: K3DeltaAttention, config: K3Config, x: Tensor) -> Tensor:
    """One row [T, D], token by token and head by head, in the order of section 4.4 of the golden README."""
    weight = {name: p.detach().double() for name, p in module.named_parameters()}
    heads, size = config.kda_num_heads, config.kda_head_dim
    taps, x = config.short_conv_kernel_size, x.double()

    def convolve(stream: str) -> Tensor:
        z, w = x @ weight[f"{stream}_proj.weight"].T, weight[f"{stream}_conv1d.weight"][:, 0]
        rows = []
        for t in range(z.shape[0]):
            c = sum(w[:, j] * z[t - (taps - 1) + j] for j in range(taps) if t - (taps - 1) + j >= 0)
            rows.append(c * torch.sigmoid(c))
        return torch.stack(rows)

    q, k, v = (convolve(stream) for stream in "qkv")
    r = (x @ weight["f_a_proj.weight"].T) @ weight["f_b_proj.weight"].T + weight["dt_bias"]
    strength = torch.sigmoid(x @ weight["b_proj.weight"].T)
    if config.use_full_rank_gate:
        gate = x @ weight["g_proj.weight"].T
    else:
        gate = (x @ weight["g_a_proj.weight"].T) @ weight["g_b_proj.weight"].T
    joined = torch.zeros(x.shape[0], heads * size, dtype=torch.float64)
    for h in range(heads):
        part, m = slice(h * size, (h + 1) * size), torch.zeros(size, size, dtype=torch.float64)
        rate = weight["A_log"][h].exp()
        for t in range(x.shape[0]):
            query, key = (c[t, part] / (c[t, part].pow(2).sum() + 1e-6).sqrt() for c in (q, k))
            if config.gate_lower_bound is None:
                log_decay = -rate * torch.log1p(r[t, part].exp())
            else:
                log_decay = config.gate_lower_bound * torch.sigmoid(rate * r[t, part])
            m = m * log_decay.exp()
            m = m + strength[t, h] * torch.outer(v[t, part] - m @ key, key)
            o = m @ query / size**0.5
            y = o / (o.pow(2).mean() + config.rms_norm_eps).sqrt() * weight["o_norm.weight"]
            joined[t, part] = y * torch.sigmoid(gate[t, part])
    return joined @ weight["o_proj.weight"].T


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", VARIANTS)
def test_layer_follows_the_equations(name: str, implementation: str) -> None:
    module, config = make(**VARIANTS[name])
    for length in (1, 4, 21):
        x = tensor(2, length, 64)
        y, weights = module(x, kda_implementation=implementation)
        assert weights is None
        assert max_diff(y, torch.stack([truth(module, config, row) for row in x])) < bound("f64_paths_max_abs")


def test_padding_anywhere_is_the_row_alone() -> None:
    module, config = make()
    masks = torch.tensor(
        [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 0, 1, 1], [1] * 8, [0] * 8],
        dtype=torch.bool,
    )
    x = tensor(5, 8, 64).masked_fill(~masks[..., None], 0)
    for implementation in IMPLEMENTATIONS:
        cache = K3Cache(config)
        y, _ = module(x, masks, cache, kda_implementation=implementation)
        assert (y[~masks] == 0).all()
        state = cache.linear_layer(0).state
        for row, mask in enumerate(masks[:4]):
            alone = K3Cache(config)
            module(x[row : row + 1, mask], None, alone)
            assert max_diff(y[row, mask], truth(module, config, x[row, mask])) < bound("f64_paths_max_abs")
            assert max_diff(state[row : row + 1], alone.linear_layer(0).state) < bound("f64_paths_max_abs")
            for mine, other in zip(cache.linear_layer(0).windows, alone.linear_layer(0).windows, strict=True):
                assert max_diff(mine[row : row + 1], other) < bound("unit_f64_max_abs")
        assert (state[4] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_split_through_the_cache_equals_the_whole(implementation: str) -> None:
    module, config = make()
    x = tensor(2, 7, 64)
    whole, _ = module(x)
    for borders in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 3, 7], [0, 6, 7], [0, 1, 7], [0, 2, 3, 7]):
        cache = K3Cache(config)
        pieces = [
            module(x[:, start:stop], None, cache, kda_implementation=implementation)[0]
            for start, stop in pairwise(borders)
        ]
        assert max_diff(torch.cat(pieces, 1), whole) < bound("f64_paths_max_abs"), borders
        assert cache.get_seq_length(0) == 7


def test_the_cache_keeps_projections_and_the_key_first_state() -> None:
    module, config = make(torch.bfloat16)
    x, cache = tensor(2, 6, 64, dtype=torch.bfloat16), K3Cache(config)
    module(x, None, cache)
    memory = cache.linear_layer(0)
    for window, projection in zip(memory.windows, (module.q_proj, module.k_proj, module.v_proj), strict=True):
        assert torch.equal(window, projection(x)[:, -4:].mT)
    assert memory.state.shape == (2, 3, 16, 16) and memory.state.dtype == torch.float32


def test_weights_are_given_where_they_exist() -> None:
    module, _ = make()
    x = tensor(2, 9, 64)
    for implementation in IMPLEMENTATIONS:
        y, weights = module(x, kda_implementation=implementation, output_attentions=True)
        assert (weights is not None) == (implementation == "exact")
        assert max_diff(y, module(x)[0]) < bound("f64_paths_max_abs")
    assert module(x, kda_implementation="exact", output_attentions=True)[1].shape == (2, 3, 9, 9)
    with pytest.raises(ValueError, match=r"kda_implementation='fast'.*auto.*chunk.*recurrent.*exact"):
        module(x, kda_implementation="fast")


def test_every_parameter_gets_a_gradient_and_padding_none() -> None:
    module, _ = make()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1, 0]], dtype=torch.bool)
    x = tensor(2, 8, 64).masked_fill(~mask[..., None], 0).requires_grad_()
    module(x, mask)[0].pow(2).sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in module.parameters())
    assert (x.grad[~mask] == 0).all() and x.grad[mask].abs().min() > 0


@pytest.mark.parametrize("t", [0, 3, 15, 16, 30])
def test_causality(t: int) -> None:
    module, _ = make(torch.float32)
    x = tensor(1, 40, 64, dtype=torch.float32)
    changed = torch.cat([x[:, : t + 1], x[:, t + 1 :] + 1], dim=1)
    assert torch.equal(module(x)[0][:, : t + 1], module(changed)[0][:, : t + 1])


def test_bf16_stays_close_to_float64() -> None:
    module, config = make(torch.bfloat16)
    x = tensor(1, 40, 64, dtype=torch.bfloat16)
    y, _ = module(x)
    expected = truth(module, config, x[0])
    assert y.dtype == torch.bfloat16
    assert (y[0].double() - expected).norm() / expected.norm() < bound("unit_kda_layer_bf16_relative")


def test_names_are_the_released_ones() -> None:
    streams = {f"{s}_{part}.weight" for s in "qkv" for part in ("proj", "conv1d")}
    both = {"A_log", "dt_bias", *(f"{name}.weight" for name in ("f_a_proj", "f_b_proj", "b_proj", "o_norm", "o_proj"))}
    full, low = (make(use_full_rank_gate=rank)[0] for rank in (True, False))
    assert {name for name, _ in full.named_parameters()} == streams | both | {"g_proj.weight"}
    assert {name for name, _ in low.named_parameters()} == streams | both | {"g_a_proj.weight", "g_b_proj.weight"}
    assert full.A_log.shape == (3,) and full.dt_bias.shape == (48,) and full.o_norm.weight.shape == (16,)
