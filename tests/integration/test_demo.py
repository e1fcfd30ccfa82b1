"""The demo from end to end at toy size: complete, interrupted, killed, resumed, and asked for the impossible."""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from modeling_k3.demo import UserError
from modeling_k3.demo.corpus import load_corpus
from modeling_k3.demo.run import DemoOptions, run_demo
from modeling_k3.demo.start import StartOptions, start_demo
from modeling_k3.demo.state import read_progress
from modeling_k3.demo.train import Interrupted, Tick, TrainSettings, Windows, train
from tests.models import tiny_config

HELD_OUT = 6_000
QUICK = TrainSettings(max_steps=12, batch_size=2, sequence_length=64, looks=4, look_windows=2)
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def options(texts: Path, preset: str, tmp_path_factory: pytest.TempPathFactory) -> DemoOptions:
    """A run of a few seconds."""
    return DemoOptions(
        out=tmp_path_factory.mktemp("run") / "demo",
        data=(texts,),
        preset=preset,
        settings=replace(QUICK, max_steps=None, seconds=3.0),
        threads=1,
        held_out_bytes=HELD_OUT,
    )


@pytest.fixture(scope="module")
def report(options: DemoOptions) -> dict[str, Any]:
    """The report of a complete run."""
    return run_demo(options, QUIET)


def weights(root: Path) -> dict[str, Tensor]:
    """The parameters of the latest state."""
    (folder,) = root.glob("step-*")
    return load_file(folder / "model.safetensors")


def assert_same_weights(first: Path, second: Path) -> None:
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


# -- a complete run ---------------------------------------------------------------------------------------------------


def test_it_learns_within_its_budget(report: dict[str, Any]) -> None:
    bits = report["bits_per_byte"]
    assert 8.5 < bits["before"] < 9.5
    assert bits["after"] < bits["before"] - 1
    assert 3.0 <= report["training"]["seconds"] < 30
    assert report["training"]["steps"] > 3


def test_report_on_disk_has_every_figure(report: dict[str, Any], options: DemoOptions) -> None:
    saved = json.loads((options.out / "report.json").read_text())
    assert saved == json.loads(json.dumps(report))
    assert saved["parameters"]["total"] > saved["parameters"]["active"] > 0
    assert saved["held_out"]["bytes"] >= HELD_OUT
    assert len(saved["held_out"]["names"]) == saved["held_out"]["documents"]
    assert saved["bits_per_byte"]["references"].keys() == {"gzip -9", "lzma"}
    assert saved["speed"]["prefill_tokens_per_second"] > 0
    assert saved["speed"]["decode_tokens_per_second"] > 0
    assert saved["memory"]["peak_bytes"] > 2**20
    assert saved["curve"]["train"] and saved["curve"]["held_out"]


def test_curve_is_a_picture(report: dict[str, Any]) -> None:
    picture = imread(report["files"]["curve"])
    assert picture.shape[0] > 400 and picture.shape[1] > 600
    assert picture[..., :3].std() > 0.01


def test_checkpoint_loads_and_measures_the_same(report: dict[str, Any], options: DemoOptions) -> None:
    model = AutoModelForCausalLM.from_pretrained(options.model)
    assert type(model).__name__ == "K3ForCausalLM"
    assert list(options.model.glob("*.safetensors"))
    assert not [path for path in options.out.rglob("*") if path.suffix in {".bin", ".pt", ".pkl"}]
    saved = weights(options.states)
    name = "model.embed_tokens.weight"
    assert torch.equal(model.state_dict()[name], saved[name])
    assert len(AutoTokenizer.from_pretrained(options.model)) == model.config.vocab_size == 512


def test_finished_run_only_reports(report: dict[str, Any], options: DemoOptions) -> None:
    written = (options.model / "model.safetensors").stat().st_mtime_ns
    console = Console(record=True, width=120, file=io.StringIO())
    again = run_demo(options, console)
    assert again == json.loads(json.dumps(report))
    assert "--fresh starts over" in console.export_text()
    assert (options.model / "model.safetensors").stat().st_mtime_ns == written


def test_finished_run_continues_another_prompt(report: dict[str, Any], options: DemoOptions) -> None:
    again = run_demo(replace(options, prompt="class "), QUIET)
    assert again["prompt"] == "class "
    assert again["bits_per_byte"] == report["bits_per_byte"]


@pytest.mark.parametrize("change", [{"seed": 5}, {"seconds": 9.0}])
def test_a_run_is_not_resumed_with_other_settings(
    report: dict[str, Any], options: DemoOptions, change: dict[str, Any]
) -> None:
    (name,) = change
    with pytest.raises(UserError, match=rf"{name} was .*--fresh"):
        run_demo(replace(options, settings=replace(options.settings, **change)), QUIET)


def test_a_run_is_not_resumed_with_other_text(report: dict[str, Any], options: DemoOptions, tmp_path: Path) -> None:
    shutil.copytree(options.data[0], tmp_path / "texts")
    (tmp_path / "texts" / "new.py").write_text("x = 1\n" * 100)
    with pytest.raises(UserError, match="the text is not the same"):
        run_demo(replace(options, data=(tmp_path / "texts",)), QUIET)


def test_fresh_starts_over_and_touches_nothing_else(texts: Path, preset: str, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    options = DemoOptions(
        out=tmp_path,
        data=(texts,),
        preset=preset,
        settings=replace(QUICK, max_steps=2),
        threads=1,
        held_out_bytes=HELD_OUT,
    )
    run_demo(options, QUIET)
    again = run_demo(replace(options, fresh=True, settings=replace(options.settings, seed=1)), QUIET)
    assert again["training"]["settings"]["seed"] == 1
    assert (tmp_path / "mine.txt").read_text() == "keep"


# -- on the released grid, with a card, and shown again ----------------------------------------------------------------


@pytest.fixture(scope="module")
def released(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A short quantisation-aware run that was saved with its card."""
    root = tmp_path_factory.mktemp("released")
    tiny_config(
        layers="KM",
        hidden_size=32,
        vocab_size=512,
        routed_expert_hidden_size=32,
        moe_intermediate_size=32,
    ).save_pretrained(root / "preset")
    options = DemoOptions(
        out=root / "run",
        data=(texts,),
        preset=str(root / "preset"),
        settings=replace(QUICK, max_steps=20, qat=True),
        threads=1,
        held_out_bytes=HELD_OUT,
        save=root / "model",
    )
    return root / "model", run_demo(options, QUIET)


def test_what_was_trained_on_the_grid_is_saved_as_a_release(released: tuple[Path, dict[str, Any]]) -> None:
    folder, report = released
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "kimi_k3"
    names = load_file(folder / "model.safetensors")
    assert any(name.endswith("experts.0.w1.weight_packed") for name in names)
    assert names["language_model.lm_head.weight"].dtype == torch.bfloat16
    assert report["bits_per_byte"]["after"] < report["bits_per_byte"]["before"] - 0.5
    dense = AutoModelForCausalLM.from_pretrained(folder, dequantize=True)
    assert report["parameters"]["total"] == sum(parameter.numel() for parameter in dense.parameters())


def test_the_card_says_what_was_measured_and_how_to_repeat_it(released: tuple[Path, dict[str, Any]]) -> None:
    folder, report = released
    card = (folder / "README.md").read_text()
    assert f"**{report['bits_per_byte']['after']:.3f}**" in card and "routed experts MXFP4" in card
    assert "k3 demo --train --qat --steps 20 --batch-size 2 --sequence-length 64" in card
    saved = json.loads((folder / "report.json").read_text())
    assert saved["held_out"]["names"] == report["held_out"]["names"] and "files" not in saved
    assert imread(folder / "loss.png").ndim == 3


def test_a_saved_model_is_measured_on_text_it_has_not_seen(released: tuple[Path, dict[str, Any]], texts: Path) -> None:
    folder, report = released
    names = report["held_out"]["names"]
    corpus = load_corpus((texts,), held_out_names=names)
    assert set(corpus.held_out_files) == set(names)
    assert not set(corpus.train_files) & set(names)
    console = Console(record=True, width=120, file=io.StringIO())
    options = StartOptions(folder, (texts,), everything=True, threads=1, prompt="def ", held_out_bytes=HELD_OUT)
    shown = start_demo(options, console)
    assert "held-out bits per byte" in console.export_text()
    # The same split, the same files: the same figure as at the end of the training.
    assert shown["bits_per_byte"]["after"] == report["bits_per_byte"]["after"]
    sampled = start_demo(replace(options, everything=False), QUIET)
    assert 0 < sampled["held_out"]["sample_bytes"] <= shown["held_out"]["bytes"]
    assert sampled["bits_per_byte"]["after"] == pytest.approx(shown["bits_per_byte"]["after"], rel=0.1)


def test_a_model_that_does_not_say_what_it_has_seen_is_not_measured(
    released: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(released[0], tmp_path / "model")
    (tmp_path / "model" / "report.json").unlink()
    with pytest.raises(UserError, match="does not say which text was held out"):
        start_demo(StartOptions(model=tmp_path / "model", threads=1), QUIET)
    with pytest.raises(UserError, match="none of the 2 held-out documents"):
        load_corpus((Path(__file__).parent,), held_out_names=["a", "b"])


# -- interrupted and resumed ------------------------------------------------------------------------------------------


def start(options: DemoOptions, watch: Any = lambda tick: None) -> dict[str, Any]:
    """Train only, without measuring."""
    from modeling_k3.demo.run import demo_config

    corpus = load_corpus(options.data, held_out_bytes=options.held_out_bytes)
    set_seed(options.settings.seed)
    model = AutoModelForCausalLM.from_config(demo_config(options.preset))
    return train(model, corpus, options.settings, options.states, identity={}, first_look=lambda: 9.0, watch=watch)


@pytest.fixture
def steps(texts: Path, preset: str, tmp_path: Path) -> DemoOptions:
    """A run with a budget of steps, which is reproducible to the bit."""
    return DemoOptions(out=tmp_path / "a", data=(texts,), preset=preset, settings=QUICK, held_out_bytes=HELD_OUT)


def test_interrupted_and_resumed_equals_straight(steps: DemoOptions) -> None:
    straight = start(steps)
    other = replace(steps, out=steps.out.with_name("b"))

    def stop_twice(tick: Tick) -> None:
        if tick.step in (1, 7):
            os.kill(os.getpid(), signal.SIGINT)

    for step in (1, 7):
        with pytest.raises(Interrupted) as stopped:
            start(other, stop_twice)
        assert stopped.value.step == step
        assert read_progress(other.states)["step"] == step
    resumed = start(other, stop_twice)
    assert_same_weights(steps.states, other.states)
    assert [point[1:] for point in resumed["curve"]["train"]] == [point[1:] for point in straight["curve"]["train"]]
    assert [point[1:] for point in resumed["curve"]["held_out"]] == [
        point[1:] for point in straight["curve"]["held_out"]
    ]


def test_interrupted_at_once_after_resuming_keeps_the_state(steps: DemoOptions) -> None:
    before = signal.getsignal(signal.SIGINT)
    for _ in range(2):
        with pytest.raises(Interrupted):
            start(steps, lambda tick: os.kill(os.getpid(), signal.SIGTERM))
    assert read_progress(steps.states)["step"] == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_killed_and_resumed_equals_straight(steps: DemoOptions) -> None:
    steps = replace(steps, settings=replace(QUICK, max_steps=30))
    start(steps)
    # A state after every step, so that the kill often hits the moment of writing.
    killed = replace(steps, out=steps.out.with_name("b"))
    code = (
        "import sys; from pathlib import Path; from tests.integration.test_demo import *\n"
        "out, text, preset = sys.argv[1:]\n"
        "settings = replace(QUICK, max_steps=30, save_seconds=0.0)\n"
        "print('ready', flush=True)\n"
        "start(DemoOptions(Path(out), (Path(text),), preset, settings, held_out_bytes=HELD_OUT),"
        " lambda tick: (print(tick.step, flush=True), time.sleep(0.02)))\n"
    )
    command = [sys.executable, "-c", code, str(killed.out), str(steps.data[0]), steps.preset]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        for line in process.stdout:
            if line.strip() == "4":
                break
        time.sleep(random.uniform(0, 0.3))
        process.kill()
    progress = read_progress(killed.states)
    assert 3 <= progress["step"] < 30
    seen: list[int] = []
    killed = replace(killed, settings=replace(QUICK, max_steps=30, save_seconds=0.0))
    start(killed, lambda tick: seen.append(tick.step))
    assert seen == list(range(progress["step"] + 1, 31))
    assert_same_weights(steps.states, killed.states)
    assert not list(killed.states.glob(".unfinished*"))


def test_windows_depend_on_the_position_alone() -> None:
    stream = torch.arange(1000, dtype=torch.int16)
    straight = Windows(stream, 16, seed=3)
    batches = [straight.batch(position, 4) for position in range(0, 400, 4)]
    resumed = Windows(stream, 16, seed=3)
    assert torch.equal(resumed.batch(396, 4), batches[-1])
    first_pass = torch.cat(batches)[: straight.count]
    assert len({tuple(row.tolist()) for row in first_pass}) == straight.count
    assert not torch.equal(Windows(stream, 16, seed=4).batch(0, 4), batches[0])
