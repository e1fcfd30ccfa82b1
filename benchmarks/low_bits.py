"""What fewer bits cost: held-out bits per byte and distance from the full model, form by form, on examples/pico.

    python benchmarks/low_bits.py --out benchmarks/results/low_bits.json

Every form is loaded by the calls a user would make and measured on the same windows of text the model has not seen.
All compute in float32, so that what differs is the weights (and activations, where a form rounds them). KL is that of
the next-token distribution from the full model's, in bits for each token. "no routed experts" (their outputs zero) says
how much of the model there is to lose: a small model loses little. Needs bitsandbytes and hqq; a form whose package is
missing is left out and named.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measure import machine  # noqa: E402

#: Form -> (dense part, experts): a form of bitsandbytes or None, and bits and group of HQQ, "mxfp4", "bf16" or None.
FORMS: dict[str, tuple[str | None, Any]] = {
    "bf16": (None, "bf16"),
    "no routed experts": (None, None),
    "release": (None, "mxfp4"),
    "dense int8": ("int8", "mxfp4"),
    "dense nf4": ("nf4", "mxfp4"),
    "dense fp4": ("fp4", "mxfp4"),
    "experts 8 bits": (None, (8, 64)),
    "experts 4 bits": (None, (4, 64)),
    "experts 3 bits": (None, (3, 64)),
    "experts 3 bits, groups of 32": (None, (3, 32)),
    "experts 2 bits": (None, (2, 64)),
    "experts 2 bits, groups of 16": (None, (2, 16)),
    "dense int8, experts 3 bits": ("int8", (3, 64)),
    "dense nf4, experts 3 bits": ("nf4", (3, 64)),
}


def load(folder: Path, dense: str | None, experts: Any) -> Any:
    """The model in one form."""
    import torch
    from transformers import BitsAndBytesConfig

    from modeling_k3 import K3ForCausalLM
    from modeling_k3.low_bits import quantize_experts

    options: dict[str, Any] = {"dtype": torch.float32, "expert_storage": "packed" if experts == "mxfp4" else "dense"}
    if dense == "int8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    elif dense is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=dense, bnb_4bit_compute_dtype=torch.float32
        )
    model = K3ForCausalLM.from_pretrained(folder, **options)
    for name, parameter in model.named_parameters():
        if experts is None and ".experts." in name:
            parameter.data.zero_()
    if isinstance(experts, tuple):
        quantize_experts(model, bits=experts[0], group=experts[1])
    return model.eval()


def count(model: Any) -> dict[str, Any]:
    """Bytes of experts and of everything else, plain numbers at two bytes as bf16 would have them."""
    from modeling_k3.stored_bits import stored_bytes

    experts = rest = numbers = 0
    for name, module in model.named_modules():
        is_expert = name.endswith(".experts")
        own = stored_bytes(module)
        size = sum(own.values())
        for leaf, parameter in module.named_parameters(recurse=False):
            if not (own and leaf == "weight"):
                plain = (
                    parameter.numel() * 2 if parameter.dtype.itemsize == 4 and parameter.is_floating_point() else None
                )
                size += parameter.nbytes if plain is None else plain
        if is_expert:
            experts, numbers = experts + size, numbers + module.count_weights()
        else:
            rest += size
    return {"expert_bytes": experts, "bits_per_expert_weight": 8 * experts / numbers, "dense_bytes": rest}


def measure(model: Any, windows: Any, reference: list[Any] | None) -> tuple[dict[str, float], list[Any]]:
    """Bits per byte on windows [n, T + 1]; KL and agreement of the likeliest token with the reference's logits."""
    import torch

    nats = kl = agree = 0.0
    logits = []
    begin = time.perf_counter()
    with torch.no_grad():
        for number, ids in enumerate(windows.split(4)):
            ids = ids.long()
            found = torch.log_softmax(model(input_ids=ids[:, :-1], use_cache=False).logits.float(), dim=-1)
            nats -= found.gather(-1, ids[:, 1:, None]).sum().item()
            if reference is None:
                logits.append(found)
                continue
            full = reference[number]
            kl += (full.exp() * (full - found)).sum().item()
            agree += (full.argmax(-1) == found.argmax(-1)).sum().item()
    text, tokens = int((windows[:, 1:] < 256).sum()), windows[:, 1:].numel()
    result = {"bits_per_byte": nats / math.log(2) / text, "seconds": time.perf_counter() - begin}
    if reference is not None:
        result |= {"kl_bits": kl / math.log(2) / tokens, "same_token": agree / tokens}
    return result, logits


def main() -> None:
    """Measure all forms, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "pico", help="a folder with a report.json")
    parser.add_argument("--windows", type=int, default=48, help="of 1024 bytes, spread over the held-out text")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "low_bits.json")
    options = parser.parse_args()

    from transformers.utils import logging

    from modeling_k3.demo.corpus import load_corpus
    from modeling_k3.demo.measure import sample_windows

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    names = json.loads((options.model / "report.json").read_text())["held_out"]["names"]
    windows = sample_windows(load_corpus((), held_out_names=names).held_out, options.windows, 1025)
    rows, reference, left_out = {}, None, {}
    for form, (dense, experts) in FORMS.items():
        try:
            model = load(options.model, dense, experts)
        except ImportError as error:
            left_out[form] = str(error)
            continue
        found, logits = measure(model, windows, reference)
        reference = logits if reference is None else reference
        rows[form] = {**count(model), **found}
        extra = f"{found['kl_bits']:9.4f} {found['same_token']:8.1%}" if "kl_bits" in found else ""
        print(
            f"{form:30}{rows[form]['expert_bytes']:>10}{rows[form]['bits_per_expert_weight']:7.2f}"
            f"{rows[form]['dense_bytes']:>10}{found['bits_per_byte']:9.4f}{extra}",
            flush=True,
        )
    report = {
        "model": options.model.name,
        "windows": options.windows,
        "text_bytes": int((windows[:, 1:] < 256).sum()),
        "machine": machine(),
        "columns": {
            "expert_bytes": "routed experts",
            "bits_per_expert_weight": "scales included",
            "dense_bytes": "everything else, what is not quantised in two bytes for each number",
            "bits_per_byte": "on held-out text",
            "kl_bits": "of the next token's distribution from the bf16 model's, bits for each token",
            "same_token": "share of positions where the likeliest next token is the bf16 model's",
            "seconds": "of the measurement; two busy cores, for the order of magnitude only",
        },
        "left_out": left_out,
        "forms": rows,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
