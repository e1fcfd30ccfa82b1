"""The examples of training run at toy size, and what each was written to show holds.

Those of use (generate, pipeline, lora, hub and the like) are in `test_example_scripts.py`, on the small trained model.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_k3 import K3Tokenizer
from modeling_k3.experts import iter_experts
from modeling_k3.training import export_released
from tests.models import build, tiny_config, within

PICO = Path(__file__).parents[2] / "examples" / "pico"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release like examples/pico with random weights."""
    config = tiny_config(
        layers="KM", vocab_size=512, hidden_size=32, num_experts=4, routed_expert_hidden_size=32,
        moe_intermediate_size=32, bos_token_id=256, eos_token_id=258, pad_token_id=511,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("toy")
    config.save_pretrained(folder / "config")
    return export_released(build(config), folder / "model", dtype=torch.bfloat16, tokenizer=K3Tokenizer.byte_level())


def biases(model: Any) -> torch.Tensor:
    """What balancing has moved."""
    return torch.stack([p.detach() for name, p in model.named_parameters() if name.endswith("correction_bias")])


def test_pretraining_goes_on_where_it_stopped_and_exports_a_release(
    toy: Path, tmp_path: Path, example: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(6):
        (text / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * (number + 1))
    common = ["--text", str(text), "--config", str(toy.parent / "config"), "--tokenizer", str(toy), "--length", "64"]
    main = example("pretrain")["main"]

    def run(output: str, steps: int, *more: str) -> Path:
        words = ["--output", str(tmp_path / output), "--max-steps", str(steps), "--save-steps", "2"]
        main([*common, *words, *more])
        return tmp_path / output

    torch.manual_seed(0)
    broken = run("a", 2)
    assert (broken / "checkpoint-2").is_dir()
    run("a", 4, "--export", str(tmp_path / "release"))
    state = json.loads((broken / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert imread(broken / "training.png").ndim == 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "release")
    assert {module.storage for _, module in iter_experts(model)} == {"packed"}
    assert len(AutoTokenizer.from_pretrained(tmp_path / "release")) == 512
    # Documents are cut, never mixed, and begin with the token for that.
    documents = example("pretrain")["Documents"](str(text), AutoTokenizer.from_pretrained(toy), 64)
    first = next(iter(documents))["input_ids"]
    assert first[0] == 256 and len(first) <= 64


def test_training_goes_on_from_a_trained_model(tmp_path: Path, example: Callable[[str], dict[str, Any]]) -> None:
    losses = {}
    for name, more in {"scratch": [], "on": ["--model", str(PICO), "--lr", "4e-4"]}.items():
        words = ["--output", str(tmp_path / name), "--max-steps", "2", "--save-steps", "2", "--length", "64", *more]
        example("pretrain")["main"](words)
        state = json.loads((tmp_path / name / "checkpoint-2" / "trainer_state.json").read_text())
        losses[name] = state["log_history"][0]["loss"]
    # Where nothing is known, a byte costs 6.2 nats (512 tokens).
    assert losses["scratch"] > 5 and losses["on"] < 3
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, dequantize=True).state_dict()
        for path in (PICO, tmp_path / "on" / "checkpoint-2")
    )
    experts = [name for name in before if ".experts." in name]
    assert experts and not any(torch.equal(before[name], after[name]) for name in experts)


def test_pretraining_refuses_before_it_begins(
    tmp_path: Path, example: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    main = example("pretrain")["main"]
    for words, message in (
        (["--text", str(tmp_path)], "no .py file with text"),
        (["--export", str(tmp_path)], "exists already"),
    ):
        with pytest.raises(SystemExit):
            main([*words, "--output", str(tmp_path / "run")])
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_model_that_is_not_there_is_one_line(
    name: str, tmp_path: Path, example: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl")
    with pytest.raises(SystemExit):
        example(name)["main"](["--model", str(tmp_path / "nowhere")])
    assert f"error: --model {tmp_path / 'nowhere'}: " in capsys.readouterr().err.splitlines()[-1]


def test_sft_learns_only_what_the_assistant_says(
    toy: Path, tmp_path: Path, example: Callable[[str], dict[str, Any]]
) -> None:
    pytest.importorskip("trl")
    script = example("sft")
    tokenizer = AutoTokenizer.from_pretrained(toy)
    row = script["encode"](tokenizer, ("What is <|sep|>?", "A name."))
    spoken = tokenizer.decode([label for label in row["labels"] if label != -100])
    assert "A name." in spoken and "What is" not in spoken
    assert len(row["labels"]) == len(row["input_ids"]) and row["labels"].count(-100) > 20
    script["main"](["--model", str(toy), "--output", str(tmp_path / "sft"), "--max-steps", "2", "--examples", "8"])
    trained, before = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "sft", toy))
    assert not torch.equal(trained.lm_head.weight, before.lm_head.weight.float())
    assert not torch.equal(*(biases(model) for model in (trained, before)))


def test_dpo_on_left_padded_pairs(toy: Path, tmp_path: Path, example: Callable[[str], dict[str, Any]]) -> None:
    trl = pytest.importorskip("trl.trainer.dpo_trainer")
    script = example("dpo")
    rows = [
        {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]},
        {"prompt_ids": [7], "chosen_ids": [9], "rejected_ids": [10, 11, 12, 13]},
    ]
    left, right = (make(pad_token_id=511)(rows) for make in (script["LeftPadded"], trl.DataCollatorForPreference))
    assert left["attention_mask"][1].tolist() == [0, 0, 0, 1, 1]
    assert left["input_ids"][1].tolist() == [511, 511, 511, 7, 9]
    assert left["completion_mask"][1].tolist() == [0, 0, 0, 0, 1]
    model = AutoModelForCausalLM.from_pretrained(toy, dtype="float32").eval()
    sums = []
    for batch in (left, right):
        ids, mask, spoken = batch["input_ids"], batch["attention_mask"], batch["completion_mask"][:, 1:]
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
        chosen = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
        sums.append((chosen * spoken).sum(dim=1))
    assert within(sums[0], sums[1], "same_function_fp32")
    script["main"](["--model", str(toy), "--output", str(tmp_path / "dpo"), "--max-steps", "2", "--examples", "6"])
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "dpo")
    assert not torch.equal(biases(trained), biases(model))


def test_lora_on_packed_experts(
    toy: Path, tmp_path: Path, example: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    script = example("lora_experts")
    script["main"](["--model", str(toy), "--output", str(tmp_path / "lora"), "--max-steps", "2", "--rank", "2"])
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert float(line.rpartition(" ")[2]) < 1e-4
    assert (tmp_path / "lora" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("side", ["left", "right"])
def test_log_probabilities_of_generation_are_those_of_scoring_again(toy: Path, side: str) -> None:
    """What reinforcement learning rests on: the policy that wrote the text is the one that is trained."""
    model = AutoModelForCausalLM.from_pretrained(toy, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(toy, padding_side="left")
    batch = tokenizer(["def f(", "import os, sys\n", "x"], return_tensors="pt", padding=True)
    torch.manual_seed(0)
    output = model.generate(
        **batch, max_new_tokens=24, min_new_tokens=24, do_sample=True, top_k=0, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    written = torch.stack(output.logits, dim=1).log_softmax(-1)
    new = output.sequences[:, batch["input_ids"].shape[1] :]
    ids = output.sequences
    mask = torch.cat([batch["attention_mask"], torch.ones_like(new)], dim=1)
    if side == "right":
        pads = (mask == 0).sum(dim=1).tolist()
        ids, mask = (torch.stack([row.roll(-n) for row, n in zip(x, pads, strict=True)]) for x in (ids, mask))
    with torch.no_grad():
        scored = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    for row in range(3):
        end = int(mask[row].nonzero().max())
        again = scored[row, end - 24 : end]
        at = new[row].unsqueeze(-1)
        assert within(written[row].gather(-1, at), again.gather(-1, at), "same_function_fp32")
        assert (written[row] - again).abs().max() < 1e-3
