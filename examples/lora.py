"""LoRA on linear layers and routed experts: planned, trained in plain torch, merged. Needs: pip install peft

python examples/lora.py --preset all --output runs/lora-merged
"""

import argparse
from pathlib import Path

import torch
from peft import get_peft_model
from real_text import questions
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, PreTrainedTokenizerBase

import modeling_k3  # noqa: F401  tells the Auto classes what K3 is, and peft what its experts are
from modeling_k3.adapters import PRESETS, lora_config, plan_lora


def batch_of(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> BatchEncoding:
    """Padded rows with labels; padding is not learned."""
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def main(arguments: list[str] | None = None) -> None:
    """Say what an adapter costs, train it, merge it, save the whole model under the released names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(Path(__file__).with_name("pico")), help="a folder, or one of the hub")
    parser.add_argument("--output", default="runs/lora-merged")
    parser.add_argument("--preset", choices=list(PRESETS), nargs="+", default=["attention", "experts"])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        parser.error(
            f"--model {options.model}: give a folder with a checkpoint, or one of the hub. {error}".partition("\n")[0]
        )
    # Merging rewrites weights, so experts are expanded; `lora_experts.py` leaves them packed.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, dequantize=True)
    config = lora_config(options.preset, r=options.rank)
    print(plan_lora(model, config))
    model = get_peft_model(model, config)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3)
    texts = [f"# {question}\n# {answer}\n" for question, answer in questions()]
    # Every tenth is kept for the end: that the loss falls on these as well is what learning means.
    unseen = batch_of(tokenizer, texts[::10][:32])
    texts = [text for n, text in enumerate(texts) if n % 10]
    losses = []
    with torch.no_grad():
        print(f"before    loss {model.eval()(**unseen).loss.item():.3f} on texts that it is not trained on")
    model.train()
    for step in range(1, options.steps + 1):
        start = 4 * step % (len(texts) - 4)
        loss = model(**batch_of(tokenizer, texts[start : start + 4]), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 5 == 0 or step == options.steps:
            print(f"step {step:4d} loss {sum(losses) / len(losses):.3f}, mean of {len(losses)} steps")
            losses.clear()
    with torch.no_grad():
        print(f"after     loss {model.eval()(**unseen).loss.item():.3f} on texts that it is not trained on")
    merged = model.merge_and_unload()
    merged.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
