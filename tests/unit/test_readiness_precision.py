"""The precision tool: routes, texts, numbers that must be zero, and numbers that must not."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modeling_k3 import kda_paths
from modeling_k3.readiness import precision_report, texts
from modeling_k3.readiness.precision import THRESHOLDS, PrecisionReport, measure_precision
from modeling_k3.readiness.routes import changed_share, force_routes, record_routes
from modeling_k3.readiness.texts import Sample, read_samples
from tests.models import build, max_diff, tiny_config, token_ids


def samples() -> list[Sample]:
    return [Sample("a", token_ids(1, 40)[0]), Sample("b", token_ids(1, 30, seed=1)[0], 20, "x")]


def encode(text: str) -> list[int]:
    return [ord(letter) % 150 for letter in text]


def test_the_exact_path_against_itself_is_zero() -> None:
    report = measure_precision(build(tiny_config()), samples(), fast="exact")
    (group,) = report.groups
    assert group.kl == group.forced_kl == group.route_changes == 0.0 and group.top1 == 1.0
    assert group.perplexity_exact == group.perplexity_fast
    assert set(report.layers) == {0, 1, 2} and max(report.layers.values()) == 0.0
    assert group.tokens == 39 + 10, "plain text counts from its second token, a prompt not at all"


def test_the_chunk_path_is_within_the_noise_floor_and_hooks_are_gone() -> None:
    model, before = build(tiny_config()), None
    with torch.no_grad():
        before = model(input_ids=token_ids(1, 20)).logits
        report = measure_precision(model, samples(), fast="chunk", calibration_seeds=2)
        assert torch.equal(model(input_ids=token_ids(1, 20)).logits, before)
    assert report.passed and len(report.noise) == 4 and 0 < report.threshold < THRESHOLDS[torch.float32]
    assert all(0 < error < 1e-5 for error in report.layers.values())
    assert not [hook for module in model.modules() for hook in module._forward_hooks]


def test_a_wrong_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kda_paths.chunk_kda

    def wrong(*args: Tensor, **options: float | None) -> tuple[Tensor, Tensor]:
        o, state = right(*args, **options)
        return o * 1.02 + 0.01 * o.flip(-1), state

    monkeypatch.setattr(kda_paths, "chunk_kda", wrong)
    report = measure_precision(build(tiny_config()), samples(), fast="chunk")
    assert not report.passed and "ABOVE" in precision_report.as_sentence(report)
    assert min(report.layers.values()) > 1e-3


def test_forced_routes_are_those_of_the_other_run() -> None:
    model, other = build(tiny_config()), build(tiny_config(), seed=5)
    ids = token_ids(1, 30)
    with torch.no_grad():
        with record_routes(model) as mine:
            first = model(input_ids=ids).logits
        with record_routes(other) as theirs:
            other(input_ids=ids)
        assert len(mine) == 4 and changed_share(mine, mine) == 0.0 and changed_share(mine, theirs) > 0.5
        with force_routes(model, theirs):
            assert max_diff(model(input_ids=ids).logits, first) > 0.1
        with force_routes(model, mine):
            assert max_diff(model(input_ids=ids).logits, first) < 1e-5


def test_long_inputs_are_reported_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(texts, "LONG_FROM", 35)
    report = measure_precision(build(tiny_config()), samples(), fast="chunk")
    assert [group.group for group in report.groups] == ["short", "long"]
    precision_report.write_json(report, tmp_path / "report.json")
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["passed"] is True and len(stored["groups"]) == 2
    precision_report.draw(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert len(precision_report.as_table(report).columns[1:]) == 2


def test_a_report_passes_only_if_every_group_does() -> None:
    report = measure_precision(build(tiny_config()), samples(), fast="chunk", threshold=0.0)
    assert isinstance(report, PrecisionReport) and not report.passed


def test_plain_text_is_cut_and_too_little_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("abcdefghijk")
    found = read_samples(file, encode, max_tokens=5, limit=8)
    assert [sample.ids.numel() for sample in found] == [5, 5], "a rest of one token predicts nothing"
    assert len(read_samples(file, encode, max_tokens=5, limit=1)) == 1
    file.write_text("a")
    with pytest.raises(ValueError, match="at least 2 tokens"):
        read_samples(file, encode, max_tokens=5, limit=8)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "2 is no JSON"),
        ('{"prompt": "a"}', 'needs the fields "prompt" and "answer"'),
        ('{"prompt": "", "answer": "b"}', "not empty"),
        ("[1]", "needs the fields"),
        ('{"prompt": "abcdefghi", "answer": "bcd"}', "has 12 tokens; allowed are 10"),
    ],
)
def test_bad_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "abc", "answer": "de"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_samples(file, encode, max_tokens=10, limit=8)
    (sample,) = read_samples(file, encode, max_tokens=10, limit=1)
    assert sample.prompt_length == 3 and sample.answer == "de" and sample.ids.tolist() == encode("abcde")
