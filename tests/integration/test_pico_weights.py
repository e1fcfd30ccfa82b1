"""Trained weights and real text: what random ones hide, from precision to storage, caches, adapters and clipping.

Random weights have no strong decays, no sure predictions, no experts that matter; trained ones have all of them.
"""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from modeling_k3 import PrefixCache
from modeling_k3.demo.corpus import load_corpus
from modeling_k3.demo.measure import sample_windows
from modeling_k3.demo.start import PICO
from modeling_k3.experts import iter_experts
from modeling_k3.readiness.precision import THRESHOLDS, measure_precision
from modeling_k3.readiness.texts import Sample
from modeling_k3.training import QKClip, build_optimizer
from tests.models import within


def load(**options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(PICO, **{"dtype": "float32", **options}).eval()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """As stored, computed in float32."""
    return load(expert_storage="packed").requires_grad_(False)


@pytest.fixture(scope="module")
def text() -> Tensor:
    """Pieces [16, 321] of sources that the model has not seen."""
    names = json.loads((PICO / "report.json").read_text())["held_out"]["names"]
    return sample_windows(load_corpus(held_out_names=names).held_out, 16, 321).long()


def test_the_weights_are_such_that_a_mistake_would_show(model: Any, text: Tensor) -> None:
    with torch.no_grad():
        p = model(text[:4]).logits[..., :256].softmax(-1)
    surest = p.amax(dim=-1)
    assert (surest > 0.9).float().mean() > 0.15 and (surest < 0.5).float().mean() > 0.15
    biases = [module.e_score_correction_bias for module in model.modules() if hasattr(module, "overflow")]
    assert len(biases) == 3 and all(bias.std() > 0.01 for bias in biases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_fast_path_predicts_what_the_exact_path_does(dtype: torch.dtype, text: Tensor) -> None:
    samples = [Sample(str(number), row) for number, row in enumerate(text[:3])]
    report = measure_precision(load(dtype=dtype), samples, fast="chunk")
    assert report.passed and report.threshold == THRESHOLDS[dtype]
    # Perplexity 7 at the heads of files: sure enough that a KL means something, unsure enough that it could grow.
    assert all(group.forced_top1 > 0.99 and 4 < group.perplexity_exact < 12 for group in report.groups)


def test_every_storage_form_computes_the_same(model: Any, text: Tensor) -> None:
    forms = {"mapped": load(expert_storage="mapped"), "dense": load(dequantize=True)}
    forms["dense"].set_experts_implementation("eager")
    for name, other in forms.items():
        assert {module.storage for _, module in iter_experts(other)} == {name}
        with torch.no_grad():
            assert torch.equal(other(text[:2]).logits, model(text[:2]).logits), name


@pytest.mark.parametrize("pieces", [[160, 160], [1, 63, 64, 65, 127], [300, *[1] * 20]], ids=["halves", "odd", "steps"])
def test_a_continued_cache_predicts_what_recomputation_does(pieces: list[int], model: Any, text: Tensor) -> None:
    ids, cache, parts = text[:2, :320], None, []
    with torch.no_grad():
        for part in ids.split(pieces, dim=1):
            output = model(part, cache=cache, use_cache=True)
            cache = output.cache
            parts.append(output.logits.log_softmax(-1))
        whole = model(ids).logits.log_softmax(-1)
    assert within(torch.cat(parts, dim=1), whole, "same_function_fp32")


def test_a_known_beginning_is_reused_without_a_trace(model: Any, text: Tensor) -> None:
    """Two files with the same head: the second prompt finds it in the cache and goes on as if it had read it."""
    prefixes = PrefixCache(block_size=64)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    for tail in (text[1:2, :70], text[2:3, :70]):
        prompt = torch.cat([text[:1, :192], tail], dim=1)
        with_cache, without = (
            model.generate(prompt, output_logits=True, **options, **extra) for extra in ({"prefix_cache": prefixes}, {})
        )
        assert torch.equal(with_cache.sequences, without.sequences)
        assert within(torch.stack(with_cache.logits), torch.stack(without.logits), "same_function_fp32")
    assert prefixes.stats()["hit_tokens"] == 192


def test_an_adapter_on_packed_experts_learns_a_new_kind_of_text() -> None:
    """The experts alone can carry a new task, and their stored bytes stay as they are."""
    peft = pytest.importorskip("peft")
    from modeling_k3.adapters import lora_config

    torch.manual_seed(0)
    base = load(expert_storage="packed")
    experts = [module for _, module in iter_experts(base)]
    stored = [module.gate_up_proj_packed.clone() for module in experts]
    adapted = peft.get_peft_model(base, lora_config("experts", r=4)).train()
    lines = "".join(f"{n:03d};{n * n % 97:02d};{'odd' if n % 2 else 'even'}\n" for n in range(64)).encode()
    ids = torch.tensor([list(lines[start : start + 128]) for start in (0, 140, 280, 420)])
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = adapted(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / math.log(2))
    assert losses[-1] < losses[0] - 0.5
    assert all(
        torch.equal(m.gate_up_proj_packed, bytes_before) for m, bytes_before in zip(experts, stored, strict=True)
    )


def test_qk_clip_holds_the_logits_where_training_would_raise_them(text: Tensor) -> None:
    """At a rate that makes attention's logits grow; the model goes on learning just as well."""
    threshold, runs = 4.0, {}
    for bound in (1e9, threshold):
        model = load(dequantize=True).train()
        optimizer = build_optimizer(model, lr=1e-3, muon_lr=0.05, weight_decay=0.0)
        clip, largest, losses = QKClip(model, bound), [], []
        for step in range(6):
            ids = text[2 * (step % 4) : 2 * (step % 4) + 2, :257]
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            largest.append(clip.step()["qk_max_logit"])
            losses.append(loss.item() / math.log(2))
        runs[bound] = largest, losses
    (free, free_loss), (held, held_loss) = runs[1e9], runs[threshold]
    assert free[0] == held[0] > 2 * threshold
    assert max(free[1:]) > 1.2 * free[0]
    # What a clip has seen is held exactly (tests/unit); new text and the next update raise it again, from lower down.
    assert sum(held[1:]) < 0.6 * sum(free[1:])
    assert max(abs(a - b) for a, b in zip(free_loss, held_loss, strict=True)) < 0.15
