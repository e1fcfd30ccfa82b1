"""lm-evaluation-harness on two tasks made on the spot, without a network. Needs: pip install 'modeling_k3[eval]'

python examples/evaluation.py --limit 20
"""

import argparse
import json
import random
import sysconfig
from pathlib import Path

import torch
from real_text import questions
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_k3  # noqa: F401  tells the Auto classes what K3 is

try:
    from datasets import Dataset, DatasetDict
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise SystemExit(
        f"No module named {error.name!r}; lm-evaluation-harness comes with: pip install 'modeling_k3[eval]'"
    ) from None


def held_out(model: str) -> list[dict[str, str]]:
    """Files that the model was not trained on, as its report says; without a report any small ones."""
    root, report = Path(sysconfig.get_paths()["stdlib"]), Path(model) / "report.json"
    names = ["sched.py", "copyreg.py"]
    if report.is_file():
        names = json.loads(report.read_text(encoding="utf-8"))["held_out"]["names"]
    texts = [path.read_text(encoding="utf-8") for path in (root / name for name in names) if path.is_file()]
    return [{"page": text} for text in texts if text.strip()]


def which_answer() -> list[dict[str, object]]:
    """What a function is for, one right sentence among four."""
    pairs, choose = questions(), random.Random(0)
    rows = []
    for question, answer in choose.sample(pairs, 200):
        others = [other for _, other in choose.sample(pairs, 8) if other != answer][:3]
        choices = choose.sample([answer, *others], 4)
        rows.append({"question": question, "choices": choices, "gold": choices.index(answer)})
    return rows


def make_task(name: str, rows: list[dict], **config: object) -> ConfigurableTask:
    """A task on rows that are at hand; the same fields stand in a .yaml elsewhere."""
    return ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": lambda **_: DatasetDict(test=Dataset.from_list(rows)),
            "test_split": "test",
            "target_delimiter": " ",
            "metadata": {"version": 1},
            **config,
        }
    )


def main(arguments: list[str] | None = None) -> None:
    """Print one line per metric."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(Path(__file__).with_name("pico")), help="a folder, or one of the hub")
    parser.add_argument("--limit", type=int, help="rows per task; default: all")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--batch-size", type=int, default=4)
    options = parser.parse_args(arguments)

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        parser.error(
            f"--model {options.model}: give a folder with a checkpoint, or one of the hub. {error}".partition("\n")[0]
        )
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tasks = [
        make_task(
            "held_out_text",
            held_out(options.model),
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{page}}",
            metric_list=[{"metric": "bits_per_byte"}],
        ),
        make_task(
            "which_answer",
            which_answer(),
            output_type="multiple_choice",
            doc_to_text="# {{question}}\n#",
            doc_to_choice="{{choices}}",
            doc_to_target="{{gold}}",
            metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
        ),
    ]
    evaluated = HFLM(
        pretrained=model, tokenizer=tokenizer, max_length=options.max_length, batch_size=options.batch_size
    )
    found = simple_evaluate(evaluated, tasks=tasks, limit=options.limit, bootstrap_iters=0)
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                print(f"{task:14} {name.partition(',')[0]:14} {value:.3f}")


if __name__ == "__main__":
    main()
