"""A cache of fixed size computes what the growing one computes, is refused where it has no room, and compiles once."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from modeling_k3 import K3Cache, K3ForCausalLM, K3StaticCache
from tests.models import build, greedy_by_hand, max_diff, tiny_config, token_ids, variant
from tests.tolerances import bound

PROMPT = token_ids(2, 9)
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
STATIC: dict[str, Any] = {"cache_implementation": "static"}


@pytest.fixture(scope="module")
def tiny() -> K3ForCausalLM:
    """The tiny model without an end token; tests do not change it."""
    return build(tiny_config(eos_token_id=None, experts_implementation="batched_mm")).requires_grad_(False)


def left_padding() -> Tensor:
    mask = torch.ones_like(PROMPT)
    mask[0, :4] = 0
    return mask


def addresses(cache: K3StaticCache, states: bool = True) -> list[int]:
    """Where in memory the cache keeps its latents, and its states."""
    held = [
        ([*layer.windows, layer.state] if states else []) if is_linear else [layer.keys, layer.values]
        for layer, is_linear in zip(cache.layers, cache.is_linear, strict=True)
    ]
    return [tensor.data_ptr() for tensors in held for tensor in tensors]


# -- generate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "kda_only", "mla_only"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_greedy_equals_the_loop_by_hand(name: str, chunk: int | None) -> None:
    model = build(variant(name, eos_token_id=None)).requires_grad_(False)
    found = model.generate(PROMPT, prefill_chunk_size=chunk, return_dict_in_generate=True, **GREEDY, **STATIC)
    assert torch.equal(found.sequences, greedy_by_hand(model, PROMPT))
    assert found.cache.max_cache_len == 16 == found.cache.get_seq_length()


def test_left_padding(tiny: K3ForCausalLM) -> None:
    mask = left_padding()
    ids = PROMPT.masked_fill(mask == 0, 157)
    alone = [greedy_by_hand(tiny, PROMPT[:1, 4:])[:, 5:], greedy_by_hand(tiny, PROMPT[1:])[:, 9:]]
    assert torch.equal(tiny.generate(ids, attention_mask=mask, **GREEDY, **STATIC)[:, 9:], torch.cat(alone))


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "attention_mask": left_padding()},
        {"do_sample": True, "num_return_sequences": 2},
        {"input_ids": PROMPT[:1], "prompt_lookup_num_tokens": 3},
        {"input_ids": PROMPT[:1], "assistant_early_exit": 2},
    ],
    ids=lambda options: ", ".join(options),
)
def test_everything_else_equals_the_growing_cache(tiny: K3ForCausalLM, options: dict[str, Any]) -> None:
    options = {"input_ids": PROMPT, **GREEDY, **options}
    results = []
    for kind in ({}, STATIC):
        torch.manual_seed(3)
        results.append(tiny.generate(**options, **kind))
    assert torch.equal(*results)


def test_embeddings_as_prompt(tiny: K3ForCausalLM) -> None:
    embeds = tiny.get_input_embeddings()(PROMPT)
    assert torch.equal(tiny.generate(inputs_embeds=embeds, **GREEDY, **STATIC), greedy_by_hand(tiny, PROMPT)[:, 9:])


def test_later_calls_are_never_smaller(tiny: K3ForCausalLM) -> None:
    """As in the library: a compiled step that served a long call serves a short one."""
    model, sizes = copy.deepcopy(tiny), []
    for count in (8, 3, 9):
        found = model.generate(PROMPT, max_new_tokens=count, do_sample=False, return_dict_in_generate=True, **STATIC)
        sizes.append(found.cache.max_cache_len)
    assert sizes == [16, 16, 17]


def test_a_given_cache_is_continued_in_its_own_buffers(tiny: K3ForCausalLM) -> None:
    cache = K3StaticCache(tiny.config, max_cache_len=20)
    first = tiny.generate(PROMPT, cache=cache, max_new_tokens=3, do_sample=False)
    places = addresses(cache, states=False)
    rest = tiny.generate(first, cache=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(rest, greedy_by_hand(tiny, PROMPT))
    cache.reset()
    assert torch.equal(tiny.generate(PROMPT, cache=cache, **GREEDY), greedy_by_hand(tiny, PROMPT))
    assert places == addresses(cache, states=False)
    cache.reset()
    assert torch.equal(tiny.generate(PROMPT[:1], cache=cache, **GREEDY), greedy_by_hand(tiny, PROMPT[:1]))


def test_no_room_is_said_before_anything_changes(tiny: K3ForCausalLM) -> None:
    cache = K3StaticCache(tiny.config, max_cache_len=15)
    with pytest.raises(ValueError, match="max_cache_len=15 and holds 0 tokens; allowed are 15 new ones, not 16"):
        tiny.generate(PROMPT, cache=cache, **GREEDY)
    assert cache.get_seq_length() == 0 and cache.held_batch_size is None
    tiny(PROMPT, cache=cache)
    logits = tiny(PROMPT[:, :2], cache=copy.deepcopy(cache)).logits
    with pytest.raises(ValueError, match="max_cache_len=15 and holds 9 tokens; allowed are 6 new ones, not 7"):
        tiny(PROMPT[:, :7], cache=cache)
    assert torch.equal(tiny(PROMPT[:, :2], cache=cache).logits, logits)
    only_states = build(tiny_config("KK")).requires_grad_(False)
    with pytest.raises(ValueError, match="allowed are 3 new ones, not 9"):
        only_states(PROMPT, cache=K3StaticCache(only_states.config, max_cache_len=3))
    with pytest.raises(ValueError, match="allowed are 3 new ones, not 4"):
        K3StaticCache(tiny_config("MM"), max_cache_len=3).update(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), 0)
    for size in (0, -1, 2.5, None):
        with pytest.raises(ValueError, match="max_cache_len"):
            K3StaticCache(tiny.config, max_cache_len=size)


def test_kinds_that_are_not_there(tiny: K3ForCausalLM) -> None:
    with pytest.raises(TypeError, match="K3StaticCache"):
        tiny.generate(PROMPT, cache=StaticCache(tiny.config, max_cache_len=30), **GREEDY)
    with pytest.raises(ValueError, match="'offloaded_static' is not supported"):
        tiny.generate(PROMPT, cache_implementation="offloaded_static", **GREEDY)
    with pytest.raises(ValueError, match="no gradients"):
        build(tiny_config("KM"))(PROMPT, cache=K3StaticCache(tiny_config("KM"), max_cache_len=20))


def test_bytes_are_there_from_the_first_token(tiny: K3ForCausalLM) -> None:
    static, growing = K3StaticCache(tiny.config, max_cache_len=40), K3Cache(tiny.config)
    for cache in (static, growing):
        tiny(PROMPT, cache=cache)
    held, used = static.nbytes(), growing.nbytes()
    assert (held["latent"], held["state"], held["window"]) == (used["latent"], used["state"], used["window"])
    assert held["latent"] + held["reserved"] == held["latent"] // 9 * 40


@pytest.mark.slow
def test_a_compiled_step_through_inductor() -> None:
    """Also from a prompt that was read in inference mode, whose tensors nothing outside it may write to."""
    model = build(tiny_config("KM", experts_implementation="batched_mm")).requires_grad_(False)
    ids, step = token_ids(2, 16), torch.compile(model, fullgraph=True)
    for mode in (torch.inference_mode, torch.no_grad):
        cache = K3StaticCache(model.config, max_cache_len=20)
        with mode():
            model(ids[:, :9], cache=cache)
        with torch.no_grad():
            logits = [step(ids[:, i : i + 1], cache=cache).logits for i in range(9, 16)]
        assert max_diff(torch.cat(logits, dim=1), model(ids).logits[:, 9:]) < bound("unit_model_fp32_max_abs")
    torch._dynamo.reset()


# -- graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "masked"), [("KM", False), ("KK", False), ("MM", False), ("KM", True)])
def test_a_compiled_step_is_one_graph_for_every_token_and_cache(layers: str, masked: bool) -> None:
    model = build(tiny_config(layers, experts_implementation="batched_mm")).requires_grad_(False)
    ids, mask = token_ids(2, 24), torch.ones(2, 24).long()
    mask[0, :3] = 0
    # As `generate` gives it: over all that there is room for.
    wide = torch.cat([mask, mask.new_ones(2, 3)], dim=1) if masked else None
    whole = model(ids, attention_mask=mask if masked else None).logits[:, 9:]
    torch._dynamo.reset()
    counters.clear()
    step = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            cache = K3StaticCache(model.config, max_cache_len=27)
            model(ids[:, :9], attention_mask=wide, cache=cache)
            places = addresses(cache)
            logits = [step(ids[:, i : i + 1], attention_mask=wide, cache=cache).logits for i in range(9, 24)]
            assert max_diff(torch.cat(logits, dim=1), whole) < bound("unit_model_fp32_max_abs")
            assert places == addresses(cache)
            assert cache.get_seq_length() == 24
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        # Outside the graph it goes on where the graph stopped.
        more = torch.cat([mask, mask.new_ones(2, 2)], dim=1) if masked else None
        last = model(torch.cat([ids, ids[:, :2]], dim=1), attention_mask=more).logits[:, -2:]
        assert max_diff(model(ids[:, :2], attention_mask=wide, cache=cache).logits, last) < bound(
            "unit_model_fp32_max_abs"
        )
        step(ids[:, :1], attention_mask=wide, cache=cache)
        with pytest.raises(RuntimeError, match="no room behind max_cache_len=27"):
            step(ids[:, :1], attention_mask=wide, cache=cache)
        assert cache.get_seq_length() == 27
    torch._dynamo.reset()


@pytest.mark.parametrize("padded", [False, True])
def test_generate_compiles_the_step_once(tiny: K3ForCausalLM, padded: bool) -> None:
    """What the library does by itself on a GPU, asked for on a CPU."""
    model, mask = copy.deepcopy(tiny), left_padding() if padded else torch.ones_like(PROMPT)
    expected = model.generate(PROMPT, attention_mask=mask, **GREEDY)
    torch._dynamo.reset()
    counters.clear()
    options = CompileConfig(fullgraph=True, backend="eager", mode=None)
    options._compile_all_devices = True
    for _ in range(2):
        found = model.generate(PROMPT, attention_mask=mask, compile_config=options, **GREEDY, **STATIC)
        assert torch.equal(found, expected)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
