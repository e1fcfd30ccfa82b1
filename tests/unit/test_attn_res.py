"""Attention over depth, against the equation for single numbers, and the order of sources inside a model."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modeling_k3 import K3ForCausalLM, precision
from modeling_k3.attn_res import K3KeyRMSNorm, K3PseudoQuery, mix_residuals
from tests.models import build, max_diff, tiny_config, token_ids
from tests.tolerances import bound
from tests.unit.helpers import tensor

DEPTHS = (1, 2, 3, 7)


def truth(sources: Sequence[Tensor], query: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Scores see normalised sources, the sum takes them raw; one token after the other."""
    rows = [source.double().flatten(0, -2).tolist() for source in sources]
    q, w = query.tolist(), gain.tolist()
    mixed, weights = [], []
    for candidates in zip(*rows, strict=True):
        scores = []
        for v in candidates:
            root = math.sqrt(sum(x * x for x in v) / len(v) + eps)
            scores.append(sum(n * g * x / root for n, g, x in zip(q, w, v, strict=True)))
        exps = [math.exp(score - max(scores)) for score in scores]
        p = [e / sum(exps) for e in exps]
        weights.append(p)
        mixed.append([sum(a * v[d] for a, v in zip(p, candidates, strict=True)) for d in range(len(q))])
    shape = sources[0].shape
    mixture = torch.tensor(mixed, dtype=torch.float64).view(shape)
    return mixture, torch.tensor(weights, dtype=torch.float64).view(*shape[:-1], len(sources))


def made(depth: int, width: int = 6, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Tensor]:
    """Sources of different sizes, as block sums are; a query and a gain."""
    sources = [tensor(2, 3, width, seed=i, dtype=dtype, scale=10.0 ** (i % 4 - 2)) for i in range(depth)]
    return sources, tensor(width, seed=50), 1 + tensor(width, seed=60, scale=0.5)


@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("depth", DEPTHS)
def test_mixture_follows_the_equation(depth: int, eps: float) -> None:
    """Among the sources are some at which the epsilon matters; 0.1 makes it matter everywhere."""
    sources, query, gain = made(depth)
    kept = [source.clone() for source in sources]
    h, p = mix_residuals(sources, query, gain, eps=eps)
    expected_h, expected_p = truth(sources, query, gain, eps)
    assert h.dtype == p.dtype == torch.float64
    assert max_diff(p, expected_p) < bound("unit_f64_max_abs") and max_diff(h, expected_h) < bound("unit_f64_max_abs")
    assert all(torch.equal(*pair) for pair in zip(sources, kept, strict=True))


@pytest.mark.parametrize("depth", DEPTHS)
def test_weights_are_a_distribution_over_depth(depth: int) -> None:
    sources, query, gain = made(depth)
    _, p = mix_residuals(sources, query, gain, eps=1e-5)
    assert p.shape == (2, 3, depth) and (p > 0).all()
    assert max_diff(p.sum(-1), torch.ones(2, 3)) < bound("unit_f64_max_abs")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_source_is_the_identity_to_the_bit(dtype: torch.dtype) -> None:
    source = tensor(2, 3, 6, dtype=dtype, scale=1e3)
    h, p = mix_residuals([source], tensor(6, seed=1, scale=100), tensor(6, seed=2), eps=1e-5)
    assert torch.equal(h, source) and h.dtype == dtype and (p == 1).all()


@pytest.mark.parametrize("depth", DEPTHS)
def test_zero_query_is_the_plain_mean(depth: int) -> None:
    """A fresh model starts here: every source weighs the same, however large it is."""
    sources, query, gain = made(depth)
    h, p = mix_residuals(sources, torch.zeros_like(query), gain, eps=1e-5)
    assert (p == p[0, 0, 0]).all() and max_diff(p, torch.full_like(p, 1 / depth)) < bound("unit_f64_max_abs")
    assert max_diff(h, torch.stack(sources).mean(0)) < bound("unit_f64_max_abs")


def test_there_is_no_scale_by_the_width() -> None:
    """Two opposite sources of ones, a query of ones: scores +D and -D."""
    one = torch.ones(1, 1, 4, dtype=torch.float64)
    unit = torch.ones(4, dtype=torch.float64)
    _, p = mix_residuals([one, -one], unit, unit, eps=1e-12)
    assert abs(p[0, 0, 0].item() - 1 / (1 + math.exp(-8.0))) < bound("unit_f64_max_abs")


def test_keys_are_normalised_and_values_are_not() -> None:
    """A source that grows keeps its weight (up to epsilon) and contributes in full."""
    sources, query, gain = made(3)
    sources = [source / source.pow(2).mean(-1, keepdim=True).sqrt() for source in sources]
    h, p = mix_residuals(sources, query, gain, eps=1e-12)
    grown = [sources[0], sources[1] * 1000, sources[2]]
    grown_h, grown_p = mix_residuals(grown, query, gain, eps=1e-12)
    assert max_diff(p, grown_p) < bound("f64_paths_max_abs")
    assert max_diff(grown_h - h, 999 * p[..., 1:2] * sources[1]) < bound("f64_paths_max_abs") * 1000


def test_the_gain_acts_on_the_key_only() -> None:
    sources, query, gain = made(3)
    h, p = mix_residuals(sources, query, gain, eps=1e-5)
    same_h, same_p = mix_residuals(sources, query * 4, gain / 4, eps=1e-5)
    assert torch.equal(h, same_h) and torch.equal(p, same_p)
    other_h, _ = mix_residuals(sources, query, gain * 4, eps=1e-5)
    assert max_diff(h, other_h) > 1e-3


def test_the_order_of_sources_does_not_matter() -> None:
    sources, query, gain = made(4)
    h, p = mix_residuals(sources, query, gain, eps=1e-5)
    order = [2, 0, 3, 1]
    shuffled_h, shuffled_p = mix_residuals([sources[i] for i in order], query, gain, eps=1e-5)
    assert max_diff(shuffled_p, p[..., order]) < bound("unit_f64_max_abs")
    assert max_diff(shuffled_h, h) < bound("unit_f64_max_abs")


def test_an_extreme_query_chooses_one_source() -> None:
    sources, query, gain = made(4, dtype=torch.float32)
    h, p = mix_residuals(sources, query * 1e8, gain, eps=1e-5)
    assert p.isfinite().all() and (p.max(-1).values == 1).all()
    chosen = torch.stack(sources, -2).gather(-2, p.argmax(-1)[..., None, None].expand(-1, -1, 1, 6)).squeeze(-2)
    assert torch.equal(h, chosen)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_gradients_of_mixture_and_weights(depth: int, eps: float) -> None:
    sources, query, gain = made(depth, width=4)
    inputs = [x.requires_grad_() for x in (*(source * 10 for source in sources), query, gain)]

    def call(*given: Tensor) -> tuple[Tensor, Tensor]:
        return mix_residuals(given[:depth], given[depth], given[depth + 1], eps=eps)

    assert torch.autograd.gradcheck(call, inputs)


def test_gradients_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sources, query, gain = made(3)
    inputs = [x.requires_grad_() for x in (*sources, query, gain)]

    def gradients() -> tuple[Tensor, ...]:
        h, p = mix_residuals(inputs[:3], query, gain, eps=1e-5)
        return torch.autograd.grad((h.square().sum(), p.square().sum()), inputs)

    whole = gradients()
    monkeypatch.setattr(precision, "_BLOCK", 1)
    for mine, expected in zip(gradients(), whole, strict=True):
        assert mine.shape == expected.shape and max_diff(mine, expected) < 1e-12


def test_gradients_reach_only_what_asks_for_them() -> None:
    """A frozen query, frozen sources, an unused output: what is left does not change. Sources may lie transposed."""
    sources, query, gain = made(3)

    def grads(wanted: Sequence[int], use: int) -> list[Tensor]:
        leaves = [x.detach().clone() for x in (*sources, query, gain)]
        leaves[0] = leaves[0].transpose(0, 1).contiguous().transpose(0, 1)
        for index in wanted:
            leaves[index].requires_grad_()
        result = mix_residuals(leaves[:3], leaves[3], leaves[4], eps=1e-5)[use]
        return list(torch.autograd.grad(result.pow(2).sum(), [leaves[index] for index in wanted]))

    for use in (0, 1):
        together = grads(range(5), use)
        for index in range(5):
            assert max_diff(grads([index], use)[0], together[index]) < bound("unit_f64_max_abs")


def test_a_query_at_zero_is_no_standstill() -> None:
    sources, query, gain = made(3)
    zero = torch.zeros_like(query, requires_grad=True)
    mix_residuals(sources, zero, gain, eps=1e-3)[0].sum().backward()
    assert zero.grad.abs().max() > 1e-3


def test_gradients_in_half_precision_have_the_dtype_of_their_source() -> None:
    sources, query, gain = made(3, width=64, dtype=torch.bfloat16)
    leaves = [source.requires_grad_() for source in sources]
    query = query.div(8).bfloat16().requires_grad_()
    mix_residuals(leaves, query, gain.bfloat16(), eps=1e-5)[0].float().pow(2).sum().backward()
    wide = [source.detach().double().requires_grad_() for source in sources]
    wide_query = query.detach().double().requires_grad_()
    mix_residuals(wide, wide_query, gain.bfloat16().double(), eps=1e-5)[0].pow(2).sum().backward()
    for narrow, expected in zip([*leaves, query], [*wide, wide_query], strict=True):
        assert narrow.grad.dtype == torch.bfloat16
        error = (narrow.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert error < bound("unit_bf16_gradient_relative")


def test_second_derivatives_are_refused_not_dropped() -> None:
    sources, query, gain = made(3)
    leaf = query.clone().requires_grad_()
    (first,) = torch.autograd.grad(
        mix_residuals(sources, leaf, gain, eps=1e-3)[0].pow(3).sum(), leaf, create_graph=True
    )
    with pytest.raises(RuntimeError, match="differentia"):
        first.pow(2).sum().backward()


def test_half_precision_is_mixed_wide_and_rounded_once() -> None:
    sources, query, gain = made(5, width=64, dtype=torch.bfloat16)
    query, gain = query.bfloat16() / 8, gain.bfloat16()
    h, p = mix_residuals(sources, query, gain, eps=1e-5)
    expected_h, expected_p = truth(sources, query.float(), gain.float(), 1e-5)
    assert h.dtype == torch.bfloat16 and p.dtype == torch.float32
    assert max_diff(p, expected_p) < bound("unit_fp32_max_abs")
    # One rounding to 8 bits, on top of an error far below it.
    assert ((h.double() - expected_h).abs() <= expected_h.abs() * 2**-8 + bound("unit_fp32_max_abs")).all()


def test_autocast_does_not_reach_the_scores() -> None:
    sources, query, gain = made(4, width=64, dtype=torch.float32)
    query, gain = query.float(), gain.float()
    _, p = mix_residuals(sources, query, gain, eps=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h, inside = mix_residuals(sources, query, gain, eps=1e-5)
    assert inside.dtype == h.dtype == torch.float32
    assert max_diff(inside, p) < bound("unit_fp32_max_abs")


def test_the_modules_own_the_released_weights() -> None:
    """Called, not read; and not `nn.Linear`, which quantisers and adapters collect."""
    norm, query = K3KeyRMSNorm(6), K3PseudoQuery(6)
    assert {n: tuple(p.shape) for n, p in norm.named_parameters()} == {"weight": (6,)} and (norm() == 1).all()
    assert {n: tuple(p.shape) for n, p in query.named_parameters()} == {"weight": (1, 6)} and (query.weight == 0).all()
    assert not isinstance(query, nn.Linear)
    query.double().weight.data = tensor(1, 6, seed=9)
    norm.double().weight.data = tensor(6, seed=8)
    sources, *_ = made(3)
    mixed, weights = query(sources, norm(), eps=1e-5)
    expected_h, expected_p = truth(sources, query.weight[0], norm.weight, 1e-5)
    assert max_diff(mixed, expected_h) < bound("unit_f64_max_abs")
    assert max_diff(weights, expected_p) < bound("unit_f64_max_abs")


class Trace:
    """What goes into and comes out of every sub-layer of a model, by forward hooks."""

    def __init__(self, model: K3ForCausalLM) -> None:
        self.read: list[Tensor] = []
        self.wrote: list[Tensor] = []
        self.embedding = self.final = torch.empty(0)
        body = model.model
        body.embed_tokens.register_forward_hook(lambda m, i, o: setattr(self, "embedding", o))
        body.norm.register_forward_pre_hook(lambda m, i: setattr(self, "final", i[0]))
        for layer in body.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.register_forward_pre_hook(lambda m, i: self.read.append(i[0]))
            feed_forward = layer.block_sparse_moe if layer.is_sparse else layer.mlp
            for part in (layer.self_attn, feed_forward):
                part.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self.wrote.append(output[0] if isinstance(output, tuple) else output)


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 7])
def test_block_boundaries(block_size: int) -> None:
    """Every sub-layer of a 5-layer model reads the mixture of an explicit list of sources, and writes into its sum.

    At layer i with i mod S = 0 the sum that came in becomes a finished block and a new sum starts at zero.
    """
    model = build(tiny_config(attn_res_block_size=block_size), dtype=torch.float64)
    trace = Trace(model)
    with torch.no_grad():
        output = model(token_ids(1, 4), output_depth_weights=True)
    finished: list[Tensor] = []
    running, step, counts = trace.embedding, iter(zip(trace.read, trace.wrote, strict=True)), []
    eps = model.config.rms_norm_eps

    def check(read: Tensor, sources: list[Tensor], query: nn.Module, norm: nn.Module) -> None:
        counts.append(len(sources))
        expected = truth(sources, query.weight[0], norm.weight, eps)[0]
        assert max_diff(read, expected) < bound("f64_paths_max_abs")

    for i, layer in enumerate(model.model.layers):
        read, wrote = next(step)
        check(read, [*finished, running], layer.self_attention_res_proj, layer.self_attention_res_norm)
        if i % block_size == 0:
            finished, running = [*finished, running], wrote
        else:
            running = running + wrote
        read, wrote = next(step)
        check(read, [*finished, running], layer.mlp_res_proj, layer.mlp_res_norm)
        running = running + wrote
    body = model.model
    check(trace.final, [*finished, running], body.output_attn_res_proj, body.output_attn_res_norm)
    assert len(finished) == -(-5 // block_size)
    assert [weights.shape[-1] for weights in output.depth_weights] == counts
