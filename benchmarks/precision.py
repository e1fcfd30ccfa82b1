"""Fast against exact KDA on the small trained model, in both number formats: what `k3 precision` measures.

    python benchmarks/precision.py                             two minutes; writes benchmarks/results/precision.json

The text is this repository's licence, which does not change. The same with a table and a picture:

    k3 precision examples/pico --text LICENSE --samples 2 --max-tokens 2048 [--dtype float32]
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from measure import machine
from transformers import PreTrainedTokenizerBase

from modeling_k3.demo.text import load
from modeling_k3.readiness.precision import measure_precision
from modeling_k3.readiness.texts import read_samples

ROOT = Path(__file__).resolve().parents[1]
SETTING = {"max_tokens": 2048, "limit": 2}


def main() -> None:
    """Measure in bfloat16, as the model is stored, and in float32."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "precision.json")
    options = parser.parse_args()
    runs = {}
    for dtype in ("bfloat16", "float32"):
        model, tokenizer = load(ROOT / "examples" / "pico", dtype)

        def encode(piece: str, tokenizer: PreTrainedTokenizerBase = tokenizer) -> list[int]:
            return tokenizer(piece, add_special_tokens=False)["input_ids"]

        samples = read_samples(ROOT / "LICENSE", encode, **SETTING)
        (group,) = measure_precision(model, samples).groups
        runs[dtype] = {name: value for name, value in asdict(group).items() if name != "drift"}
        print(dtype, runs[dtype], flush=True)
    report = {"machine": machine(), "setting": {"model": "examples/pico", "text": "LICENSE", **SETTING}, "runs": runs}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
