"""The parts compose: attention x residual x feed-forward, each with every implementation of the experts."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from modeling_k3 import K3Cache, K3Config, K3ForCausalLM
from tests.models import build, close_gradients, max_diff, released_weights, tiny_config, token_ids, within
from tests.oracle import Oracle
from tests.tolerances import bound

ATTENTION = {"kda": "KKK", "mla": "MMM", "mixed": "KMKM"}
RESIDUAL = {"attn_res": 2, "plain": None}
FEED_FORWARD: dict[str, dict[str, Any]] = {
    "latent": {},
    "full_width": {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
    "dense": {"num_experts": None},
}
EXPERTS = ("eager", "batched_mm", "grouped_mm")
GRID = list(product(ATTENTION, RESIDUAL, FEED_FORWARD))
IDS = token_ids(2, 9)


def cell(attention: str, residual: str, feed_forward: str) -> K3Config:
    """The config of one cell of the grid."""
    changes = FEED_FORWARD[feed_forward]
    return tiny_config(layers=ATTENTION[attention], attn_res_block_size=RESIDUAL[residual], **changes)


def left_padded() -> tuple[Tensor, Tensor]:
    """Ids and mask: the first row has four tokens less."""
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    return IDS.masked_fill(mask == 0, 157), mask


@pytest.mark.parametrize(("attention", "residual", "feed_forward"), GRID)
def test_equals_the_oracle(attention: str, residual: str, feed_forward: str) -> None:
    model = build(cell(attention, residual, feed_forward), dtype=torch.float64)
    truth = Oracle(model.config.to_dict(), released_weights(model)).run(IDS[0])
    assert max_diff(model(IDS).logits[0], truth.logits) < bound("f64_paths_max_abs")


@pytest.mark.parametrize(("attention", "residual", "feed_forward"), GRID)
def test_trains_and_survives_a_round_trip(attention: str, residual: str, feed_forward: str, tmp_path: Path) -> None:
    model = build(cell(attention, residual, feed_forward)).train()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0
    model.eval().save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and type(loaded) is K3ForCausalLM
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(("attention", "residual", "feed_forward"), GRID)
@torch.no_grad()
def test_cache_and_padding(attention: str, residual: str, feed_forward: str) -> None:
    model = build(cell(attention, residual, feed_forward))
    ids, mask = left_padded()
    whole = model(ids, attention_mask=mask).logits
    assert within(whole[0, 4:], model(IDS[:1, 4:]).logits[0], "same_function_fp32")
    cache, pieces = K3Cache(model.config), []
    for start, stop in ((0, 3), (3, 4), (4, 9)):
        pieces.append(model(ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache).logits)
    assert within(torch.cat(pieces, dim=1)[mask.bool()], whole[mask.bool()], "same_function_fp32")


@pytest.mark.parametrize(("attention", "residual", "feed_forward"), GRID)
def test_generates_as_the_loop_without_a_cache(attention: str, residual: str, feed_forward: str) -> None:
    config = cell(attention, residual, feed_forward)
    config.eos_token_id = None
    model, ids = build(config).requires_grad_(False), IDS
    for _ in range(5):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), ids)


@pytest.mark.parametrize(("attention", "residual", "feed_forward"), [c for c in GRID if c[2] != "dense"])
def test_implementations_of_the_experts_agree(attention: str, residual: str, feed_forward: str) -> None:
    config, (ids, mask) = cell(attention, residual, feed_forward), left_padded()
    reference = build(config).train()
    reference.set_experts_implementation("eager")
    expected = reference(ids, attention_mask=mask, labels=IDS)
    expected.loss.backward()
    for implementation in EXPERTS[1:]:
        model = build(config).train()
        model.set_experts_implementation(implementation)
        assert model.config._experts_implementation == implementation
        outputs = model(ids, attention_mask=mask, labels=IDS)
        outputs.loss.backward()
        assert within(outputs.logits, expected.logits, "same_function_fp32")
        assert close_gradients(model, reference, "same_gradient_fp32")


@pytest.mark.parametrize("implementation", EXPERTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_leaves_most_experts_idle(implementation: str, dtype: torch.dtype) -> None:
    """Idle experts get no gradient, consistently zero or None, and nothing is mixed up by an empty slice."""
    model = build(tiny_config(), dtype=dtype).train()
    model.set_experts_implementation(implementation)
    chosen = []
    gate = model.model.layers[1].block_sparse_moe.gate
    gate.register_forward_hook(lambda _m, _a, output: chosen.append(output[2]))
    model(IDS[:1, :1]).logits.sum().backward()
    gradient = model.model.layers[1].block_sparse_moe.experts.down_proj.grad
    assert gradient.isfinite().all() and gradient.dtype == dtype
    busy = {e for e in range(8) if gradient[e].abs().sum() > 0}
    assert busy == set(chosen[0].flatten().tolist()) and len(busy) == 2


@pytest.mark.parametrize("implementation", EXPERTS)
def test_batch_invariance(implementation: str) -> None:
    """A row's logits do not depend on its neighbours, whatever experts those choose."""
    model = build(tiny_config()).requires_grad_(False)
    model.set_experts_implementation(implementation)
    ids = token_ids(4, 9, seed=3)
    together = model(ids).logits
    for row in range(4):
        assert within(model(ids[row : row + 1]).logits, together[row : row + 1], "same_function_fp32")


@pytest.mark.parametrize("implementation", EXPERTS)
def test_tokens_of_another_rank_are_left_out(implementation: str) -> None:
    """Expert parallelism marks a choice that lives elsewhere by the number after the last expert and a weight of 0."""
    model = build(tiny_config()).requires_grad_(False)
    model.set_experts_implementation(implementation)
    experts, z = model.model.layers[1].block_sparse_moe.experts, torch.randn(5, 32)
    index, weights = torch.tensor([[0, 1], [3, 8], [8, 8], [8, 2], [7, 5]]), torch.rand(5, 2)
    weights = weights.masked_fill(index == 8, 0)
    expected = experts(z, index.clamp(max=7), weights)
    experts._is_expert_parallel = True
    assert within(experts(z, index, weights), expected, "same_function_fp32")


def test_experts_of_a_double_model_are_the_definition() -> None:
    model = build(tiny_config(), dtype=torch.float64)
    expected = model(IDS).logits
    for implementation in EXPERTS:
        model.set_experts_implementation(implementation)
        assert torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("shared", [None, 0, 1, 3])
def test_number_of_shared_experts(shared: int | None, tmp_path: Path) -> None:
    """None builds none, zero builds one of width zero as the release's code would."""
    model = build(tiny_config(num_shared_experts=shared))
    names = {n for n, _ in model.named_parameters() if "shared_experts" in n}
    assert bool(names) == (shared is not None)
    model(IDS, labels=IDS).loss.backward()
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("top_k", [1, 8])
def test_extreme_top_k(top_k: int) -> None:
    model = build(tiny_config(num_experts_per_token=top_k), dtype=torch.float64)
    truth = Oracle(model.config.to_dict(), released_weights(model)).run(IDS[0])
    assert max_diff(model(IDS).logits[0], truth.logits) < bound("f64_paths_max_abs")


@pytest.mark.parametrize(("first_dense", "frequency"), [(0, 1), (2, 2), (9, 1)])
def test_where_the_experts_stand(first_dense: int, frequency: int) -> None:
    model = build(tiny_config(first_k_dense_replace=first_dense, moe_layer_freq=frequency), dtype=torch.float64)
    sparse = [i for i, layer in enumerate(model.model.layers) if hasattr(layer, "block_sparse_moe")]
    assert sparse == [i for i in range(5) if i >= first_dense and i % frequency == 0]
    truth = Oracle(model.config.to_dict(), released_weights(model)).run(IDS[0])
    assert max_diff(model(IDS).logits[0], truth.logits) < bound("f64_paths_max_abs")


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@torch.no_grad()
def test_widths_of_the_short_convolution(kernel: int) -> None:
    """The release has four taps; a window of one tap holds only the current token."""
    model = build(tiny_config(linear={"short_conv_kernel_size": kernel}), dtype=torch.float64)
    truth = Oracle(model.config.to_dict(), released_weights(model)).run(IDS[0])
    cache = K3Cache(model.config)
    pieces = [model(piece, cache=cache).logits for piece in IDS.split([1, 2, 5, 1], dim=1)]
    assert max_diff(torch.cat(pieces, dim=1)[0], truth.logits) < bound("f64_paths_max_abs")
