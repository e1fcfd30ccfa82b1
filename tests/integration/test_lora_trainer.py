"""The library's Trainer on adapters: a run that was interrupted and resumed is the uninterrupted one, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import Trainer, TrainingArguments

from modeling_k3.adapters import lora_config
from tests.loras import factors, load
from tests.models import Rows


def train(output: Path, steps: int, storage: str, seed: int = 0, resume: Path | None = None, **options: Any) -> Trainer:
    """Train an adapter on attention and experts, saving after two steps."""
    torch.manual_seed(seed)
    model = get_peft_model(load(storage), lora_config(["attention", "experts"], r=2, lora_dropout=0.1))
    arguments = TrainingArguments(
        str(output), max_steps=steps, per_device_train_batch_size=2, save_steps=2, logging_steps=1, report_to=[],
        use_cpu=True, learning_rate=1e-2, lr_scheduler_type="constant", disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Rows())
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


@pytest.mark.parametrize(
    ("storage", "options"),
    [
        ("packed", {}),
        ("mapped", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        ("packed", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    ],
    ids=["packed", "mapped_checkpointed", "packed_reentrant"],
)
def test_a_resumed_run_is_the_uninterrupted_one(storage: str, options: dict[str, Any], tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", 4, storage, **options)
    train(tmp_path / "broken", 2, storage, **options)
    resumed = train(
        tmp_path / "broken", 4, storage, seed=7, resume=tmp_path / "broken" / "checkpoint-2", **options
    )  # fmt: skip
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (straight, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    a, b = factors(straight.model), factors(resumed.model)
    assert a.keys() == b.keys() and any(".experts." in name for name in a)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(bool(p.any()) for name, p in a.items() if ".experts.lora_B" in name)
