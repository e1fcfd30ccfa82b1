"""The models: against the oracle, their outputs, losses, precision, checkpointing, and what they refuse."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from modeling_k3 import K3Cache, K3ForCausalLM, K3ForSequenceClassification, K3ForTokenClassification, K3Model
from tests.models import (
    BOUNDS,
    VARIANTS,
    build,
    close_gradients,
    max_diff,
    released_weights,
    tiny_config,
    token_ids,
    variant,
    within,
)
from tests.oracle import Oracle, Truth
from tests.tolerances import bound

IDS = token_ids(2, 12)


@pytest.fixture(scope="module")
def tiny() -> K3ForCausalLM:
    """The tiny model in fp32; tests do not change it."""
    return build(tiny_config()).requires_grad_(False)


@pytest.fixture(scope="module")
def logits(tiny: K3ForCausalLM) -> Tensor:
    """Its logits for IDS."""
    return tiny(IDS).logits


def truth_of(model: K3ForCausalLM, row: Tensor) -> Truth:
    return Oracle(model.config.to_dict(), released_weights(model)).run(row)


# -- the oracle -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_oracle(name: str) -> None:
    model = build(variant(name), dtype=torch.float64)
    outputs = model(IDS, output_router_logits=True)
    for row in range(2):
        truth = truth_of(model, IDS[row])
        assert max_diff(outputs.logits[row], truth.logits) < bound("f64_paths_max_abs")
        for i, state in enumerate(truth.states):
            assert max_diff(outputs.cache.layers[i].state[row], state.mT) < bound("f64_paths_max_abs")


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 7])
def test_block_sizes_equal_the_oracle(block_size: int) -> None:
    model = build(tiny_config(attn_res_block_size=block_size), dtype=torch.float64)
    outputs = model(IDS, output_depth_weights=True)
    truth = truth_of(model, IDS[0])
    assert max_diff(outputs.logits[0], truth.logits) < bound("f64_paths_max_abs")
    assert len(outputs.depth_weights) == len(truth.depth_weights) == 2 * 5 + 1
    for i, (weights, expected) in enumerate(zip(outputs.depth_weights, truth.depth_weights, strict=True)):
        # The mix before attention of layer l sees the blocks begun before l, everything later those begun up to l.
        layer = min(i // 2, 4)
        starts = -(-layer // block_size) if i % 2 == 0 and i < 10 else layer // block_size + 1
        assert weights.shape == (2, 12, starts + 1)
        assert max_diff(weights[0], expected) < bound("f64_paths_max_abs")
        assert within(weights.sum(-1), torch.ones(2, 12), "sums_to_one")


def test_a_row_of_several_chunks_equals_the_oracle() -> None:
    model = build(tiny_config(layers="KM"), dtype=torch.float64)
    ids = token_ids(1, 70)
    assert max_diff(model(ids).logits[0], truth_of(model, ids[0]).logits) < bound("f64_paths_max_abs")


def test_router_chooses_what_the_oracle_chooses() -> None:
    model = build(tiny_config(), dtype=torch.float64)
    chosen = []
    for layer in model.model.layers[1:]:
        layer.block_sparse_moe.gate.register_forward_hook(lambda _m, _a, output: chosen.append(output[1:]))
    model(IDS[:1])
    for (weights, experts), expected in zip(chosen, truth_of(model, IDS[0]).chosen, strict=True):
        for token, by_expert in enumerate(expected):
            assert set(experts[token].tolist()) == set(by_expert)
            assert sum(weights[token].tolist()) == pytest.approx(sum(by_expert.values()))


# -- outputs ----------------------------------------------------------------------------------------------------


def test_hidden_states_are_the_stream(tiny: K3ForCausalLM) -> None:
    outputs = tiny(IDS, output_hidden_states=True)
    assert len(outputs.hidden_states) == 6 and all(h.shape == (2, 12, 64) for h in outputs.hidden_states)
    assert torch.equal(outputs.hidden_states[0], tiny.get_input_embeddings()(IDS))
    assert torch.equal(tiny.lm_head(outputs.hidden_states[-1]), outputs.logits)


def test_router_logits_of_the_sparse_layers_in_fp32(tiny: K3ForCausalLM) -> None:
    outputs = copy.deepcopy(tiny).bfloat16()(IDS, output_router_logits=True)
    assert [tuple(x.shape) for x in outputs.router_logits] == [(24, 8)] * 4
    assert {x.dtype for x in outputs.router_logits} == {torch.float32}


def test_attentions_stand_at_the_place_of_their_layer(tiny: K3ForCausalLM, logits: Tensor) -> None:
    model = copy.deepcopy(tiny)
    kinds = model.config.layer_types
    assert model(IDS, output_attentions=True).attentions == (None,) * len(kinds), "sdpa forms none either"
    model.set_attn_implementation("eager")
    outputs = model(IDS, output_attentions=True)
    assert [kind == "linear_attention" for kind in kinds] == [a is None for a in outputs.attentions]
    full = [a for a in outputs.attentions if a is not None]
    assert [tuple(a.shape) for a in full] == [(2, 3, 12, 12)] * 2
    assert within(full[0].sum(-1), torch.ones(2, 3, 12), "sums_to_one") and full[0].triu(1).abs().max() == 0
    assert within(outputs.logits, logits, "same_function_fp32")
    exact = model(IDS, output_attentions=True, kda_implementation="exact").attentions
    assert [a.shape[0] for a in exact] == [2] * len(kinds) and all(a.shape[2:] == (12, 12) for a in exact)
    model.set_kda_implementation("exact", layers=[0])
    model.config.output_attentions = True
    by_config = model(IDS).attentions
    assert [a is None for a in by_config] == [k == "linear_attention" and i > 0 for i, k in enumerate(kinds)]
    assert model(IDS, output_attentions=False).attentions is None
    model.config.output_attentions = False
    some = model(IDS, output_attentions=True, return_dict=False)[-1]
    assert [a is None for a in some] == [k == "linear_attention" and i > 0 for i, k in enumerate(kinds)]


def test_attentions_while_generating(tiny: K3ForCausalLM) -> None:
    model = copy.deepcopy(tiny)
    model.set_attn_implementation("eager")
    options = {"max_new_tokens": 3, "do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    for beams in (1, 2):
        steps = model.generate(IDS, num_beams=beams, eos_token_id=None, **options).attentions
        assert len(steps) == 3
        for step in steps:
            assert [a is None for a in step] == [kind == "linear_attention" for kind in model.config.layer_types]
    with pytest.raises(ValueError, match="output_attentions=True with drafts"):
        model.generate(IDS[:1], prompt_lookup_num_tokens=2, **options)


def test_nothing_is_recorded_unless_asked_for(tiny: K3ForCausalLM) -> None:
    outputs = tiny(IDS)
    assert {"logits", "cache"} == set(outputs)
    assert "cache" not in tiny(IDS, use_cache=False) and isinstance(tiny(IDS, return_dict=False), tuple)


@pytest.mark.parametrize("keep", [1, 3, 12, torch.tensor([0, 5, 11]), torch.tensor([-1])])
def test_logits_to_keep(tiny: K3ForCausalLM, logits: Tensor, keep: int | Tensor) -> None:
    expected = logits[:, keep] if isinstance(keep, Tensor) else logits[:, -keep:]
    assert within(tiny(IDS, logits_to_keep=keep).logits, expected, "same_function_fp32")


@pytest.mark.parametrize("config", [tiny_config(), variant("plain_residual")], ids=["attn_res", "plain"])
def test_depth_weights_need_attn_res(config: Any) -> None:
    assert len(build(config)(IDS, output_depth_weights=True).depth_weights) == (11 if config.attn_res_block_size else 0)


def test_deprecated_name_of_the_cache(tiny: K3ForCausalLM, logits: Tensor) -> None:
    cache = K3Cache(tiny.config)
    with pytest.warns(FutureWarning, match="past_key_values"):
        outputs = tiny(IDS[:, :6], past_key_values=cache)
    assert outputs.cache is cache and outputs.past_key_values is cache and cache.get_seq_length() == 6
    assert within(tiny(IDS[:, 6:], cache=cache).logits, logits[:, 6:], "same_function_fp32")


@pytest.mark.parametrize(
    ("model_class", "labels", "shape"),
    [(K3ForSequenceClassification, torch.tensor([0, 2]), (2, 3)), (K3ForTokenClassification, IDS % 3, (2, 12, 3))],
)
def test_classification_heads(model_class: type, labels: Tensor, shape: tuple[int, ...]) -> None:
    model = build(tiny_config(num_labels=3), model_class=model_class)
    outputs = model(IDS, labels=labels)
    outputs.loss.backward()
    assert outputs.logits.shape == shape and outputs.loss.isfinite()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
    assert isinstance(model.model, K3Model)


@pytest.mark.parametrize("filler", [157, 3], ids=["pad token", "another token"])
@pytest.mark.parametrize("side", [slice(8, None), slice(None, 4)], ids=["right", "left"])
def test_sequence_label_is_read_at_the_last_real_token(side: slice, filler: int) -> None:
    """The mask says what is padding; which token stands there does not matter, nor whether ids are given at all."""
    model = build(tiny_config(num_labels=3), model_class=K3ForSequenceClassification).requires_grad_(False)
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[0, side], mask[0, side] = filler, 0
    ids[0, mask[0].bool()] = IDS[0, :8]
    alone, embeds = model(IDS[:1, :8]).logits, model.get_input_embeddings()(ids)
    assert within(model(ids, attention_mask=mask).logits[:1], alone, "same_function_fp32")
    assert within(model(inputs_embeds=embeds, attention_mask=mask).logits[:1], alone, "same_function_fp32")


# -- losses -----------------------------------------------------------------------------------------------------


def test_loss_is_the_shifted_cross_entropy(tiny: K3ForCausalLM, logits: Tensor) -> None:
    labels = IDS.masked_fill(torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.3, -100)
    flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    assert within(tiny(IDS, labels=labels).loss, F.cross_entropy(*flat), "same_loss_fp32")
    total = F.cross_entropy(*flat, reduction="sum")
    for items in (7, torch.tensor(7)):
        assert within(tiny(IDS, labels=labels, num_items_in_batch=items).loss, total / 7, "same_loss_fp32")


def test_accumulated_micro_batches_equal_one_batch() -> None:
    ids = token_ids(4, 12, seed=1)
    labels = ids.clone()
    for row, kept in enumerate((12, 3, 7, 2)):
        labels[row, kept:] = -100
    items = int((labels[:, 1:] != -100).sum())
    whole, pieces = build(tiny_config()), build(tiny_config())
    loss = whole(ids, labels=labels).loss
    loss.backward()
    summed = torch.zeros(())
    for row in range(4):
        part = pieces(ids[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=items).loss
        part.backward()
        summed += part.detach()
    assert within(summed, loss.detach(), "same_loss_fp32")
    assert close_gradients(pieces, whole, "same_gradient_fp32")


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 5}, {"num_items_in_batch": 0}], ids=str)
def test_no_label_at_all_is_a_loss_of_zero(options: dict[str, int]) -> None:
    model = build(tiny_config())
    loss = model(IDS, labels=torch.full_like(IDS, -100), **options).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# -- start values and precision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bounded", [True, False])
def test_start_values(bounded: bool) -> None:
    config = tiny_config(linear={"gate_lower_bound": -5.0 if bounded else None}, initializer_range=0.1)
    for name, parameter in K3ForCausalLM(config).named_parameters():
        if name.endswith(("_res_proj.weight", "e_score_correction_bias")) or (bounded and name.endswith("A_log")):
            assert parameter.eq(0).all(), name
        elif name.endswith("norm.weight"):
            assert parameter.eq(1).all(), name
        elif name.endswith("A_log"):
            assert (parameter.exp() >= 1).all() and (parameter.exp() <= 16).all(), name
        elif name.endswith("dt_bias"):
            step = F.softplus(parameter)
            assert (step > 9e-4).all() and (step < 0.11).all(), name
        elif name.endswith("conv1d.weight"):
            assert parameter.abs().max() <= 0.5 and parameter.std() > 0.2, name
        else:
            assert 0.08 < parameter.std() < 0.12, name
        assert parameter.requires_grad != name.endswith("e_score_correction_bias")


def test_start_is_uniform_over_depth() -> None:
    for weights in K3ForCausalLM(tiny_config())(IDS, output_depth_weights=True).depth_weights:
        assert within(weights, torch.full_like(weights, 1 / weights.shape[-1]), "sums_to_one")


@pytest.mark.parametrize("way", ["from_config", "double first", "load"])
def test_bf16_keeps_the_fp32_list(way: str, tiny: K3ForCausalLM, tmp_path: Any) -> None:
    if way == "from_config":
        model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.bfloat16)
    elif way == "double first":
        model = copy.deepcopy(tiny).double().bfloat16()
    else:
        tiny.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kinds = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    assert {p.dtype for n, p in model.named_parameters() if n.endswith(kinds)} == {torch.float32}
    assert {p.dtype for n, p in model.named_parameters() if not n.endswith(kinds)} == {torch.bfloat16}
    assert model(IDS).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["tiny", "plain_residual", "mla_only", "kda_only", "full_width_moe"])
def test_bf16_forward_and_backward(name: str) -> None:
    model, wide = build(variant(name), dtype=torch.bfloat16).train(), build(variant(name))
    outputs = model(IDS, labels=IDS)
    outputs.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    expected = wide(IDS).logits
    relative = (outputs.logits.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert relative.median() < bound("median_relative_error_per_token")


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("length", [3, 12])
def test_autocast_keeps_router_gates_and_state_in_fp32(experts: str, length: int) -> None:
    model, ids = build(tiny_config()).train(), IDS[:, :length]
    model.set_experts_implementation(experts)
    gate, probe = model.model.layers[1].block_sparse_moe.gate, torch.randn(5, 64)
    routed = gate(probe)[0]
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(ids, labels=ids, use_cache=True, output_router_logits=True, output_depth_weights=True)
        assert torch.equal(gate(probe)[0], routed)
    outputs.loss.backward()
    wide = [outputs.cache.layers[0].state, *outputs.router_logits, *outputs.depth_weights]
    assert {x.dtype for x in wide} == {torch.float32}
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("length", [3, 12])
def test_autocast_loss(length: int) -> None:
    model, ids = build(variant("dense")).requires_grad_(False), token_ids(16, length)
    expected = model(ids, labels=ids).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        assert abs(model(ids, labels=ids).loss.item() / expected - 1) < BOUNDS["autocast_loss"].bound
