"""Train a K3 with the library's Trainer, from scratch or on: streamed text, packing, K3's optimizer, exact resuming.

python examples/pretrain.py --output runs/pretrain --max-steps 300             # again: goes on from the last checkpoint
python examples/pretrain.py --model examples/pico --lr 4e-4 --text my-code --output runs/continued
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from real_text import source_files
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments
from transformers.integrations import is_tensorboard_available
from transformers.trainer_utils import get_last_checkpoint

from modeling_k3 import K3Config
from modeling_k3.configuration import preset_path
from modeling_k3.training import (
    K3TrainingCallback,
    OptimizerFactory,
    PackingCollator,
    export_released,
    fake_quantized_experts,
)

PICO = Path(__file__).with_name("pico")


class Documents(torch.utils.data.IterableDataset):
    """Files as documents of at most `length` tokens, read while training; a resumed run skips what it has seen.

    Args:
        folder: of the .py files; None for the standard library.
        tokenizer: any.
        length: longer files are cut, and every part is a document of its own.
    """

    def __init__(self, folder: str | None, tokenizer: object, length: int) -> None:
        self.folder, self.tokenizer, self.length = folder, tokenizer, length

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        while True:
            for text in source_files(self.folder):
                # Control tokens spelled out in a file stay text.
                ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
                ids = [self.tokenizer.bos_token_id, *ids, self.tokenizer.eos_token_id]
                for start in range(0, len(ids) - 1, self.length):
                    yield {"input_ids": ids[start : start + self.length]}


def start_model(model: str | None, config: str) -> PreTrainedModel:
    """A trained model in float32, packed experts expanded so that they can be trained; or a new one of a config."""
    if model is None:
        return AutoModelForCausalLM.from_config(K3Config.from_pretrained(config))
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, dequantize=True)


def main(arguments: list[str] | None = None) -> None:
    """Train, or go on training, and export the result as a release."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="runs/pretrain")
    parser.add_argument("--model", help="train this one on: a folder, or one of the hub; default: from scratch")
    parser.add_argument("--text", help="folder of .py files; default: the standard library")
    parser.add_argument("--config", default=str(preset_path("pico")), help="folder with a config.json")
    parser.add_argument("--tokenizer", help="default: the one of --model, or of examples/pico")
    parser.add_argument("--lr", type=float, default=4e-3, help="a tenth of it suits a trained model")
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--export", help="folder for the result in the released layout, experts MXFP4")
    options = parser.parse_args(arguments)
    if next(source_files(options.text), None) is None:
        parser.error(f"--text {options.text}: no .py file with text in that folder")
    # Now, and not after hours of training.
    if options.export and Path(options.export).exists():
        parser.error(f"--export {options.export} exists already; remove it or choose another folder")

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.model or str(PICO))
        model = start_model(options.model, options.config)
    except (OSError, ValueError) as error:
        parser.error(f"--model, --config and --tokenizer take a folder, or one of the hub. {error}".partition("\n")[0])
    rates = {"lr": options.lr, "muon_lr": 1.5 * options.lr}
    trainer = Trainer(
        model,
        TrainingArguments(
            options.output,
            max_steps=options.max_steps,
            save_steps=options.save_steps,
            per_device_train_batch_size=4,
            logging_steps=max(options.max_steps // 50, 1),
            lr_scheduler_type="cosine",
            warmup_steps=0.01,
            max_grad_norm=1.0,
            report_to=["tensorboard"] if is_tensorboard_available() else [],
        ),
        train_dataset=Documents(options.text, tokenizer, options.length),
        data_collator=PackingCollator(options.length, pad_token_id=tokenizer.pad_token_id),
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=(OptimizerFactory, rates | {"weight_decay": 0.1}),
    )
    # At the front, so that TensorBoard sees the routers' and depth's figures: tensorboard --logdir runs/pretrain
    K3TrainingCallback(plot=Path(options.output) / "training.png").attach(trainer)
    last = get_last_checkpoint(options.output) if Path(options.output).is_dir() else None
    # From the first step on the experts compute with the values that the export will hold.
    with fake_quantized_experts(model):
        trainer.train(resume_from_checkpoint=last)
    if options.export:
        print(export_released(model, options.export, dtype=torch.bfloat16, tokenizer=tokenizer))


if __name__ == "__main__":
    main()
