"""K3's recipe in the library's Trainer: one optimizer for all, quantisation-aware experts, exact resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from modeling_k3.training import MuonAdamW, OptimizerFactory, fake_quantized_experts, parameter_groups
from tests.models import Rows, build, tiny_config


def train(
    output: Path, steps: int, *, seed: int = 0, resume: Path | None = None, by_groups: bool = False, **options: Any
) -> Trainer:
    """Train the tiny model on the MXFP4 grid, saving after two steps; a resume must overwrite what `seed` decides."""
    arguments = TrainingArguments(
        str(output), max_steps=steps, per_device_train_batch_size=2, save_steps=2, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, lr_scheduler_type="cosine", warmup_steps=1, **options,
    )  # fmt: skip
    config = tiny_config(layers="KM", num_experts=4, routed_expert_hidden_size=32, moe_intermediate_size=32)
    model = build(config, seed=seed)
    rates = {"lr": 1e-2, "muon_lr": 2e-2}
    how = (MuonAdamW, {"params": parameter_groups(model, **rates)}) if by_groups else (OptimizerFactory, rates)
    trainer = Trainer(model, arguments, train_dataset=Rows(), optimizer_cls_and_kwargs=how)
    with fake_quantized_experts(model):
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}, {"by_groups": True}],
    ids=["factory", "accumulated", "groups"],
)
def test_a_resumed_run_ends_with_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    straight = train(tmp_path / "a", 4, **options)
    # The schedule must know the whole length, so the run is not shortened but taken up half-way.
    resumed = train(tmp_path / "b", 4, seed=7, resume=tmp_path / "a" / "checkpoint-2", **options)
    inner = straight.optimizer.optimizer
    assert isinstance(inner, MuonAdamW)
    for (name, a), b in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    for first, second in zip(inner.state.values(), resumed.optimizer.optimizer.state.values(), strict=True):
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (straight, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_each_group_follows_the_schedule_from_its_own_peak(tmp_path: Path) -> None:
    trainer = train(tmp_path, 3)
    groups = trainer.optimizer.optimizer.param_groups
    assert {group["initial_lr"] for group in groups if group["rule"] == "muon"} == {2e-2}
    assert {group["initial_lr"] for group in groups if group["rule"] == "adamw"} == {1e-2}
    assert all(group["lr"] < 0.01 * group["initial_lr"] for group in groups)


def test_checkpoints_hold_the_full_precision_weights_under_their_own_names(tmp_path: Path) -> None:
    trainer = train(tmp_path, 2)
    again = type(trainer.model).from_pretrained(tmp_path / "checkpoint-2")
    state = trainer.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
