"""The ablation benchmark: each variant is the preset with one change, and its table says what the runs said."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from modeling_k3 import K3ForCausalLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: What a variant may differ in. The attention kinds live in the dictionary of KDA as well.
CHANGED = {
    "attention": {"linear_attn_config"},
    "attn_res": {"attn_res_block_size"},
    "routing": {"router_input"},
    "latent": {"routed_expert_hidden_size"},
    "balancing": {"router_balancing", "router_bias_update_rate", "router_aux_loss_coef"},
    "capacity": {"moe_expert_capacity_factor"},
    "gate": {"linear_attn_config"},
    "seeds": set(),
}


@pytest.fixture
def ablations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__("ablations")


def row(bits: float, **changes: Any) -> dict[str, Any]:
    return {
        "held_out_bits_per_byte": bits, "tokens_per_cpu_second": 3000, "peak_megabytes": 400.0, "dropped": 0.0,
        "load_max_over_mean": 2.0, "loads": [3.0, 2.0], "parameters": {"total": 4_000_000, "active": 2_000_000},
        **changes,
    }  # fmt: skip


def test_every_variant_changes_its_one_thing(ablations: ModuleType) -> None:
    assert set(ablations.GROUPS) == set(CHANGED) == set(ablations.BASELINE_IS)
    base = ablations.build_config(ablations.BASELINE, "pico").to_dict()
    for group, variants in ablations.GROUPS.items():
        for name in variants:
            other = ablations.build_config(name, "pico").to_dict()
            differing = {key for key in base if base[key] != other.get(key)} | (set(other) - set(base))
            assert differing <= CHANGED[group] and bool(differing) is bool(CHANGED[group]), name
            with torch.device("meta"):
                assert K3ForCausalLM(ablations.build_config(name, "pico")).num_parameters() > 3e6


def test_variants_are_what_they_are_called(ablations: ModuleType) -> None:
    config = {name: ablations.build_config(name, "pico") for name in ablations.VARIANTS}
    assert set(config["KDA only"].layer_types) == {"linear_attention"}
    assert set(config["full attention only"].layer_types) == {"full_attention"}
    assert config["baseline"].layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert config["softplus gate"].gate_lower_bound is None and config["baseline"].gate_lower_bound == -5.0
    assert [config[f"latent 1/{n}"].routed_expert_hidden_size for n in (2, 4)] == [128, 64]
    assert config["baseline"].routed_expert_hidden_size / config["baseline"].hidden_size == 3 / 8
    assert config["baseline"].attn_res_block_size == 2 and config["baseline"].router_balancing == "quantile"


def test_the_table_says_what_the_runs_said(ablations: ModuleType) -> None:
    rows = {"baseline": row(2.5), "KDA only": row(2.75, dropped=0.25, peak_megabytes=1234.4)}
    text = ablations.table(["attention"], ablations.GROUPS, ablations.BASELINE_IS, rows)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[1].startswith("| **3 KDA to 1 full attention** (baseline) | 2.500 |  | 3,000 |")
    assert lines[2] == "| KDA only | 2.750 | +0.250 | 3,000 | 1,234 | 2.00 | 25.0% | 4,000,000 | 2,000,000 |"
    assert "full attention only" not in text and "NoPE" in text


def test_runs_of_two_settings_do_not_share_a_table(ablations: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "ablations.json"
    assert ablations.known_rows(file, {"steps": 3}) == {}
    ablations._write(file, {"preset": "pico", "steps": 3, "rows": 1, "length": 8, "seed": 0}, {"baseline": row(2.5)})
    setting = json.loads(file.read_text())["setting"]
    assert ablations.known_rows(file, setting)["baseline"]["loads"] == [3.0, 2.0]
    with pytest.raises(SystemExit, match="another setting"):
        ablations.known_rows(file, {**setting, "steps": 4})


def test_what_was_seen_survives_an_interruption(
    ablations: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state two steps older than the record: the steps trained again replace what was seen of them."""

    class Routers:
        def __init__(self, model: Any) -> None:
            self.value = 0.0

        def take(self) -> dict[str, dict[str, float]]:
            self.value += 1
            return {"a": {"max_over_mean": self.value, "dropped": 0.0}, "b": {"max_over_mean": 0.5, "dropped": 0.5}}

        def close(self) -> None:
            pass

    monkeypatch.setattr(ablations, "RouterWatch", Routers)
    for steps in ((1, 2, 3, 4), (3, 4, 5)):
        seen = ablations._Seen(None, tmp_path / "seen.json")
        for step in steps:
            seen.tick(ablations.Tick(step, 0.0, 0.0, 1.0, None, 1.0))
    figures = seen.figures(tokens=10)
    assert figures["loads"] == [1, 2, 1, 2, 3] and figures["dropped"] == 0.25
    assert figures["tokens_per_cpu_second"] > 0
