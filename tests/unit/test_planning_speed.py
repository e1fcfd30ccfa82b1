"""Expected seconds of a decode step: measured once for a machine, and made of what a step reads and computes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.conversion.tiny import make_tiny
from modeling_k3.planning.expected import Machine
from modeling_k3.planning.speed import expected_step, measure_machine

MACHINE = Machine(disk=1e9, memory=1e10, packed=5e8, expert_call=1e-4, layer_call=1e-3, flops=1e11, read_cost=0.0)
SIZE = 3 * 64 * 64 * 17 // 32


def test_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = measure_machine(tmp_path)
    assert min(vars(found).values()) >= 0 and min(found.disk, found.memory, found.packed) > 1e6
    store = tmp_path / "cache" / "modeling_k3" / "machine.json"
    (key,) = json.loads(store.read_text())
    store.write_text(json.dumps({key: vars(replace(found, disk=123.0))}))
    assert measure_machine(tmp_path).disk == 123.0
    assert measure_machine(tmp_path, use_known=False).disk > 1e6
    store.write_text("broken")
    assert measure_machine(tmp_path).disk > 1e6
    assert list(tmp_path.iterdir()) == [tmp_path / "cache"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> K3ForCausalLM:
    config = K3Config(vocab_size=64, num_hidden_layers=3, num_experts=16, num_experts_per_token=4,
                      moe_intermediate_size=64, routed_expert_hidden_size=64, dtype="bfloat16")  # fmt: skip
    folder = make_tiny(tmp_path_factory.mktemp("speed") / "checkpoint", config, tokens=0)
    return K3ForCausalLM.from_pretrained(folder, expert_memory=16 * SIZE)


def test_what_a_step_is_made_of(model: K3ForCausalLM) -> None:
    half, all_missing = expected_step(model, MACHINE), expected_step(model, MACHINE, is_cold=True)
    assert (half["share_missing"], all_missing["share_missing"]) == (0.5, 1.0)
    assert (half["bytes_read"], all_missing["bytes_read"]) == (4 * SIZE, 8 * SIZE)
    assert all_missing["reading"] == pytest.approx(8 * SIZE / 1e9)
    experts = 8 * (1e-4 + SIZE / 5e8)
    dense = half["compute"] - experts - 3e-3
    assert 0 < dense < 1e-4
    assert half["seconds"] == pytest.approx(half["compute"] + 2 * 0.5 * SIZE / 1e9)
    # A slow disk is what binds.
    slow = expected_step(model, replace(MACHINE, disk=1e5), is_cold=True)
    assert slow["seconds"] == pytest.approx(3e-3 + dense + slow["reading"] + 2 * SIZE / 1e5)


def test_plain_experts_are_as_large_as_they_are(model: K3ForCausalLM, tmp_path: Path) -> None:
    K3ForCausalLM.from_pretrained(model.name_or_path, dequantize=True).save_pretrained(tmp_path)
    size = 3 * 64 * 64 * 2
    plain = K3ForCausalLM.from_pretrained(tmp_path, expert_memory=16 * size)
    found = expected_step(plain, MACHINE)
    assert (found["share_missing"], found["bytes_read"]) == (0.5, 4 * size)
    assert found["compute"] == pytest.approx(expected_step(model, MACHINE)["compute"] + 8 * (size / 1e10 - SIZE / 5e8))


def test_nothing_is_missing_without_a_limit(model: K3ForCausalLM) -> None:
    model.limit_expert_memory(None)
    assert expected_step(model, MACHINE)["bytes_read"] == 0
