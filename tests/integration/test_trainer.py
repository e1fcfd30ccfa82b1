"""The library's Trainer: a run that was interrupted and resumed ends where an uninterrupted one ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import load_sharded_checkpoint

from tests.models import Rows, build, tiny_config, within


def train(output: Path, steps: int, seed: int = 0, resume: Path | None = None, **options: Any) -> Trainer:
    """Train the tiny model, saving after two steps; `seed` only matters for what a resume must overwrite."""
    arguments = TrainingArguments(
        str(output), max_steps=steps, per_device_train_batch_size=2, save_steps=2, logging_steps=1, report_to=[],
        use_cpu=True, learning_rate=1e-3, lr_scheduler_type="constant", disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(build(tiny_config(layers="KM", num_experts=4), seed=seed), arguments, train_dataset=Rows())
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


@pytest.mark.parametrize(
    "options", [{}, {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}], ids=["plain", "accumulated"]
)
def test_trainer_resumes_where_it_stopped(options: dict[str, Any], tmp_path: Path) -> None:
    straight, _ = train(tmp_path / "straight", 4, **options), train(tmp_path / "broken", 2, **options)
    resumed = train(tmp_path / "broken", 4, seed=7, resume=tmp_path / "broken" / "checkpoint-2", **options)
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (straight, resumed)]
    assert losses[0] == pytest.approx(losses[1]) and len(losses[0]) == 4
    for (name, a), b in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert within(a, b, "same_loss_fp32"), name


def test_the_trainers_way_of_loading_shards(tmp_path: Path) -> None:
    """Shard by shard through `load_state_dict`, an expert's matrices in different shards."""
    saved, model = build(tiny_config()), build(tiny_config(), seed=7)
    saved.save_pretrained(tmp_path, max_shard_size="300KB")
    load_sharded_checkpoint(model, str(tmp_path), strict=False)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))


def test_prediction_with_attentions_whose_entries_may_be_none(tmp_path: Path) -> None:
    """They are left out of what the Trainer joins over batches."""
    model = build(tiny_config(layers="KM", num_experts=4))
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    arguments = TrainingArguments(str(tmp_path), per_device_eval_batch_size=8, report_to=[], use_cpu=True)
    found = Trainer(model, arguments).predict(Rows()).predictions
    assert found.shape == (16, 10, model.config.vocab_size)
