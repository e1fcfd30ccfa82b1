"""Packed training equals unpacked training: loss, gradients, accumulation, Trainer runs, resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from modeling_k3.training.callback import K3TrainingCallback
from modeling_k3.training.collator import PackingCollator
from tests.models import BOUNDS, build, close_gradients, tiny_config, token_ids, within

SIZES = [1, 7, 64, 3, 12, 1, 30, 2]
PACKERS = {
    "one_row": PackingCollator(),
    "lengths": PackingCollator(with_lengths=True),
    "rows": PackingCollator(70, pad_token_id=157),
    "one_wide_row": PackingCollator(200, pad_token_id=3),
}


class Documents(torch.utils.data.Dataset):
    """Documents of mixed lengths, some with a prompt that is no label, one without any label."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = token_ids(1, self.sizes[index], seed=index)[0]
        labels = ids.clone()
        labels[: [0, 2, 100, 0, 5][index % 5]] = -100
        return {"input_ids": ids.tolist(), "labels": labels.tolist()}


class Padder:
    """Each document in a row of its own, padded on the right; the labels of `PackingCollator`."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        rows = [PackingCollator()([feature]) for feature in features]
        longest = max(row["input_ids"].shape[1] for row in rows)
        batch = {}
        for name, filler in (("input_ids", 3), ("labels", -100)):
            padded = [
                torch.nn.functional.pad(row[name], (0, longest - row[name].shape[1]), value=filler) for row in rows
            ]
            batch[name] = torch.cat(padded)
        sizes = torch.tensor([row["input_ids"].shape[1] for row in rows]).unsqueeze(1)
        return {**batch, "attention_mask": (torch.arange(longest) < sizes).long()}


def model_of(seed: int = 0, **changes: Any) -> Any:
    return build(tiny_config("KKM", **changes), seed=seed).train()


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(
    ("kda", "attention"), [("chunk", "sdpa"), ("recurrent", "sdpa"), ("exact", "sdpa"), ("chunk", "eager")]
)
def test_loss_and_gradients_are_those_of_the_documents(packer: str, kda: str, attention: str) -> None:
    documents = [Documents(SIZES)[i] for i in range(len(SIZES))]
    packed, alone = model_of(), model_of()
    for model in (packed, alone):
        model.set_kda_implementation(kda)
        model.set_attn_implementation(attention)
    batch = PACKERS[packer](documents)
    count = int((batch["labels"] != -100).sum())
    loss = packed(**batch).loss
    loss.backward()
    total = 0.0
    for document in documents:
        row = PackingCollator()([document])
        each = alone(row["input_ids"], labels=row["labels"], num_items_in_batch=count).loss
        each.backward()
        total += each.item()
    assert loss.item() == pytest.approx(total, rel=BOUNDS["same_loss_fp32"].bound)
    assert close_gradients(packed, alone, "same_loss_fp32")


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing_of_a_packed_batch(packer: str, reentrant: bool) -> None:
    batch = PACKERS[packer]([Documents(SIZES)[i] for i in range(len(SIZES))])
    plain, repeated = model_of(), model_of()
    repeated.gradient_checkpointing_enable({"use_reentrant": reentrant})
    repeated.enable_input_require_grads()
    found = []
    for model in (plain, repeated):
        loss = model(**batch).loss
        loss.backward()
        found.append(loss.item())
    assert found[0] == pytest.approx(found[1], rel=BOUNDS["same_loss_fp32"].bound)
    assert close_gradients(plain, repeated, "same_gradient_fp32")


def run(output: Path, steps: int, collator: Any, seed: int = 0, resume: Path | None = None, **options: Any) -> Trainer:
    settings = {"per_device_train_batch_size": 4, "save_steps": 2, **options}
    arguments = TrainingArguments(
        str(output), max_steps=steps, report_to=[], use_cpu=True, learning_rate=1e-3, disable_tqdm=True,
        logging_steps=1, lr_scheduler_type="constant", **settings,
    )  # fmt: skip
    trainer = Trainer(
        model_of(seed), arguments, train_dataset=Documents(SIZES * 4), data_collator=collator,
        callbacks=[K3TrainingCallback()],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


@pytest.mark.parametrize("packer", ["one_row", "rows"])
@pytest.mark.parametrize("pieces", [1, 4])
def test_a_packed_run_is_the_padded_run(packer: str, pieces: int, tmp_path: Path) -> None:
    """Through the Trainer, with uneven numbers of labels in the micro-batches and balancing on."""
    options = {"per_device_train_batch_size": 8 // pieces, "gradient_accumulation_steps": pieces}
    padded = run(tmp_path / "a", 3, Padder(), per_device_train_batch_size=8)
    packed = run(tmp_path / "b", 3, PACKERS[packer], **options)
    assert losses(packed) == pytest.approx(losses(padded), rel=BOUNDS["same_loss_fp32"].bound)
    logs = [[e["router_entropy"] for e in t.state.log_history if "loss" in e] for t in (padded, packed)]
    assert logs[0] == pytest.approx(logs[1], abs=1e-3)
    for (name, a), b in zip(padded.model.named_parameters(), packed.model.named_parameters(), strict=True):
        assert within(a, b[1], "same_gradient_fp32"), name


def test_a_packed_run_resumes_exactly(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    straight = run(tmp_path / "straight", 4, PACKERS["rows"], **options)
    run(tmp_path / "broken", 2, PACKERS["rows"], **options)
    resumed = run(
        tmp_path / "broken", 4, PACKERS["rows"], seed=7, resume=tmp_path / "broken" / "checkpoint-2", **options
    )
    assert losses(resumed) == pytest.approx(losses(straight), rel=BOUNDS["same_loss_fp32"].bound)
    for (name, a), b in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert within(a, b, "same_loss_fp32"), name


def test_a_batch_without_any_label_changes_nothing() -> None:
    model = model_of()
    document = {"input_ids": [3, 4, 5], "labels": [-100, -100, -100]}
    loss = model(**PackingCollator()([document, document])).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
