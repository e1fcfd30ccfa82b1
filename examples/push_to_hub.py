"""Upload a model with its tokenizer, its code and a card, so that others can use it with nothing installed.

hf auth login
python examples/push_to_hub.py NAME/my-k3 --private
"""

import argparse
import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_k3  # noqa: F401  tells the Auto classes what K3 is


def measured(model: str) -> list[dict[str, str]]:
    """Figures from the report that `k3 demo --save` leaves beside a model."""
    report = Path(model) / "report.json"
    if not report.is_file():
        return []
    found = json.loads(report.read_text(encoding="utf-8"))
    figure = {"what": "bits per byte of held-out text", "value": f"{found['bits_per_byte']['after']:.3f}"}
    # The folder's name only: where it lies is nobody's business.
    figure["command"] = f"k3 demo --all --model {Path(model).resolve().name}"
    return [figure | {name: found[name] for name in ("machine", "date") if name in found}]


def main(arguments: list[str] | None = None) -> None:
    """Write the same files to a folder first, to look at them; then upload unless that was all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repository", help="NAME/model on the hub; made if it is not there")
    parser.add_argument("--model", default=str(Path(__file__).with_name("pico")), help="a folder, or one of the hub")
    parser.add_argument("--description", help="what it was trained for, on which data")
    parser.add_argument("--license", help="of the weights, as the hub names it, such as apache-2.0")
    parser.add_argument("--preview", type=Path, help="only write what would be uploaded, into this folder")
    parser.add_argument("--private", action="store_true")
    options = parser.parse_args(arguments)

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        parser.error(
            f"--model {options.model}: give a folder with a checkpoint, or one of the hub. {error}".partition("\n")[0]
        )
    # As stored: packed experts are uploaded packed.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    # What cannot be counted on the model. Weights derived from the released ones get their licence on the card.
    card = {"description": options.description, "license": options.license, "figures": measured(options.model)}
    card = {name: value for name, value in card.items() if value}
    if options.preview is not None:
        model.save_pretrained(
            options.preview, with_code=True, tokenizer=tokenizer, card=card, repository=options.repository
        )
        print("\n".join(sorted(path.name for path in options.preview.iterdir())))
        return
    print(model.push_to_hub(options.repository, tokenizer=tokenizer, card=card, private=options.private))


if __name__ == "__main__":
    main()
