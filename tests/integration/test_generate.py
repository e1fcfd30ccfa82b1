"""Generation and the hybrid cache: every way to continue equals recomputing, or is refused before anything happens."""

import copy
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast, pipeline
from transformers.generation.streamers import BaseStreamer

from modeling_k3 import K3Cache, K3ForCausalLM
from tests.models import BOUNDS, build, cache_tensors, max_diff, tiny_config, token_ids, variant, within
from tests.models import greedy_by_hand as by_hand

PROMPT = token_ids(2, 9)
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
PAD = 157


@pytest.fixture(scope="module")
def tiny() -> K3ForCausalLM:
    """The tiny model without an end token; tests do not change it."""
    return build(tiny_config(eos_token_id=None)).requires_grad_(False)


def left_padded() -> tuple[Tensor, Tensor]:
    """The prompts with four tokens of the first row replaced by padding."""
    mask = torch.ones_like(PROMPT)
    mask[0, :4] = 0
    return PROMPT.masked_fill(mask == 0, PAD), mask


def in_pieces(model: K3ForCausalLM, ids: Tensor, lengths: list[int]) -> tuple[Tensor, K3Cache]:
    """Logits of the pieces joined, and the cache after the last one."""
    cache = K3Cache(model.config)
    return torch.cat([model(piece, cache=cache).logits for piece in ids.split(lengths, dim=1)], dim=1), cache


# -- the cache through forward ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "kda_only", "mla_only", "softplus"])
def test_all_splits_into_up_to_three_calls(name: str) -> None:
    model, ids = build(variant(name)).requires_grad_(False), token_ids(2, 12)
    whole, cache = in_pieces(model, ids, [12])
    cuts_in_three = combinations(range(1, 12), 2) if name == "tiny" else [(1, 2), (4, 5), (3, 10)]
    for cuts in [*[(c,) for c in range(1, 12)], *cuts_in_three]:
        edges = [0, *cuts, 12]
        pieces, held = in_pieces(model, ids, [b - a for a, b in pairwise(edges)])
        assert within(pieces, whole, "same_function_fp32"), cuts
        pairs = zip(cache_tensors(held), cache_tensors(cache), strict=True)
        assert all(within(a, b, "same_function_fp32") for a, b in pairs), cuts


@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 127, 128, 129])
def test_chunked_prefill(length: int) -> None:
    """Forward in pieces of every size, states compared too; then the pieces that generate makes."""
    model, ids = build(tiny_config(layers="KM", eos_token_id=None)).requires_grad_(False), token_ids(1, length)
    whole, cache = in_pieces(model, ids, [length])
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    for size in (1, 3, 64, 65):
        lengths = [size] * (length // size) + ([length % size] if length % size else [])
        pieces, held = in_pieces(model, ids, lengths)
        assert within(pieces, whole, "same_function_fp32"), size
        pairs = zip(cache_tensors(held), cache_tensors(cache), strict=True)
        assert all(within(a, b, "same_function_fp32") for a, b in pairs), size
        if size > 1:
            chunked = model.generate(ids, max_new_tokens=3, do_sample=False, prefill_chunk_size=size)
            assert torch.equal(chunked, expected), size


@pytest.mark.parametrize("name", ["tiny", "kda_only"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_the_convolution(name: str, length: int) -> None:
    model, ids = build(variant(name)).requires_grad_(False), token_ids(2, length + 6)
    pieces, cache = in_pieces(model, ids, [length] + [1] * 6)
    assert within(pieces, model(ids).logits, "same_function_fp32")
    assert all(w.shape == (2, 48, 4) for w in cache.layers[0].windows)


def test_the_window_holds_raw_projections(tiny: K3ForCausalLM) -> None:
    seen: list[Tensor] = []
    model = copy.deepcopy(tiny)
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda _m, _a, output: seen.append(output))
    _, cache = in_pieces(model, PROMPT, [2, 5, 2])
    assert torch.equal(cache.layers[0].windows[1], torch.cat(seen, dim=1)[:, -4:].mT)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_right_padding_then_decoding(tiny: K3ForCausalLM, implementation: str) -> None:
    """State and window stay at the last real token, whatever stands at the padding."""
    model, mask = copy.deepcopy(tiny), torch.ones_like(PROMPT)
    model.set_attn_implementation(implementation)
    mask[0, 5:] = 0
    embeds = model.get_input_embeddings()(PROMPT).masked_fill(mask[..., None] == 0, torch.inf)
    cache, new = K3Cache(model.config), token_ids(2, 3, seed=4)
    prefill = model(inputs_embeds=embeds, attention_mask=mask, cache=cache).logits
    assert prefill.isfinite().all()
    decoded = []
    for step in range(3):
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        decoded.append(model(new[:, step : step + 1], attention_mask=mask, cache=cache).logits)
    for row, kept in ((0, 5), (1, 9)):
        alone = model(torch.cat([PROMPT[row : row + 1, :kept], new[row : row + 1]], dim=1)).logits[0]
        assert within(torch.cat([prefill[row, :kept], torch.cat(decoded, dim=1)[row]]), alone, "same_function_fp32")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("empty_row", [False, True])
def test_poisoned_padding_leaves_everything_finite(implementation: str, empty_row: bool) -> None:
    model = build(tiny_config()).train()
    model.set_attn_implementation(implementation)
    mask = torch.ones_like(PROMPT)
    mask[0, :4], mask[1, 7:] = 0, 0
    if empty_row:
        mask[0] = 0
    embeds = model.get_input_embeddings()(PROMPT).detach().masked_fill(mask[..., None] == 0, torch.nan)
    embeds.requires_grad_()
    outputs = model(inputs_embeds=embeds, attention_mask=mask, labels=PROMPT.masked_fill(mask == 0, -100))
    outputs.loss.backward()
    assert outputs.logits.isfinite().all() and embeds.grad.isfinite().all()
    assert embeds.grad[mask == 0].eq(0).all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_two_caches_side_by_side(tiny: K3ForCausalLM) -> None:
    ids = token_ids(2, 12)
    caches, logits = [K3Cache(tiny.config), K3Cache(tiny.config)], [[], []]
    for piece in ids.split([4, 1, 3, 1, 3], dim=1):
        for row in range(2):
            logits[row].append(tiny(piece[row : row + 1], cache=caches[row]).logits)
    assert within(torch.cat([torch.cat(x, dim=1) for x in logits]), tiny(ids).logits, "same_function_fp32")


# -- generate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"use_cache": False}, {"prefill_chunk_size": 2}, {"cache_implementation": "dynamic"}]
)
def test_greedy_equals_the_loop_by_hand(tiny: K3ForCausalLM, options: dict[str, Any]) -> None:
    assert torch.equal(tiny.generate(PROMPT, **GREEDY, **options), by_hand(tiny, PROMPT))


@pytest.mark.parametrize("chunk", [None, 1, 3, 5])
def test_left_padding(tiny: K3ForCausalLM, chunk: int | None) -> None:
    ids, mask = left_padded()
    expected = torch.cat([by_hand(tiny, PROMPT[:1, 4:])[:, 5:], by_hand(tiny, PROMPT[1:])[:, 9:]])
    assert torch.equal(tiny.generate(ids, attention_mask=mask, prefill_chunk_size=chunk, **GREEDY)[:, 9:], expected)
    alone = tiny.generate(ids[:1], attention_mask=mask[:1], prefill_chunk_size=chunk, **GREEDY)[:, 9:]
    assert torch.equal(alone, expected[:1])


def test_embeddings_as_prompt(tiny: K3ForCausalLM) -> None:
    embeds = tiny.get_input_embeddings()(PROMPT)
    assert torch.equal(tiny.generate(inputs_embeds=embeds, **GREEDY), by_hand(tiny, PROMPT)[:, 9:])


@pytest.mark.parametrize("padded", [False, True])
def test_beam_scores_equal_scoring_again(tiny: K3ForCausalLM, padded: bool) -> None:
    ids, mask = left_padded() if padded else (PROMPT, torch.ones_like(PROMPT))
    beams = tiny.generate(
        ids, attention_mask=mask, num_beams=3, num_return_sequences=3, output_scores=True, return_dict_in_generate=True,
        length_penalty=1.0, **GREEDY,
    )  # fmt: skip
    mask = torch.cat([mask.repeat_interleave(3, 0), mask.new_ones(6, 8)], dim=1)
    log_p = tiny(beams.sequences, attention_mask=mask, use_cache=False).logits.log_softmax(-1)[:, 8:-1]
    scores = log_p.gather(-1, beams.sequences[:, 9:, None]).sum((1, 2)) / 8
    assert max_diff(beams.sequences_scores, scores) < BOUNDS["same_scores_fp32"].bound
    assert len({tuple(s) for s in beams.sequences.tolist()}) == 6


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_beams_equal_a_search_by_hand(tiny: K3ForCausalLM, options: dict[str, Any]) -> None:
    """The best three of all continuations of the best three, with everything recomputed for every token."""
    beams = tiny.generate(PROMPT, num_beams=3, num_return_sequences=3, **GREEDY, **options)
    for row, found in enumerate(beams.split(3)):
        ids, scores = PROMPT[row : row + 1], torch.zeros(1)
        for _ in range(8):
            total = scores[:, None] + tiny(ids, use_cache=False).logits[:, -1].log_softmax(-1)
            scores, best = total.flatten().topk(3)
            ids = torch.cat([ids[best // total.shape[1]], (best % total.shape[1])[:, None]], dim=1)
        assert torch.equal(found, ids)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}])
def test_samples_equal_draws_by_hand(tiny: K3ForCausalLM, options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    ids = PROMPT
    for _ in range(8):
        scores, best = (tiny(ids, use_cache=False).logits[:, -1] / 0.7).topk(20)
        kept = torch.zeros(2, 160).scatter(1, best, scores.softmax(-1))
        ids = torch.cat([ids, torch.multinomial(kept, 1)], dim=1)
    torch.manual_seed(5)
    found = tiny.generate(PROMPT, do_sample=True, temperature=0.7, top_k=20, max_new_tokens=8, **options)
    assert torch.equal(found, ids) and not torch.equal(ids, by_hand(tiny, PROMPT))


def test_sampling_follows_the_seed(tiny: K3ForCausalLM) -> None:
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(tiny.generate(PROMPT, do_sample=True, max_new_tokens=8, num_return_sequences=2))
    assert draws[0].shape == (4, 17)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0][0], draws[0][1])


@pytest.mark.parametrize("name", ["tiny", "kda_only", "mla_only"])
@pytest.mark.parametrize("given", ["continued", "part of the prompt", "new tokens and full mask"])
def test_a_given_cache_is_continued(name: str, given: str) -> None:
    model = build(variant(name, eos_token_id=None)).requires_grad_(False)
    expected, cache = by_hand(model, PROMPT), K3Cache(model.config)
    if given == "continued":
        first = model.generate(PROMPT, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, cache=cache)
        assert first.cache is cache and cache.get_seq_length() == 11
        assert torch.equal(model.generate(first.sequences, cache=cache, max_new_tokens=5, do_sample=False), expected)
        return
    model(PROMPT[:, :5], cache=cache)
    if given == "part of the prompt":
        assert torch.equal(model.generate(PROMPT, cache=cache, **GREEDY), expected)
    else:
        mask = torch.ones_like(PROMPT)
        rest = model.generate(PROMPT[:, 5:], attention_mask=mask, cache=cache, **GREEDY)
        assert torch.equal(rest[:, 4:], expected[:, 9:])


@pytest.mark.parametrize("name", ["tiny", "kda_only", "mla_only"])
@pytest.mark.parametrize("seen", [9, 12])
def test_a_cache_that_leaves_nothing_to_read_is_refused(name: str, seen: int) -> None:
    """It holds the whole prompt already, or more: reading the prompt again would count tokens twice."""
    model, cache = build(variant(name, eos_token_id=None)).requires_grad_(False), K3Cache(variant(name))
    model(token_ids(2, seen), cache=cache)
    with pytest.raises(ValueError, match="cache"):
        model.generate(PROMPT, cache=cache, **GREEDY)
    assert cache.get_seq_length() == seen


def test_caches_that_cannot_hold_the_state_are_refused(tiny: K3ForCausalLM) -> None:
    for cache in (DynamicCache(), DynamicCache(config=tiny.config)):
        with pytest.raises(TypeError, match="K3Cache"):
            tiny.generate(PROMPT, cache=cache, **GREEDY)
    for kind in ("offloaded", "quantized", "offloaded_static", "sliding_window"):
        with pytest.raises(ValueError, match=kind):
            tiny.generate(PROMPT, cache_implementation=kind, **GREEDY)


def test_either_end_token_stops(tiny: K3ForCausalLM) -> None:
    full = by_hand(tiny, PROMPT)
    ends = [full[0, 11].item(), full[1, 13].item()]
    assert ends[0] not in full[0, 9:11] and ends[0] not in full[1, 9:] and ends[1] not in full[1, 9:13]
    stopped = tiny.generate(PROMPT, eos_token_id=ends, pad_token_id=PAD, **GREEDY)
    assert stopped[0, 9:].tolist() == [*full[0, 9:12].tolist(), PAD, PAD]
    assert stopped[1, 9:].tolist() == full[1, 9:14].tolist()


def test_streamer(tiny: K3ForCausalLM) -> None:
    class Collect(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Collect()
    output = tiny.generate(PROMPT[:1], streamer=streamer, **GREEDY)
    assert streamer.ended and streamer.tokens == output[0].tolist()


def test_generating_in_the_middle_of_training(tiny: K3ForCausalLM) -> None:
    model = copy.deepcopy(tiny).train().requires_grad_(True)
    model.gradient_checkpointing_enable()
    assert torch.equal(model.generate(PROMPT, **GREEDY), by_hand(tiny, PROMPT))


def test_text_generation_pipeline(tiny: K3ForCausalLM, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(160)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w157", padding_side="left").save_pretrained(tmp_path)
    tiny.save_pretrained(tmp_path)
    generator = pipeline("text-generation", str(tmp_path), device="cpu")
    prompts = [" ".join(f"w{i}" for i in row) for row in (PROMPT[0, 4:].tolist(), PROMPT[1].tolist())]
    results = generator(prompts, batch_size=2, return_full_text=False, **GREEDY)
    for row, (result,) in enumerate(results):
        ids = PROMPT[row : row + 1, 4 if row == 0 else 0 :]
        new = by_hand(tiny, ids)[0, ids.shape[1] :].tolist()
        assert result["generated_text"].split() == [f"w{i}" for i in new]
