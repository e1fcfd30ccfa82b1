"""Supervised fine-tuning with TRL on conversations, loss on the assistant's turns only. Needs: pip install trl

python examples/sft.py --model examples/pico --output runs/sft
"""

import argparse
from pathlib import Path

from datasets import Dataset
from real_text import questions
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

import modeling_k3  # noqa: F401  tells the Auto classes what K3 is
from modeling_k3.training import K3TrainingCallback, OptimizerFactory


def encode(tokenizer: PreTrainedTokenizerBase, pair: tuple[str, str]) -> dict[str, list[int]]:
    """One conversation as ids, and as labels that are -100 outside of what the assistant says.

    Encoded here and not by TRL: segment by segment, so that nothing in the text can become a control token, and with
    the assistant's tokens marked by the format itself.
    """
    question, answer = pair
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=False, thinking=False, return_assistant_tokens_mask=True
    )
    ids = encoded["input_ids"]
    labels = [i if mine else -100 for i, mine in zip(ids, encoded["assistant_masks"], strict=True)]
    return {"input_ids": ids, "labels": labels}


def main(arguments: list[str] | None = None) -> None:
    """Fine-tune and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(Path(__file__).with_name("pico")), help="a folder, or one of the hub")
    parser.add_argument("--output", default="runs/sft")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--examples", type=int, default=400)
    options = parser.parse_args(arguments)

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        parser.error(
            f"--model {options.model}: give a folder with a checkpoint, or one of the hub. {error}".partition("\n")[0]
        )
    # Everything is trained, so packed experts are expanded.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32", dequantize=True)
    trainer = SFTTrainer(
        model,
        SFTConfig(
            options.output,
            max_steps=options.max_steps,
            per_device_train_batch_size=4,
            logging_steps=10,
            max_length=1024,
            bf16=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([encode(tokenizer, pair) for pair in questions()[: options.examples]]),
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=(OptimizerFactory, {"lr": 5e-4, "muon_lr": 1e-3}),
    )
    # Keeps the experts' load even, as the model's config says.
    K3TrainingCallback().attach(trainer)
    trainer.train()
    trainer.save_model(options.output)


if __name__ == "__main__":
    main()
