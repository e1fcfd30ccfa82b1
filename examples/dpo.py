"""Preference training (DPO) with TRL on left-padded pairs. Needs: pip install trl

python examples/dpo.py --model runs/sft --output runs/dpo
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from real_text import questions
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

import modeling_k3  # noqa: F401  tells the Auto classes what K3 is
from modeling_k3.training import K3TrainingCallback, build_optimizer


class LeftPadded(DataCollatorForPreference):
    """TRL's pairs padded on the left, where generation has its padding; for K3 both sides are the same."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch; called by the base class."""
        batch = super().torch_call(examples)
        pads = (batch["attention_mask"] == 0).sum(dim=1)
        return {name: _roll(value, pads) if value.ndim == 2 else value for name, value in batch.items()}


def _roll(rows: Tensor, by: Tensor) -> Tensor:
    return torch.stack([row.roll(int(count)) for row, count in zip(rows, by, strict=True)])


def main(arguments: list[str] | None = None) -> None:
    """Prefer answers as they were written to the same words in reverse."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(Path(__file__).with_name("pico")), help="a folder, or one of the hub")
    parser.add_argument("--output", default="runs/dpo")
    parser.add_argument("--max-steps", type=int, default=50)
    parser.add_argument("--examples", type=int, default=200)
    options = parser.parse_args(arguments)

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        parser.error(
            f"--model {options.model}: give a folder with a checkpoint, or one of the hub. {error}".partition("\n")[0]
        )
    model, reference = (
        AutoModelForCausalLM.from_pretrained(options.model, dtype="float32", dequantize=True) for _ in range(2)
    )
    pairs = questions()[: options.examples]
    rows = [
        {"prompt": f"# {question}\n# ", "chosen": f"{answer}\n", "rejected": f"{' '.join(answer.split()[::-1])}\n"}
        for question, answer in pairs
    ]
    trainer = DPOTrainer(
        model,
        reference,
        DPOConfig(
            options.output,
            max_steps=options.max_steps,
            per_device_train_batch_size=2,
            logging_steps=5,
            max_length=512,
            bf16=False,
            report_to=[],
        ),
        data_collator=LeftPadded(pad_token_id=tokenizer.pad_token_id, max_length=512),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizers=(build_optimizer(model, lr=1e-4, muon_lr=5e-4), None),
    )
    # Keeps the experts' load even, as the model's config says.
    K3TrainingCallback().attach(trainer)
    trainer.train()
    trainer.save_model(options.output)


if __name__ == "__main__":
    main()
