"""QK-clip: what is watched is what attention computes, and clipping brings it to the threshold."""

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_k3.training.qk_clip import QKClip, QKClipCallback
from tests.models import build, tiny_config, token_ids


def forward(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    """One training pass."""
    return model.train()(input_ids=ids, use_cache=False, **options).logits


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}], ids=["q_lora", "plain_q"])
def test_clipping_brings_the_same_tokens_to_the_threshold(changes: dict[str, Any]) -> None:
    model, ids = build(tiny_config(layers="KM", **changes)), token_ids(2, 700)
    attention = model.model.layers[1].self_attn
    clip = QKClip(model, threshold=1e9)
    forward(model, ids)
    before = clip.largest[attention].clone()
    # Between the heads: some are clipped, some are not.
    clip.threshold = before.median().item()
    weights = [parameter.clone() for parameter in model.parameters()]
    figures = clip.step()
    assert figures["qk_max_logit"] == pytest.approx(before.max().item())
    assert figures["qk_clipped_heads"] == float((before > clip.threshold).sum()) > 0
    forward(model, ids)
    after = clip.largest[attention]
    assert torch.allclose(after, before.clamp_max(clip.threshold), rtol=1e-4)
    changed = [
        name for (name, p), old in zip(model.named_parameters(), weights, strict=True) if not torch.equal(p, old)
    ]
    query = "q_proj" if "q_lora_rank" in changes else "q_b_proj"
    assert sorted(changed) == [f"model.layers.1.self_attn.{name}.weight" for name in ("kv_b_proj", query)]
    values = attention.kv_b_proj.weight.view(attention.num_heads, -1, attention.kv_lora_rank)[:, attention.nope_dim :]
    old = dict(zip([n for n, _ in model.named_parameters()], weights, strict=True))[
        "model.layers.1.self_attn.kv_b_proj.weight"
    ]
    assert torch.equal(values, old.view(attention.num_heads, -1, attention.kv_lora_rank)[:, attention.nope_dim :])


def test_what_is_watched_is_what_attention_computes() -> None:
    model, ids = build(tiny_config(layers="KM")), token_ids(1, 33)
    clip = QKClip(model)
    forward(model, ids)
    largest = clip.largest[model.model.layers[1].self_attn]
    recorded: list[Tensor] = []

    def record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        recorded.append((query @ key.mT * kwargs["scaling"]).detach())
        return value.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("recording", record)
    model.config._attn_implementation = "recording"
    forward(model, ids)
    causal = torch.ones(33, 33, dtype=torch.bool).tril()
    wanted = recorded[0].masked_fill(~causal, float("-inf")).amax(dim=(0, 2, 3))
    assert torch.allclose(largest, wanted, rtol=1e-5)


def test_micro_batches_add_up_and_evaluation_does_not_count() -> None:
    model = build(tiny_config(layers="KM"))
    clip = QKClip(model)
    attention = model.model.layers[1].self_attn
    seen = []
    for seed in (0, 1):
        forward(model, token_ids(1, 20, seed=seed))
        seen.append(clip.largest[attention].clone())
    assert torch.equal(seen[1], torch.maximum(*seen)) and not torch.equal(*seen)
    clip.step()
    with torch.no_grad():
        model.eval()(input_ids=token_ids(1, 20))
    assert clip.step() == {}
    clip.close()
    forward(model, token_ids(1, 20))
    assert not clip.largest


def test_packed_documents_do_not_see_each_other() -> None:
    model = build(tiny_config(layers="KM"))
    clip, attention = QKClip(model), model.model.layers[1].self_attn
    ids = token_ids(1, 24)
    position = torch.cat([torch.arange(10), torch.arange(14)]).unsqueeze(0)
    forward(model, ids, position_ids=position)
    together = clip.largest.pop(attention)
    parts = []
    for part in ids.split([10, 14], dim=1):
        forward(model, part)
        parts.append(clip.largest.pop(attention))
    assert torch.allclose(together, torch.maximum(*parts), rtol=1e-4)


def test_padding_does_not_count() -> None:
    model = build(tiny_config(layers="KM"))
    clip, attention = QKClip(model), model.model.layers[1].self_attn
    ids, mask = token_ids(1, 12), torch.ones(1, 20, dtype=torch.long)
    forward(model, ids)
    alone = clip.largest.pop(attention)
    mask[:, :8] = 0
    forward(model, torch.cat([token_ids(1, 8, seed=9), ids], dim=1), attention_mask=mask)
    assert torch.allclose(clip.largest.pop(attention), alone, rtol=1e-4)


def test_a_threshold_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"threshold=0\.0"):
        QKClip(nn.Linear(2, 2), threshold=0.0)
    with pytest.raises(ValueError, match=r"threshold=0\.0"):
        QKClipCallback(threshold=0.0)


def test_an_interrupted_training_leaves_no_second_watch() -> None:
    model, callback = build(tiny_config(layers="KM")), QKClipCallback()
    attention = model.model.layers[1].self_attn
    for _ in range(2):
        callback.on_train_begin(None, None, None, model=model)
        assert len(attention._forward_hooks) == 1
    callback.on_train_end(None, None, None)
    assert not attention._forward_hooks


def test_the_log_has_the_largest_since_its_last_entry() -> None:
    model, callback = build(tiny_config(layers="KM")), QKClipCallback(threshold=1e-3)
    others = types.SimpleNamespace(callback_handler=types.SimpleNamespace(callbacks=["reporter"]))
    assert callback.attach(others) is callback and others.callback_handler.callbacks == [callback, "reporter"]
    callback.on_train_begin(None, None, None, model=model)
    state, largest = types.SimpleNamespace(log_history=[{}]), []
    for _ in range(2):
        forward(model, token_ids(1, 9))
        largest.append(callback._clip.largest[model.model.layers[1].self_attn].max().item())
        callback.on_optimizer_step(None, None, None)
    assert largest[0] > largest[1]
    callback.on_log(None, state, None, logs=(logs := {"loss": 1.0}))
    assert logs["qk_max_logit"] == state.log_history[-1]["qk_max_logit"] == largest[0]
    callback.on_log(None, state, None, logs=(logs := {"loss": 1.0}))
    assert logs == {"loss": 1.0}


def test_the_callback_clips_in_the_trainer(tmp_path: Path) -> None:
    rows = [{"input_ids": token_ids(1, 12, seed=i)[0], "labels": token_ids(1, 12, seed=i)[0]} for i in range(4)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, logging_steps=1,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    model = build(tiny_config(layers="KM"))
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[QKClipCallback(threshold=1e-3)])
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs[0]["qk_clipped_heads"] == model.model.layers[1].self_attn.num_heads
    assert logs[1]["qk_max_logit"] < 0.1 * logs[0]["qk_max_logit"]
    assert not model.model.layers[1].self_attn._forward_hooks
