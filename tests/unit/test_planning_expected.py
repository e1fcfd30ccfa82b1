"""Expected seconds of a plan: the same as of the loaded model, and what binds them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modeling_k3 import K3Config
from modeling_k3.cli import app
from modeling_k3.conversion.tiny import make_tiny
from modeling_k3.planning import load_within, plan_memory
from modeling_k3.planning.components import one_expert_bytes, weight_bytes
from modeling_k3.planning.expected import Machine, expected_of, expert_layer
from modeling_k3.planning.shape import read_shape
from modeling_k3.planning.speed import expected_step

MACHINE = Machine(disk=1e9, memory=1e10, packed=5e8, expert_call=1e-4, layer_call=1e-3, flops=1e11, read_cost=0.0)


def test_a_plan_and_its_model_agree(tmp_path: Path) -> None:
    config = K3Config(vocab_size=512, num_hidden_layers=4, num_experts=32, num_experts_per_token=4,
                      moe_intermediate_size=256, routed_expert_hidden_size=256, dtype="bfloat16")  # fmt: skip
    folder = make_tiny(tmp_path / "checkpoint", config, tokens=0)
    least = plan_memory(folder, "64GiB", context=16, prefill_chunk=16)
    for budget in ("64GiB", least.used - least.expert_total // 2 + (2 << 20)):
        model = load_within(folder, budget, context=16, prefill_chunk=16)
        found = expected_of(model.memory_plan, read_shape(folder), MACHINE)
        step = expected_step(model, MACHINE)
        assert found.step == pytest.approx(step["seconds"], rel=0.01)
        assert found.step_bytes == pytest.approx(step["bytes_read"], rel=0.05)
        assert (step["bytes_read"] > 0) == (model.memory_plan.expert_place == "mapped")
    assert model.memory_plan.expert_place == "mapped"


def test_reading_runs_beside_computing() -> None:
    both, compute, reading = expert_layer(MACHINE, 8, 1e6, 0.5, 5e8, 1e8)
    assert compute == pytest.approx(8 * (1e-4 + 2e-3) + 1e-3) and reading == pytest.approx(4e-3)
    assert both == pytest.approx(compute + 0.5e-3)
    # Where no core is spare, what reads takes time from what computes.
    crowded = expert_layer(replace(MACHINE, read_cost=1e-9), 8, 1e6, 0.5, 5e8, 1e8)
    assert crowded[1] == pytest.approx(compute + 4e-3) and crowded[0] == pytest.approx(both + 4e-3)
    slow = replace(MACHINE, disk=1e6)
    both, _, reading = expert_layer(slow, 8, 1e6, 0.5, 5e8)
    assert both == pytest.approx(reading + 0.5) and reading == pytest.approx(4)


def test_the_release_in_little_memory_waits_for_the_disk() -> None:
    plan, shape = plan_memory("kimi-k3", "24GiB", context=131072), read_shape("kimi-k3")
    found, fast = (expected_of(plan, shape, replace(MACHINE, disk=disk)) for disk in (1e9, 1e10))
    used = shape.num_moe * shape.top_k * one_expert_bytes(shape, 2, "mxfp4")
    # The whole dense part, and the experts of a token that are not resident.
    held = weight_bytes(shape, 2, experts="mxfp4")
    dense = sum(held.values()) - held["routed experts"] - held["embedding"]
    assert found.step_bytes == pytest.approx(dense + used * (1 - plan.expert_bytes / plan.expert_total))
    assert found.step_bytes / 1e9 < found.step and fast.step < found.step / 2
    # Each of 64 pieces reads nearly all experts.
    assert 50 * plan.expert_total < found.prefill_bytes < 64 * (plan.expert_total + 120e9)
    assert found.prefill_bytes / 1e9 < found.prefill


def test_longer_contexts_and_more_rows_take_longer() -> None:
    shape = read_shape("kimi-k3")
    one, longer, rows = (
        expected_of(plan_memory("kimi-k3", "4TiB", context=context, batch=batch), shape, MACHINE)
        for context, batch in ((1024, 1), (65536, 1), (1024, 4))
    )
    assert one.step < longer.step and 32 * one.prefill < longer.prefill
    assert one.step < rows.step < 4 * one.step and one.step_bytes == rows.prefill_bytes == 0


def test_the_command_measures_when_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = ["plan", "kimi-k3", "--budget", "24GiB", "--json", str(tmp_path / "plan.json")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "--measure DIR measures" in done.output
    assert json.loads((tmp_path / "plan.json").read_text())["expected"] is None
    assert not (tmp_path / "cache").exists()
    done = CliRunner().invoke(app, [*command, "--measure", str(tmp_path)])
    assert done.exit_code == 0 and "s for a token with a full context" in done.output
    found = json.loads((tmp_path / "plan.json").read_text())["expected"]
    assert found["step"] > 0 and found["machine"]["disk"] > 1e6 and (tmp_path / "cache").exists()
    for wrong in (["plan", "tiny", "--measure", str(tmp_path)], [*command, "--measure", str(tmp_path / "none")]):
        done = CliRunner().invoke(app, wrong)
        assert done.exit_code == 2 and "--measure" in done.output
