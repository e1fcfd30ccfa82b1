"""`k3 doctor`, `k3 precision` and the GPU check as a user runs them."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from modeling_k3 import K3ForCausalLM, kda_paths
from modeling_k3.cli import app
from modeling_k3.demo.tokenizer import build_tokenizer
from modeling_k3.readiness import gpu_check, model_check, operators
from modeling_k3.readiness.doctor import is_ready
from modeling_k3.readiness.model_check import ModelCheck
from tests.models import build, tiny_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model over bytes with KDA, MLA and experts, with random weights."""
    folder = tmp_path_factory.mktemp("model")
    build(tiny_config(layers="KKM", vocab_size=512, eos_token_id=257, pad_token_id=511)).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_precision_on_plain_text(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    words = [
        "precision",
        checkpoint,
        "--text",
        text,
        "--out",
        tmp_path / "out",
        "--max-tokens",
        "128",
        "--samples",
        "2",
    ]
    result = run(*words, "--calibrate", "--seeds", "1", "--fast", "chunk")
    assert result.exit_code == 0, result.output
    assert "within the threshold" in result.output and "2 short" in result.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["passed"] and len(report["noise"]) == 2 and set(report["layers"]) == {"0", "1"}
    assert (tmp_path / "out" / "report.png").stat().st_size > 10_000
    above = run(*words, "--threshold", "0", "--fast", "chunk")
    assert above.exit_code == 1 and "ABOVE the threshold" in above.output


def test_precision_on_prompts_with_answers(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"def f{i}(", "answer": "self): pass"}) for i in range(3)))
    result = run("precision", checkpoint, "--text", file, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "answers: equal 100%" in result.output
    assert json.loads((tmp_path / "out" / "report.json").read_text())["answers"]["equal"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--fast", "quick"], "kda_implementation='quick' is unknown"), (["--text", "missing.txt"], "missing.txt")],
)
def test_precision_says_what_to_put_right(checkpoint: Path, tmp_path: Path, words: list[str], message: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text")
    result = run("precision", checkpoint, "--text", text, "--out", tmp_path / "out", *words)
    assert result.exit_code == 2 and message in result.output


def test_doctor_prints_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_LENGTHS", (1, 40))
    result = run("doctor", "--device", "cpu", "--json", tmp_path / "doctor.json")
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("KDA chunk", "AttnRes", "router", "verified"))
    assert json.loads((tmp_path / "doctor.json").read_text())["ready"] is True


def test_doctor_leaves_with_1_where_an_operator_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_LENGTHS", (1,))
    monkeypatch.setattr(operators, "_FP32_LIMIT", 0.0)
    result = run("doctor", "--device", "cpu")
    assert result.exit_code == 1 and "refused" in result.output


def test_gpu_check_runs_the_same_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operators, "_MORE_LENGTHS", (1, 40))
    # Compiled by the first call, which takes half a minute.
    monkeypatch.delitem(model_check.ATTENTIONS, "flex_attention")
    words = ["--device", "cpu", "--lengths", "64", "--heads", "2", "--preset", "tiny", "--tokens", "40"]
    assert gpu_check.main([*words, "--out", str(tmp_path)]) == 0
    speed = json.loads((tmp_path / "speed.json").read_text())
    assert [row["backward"] for row in speed] == [False, True] and all(row["ms"] > 0 for row in speed)
    rows = json.loads((tmp_path / "operators.json").read_text())["operators"]
    found = {(row["operator"], row["implementation"]): row["status"] for row in rows}
    verified = [("packed experts", "MXFP4"), ("mapped experts", "a budget"), ("generation", "cache")]
    verified += [("training", "KDA chunk"), ("training, auto", "KDA auto"), ("attention", "sdpa")]
    assert all(found[f"model: {operator}", by] == "verified" for operator, by in verified)
    assert found["model: attention", "flash_attention_2"] in ("not available", "refused")
    assert "tokens a second" in " ".join(capsys.readouterr().out.split())
    kda_paths.reset_choices()


def test_gpu_check_without_a_gpu_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr()
    assert not output.out and output.err.count("\n") == 1
    assert "no CUDA device here; make gpu-check ARGS=" in output.err
    assert not (tmp_path / "out").exists()


def test_what_goes_wrong_on_a_device_is_a_row_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_check, "ATTENTIONS", {"sdpa": torch.float32})
    check = ModelCheck("cpu", tmp_path, "tiny", tokens=32)
    switch = K3ForCausalLM.set_attn_implementation

    def wrong_kernel(model: K3ForCausalLM, name: str) -> None:
        switch(model, name)
        model.lm_head.weight[0] += 1

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more lines")

    monkeypatch.setattr(K3ForCausalLM, "set_attn_implementation", wrong_kernel)
    monkeypatch.setattr(K3ForCausalLM, "generate", broken)
    found = {(report.operator, report.implementation): report for report in check.reports()}
    refused = {name: report.reason for name, report in found.items() if report.status == operators.REFUSED}
    assert set(refused) == {("model: attention", "sdpa"), ("model: generation", "cache")}
    assert "logits are off by" in refused["model: attention", "sdpa"]
    assert refused["model: generation", "cache"].endswith("an illegal memory access was encountered")
    assert not is_ready(list(found.values()))
    # A length that has no room does not end the measurement of the others.
    monkeypatch.setattr(gpu_check, "_median", broken)
    assert "illegal memory" in next(gpu_check.measure_speed("cpu", (64,), heads=1))["error"]
