"""LoRA on linear layers and routed experts: planned, trained in plain torch, merged. Needs: pip install peft

python examples/lora.py --preset all --output runs/lora-merged
"""

import argparse
from pathlib import Path

import torch
from peft import get_peft_model
from real_text import questions
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_k3  # noqa: F401  tells the Auto classes what K3 is, and peft what its experts are
from modeling_k3.adapters import PRESETS, lora_config, plan_lora


def main(arguments: list[str] | None = None) -> None:
    """Say what an adapter costs, train it, merge it, save the whole model under the released names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(Path(__file__).with_name("pico")))
    parser.add_argument("--output", default="runs/lora-merged")
    parser.add_argument("--preset", choices=list(PRESETS), nargs="+", default=["attention", "experts"])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # Merging rewrites weights, so experts are expanded; `lora_experts.py` leaves them packed.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, dequantize=True)
    config = lora_config(options.preset, r=options.rank)
    print(plan_lora(model, config))
    model = get_peft_model(model, config)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3)
    texts = [f"# {question}\n# {answer}\n" for question, answer in questions()]
    model.train()
    for step in range(options.steps):
        start = 4 * step % (len(texts) - 4)
        batch = tokenizer(texts[start : start + 4], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == options.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    merged = model.merge_and_unload()
    merged.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
