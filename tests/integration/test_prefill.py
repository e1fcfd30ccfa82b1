"""Long prompts go through in pieces by themselves, with the same output; their memory is measured in benchmarks."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modeling_k3 import K3Cache, K3ForCausalLM
from tests.models import build, max_diff, tiny_config, token_ids
from tests.tolerances import bound

GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture(scope="module")
def tiny() -> K3ForCausalLM:
    """The tiny model without an end token; tests do not change it."""
    return build(tiny_config("KKM", eos_token_id=None)).requires_grad_(False)


def pieces_of(model: K3ForCausalLM, *args: Any, **kwargs: Any) -> tuple[list[int], Any]:
    """Tokens per forward of a `generate`, and its output."""
    seen: list[int] = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    output = model.generate(*args, **GREEDY, **kwargs)
    handle.remove()
    return seen, output


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_long_prompts_are_cut_by_themselves(rows: int, tiny: K3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts rows times tokens; states and output are those of one piece."""
    ids, mask = token_ids(rows, 41), torch.ones(rows, 41).long()
    mask[0, :7] = 0
    whole_cache, cut_cache = K3Cache(tiny.config), K3Cache(tiny.config)
    whole, expected = pieces_of(tiny, ids, attention_mask=mask, cache=whole_cache)
    monkeypatch.setattr(K3ForCausalLM, "prefill_tokens", 16)
    cut, output = pieces_of(tiny, ids, attention_mask=mask, cache=cut_cache)
    assert whole == [41, 1, 1] and max(cut) == 16 // rows and sum(cut) == 43
    assert torch.equal(output, expected)
    for a, b in zip(whole_cache.layers, cut_cache.layers, strict=True):
        pairs = (
            [(a.keys, b.keys)] if hasattr(a, "keys") else [(a.state, b.state), *zip(a.windows, b.windows, strict=True)]
        )
        assert all(max_diff(x, y) < bound("unit_model_fp32_max_abs") for x, y in pairs)


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"do_embeds": True}])
def test_every_way_to_generate_is_cut(
    options: dict[str, Any], tiny: K3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = token_ids(1, 41)
    inputs: dict[str, Any] = {"input_ids": ids}
    if "do_embeds" in options:
        options, inputs = {}, {"inputs_embeds": tiny.get_input_embeddings()(ids)}
    _, expected = pieces_of(tiny, **inputs, **options)
    monkeypatch.setattr(K3ForCausalLM, "prefill_tokens", 16)
    cut, output = pieces_of(tiny, **inputs, **options)
    assert max(cut) <= 16 and torch.equal(output, expected)


def test_a_chunk_size_of_the_user_wins(tiny: K3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(K3ForCausalLM, "prefill_tokens", 16)
    assert pieces_of(tiny, token_ids(1, 41), prefill_chunk_size=30)[0] == [30, 11, 1, 1]


def test_recorded_outputs_are_not_cut(tiny: K3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states of a prompt belong together."""
    monkeypatch.setattr(K3ForCausalLM, "prefill_tokens", 16)
    output = tiny.generate(token_ids(1, 41), output_hidden_states=True, return_dict_in_generate=True, **GREEDY)
    assert output.hidden_states[0][0].shape[1] == 41


def test_the_reserve_is_made_once(tiny: K3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents of a long prompt get their place before the first piece, and are not copied by the others."""
    monkeypatch.setattr(K3ForCausalLM, "prefill_tokens", 16)
    cache, places = K3Cache(tiny.config), set()
    handle = tiny.model.layers[2].register_forward_hook(lambda *_: places.add(cache.layers[2].keys.data_ptr()))
    tiny.generate(token_ids(1, 41), cache=cache, max_new_tokens=1, do_sample=False)
    handle.remove()
    assert len(places) == 1


@pytest.mark.parametrize("size", [0, -3])
def test_pieces_of_nothing_are_refused(size: int, tiny: K3ForCausalLM) -> None:
    cache = K3Cache(tiny.config)
    with pytest.raises(ValueError, match=f"prefill_chunk_size={size}; allowed"):
        tiny.generate(token_ids(1, 9), cache=cache, prefill_chunk_size=size, **GREEDY)
    assert cache.get_seq_length() == 0


def test_memory_of_a_prefill_stays_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lives while a long prompt goes through KDA and AttnRes does not grow with it, but for ids and mask."""
    model = build(tiny_config("KKK", eos_token_id=None)).requires_grad_(False)
    monkeypatch.setattr(K3ForCausalLM, "prefill_tokens", 32)
    peaks = []
    for length in (128, 512):
        with LiveBytes() as live:
            model.generate(token_ids(1, length), max_new_tokens=1, do_sample=False)
        peaks.append(live.peak - 64 * length)
    assert 0 < peaks[1] < 1.1 * peaks[0]


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside the block and alive at the same time, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.see(x.untyped_storage())
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        place, size = storage.data_ptr(), storage.nbytes()
        if not size or place in self.known:
            return
        self.known[place] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, place)

    def forget(self, place: int) -> None:
        """It is freed."""
        self.now -= self.known.pop(place, 0)
