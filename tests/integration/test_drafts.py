"""Assisted decoding: drafts by another model, by the model itself, from the prompt; verified and taken back."""

import threading
from typing import Any

import pytest
import torch

from modeling_k3 import K3Cache, K3ForCausalLM
from tests.integration.test_generate import GREEDY, PROMPT, by_hand
from tests.models import build, max_diff, tiny_config, variant
from tests.tolerances import bound


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


def test_drafts_of_the_first_layers_leave_other_threads_alone(tiny: K3ForCausalLM) -> None:
    """The depth of a draft belongs to its calls, not to the config that all calls read."""
    expected, stop, failures = tiny(PROMPT[:1], use_cache=False).logits, threading.Event(), []

    def draft() -> None:
        try:
            while not stop.is_set():
                tiny.generate(PROMPT[:1], assistant_early_exit=2, **GREEDY)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=draft)
    thread.start()
    wrong = sum(not torch.equal(tiny(PROMPT[:1], use_cache=False).logits, expected) for _ in range(60))
    stop.set()
    thread.join()
    assert not failures and wrong == 0


def test_drafts_run_the_first_layers_only(tiny: K3ForCausalLM) -> None:
    counts, config = [0] * 5, tiny.config.to_dict()
    handles = [
        layer.register_forward_pre_hook(lambda _, args, i=i: counts.__setitem__(i, counts[i] + 1))
        for i, layer in enumerate(tiny.model.layers)
    ]
    tiny.generate(PROMPT[:1], assistant_early_exit=2, **GREEDY)
    for handle in handles:
        handle.remove()
    assert counts[0] == counts[1] > counts[2] == counts[3] == counts[4] > 0
    assert tiny.config.to_dict() == config


def test_an_early_exit_of_a_forward(tiny: K3ForCausalLM) -> None:
    """The first layers with their own cache; another cache, or a depth that is none, is refused."""
    cache = tiny(PROMPT[:1, :4], exit_layer=3, use_cache=True).cache
    pieces = tiny(PROMPT[:1, 4:], exit_layer=3, cache=cache).logits
    assert len(cache.layers) == 3
    whole = tiny(PROMPT[:1], exit_layer=3, use_cache=False).logits
    assert max_diff(pieces, whole[:, 4:]) < bound("unit_model_fp32_max_abs")
    assert max_diff(whole, tiny(PROMPT[:1]).logits) > 0.01
    with pytest.raises(ValueError, match="cache was made for 3 layers, the model has 5"):
        tiny(PROMPT[:1], cache=cache)
    for depth in (0, 6):
        with pytest.raises(ValueError, match=f"exit_layer={depth}; allowed are None and 1 to 5"):
            tiny(PROMPT[:1], exit_layer=depth)


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
