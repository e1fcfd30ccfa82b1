"""Assisted decoding: drafts by another model, by the model itself, from the prompt; verified and taken back."""

from typing import Any

import pytest
import torch

from modeling_k3 import K3Cache, K3ForCausalLM
from tests.integration.test_generate import GREEDY, PROMPT, by_hand
from tests.models import build, tiny_config, variant


@pytest.fixture(scope="module")
def tiny() -> K3ForCausalLM:
    """The tiny model without an end token; tests do not change it."""
    return build(tiny_config(eos_token_id=None)).requires_grad_(False)


@pytest.mark.parametrize("name", ["tiny", "kda_only", "mla_only"])
@pytest.mark.parametrize(
    "way", ["assistant", "itself", "a draft that is always wrong", "prompt lookup", "early exit", "wide drafts"]
)
def test_drafts_change_nothing(name: str, way: str) -> None:
    """Drafts are verified and taken back: the outcome is plain greedy decoding, whatever the draft says."""
    model = build(variant(name, eos_token_id=None)).requires_grad_(False)
    assistant = build(tiny_config("KM", eos_token_id=None), seed=5).requires_grad_(False)
    options: dict[str, Any] = {
        "assistant": {"assistant_model": assistant},
        "itself": {"assistant_model": model},
        "a draft that is always wrong": {"assistant_model": assistant},
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "early exit": {"assistant_early_exit": 2},
        "wide drafts": {"assistant_model": assistant, "num_assistant_tokens": 50},
    }[way]
    if way == "a draft that is always wrong":
        assistant.lm_head.weight.zero_()
        assistant.lm_head.bias = torch.nn.Parameter(torch.zeros(160).index_fill(0, torch.tensor([0]), 1.0))
    if way == "prompt lookup":
        prompt = torch.cat([PROMPT[:1], PROMPT[:1, 2:6]], dim=1)
    else:
        prompt = PROMPT[:1]
    expected = by_hand(model, prompt, 24)
    assert way != "a draft that is always wrong" or not (expected[:, 9:] == 0).any()
    types = model.config.layer_types
    output = model.generate(prompt, max_new_tokens=24, do_sample=False, **options)
    assert torch.equal(output, expected) and model.config.layer_types == types


def test_a_cache_survives_assisted_decoding(tiny: K3ForCausalLM) -> None:
    """What comes back stands where the output ends, and goes on as if nothing had been taken back."""
    first = tiny.generate(
        PROMPT[:1], max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=3, return_dict_in_generate=True
    )
    assert first.cache.get_seq_length() == 14
    rest = tiny.generate(first.sequences, cache=first.cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(rest, by_hand(tiny, PROMPT[:1], 11))
    given = K3Cache(tiny.config)
    tiny(PROMPT[:1, :4], cache=given)
    again = tiny.generate(PROMPT[:1], cache=given, prompt_lookup_num_tokens=3, **GREEDY)
    assert torch.equal(again, by_hand(tiny, PROMPT[:1]))


@pytest.mark.parametrize("depth", [0, 5, 9])
def test_an_exit_that_is_no_layer_is_refused(tiny: K3ForCausalLM, depth: int) -> None:
    with pytest.raises(ValueError, match="assistant_early_exit"):
        tiny.generate(PROMPT[:1], assistant_early_exit=depth, **GREEDY)


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 2}])
def test_drafts_after_a_padded_prompt(tiny: K3ForCausalLM, options: dict[str, Any]) -> None:
    ids, mask = PROMPT[:1].clone(), torch.ones_like(PROMPT[:1])
    mask[0, :3] = 0
    output = tiny.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, **options)
    assert torch.equal(output[:, 3:], by_hand(tiny, ids[:, 3:], 20))


def test_embeddings_and_drafts_are_refused(tiny: K3ForCausalLM) -> None:
    embeds = tiny.get_input_embeddings()(PROMPT[:1])
    with pytest.raises(ValueError, match="inputs_embeds with assisted decoding"):
        tiny.generate(inputs_embeds=embeds, prompt_lookup_num_tokens=3, **GREEDY)
