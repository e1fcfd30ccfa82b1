"""Latent attention against loops over heads and positions; its cache, its unrotated lanes, its gate."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modeling_k3 import K3Cache, K3Config
from modeling_k3.mla import K3MLAttention
from tests.models import max_diff, randomize, tiny_config
from tests.tolerances import bound
from tests.unit.helpers import tensor

VARIANTS: dict[str, dict[str, Any]] = {
    "released": {},
    "no q_lora": {"q_lora_rank": None},
    "no output gate": {"mla_use_output_gate": False},
    "values narrower than keys": {"v_head_dim": 5},
    "values wider than keys": {"v_head_dim": 40},
    "no shared lanes": {"qk_rope_head_dim": 0},
    "one head": {"num_attention_heads": 1},
}
ATTENTION = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def make(implementation: str = "eager", **changes: Any) -> tuple[K3MLAttention, K3Config]:
    config = tiny_config("MM", num_experts=None, attn_implementation=implementation, **changes)
    module = K3MLAttention(config, 0)
    randomize(module)
    return module.double(), config


def additive(seen: int, length: int, real: Tensor | None = None) -> Tensor:
    """[B, 1, length, seen + length] of zeros and minus infinity: causal, and no padded keys.

    A padded query sees itself, so that its softmax stays defined, as the library's masks arrange it.
    """
    position = torch.arange(seen + length)
    allowed = (position[None] <= position[seen:, None])[None]
    if real is not None:
        allowed = allowed & real[:, None, :] | (position[None] == position[seen:, None])
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, float("-inf")).unsqueeze(1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def truth(module: nn.Module, config: K3Config, x: Tensor) -> Tensor:
    """One row [T, D], head by head, position by position; keys are [own part | shared part], nothing is rotated."""
    heads, nope, lanes, width = (
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
    )
    weight = {name: p.detach() for name, p in module.named_parameters()}
    if config.q_lora_rank is None:
        q = x @ weight["q_proj.weight"].T
    else:
        low = rms(x @ weight["q_a_proj.weight"].T, weight["q_a_layernorm.weight"], 1e-6)
        q = low @ weight["q_b_proj.weight"].T
    both = x @ weight["kv_a_proj_with_mqa.weight"].T
    latent = rms(both[:, : config.kv_lora_rank], weight["kv_a_layernorm.weight"], 1e-6)
    shared, expanded = both[:, config.kv_lora_rank :], latent @ weight["kv_b_proj.weight"].T
    joined = []
    for t in range(x.shape[0]):
        parts = []
        for h in range(heads):
            query = q[t, h * (nope + lanes) : (h + 1) * (nope + lanes)]
            rows = expanded[: t + 1, h * (nope + width) : (h + 1) * (nope + width)]
            keys = torch.cat([rows[:, :nope], shared[: t + 1]], dim=-1)
            p = torch.softmax(keys @ query / math.sqrt(nope + lanes), dim=0)
            parts.append(p @ rows[:, nope:])
        joined.append(torch.cat(parts))
    o = torch.stack(joined)
    if config.mla_use_output_gate:
        o = o * torch.sigmoid(x @ weight["g_proj.weight"].T)
    return o @ weight["o_proj.weight"].T


@ATTENTION
@pytest.mark.parametrize("name", VARIANTS)
def test_attention_follows_the_equations(name: str, implementation: str) -> None:
    module, config = make(implementation, **VARIANTS[name])
    x = tensor(2, 9, 64)
    y, weights = module(x, additive(0, 9) if implementation == "eager" else None)
    assert max_diff(y, torch.stack([truth(module, config, row) for row in x])) < bound("f64_paths_max_abs")
    assert (weights is not None) == (implementation == "eager")


def test_the_inner_norms_have_an_epsilon_of_their_own() -> None:
    """With inputs this small 1e-6 and `rms_norm_eps` 1e-5 give different results."""
    module, config = make()
    x = tensor(1, 9, 64, scale=1e-3)
    y, _ = module(x, additive(0, 9))
    assert max_diff(y[0], truth(module, config, x[0])) < bound("f64_paths_max_abs")
    other, _ = make(mla_norm_eps=1e-5)
    other.load_state_dict(module.state_dict())
    assert max_diff(other(x, additive(0, 9))[0], y) > 1e-3


def test_weights_are_causal_distributions() -> None:
    module, _ = make()
    _, weights = module(tensor(2, 9, 64), additive(0, 9))
    assert weights.shape == (2, 3, 9, 9) and (weights.triu(1) == 0).all()
    assert max_diff(weights.sum(-1), torch.ones(2, 3, 9)) < bound("unit_f64_max_abs")


@ATTENTION
def test_the_shared_lanes_take_part(implementation: str) -> None:
    module, config = make(implementation)
    x = tensor(1, 9, 64)
    before, _ = module(x, additive(0, 9))
    with torch.no_grad():
        module.kv_a_proj_with_mqa.weight[config.kv_lora_rank :] = 0
    after, _ = module(x, additive(0, 9))
    assert max_diff(before[:, 1:], after[:, 1:]) > 1e-2


@ATTENTION
def test_the_order_of_the_past_does_not_matter(implementation: str) -> None:
    """Nothing is rotated: attention sees a set of earlier tokens."""
    module, _ = make(implementation)
    x = tensor(1, 9, 64)
    order = torch.tensor([4, 2, 7, 0, 1, 6, 3, 5, 8])
    last, shuffled = module(x, additive(0, 9))[0][:, -1], module(x[:, order], additive(0, 9))[0][:, -1]
    assert max_diff(last, shuffled) < bound("f64_paths_max_abs")


def test_the_gate_reads_the_input_and_opens_completely() -> None:
    module, config = make()
    plain, _ = make(mla_use_output_gate=False)
    plain.load_state_dict(module.state_dict(), strict=False)
    x = tensor(1, 9, 64).abs()
    with torch.no_grad():
        module.g_proj.weight.fill_(100.0)
    assert max_diff(module(x, additive(0, 9))[0], plain(x, additive(0, 9))[0]) < bound("unit_f64_max_abs")
    with torch.no_grad():
        module.g_proj.weight.fill_(-100.0)
    assert module(x, additive(0, 9))[0].abs().max() < 1e-30
    assert not hasattr(plain, "g_proj") and module.g_proj.weight.shape == (3 * config.v_head_dim, 64)


# -- cache --------------------------------------------------------------------------------------------------------


@ATTENTION
def test_every_split_through_the_latent_cache_equals_the_whole(implementation: str) -> None:
    module, config = make(implementation)
    x = tensor(2, 5, 64)
    whole, _ = module(x, additive(0, 5))
    for cuts in range(2**4):
        borders = [0, *(i + 1 for i in range(4) if cuts >> i & 1), 5]
        cache, pieces = K3Cache(config), []
        for start, stop in pairwise(borders):
            pieces.append(module(x[:, start:stop], additive(start, stop - start), cache)[0])
        assert max_diff(torch.cat(pieces, 1), whole) < bound("unit_f64_max_abs"), borders


def test_the_cache_keeps_the_normalised_latent_and_the_raw_shared_lanes() -> None:
    module, config = make()
    x, cache = tensor(2, 5, 64), K3Cache(config)
    module(x[:, :3], additive(0, 3), cache)
    module(x[:, 3:], additive(3, 2), cache)
    both = x @ module.kv_a_proj_with_mqa.weight.T
    latent, shared = both.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
    layer = cache.layers[0]
    assert layer.keys.shape == (2, 1, 5, config.kv_lora_rank) and layer.values.shape == (2, 1, 5, 8)
    assert max_diff(layer.keys[:, 0], rms(latent, module.kv_a_layernorm.weight, 1e-6)) < bound("unit_f64_max_abs")
    assert max_diff(layer.values[:, 0], shared) < bound("unit_f64_max_abs")


# -- padding ------------------------------------------------------------------------------------------------------


@ATTENTION
@pytest.mark.parametrize("kind", ["left", "right", "holes"])
def test_a_padded_row_is_the_row_alone(kind: str, implementation: str) -> None:
    module, config = make(implementation)
    real = {"left": [0, 0, 0, 1, 1, 1, 1], "right": [1, 1, 1, 1, 0, 0, 0], "holes": [1, 0, 1, 1, 0, 0, 1]}[kind]
    real = torch.tensor([real, [1] * 7], dtype=torch.bool)
    x = tensor(2, 7, 64).masked_fill(~real[..., None], 0)
    y, _ = module(x, additive(0, 7, real), padding_mask=real)
    for row in range(2):
        alone = truth(module, config, x[row, real[row]])
        assert max_diff(y[row, real[row]], alone) < bound("f64_paths_max_abs")
    assert (y[~real] == 0).all()


@ATTENTION
def test_a_query_that_sees_nothing_leaves_no_nan(implementation: str) -> None:
    """Whatever a fully masked softmax gives, selection drops it, from the output and from the gradients."""
    module, _ = make(implementation)
    real = torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.bool)
    mask = additive(0, 5, real).masked_fill(~real[:, None, None, :], torch.finfo(torch.float64).min)
    x = tensor(1, 5, 64).masked_fill(~real[..., None], 0).requires_grad_()
    y, _ = module(x, mask, padding_mask=real)
    y.pow(2).sum().backward()
    assert (y[:, :2] == 0).all() and y.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


# -- implementations and precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("v_head_dim", [5, 40])
def test_no_score_per_pair_of_tokens_is_kept(v_head_dim: int) -> None:
    """torch's fused kernel for a CPU takes one width only; keys and values have two."""
    module, config = make("sdpa", v_head_dim=v_head_dim)
    x = torch.randn(1, 9, config.hidden_size, dtype=torch.float64)
    with torch.profiler.profile() as profile:
        module(x)
    called = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in called
    assert "aten::_scaled_dot_product_attention_math" not in called


def test_eager_and_sdpa_have_the_same_gradients() -> None:
    eager, _ = make("eager")
    fused, _ = make("sdpa")
    fused.load_state_dict(eager.state_dict())
    x, real = tensor(2, 7, 64), torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7], dtype=torch.bool)
    results = []
    for module in (eager, fused):
        leaf = x.clone().requires_grad_()
        y, _ = module(leaf, additive(0, 7, real), padding_mask=real)
        results.append(torch.autograd.grad((y * tensor(2, 7, 64, seed=5)).sum(), [leaf, *module.parameters()]))
    for a, b in zip(*results, strict=True):
        assert max_diff(a, b) < bound("f64_paths_max_abs")


@ATTENTION
@pytest.mark.parametrize("t", [0, 4, 7])
def test_causality(t: int, implementation: str) -> None:
    module, _ = make(implementation)
    x = tensor(1, 9, 64)
    changed = torch.cat([x[:, : t + 1], x[:, t + 1 :] + 1], dim=1)
    mask = additive(0, 9) if implementation == "eager" else None
    assert torch.equal(module(x, mask)[0][:, : t + 1], module(changed, mask)[0][:, : t + 1])


@ATTENTION
def test_bf16_stays_close_to_float64(implementation: str) -> None:
    module, config = make(implementation)
    x = tensor(1, 9, 64).bfloat16()
    module.bfloat16()
    expected = truth(module.double(), config, x[0].double())
    y, _ = module.bfloat16()(x, additive(0, 9).bfloat16())
    assert y.dtype == torch.bfloat16
    assert (y[0].double() - expected).norm() / expected.norm() < bound("unit_mla_bf16_relative")


def test_names_are_the_released_ones() -> None:
    module, _ = make()
    assert {name for name, _ in module.named_parameters()} == {
        f"{name}.weight"
        for name in "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj g_proj o_proj".split()
    }
    assert {name for name, _ in make(q_lora_rank=None)[0].named_parameters() if name.startswith("q_")} == {
        "q_proj.weight"
    }
