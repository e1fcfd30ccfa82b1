"""The library's Trainer with our callback: biases move once a step, figures reach the log, resuming changes nothing."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from modeling_k3.training.callback import K3TrainingCallback
from tests.models import build, tiny_config, token_ids, within

FIGURES = {
    *("router_entropy", "router_mean_violation", "router_max_violation", "router_peak_violation", "router_dropped"),
    *("depth_entropy", "depth_largest_weight", "depth_query_norm"),
}


class Rows(torch.utils.data.Dataset):
    """Rows of ten random tokens."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = token_ids(1, 10, seed=index)[0]
        return {"input_ids": row, "labels": row.clone().index_fill_(0, torch.tensor([0]), -100)}


class Reporter(TrainerCallback):
    """Keeps the names of what it is told."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.seen.append(set(logs))


def trainer_of(output: Path, steps: int, callback: K3TrainingCallback, seed: int = 0, **options: Any) -> Trainer:
    config = options.pop("config", {})
    settings = {"per_device_train_batch_size": 2, "save_steps": 2, "logging_steps": 1, "report_to": [], **options}
    arguments = TrainingArguments(
        str(output), max_steps=steps, use_cpu=True, learning_rate=1e-3, lr_scheduler_type="constant",
        disable_tqdm=True, **settings,
    )  # fmt: skip
    model = build(tiny_config(layers="KM", first_k_dense_replace=0, num_experts=4, **config), seed=seed)
    return Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[callback])


def biases(model: Any) -> Tensor:
    return torch.stack([p.detach() for n, p in model.named_parameters() if n.endswith("correction_bias")])


def test_figures_reach_the_log_and_a_picture(tmp_path: Path) -> None:
    callback = K3TrainingCallback(plot=tmp_path / "plots" / "training.png")
    trainer = trainer_of(tmp_path, 3, callback, eval_strategy="steps", eval_steps=1)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 3 and all(set(entry) >= FIGURES for entry in entries)
    assert not any(set(entry) & FIGURES for entry in trainer.state.log_history if "loss" not in entry)
    assert all(0 <= entry["router_entropy"] <= 1 and 0 < entry["depth_entropy"] <= 1 for entry in entries)
    assert [sum(row["load"]) for row in callback.routers.values()] == [2 * 10 * 2] * 2
    with Image.open(callback.plot) as image:
        assert image.format == "PNG" and image.width > 500
    assert [path.name for path in callback.plot.parent.iterdir()] == ["training.png"]


def test_reporters_see_the_figures_after_attach(tmp_path: Path) -> None:
    callback, reporter = K3TrainingCallback(), Reporter()
    trainer = trainer_of(tmp_path, 1, callback)
    trainer.callback_handler.callbacks.insert(0, reporter)
    callback.attach(trainer)
    assert trainer.callback_handler.callbacks.count(callback) == 1
    trainer.train()
    assert reporter.seen[0] >= FIGURES


def test_tensorboard_gets_the_figures_through_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    callback = K3TrainingCallback()
    trainer = trainer_of(tmp_path, 2, callback, report_to=["tensorboard"])
    callback.attach(trainer)
    trainer.train()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= {f"train/{name}" for name in FIGURES | {"loss"}}
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name in FIGURES:
        points = [(point.step, point.value) for point in events.Scalars(f"train/{name}")]
        assert points == [(entry["step"], pytest.approx(entry[name], rel=1e-6)) for entry in entries]


def test_reporters_that_see_nothing_are_not_left_so_in_silence(tmp_path: Path) -> None:
    said = []
    for attach in (False, True):
        callback = K3TrainingCallback()
        trainer = trainer_of(tmp_path, 1, callback)
        if attach:
            callback.attach(trainer)
        trainer.args.report_to = ["board"]
        with CaptureLogger(logging.get_logger("modeling_k3.training.callback")) as log:
            trainer.train()
        said.append(log.out)
    assert "attach(trainer)" in said[0] and not said[1]


def test_the_picture_is_drawn_while_training_but_takes_little_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def slow(path: Path, log: Any, loads: Any, depth: Any, **options: Any) -> None:
        drawn.append(log[-1]["step"])
        assert len(loads) == 2 and len(next(iter(loads.values()))) == 4
        assert len(depth) == 4 and all(sum(row) == pytest.approx(1, abs=1e-5) for row in depth.values())
        time.sleep(0.5)

    monkeypatch.setattr("modeling_k3.training.callback.draw_training", slow)
    trainer_of(tmp_path, 5, K3TrainingCallback(plot=tmp_path / "training.png")).train()
    # At the first entry, and at the last, which is drawn once the training is over.
    assert drawn[0] == 1 and drawn[-1] == 5 and len(drawn) == 2


def test_a_run_that_logs_nothing_has_a_picture_of_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[Any, Any]] = []
    monkeypatch.setattr(
        "modeling_k3.training.callback.draw_training",
        lambda path, log, loads, depth, **options: drawn.append((loads, depth)),
    )
    trainer_of(tmp_path, 2, K3TrainingCallback(plot=tmp_path / "training.png"), logging_strategy="no").train()
    ((loads, depth),) = drawn
    assert [sum(load) for load in loads.values()] == [2 * 2 * 10 * 2] * 2 and len(depth) == 4


def test_violations_do_not_depend_on_how_often_is_logged(tmp_path: Path) -> None:
    logs = []
    for every in (1, 4):
        trainer = trainer_of(tmp_path / str(every), 4, K3TrainingCallback(), logging_steps=every)
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
    often, (rare,) = logs
    means, peaks = ([e[f"router_{name}_violation"] for e in often] for name in ("mean", "peak"))
    assert len(often) == 4 and min(means) > 0.05
    assert rare["router_mean_violation"] == pytest.approx(sum(means) / 4, rel=1e-5)
    assert rare["router_peak_violation"] == pytest.approx(max(peaks), rel=1e-5)


@pytest.mark.parametrize("method", ["quantile", "histogram", "sign"])
def test_accumulation_moves_the_bias_as_one_batch(method: str, tmp_path: Path) -> None:
    moved = []
    for size, pieces in ((8, 1), (2, 4)):
        trainer = trainer_of(
            tmp_path,
            2,
            K3TrainingCallback(method),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=pieces,
        )
        before = biases(trainer.model).clone()
        trainer.train()
        moved.append(biases(trainer.model))
        assert (moved[-1] - before).abs().max() > 1e-4
    assert within(*moved, "same_loss_fp32")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"config": {"router_balancing": "aux_loss", "router_aux_loss_coef": 0.1, "moe_expert_capacity_factor": 1.0}},
    ],
    ids=["plain", "accumulated", "reentrant", "aux_loss"],
)
def test_resuming_with_the_callback_is_exact(options: dict[str, Any], tmp_path: Path) -> None:
    straight = trainer_of(tmp_path / "straight", 4, K3TrainingCallback(), **options)
    straight.train()
    trainer_of(tmp_path / "broken", 2, K3TrainingCallback(), **options).train()
    resumed = trainer_of(tmp_path / "broken", 4, K3TrainingCallback(), seed=7, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "broken" / "checkpoint-2"))
    logs = [
        [{n: e[n] for n in FIGURES | {"loss"}} for e in t.state.log_history if "loss" in e] for t in (straight, resumed)
    ]
    assert len(logs[0]) == 4
    assert all(a == pytest.approx(b, abs=1e-5) for a, b in zip(*logs, strict=True))
    assert within(biases(straight.model), biases(resumed.model), "same_loss_fp32")
    for (name, a), b in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert within(a, b, "same_loss_fp32"), name


def test_dropped_places_are_reported(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 1, K3TrainingCallback(), config={"moe_expert_capacity_factor": 0.5})
    trainer.train()
    assert 0.4 < trainer.state.log_history[0]["router_dropped"] < 0.8
