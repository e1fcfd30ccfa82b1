"""A finished model as others get it: weights, tokenizer, curve, report, and a card that says what it is."""

import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

from .state import publish, sweep

_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [kimi, k3, mxfp4]
---

# K3 {preset}: {total:.1f} million parameters, trained from scratch

A K3 with every part of the large one (KDA, gated MLA, AttnRes, latent experts, SiTU), small enough for tests and for a
laptop. It continues text byte by byte and knows no chat. It is here so that tools have real weights to work on.

| | |
|---|---|
| parameters | {total_count:,}, of which {active_count:,} work on each token |
| format | {form} |
| held-out bits per byte | **{after:.3f}** after, {before:.2f} before training (on the same text {references}) |
| training | {steps:,} steps, {tokens:,} tokens, {hours} |

![loss](loss.png)

## Use

```python
import modeling_k3
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
print(tokenizer.decode(model.generate(**tokenizer("def main(", return_tensors="pt"), max_new_tokens=64)[0]))
```

## Data

{data}

Held out are {documents} documents with {held_bytes:,} bytes, chosen by a hash of their names before training (names in
`report.json`). The figure above is measured on all of them, with the files of this folder: bits for every byte
and every document border, in windows of 1,024 that begin with nothing.

## Training

```sh
{command}
```

{recipe}

The whole curve is in `report.json`. A run with a budget of steps gives the same bits again on the same machine with the
same versions and number of threads; elsewhere sums are rounded in another order.
"""

_STDLIB = (
    "Sources of the Python {python} standard library ({train_bytes:,} bytes; tests, generated tables and installed "
    "packages left out), as UTF-8 bytes. They are under the PSF licence; the weights are under Apache-2.0."
)


def save_with_card(model: Path, curve: Path, report: dict[str, Any], target: Path) -> None:
    """Copy a finished model and put its card, report and curve beside it; complete or absent.

    Args:
        model: folder of the model.
        curve: PNG.
        report: as in `report.json` of the run.
        target: folder that will appear.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent)
    unfinished = target.with_name(f".unfinished-{target.name}")
    shutil.copytree(model, unfinished)
    shutil.copyfile(curve, unfinished / "loss.png")
    # Where a run lay and what else its machine did is of no use elsewhere.
    kept = {name: value for name, value in report.items() if name not in ("files", "memory", "speed")}
    (unfinished / "report.json").write_text(json.dumps(kept) + "\n", encoding="utf-8")
    (unfinished / "README.md").write_text(card_text(kept, target), encoding="utf-8")
    publish(unfinished, target)


def card_text(report: dict[str, Any], folder: Path) -> str:
    """The card of a finished run, in Markdown."""
    bits, training, held_out = report["bits_per_byte"], report["training"], report["held_out"]
    settings, text = training["settings"], report["text"]
    packed = "released layout, routed experts MXFP4, the rest bfloat16" if settings["qat"] else "float32"
    data = f"{text['train_bytes']:,} bytes of the text that was given with `--data`."
    if text.get("python"):
        data = _STDLIB.format(python=text["python"], train_bytes=text["train_bytes"])
    return _CARD.format(
        preset=Path(report["preset"]).name,
        total=report["parameters"]["total"] / 1e6,
        total_count=report["parameters"]["total"],
        active_count=report["parameters"]["active"],
        form=packed,
        after=bits["after"],
        before=bits["before"],
        references=", ".join(f"{name} {level:.2f}" for name, level in bits["references"].items()),
        steps=training["steps"],
        tokens=training["tokens"],
        hours=f"{training['seconds'] / 60:.0f} minutes on {report['threads']} CPU thread{'s'[: report['threads'] > 1]}",
        folder=folder,
        data=textwrap.fill(data, 120),
        documents=held_out["documents"],
        held_bytes=held_out["bytes"],
        command=_command(report, folder),
        recipe=textwrap.fill(_recipe(settings), 120),
    )


def _command(report: dict[str, Any], folder: Path) -> str:
    """The command that was given."""
    settings = report["training"]["settings"]
    words = ["k3 demo --train"]
    words += ["--qat"] if settings["qat"] else []
    words += [f"--steps {settings['max_steps']}" if settings["max_steps"] else f"--seconds {settings['seconds']:g}"]
    words += [f"--batch-size {settings['batch_size']} --sequence-length {settings['sequence_length']}"]
    words += [f"--seed {settings['seed']}"] if settings["seed"] else []
    words += [f"--preset {report['preset']}"] if report["preset"] != "pico" else []
    words += [f"--threads {report['threads']} --save {folder}"]
    return " ".join(words)


def _recipe(settings: dict[str, Any]) -> str:
    """The settings in words."""
    optimizer = f"AdamW (peak rate {settings['lr']:g})"
    if settings["muon_lr"] is not None:
        optimizer = f"Muon (peak rate {settings['muon_lr']:g}, per head) for matrices, {optimizer} for the rest"
    quantised = (
        " The experts were trained on the MXFP4 grid with straight-through gradients, so packing them lost nothing."
        if settings["qat"]
        else ""
    )
    return (
        f"{optimizer}, weight decay {settings['weight_decay']:g}, gradient clipping at {settings['clip']:g}, a cosine "
        f"with {settings['warmup']:.0%} warm-up, quantile balancing of the routers; {settings['batch_size']} windows "
        f"of {settings['sequence_length']} bytes per step.{quantised}"
    )
