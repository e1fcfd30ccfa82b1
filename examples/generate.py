"""Load a checkpoint and stream what it writes: any saved K3, a release or a repository of the hub.

python examples/generate.py --prompt "def main("
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

import modeling_k3  # noqa: F401  tells the Auto classes what K3 is


def main(arguments: list[str] | None = None) -> None:
    """Continue a prompt and print the text as it comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(Path(__file__).with_name("pico")), help="a folder, or one of the hub")
    parser.add_argument("--prompt", default="def main(")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token every time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        parser.error(
            f"--model {options.model}: give a folder with a checkpoint, or one of the hub. {error}".partition("\n")[0]
        )
    # "auto" keeps the number format of the files; MXFP4 experts stay packed in any case.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval()
    prompt = tokenizer(options.prompt, return_tensors="pt")
    drawn = {"do_sample": True, "temperature": options.temperature, "top_p": 0.95, "top_k": 0}
    set_seed(options.seed)
    with torch.inference_mode():
        model.generate(
            **prompt,
            **(drawn if options.temperature > 0 else {"do_sample": False}),
            max_new_tokens=options.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        )


if __name__ == "__main__":
    main()
