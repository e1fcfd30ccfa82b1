"""transformers' own text-generation pipeline with several prompts in a batch.

python examples/pipeline.py "import os" "class Error("
"""

import argparse
from pathlib import Path

import transformers

import modeling_k3  # noqa: F401  tells the Auto classes what K3 is


def main(arguments: list[str] | None = None) -> None:
    """Print one continuation per prompt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=["import os", "def __repr__(self):\n    return "])
    parser.add_argument("--model", default=str(Path(__file__).with_name("pico")), help="a folder, or one of the hub")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    options = parser.parse_args(arguments)

    # Rows of a batch are padded on the left, where the prompt is not; padding changes nothing for K3.
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, padding_side="left")
    except (OSError, ValueError) as error:
        parser.error(
            f"--model {options.model}: give a folder with a checkpoint, or one of the hub. {error}".partition("\n")[0]
        )
    write = transformers.pipeline("text-generation", options.model, tokenizer=tokenizer, dtype="auto", batch_size=2)
    transformers.set_seed(1)
    results = write(
        options.prompts, max_new_tokens=options.max_new_tokens, do_sample=True, temperature=0.5, return_full_text=False
    )
    for prompt, found in zip(options.prompts, results, strict=True):
        print(f"\n-- {prompt}{found[0]['generated_text']}")


if __name__ == "__main__":
    main()
