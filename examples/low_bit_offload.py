"""A model larger than memory: linear layers in 8 or 4 bits, experts read from the files within a budget.

Needs: pip install bitsandbytes (not with --bits 16)

python examples/low_bit_offload.py --bits 8 --expert-memory 1MB
"""

import argparse
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, set_seed

import modeling_k3  # noqa: F401  tells the Auto classes what K3 is


def main(arguments: list[str] | None = None) -> None:
    """Load in little memory, write something, and say what the experts took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(Path(__file__).with_name("pico")), help="a folder, or one of the hub")
    parser.add_argument("--bits", type=int, choices=[4, 8, 16], default=8, help="of the linear layers; 16: as stored")
    parser.add_argument("--expert-memory", default="1MB", help="for experts and caches, e.g. 24GiB")
    parser.add_argument("--disk-layers", type=int, default=0, help="with --bits 16: layers whose weights stay on disk")
    parser.add_argument("--prompt", default="class Node:")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args(arguments)

    ways = {
        4: {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")},
        8: {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
        # What the device map leaves on disk is read again by every forward. Layers in few bits have to be in memory.
        16: {"device_map": {"": "cpu"} | {f"model.layers.{n}": "disk" for n in range(options.disk_layers)}},
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        parser.error(
            f"--model {options.model}: give a folder with a checkpoint, or one of the hub. {error}".partition("\n")[0]
        )
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, expert_memory=options.expert_memory, **ways[options.bits]
    )
    kinds = Counter(type(module).__name__ for module in model.modules() if "Linear" in type(module).__name__)
    print(f"linear layers: {dict(kinds)}")
    prompt = tokenizer(options.prompt, return_tensors="pt")
    set_seed(0)
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=options.max_new_tokens, do_sample=True, temperature=0.8)
    print(tokenizer.decode(ids[0]))
    stats = model.expert_residency.stats()
    print(
        f"experts: at most {stats['peak_bytes']:,} bytes in memory; {stats['bytes_read']:,} bytes read, "
        f"{stats['hits']} of {stats['hits'] + stats['misses']} were there when they were needed"
    )


if __name__ == "__main__":
    main()
