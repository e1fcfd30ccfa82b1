"""The ways a model may be called: training, checkpointing, equivalent inputs, resizing, tying; what is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from modeling_k3 import K3Cache, K3ForCausalLM
from tests.models import (
    build,
    cache_tensors,
    close_gradients,
    same_tensors,
    tiny_config,
    token_ids,
    variant,
    within,
)

IDS = token_ids(2, 12)
ONES = torch.ones_like(IDS)


@pytest.fixture(scope="module")
def tiny() -> K3ForCausalLM:
    """The tiny model in fp32; tests do not change it."""
    return build(tiny_config()).requires_grad_(False)


@pytest.fixture(scope="module")
def logits(tiny: K3ForCausalLM) -> Tensor:
    """Its logits for IDS."""
    return tiny(IDS).logits


def padded_mask() -> Tensor:
    """Left padding in the first row, right padding in the second."""
    mask = ONES.clone()
    mask[0, :4], mask[1, 9:] = 0, 0
    return mask


# -- training ---------------------------------------------------------------------------------------------------


def test_train_mode_equals_eval_mode(tiny: K3ForCausalLM, logits: Tensor) -> None:
    assert torch.equal(copy.deepcopy(tiny).train()(IDS).logits, logits)


def test_every_parameter_gets_a_gradient() -> None:
    """All but the mix before layer 0, which has one source, the routing bias, and experts nobody chose."""
    model = build(tiny_config(num_experts=2)).train()
    model(IDS, labels=IDS).loss.backward()
    silent = {n for n, p in model.named_parameters() if p.grad is None or p.grad.eq(0).all()}
    expected = {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    expected |= {f"model.layers.{i}.block_sparse_moe.gate.e_score_correction_bias" for i in range(1, 5)}
    assert silent == expected


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["tiny", "plain_residual", "full_width_moe"])
def test_gradient_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    mask = padded_mask()
    labels = IDS.masked_fill(mask == 0, -100)
    plain, checkpointed = (build(variant(name), dtype=torch.float64).train() for _ in range(2))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    losses = []
    for model in (plain, checkpointed):
        loss = model(IDS, attention_mask=mask, labels=labels).loss
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    assert close_gradients(checkpointed, plain, "checkpointing_f64")


def test_checkpointing_records_the_same_outputs() -> None:
    model = build(tiny_config()).train()
    asked = {"output_hidden_states": True, "output_router_logits": True, "output_depth_weights": True}
    expected = model(IDS, **asked)
    model.gradient_checkpointing_enable()
    outputs = model(IDS, **asked)
    outputs.logits.sum().backward()
    for key in ("hidden_states", "router_logits", "depth_weights"):
        assert len(outputs[key]) == len(expected[key])
        assert all(torch.equal(a, b) for a, b in zip(outputs[key], expected[key], strict=True))


@pytest.mark.parametrize("name", ["tiny", "kda_only", "mla_only"])
def test_checkpointing_and_a_cache_do_not_mix(name: str) -> None:
    """Recomputation would update a cache twice: none is made, and a given one with tokens is refused, unchanged."""
    model = build(variant(name))
    cache = K3Cache(model.config)
    with torch.no_grad():
        model(IDS[:, :6], cache=cache)
    before = cache_tensors(cache)
    model.train().gradient_checkpointing_enable()
    assert model(IDS, use_cache=True).cache is None
    with pytest.raises(ValueError, match="checkpointing"):
        model(IDS[:, 6:], cache=cache)
    assert same_tensors(cache_tensors(cache), before) and cache.get_seq_length() == 6


# -- equivalent inputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_is_inert_on_either_side(tiny: K3ForCausalLM, logits: Tensor, implementation: str) -> None:
    model, mask = copy.deepcopy(tiny), padded_mask()
    model.set_attn_implementation(implementation)
    outputs = model(IDS, attention_mask=mask)
    assert within(outputs.logits[0, 4:], model(IDS[:1, 4:]).logits[0], "same_function_fp32")
    assert within(outputs.logits[1, :9], logits[1, :9], "same_function_fp32")


def test_embeddings_instead_of_ids(tiny: K3ForCausalLM, logits: Tensor) -> None:
    embeds = tiny.get_input_embeddings()(IDS)
    outputs = tiny(inputs_embeds=embeds, output_hidden_states=True, labels=IDS)
    assert torch.equal(outputs.logits, logits) and torch.equal(outputs.hidden_states[0], embeds)
    assert torch.equal(outputs.loss, tiny(IDS, labels=IDS).loss)


@pytest.mark.parametrize("shift", [0, 1, 1000])
def test_positions_are_not_read(tiny: K3ForCausalLM, logits: Tensor, shift: int) -> None:
    assert torch.equal(tiny(IDS, position_ids=torch.arange(12)[None] + shift).logits, logits)
    counted = (padded_mask().cumsum(-1) - 1).clamp(min=0)
    expected = tiny(IDS, attention_mask=padded_mask()).logits
    assert torch.equal(tiny(IDS, attention_mask=padded_mask(), position_ids=counted).logits, expected)


def test_rows_do_not_see_each_other(tiny: K3ForCausalLM, logits: Tensor) -> None:
    assert within(tiny(IDS.flip(0)).logits.flip(0), logits, "same_function_fp32")
    assert within(tiny(IDS[1:]).logits, logits[1:], "same_function_fp32")
    changed = IDS.clone()
    changed[0] = token_ids(1, 12, seed=5)[0]
    assert within(tiny(changed).logits[1], logits[1], "same_function_fp32")


def test_no_token_sees_a_later_one(tiny: K3ForCausalLM, logits: Tensor) -> None:
    changed = IDS.clone()
    changed[:, 7:] = token_ids(2, 5, seed=6)
    assert within(tiny(changed).logits[:, :7], logits[:, :7], "same_function_fp32")


# -- embeddings and head ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_survive_a_round_trip(tied: bool, tmp_path: Path) -> None:
    model = build(tiny_config(tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_resized_vocabulary(tied: bool, tmp_path: Path) -> None:
    model = build(tiny_config(tie_word_embeddings=tied))
    expected = model(IDS).logits
    model.resize_token_embeddings(192)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == loaded.vocab_size == loaded.model.vocab_size == 192
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert torch.equal(loaded(IDS).logits[..., :160], expected)
    new = IDS + 32
    assert loaded(new, labels=new).loss.isfinite()
    with pytest.raises(ValueError, match="allowed are 0 to 191"):
        loaded(IDS + 160)


# -- refusals ---------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mask of three dimensions": ({"attention_mask": torch.ones(2, 4, 4)}, "attention_mask"),
    "mask of four dimensions": ({"attention_mask": torch.ones(2, 1, 4, 10)}, "attention_mask"),
    "masks by layer type": ({"attention_mask": {"full_attention": None}}, "attention_mask"),
    "positions of another length": ({"position_ids": torch.arange(9)[None]}, "position_ids"),
    "no token": ({"input_ids": IDS[:, :0]}, "token"),
    "not causal": ({"is_causal": False}, "is_causal"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason_and_without_a_trace(tiny: K3ForCausalLM, case: str) -> None:
    cache = K3Cache(tiny.config)
    tiny(IDS[:, :6], cache=cache)
    before = cache_tensors(cache)
    arguments, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        tiny(**{"input_ids": IDS[:, :4], **arguments}, cache=cache)
    assert same_tensors(cache_tensors(cache), before)
    assert cache.get_seq_length() == 6 and not cache.has_padding
