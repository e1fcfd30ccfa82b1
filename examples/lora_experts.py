"""LoRA on routed experts that stay packed in MXFP4, then the adapter saved and loaded again. Needs: pip install peft

python examples/lora_experts.py --model examples/pico --output runs/lora
"""

import argparse
from pathlib import Path

import torch
from peft import PeftModel
from real_text import questions
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import modeling_k3  # noqa: F401  tells the Auto classes what K3 is, and peft what its experts are
from modeling_k3.adapters import k3_lora
from modeling_k3.training import PackingCollator


def main(arguments: list[str] | None = None) -> None:
    """Train an adapter on the experts and compare it with what is loaded from disk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(Path(__file__).with_name("pico")), help="a folder, or one of the hub")
    parser.add_argument("--output", default="runs/lora")
    parser.add_argument("--max-steps", type=int, default=50)
    parser.add_argument("--rank", type=int, default=4)
    options = parser.parse_args(arguments)

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        parser.error(
            f"--model {options.model}: give a folder with a checkpoint, or one of the hub. {error}".partition("\n")[0]
        )
    # Prints what will be trained before it allocates any of it.
    model = k3_lora(AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"), "experts", r=options.rank)
    texts = [f"# {question}\n# {answer}\n" for question, answer in questions()]
    rows = [{"input_ids": tokenizer.encode(text, split_special_tokens=True)} for text in texts]
    trainer = Trainer(
        model,
        TrainingArguments(
            options.output,
            max_steps=options.max_steps,
            per_device_train_batch_size=8,
            learning_rate=2e-3,
            logging_steps=5,
            remove_unused_columns=False,
            report_to=[],
        ),
        train_dataset=rows,
        data_collator=PackingCollator(1024, pad_token_id=tokenizer.pad_token_id),
    )
    trainer.train()
    model.save_pretrained(options.output)

    base = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
    again = PeftModel.from_pretrained(base, options.output)
    ids = torch.tensor([rows[0]["input_ids"]])
    with torch.no_grad():
        difference = (again.eval()(ids).logits - model.eval()(ids).logits).abs().max().item()
    print(f"loaded adapter against trained one: largest difference of a logit {difference:.1e}")


if __name__ == "__main__":
    main()
