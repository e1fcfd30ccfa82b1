"""What MXFP4 costs a small K3 on text it has not seen, with and without quantisation-aware training.

    python benchmarks/qat.py --steps 120

Two runs with the same start, data and budget; each is measured in full precision and on the MXFP4 grid, which is what
its packed export computes. Results go to results/qat.json. Single runs: an observation, not a distribution.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import machine
from transformers import AutoModelForCausalLM, set_seed

import modeling_k3
from modeling_k3.demo.corpus import Corpus, load_corpus
from modeling_k3.demo.measure import sample_windows, sampled_bits_per_byte
from modeling_k3.demo.run import demo_config
from modeling_k3.demo.train import TrainSettings, train
from modeling_k3.training import fake_quantized_experts

RESULTS = Path(__file__).with_name("results") / "qat.json"


def run(corpus: Corpus, *, steps: int, qat: bool, seed: int) -> dict[str, Any]:
    """Train once and measure the result in both number formats."""
    settings = TrainSettings(max_steps=steps, batch_size=4, sequence_length=512, looks=1, qat=qat, seed=seed)
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(demo_config("pico"))
    windows = sample_windows(corpus.held_out, 48, 1025)
    row: dict[str, Any] = {"qat": qat, "before": round(sampled_bits_per_byte(model, windows), 4)}
    with tempfile.TemporaryDirectory() as folder:
        progress = train(model, corpus, settings, Path(folder), identity={}, first_look=lambda: row["before"])
    row["seconds"] = round(progress["elapsed"], 1)
    row["full_precision"] = round(sampled_bits_per_byte(model, windows), 4)
    with fake_quantized_experts(model):
        row["mxfp4"] = round(sampled_bits_per_byte(model, windows), 4)
    row["cost_of_packing"] = round(row["mxfp4"] - row["full_precision"], 4)
    return row


def main() -> None:
    """Run both, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    modeling_k3.register()
    torch.set_num_threads(options.threads)
    corpus = load_corpus()
    rows = [run(corpus, steps=options.steps, qat=qat, seed=options.seed) for qat in (False, True)]
    result = {
        "what": "held-out bits per byte of the pico preset on 48 windows of 1,024 bytes; one run each",
        "steps": options.steps,
        "tokens": options.steps * 2048,
        "seed": options.seed,
        "machine": machine(),
        "runs": rows,
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{'trained':>12} {'before':>8} {'full':>8} {'MXFP4':>8} {'cost':>8} {'seconds':>8}")
    for row in rows:
        figures = [row["before"], row["full_precision"], row["mxfp4"], row["cost_of_packing"], row["seconds"]]
        print(f"{'with QAT' if row['qat'] else 'without':>12} " + " ".join(f"{figure:8.3f}" for figure in figures))


if __name__ == "__main__":
    main()
