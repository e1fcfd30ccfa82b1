"""Plans: they hold their budget, say what does not fit, and hand over every knob."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modeling_k3.byte_sizes import parse_size
from modeling_k3.cli import app
from modeling_k3.configuration import preset_path
from modeling_k3.planning import MemoryPlanError, plan_memory
from modeling_k3.planning.devices import split_layers
from modeling_k3.planning.plan import base_workload, with_context
from modeling_k3.planning.scenarios import scenarios
from modeling_k3.planning.shape import read_shape
from modeling_k3.planning.shares import plan_shares


def test_the_release_runs_in_24_gib_from_the_files() -> None:
    plan = plan_memory("kimi-k3", "24GiB", context=131072)
    assert (plan.dense_place, plan.expert_place, plan.use.experts) == ("mapped", "mapped", "mxfp4")
    assert plan.used <= plan.budget == 24 << 30
    state = plan.table["state"]
    shared = plan.expert_bytes + state["KDA state"] + state["conv windows"] + state["MLA latent"] + state["rollback"]
    assert plan.load_options() == {"dtype": "bfloat16", "expert_storage": "mapped", "expert_memory": shared}
    assert shared == plan.expert_bytes_at(0) + state["KDA state"] + state["conv windows"] + state["rollback"]
    assert plan.generate_options() == {"prefill_chunk_size": 2048}
    assert plan.latent_per_token == 27648


@pytest.mark.parametrize("budget", ["10GiB", "24GiB", "200GiB", "1.2TiB", "4TiB"])
@pytest.mark.parametrize("context", [512, 131072])
def test_no_plan_overruns_its_budget(budget: str, context: int) -> None:
    plan = plan_memory("kimi-k3", budget, context=context, rollback_tokens=8, prefix_tokens=1024)
    assert plan.used <= plan.budget
    assert all(size >= 0 for group in plan.table.values() for size in group.values())


def test_experts_give_way_as_the_context_grows() -> None:
    plan = plan_memory("kimi-k3", "24GiB", context=131072)
    longer = with_context(plan, "kimi-k3", 262144)
    assert longer.used <= plan.budget and longer.use.prefill_chunk == plan.use.prefill_chunk
    assert longer.expert_bytes < plan.expert_bytes
    held = [plan.expert_bytes_at(tokens) for tokens in (0, 65536, 131072)]
    assert held[0] - held[1] == held[1] - held[2] == 65536 * plan.latent_per_token and held[2] == plan.expert_bytes
    with pytest.raises(ValueError, match="allowed are 0 to 131072"):
        plan.expert_bytes_at(131073)


def test_pieces_get_smaller_before_anything_is_refused() -> None:
    tight = plan_memory("kimi-k3", "9GiB", context=131072)
    assert tight.use.prefill_chunk < 2048 and tight.used <= 9 << 30
    with pytest.raises(MemoryPlanError):
        plan_memory("kimi-k3", "9GiB", context=131072, prefill_chunk=2048)


def test_too_little_memory_names_what_would_fit() -> None:
    with pytest.raises(MemoryPlanError, match=r"does not fit in 24.0 GiB: it needs 3\d.* fit \d+ tokens") as caught:
        plan_memory("kimi-k3", "24GiB", context=1048576)
    nearest = caught.value.nearest
    assert nearest.used <= nearest.budget == 24 << 30
    assert plan_memory("kimi-k3", "24GiB", context=nearest.use.context).used <= 24 << 30
    with pytest.raises(MemoryPlanError, match="it needs") as caught:
        plan_memory("tiny", "1MiB")
    assert caught.value.nearest.budget > 1 << 20


def test_a_small_model_stays_in_memory_as_it_is() -> None:
    plan = plan_memory("pico", "2GiB")
    assert (plan.dense_place, plan.expert_place) == ("memory", "memory")
    assert plan.load_options() == {"dtype": "float32", "expert_storage": "dense"}
    assert plan.expert_bytes == plan.expert_total


def test_a_dense_part_that_is_converted_cannot_stay_in_the_files() -> None:
    with pytest.raises(MemoryPlanError, match="it needs 2"):
        plan_memory("kimi-k3", "24GiB", dtype="float32")
    small = plan_memory("kimi-k3", "64GiB", dense="nf4")
    assert small.dense_place == "memory" and small.expert_place == "mapped"
    found = small.load_options()["quantization_config"]
    assert (found["bnb_4bit_quant_type"], found["bnb_4bit_compute_dtype"]) == ("nf4", "bfloat16")
    counted = plan_memory("pico", "2GiB", experts="hqq3")
    with pytest.raises(ValueError, match="experts='hqq3' is not what from_pretrained can load"):
        counted.load_options()


def test_a_form_that_no_file_has_is_not_mapped(tmp_path: Path) -> None:
    with pytest.raises(MemoryPlanError, match="does not fit in 200 GiB: it needs") as caught:
        plan_memory("kimi-k3", "200GiB", experts="hqq2")
    assert caught.value.nearest.expert_place == "memory" and caught.value.nearest.budget > 800 << 30
    table = caught.value.nearest.table
    assert table["process"]["a layer while it is rounded"] * 92 <= table["weights"]["routed experts"]
    (tmp_path / "config.json").write_bytes((preset_path("tiny") / "config.json").read_bytes())
    assert plan_memory(tmp_path, "2GiB", experts="mxfp4").load_options()["expert_storage"] == "packed"
    (tmp_path / "model.safetensors").touch()
    for plan in (plan_memory, lambda path, size, **use: plan_shares(path, {0: size, "cpu": size}, **use)):
        with pytest.raises(ValueError, match=r"holds plain ones, .* allowed are 'auto' and 'full'"):
            plan(tmp_path, "2GiB", experts="mxfp4")
    assert plan_memory(tmp_path, "2GiB").use.experts == "full"
    assert plan_memory(tmp_path, "2GiB", experts="mxfp4", dense="nf4").dense_place == "memory"


@pytest.mark.parametrize("budget", ["", "much", "-1GiB", "0", 0, True])
def test_a_budget_that_is_none_is_refused(budget: str | int) -> None:
    with pytest.raises(ValueError, match="budget="):
        plan_memory("tiny", budget)


@pytest.mark.parametrize("bad", [{"context": 0}, {"dense": "int3"}, {"dtype": "int8"}, {"mode": "train"}])
def test_what_makes_no_sense_is_refused(bad: dict) -> None:
    with pytest.raises(ValueError):
        plan_memory("tiny", "2GiB", **bad)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_layers_are_spread_whole_and_at_block_borders(devices: int) -> None:
    shape = read_shape("kimi-k3")
    split = split_layers(shape, base_workload(shape), devices)
    assert len(split.starts) == devices and split.starts[0] == 0 and split.at_borders
    assert all(start % 12 == 0 for start in split.starts)
    found = split.device_map(shape)
    assert {found[f"model.layers.{i}"] for i in range(93)} == set(range(devices))
    assert found["model.layers.0"] == 0 and found["lm_head"] == devices - 1


def test_more_devices_than_blocks_cut_inside_blocks() -> None:
    shape = read_shape("kimi-k3")
    split = split_layers(shape, base_workload(shape), 20)
    assert len(set(split.starts)) == 20 and not split.at_borders
    with pytest.raises(ValueError, match="must be 1 to 93"):
        split_layers(shape, base_workload(shape), 94)


def test_machines_side_by_side() -> None:
    found = scenarios("kimi-k3")
    assert len(found) == 3
    assert all(sum(items.values()) <= size for s in found for size, items in s.memories.values())


def test_the_command_answers_in_text_json_and_a_picture(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app,
        ["plan", "kimi-k3", "--budget", "24GiB", "--context", "131072", "--json", str(tmp_path / "p.json"),
         "--png", str(tmp_path / "p.png")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "read from the files" in done.output and "24.0 GiB  of 24.0 GiB" in done.output
    assert json.loads((tmp_path / "p.json").read_text())["load_options"]["expert_storage"] == "mapped"
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_counts_without_a_budget() -> None:
    done = CliRunner().invoke(app, ["plan", "pico", "--mode", "train", "--context", "256"])
    assert done.exit_code == 0 and "optimizer" in done.output
    done = CliRunner().invoke(app, ["plan", "kimi-k3", "--world", "8"])
    assert done.exit_code == 0 and "weights over 8 devices" in done.output


def test_the_command_says_in_one_line_what_does_not_fit() -> None:
    done = CliRunner().invoke(app, ["plan", "kimi-k3", "--budget", "4GiB", "--context", "131072"])
    assert done.exit_code == 2 and done.output.count("\n") == 1 and "it needs" in done.output


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--budget", "24GiB", "--world", "8"], "--budget does not use --world"),
        (["--scenarios", "--dense", "nf4", "--batch", "2"], "--scenarios does not use --dense, --batch"),
        (["--scenarios", "--budget", "24GiB"], "--scenarios does not use --budget"),
        (["--optimizer", "muon"], "--mode infer does not use --optimizer"),
        (["--budget", "24GiB", "--checkpointing"], "--budget does not use --checkpointing"),
        (["--mode", "lora", "--rollback", "8"], "--mode lora does not use --rollback"),
    ],
)
def test_the_command_says_what_it_does_not_use(options: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["plan", "kimi-k3", *options])
    assert done.exit_code == 2 and done.output.count("\n") == 1
    assert set(named.replace(",", "").split()) <= set(done.output.replace(",", "").replace(":", "").split())


def test_the_command_does_not_pay_for_torch() -> None:
    script = Path(sys.executable).parent / "k3"
    if not script.is_file():
        pytest.skip("the k3 script is not installed beside this interpreter")
    command = [sys.executable, "-X", "importtime", str(script), "plan", "kimi-k3", "--budget", "24GiB"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "transformers", "matplotlib"}


@pytest.mark.parametrize(
    ("budgets", "place"),
    [
        ({0: "288GB", 1: "288GB", 2: "288GB", 3: "288GB", 4: "288GB", 5: "288GB", "cpu": "64GiB"}, "memory"),
        ({0: "80GiB", 1: "80GiB", "cpu": "512GiB"}, "mapped"),
        ({0: "80GiB", "cpu": "200GiB"}, "mapped"),
    ],
)
def test_a_budget_for_each_memory(budgets: dict, place: str) -> None:
    plan = plan_shares("kimi-k3", budgets, context=32768)
    assert plan.expert_place == place and plan.used <= plan.budget
    options = plan.load_options()
    assert options["device_map"] == "auto" and options["expert_storage"] == {"memory": "packed"}.get(place, place)
    rooms, limits = options["max_memory"], {key: parse_size(size) for key, size in budgets.items()}
    live = [sum(plan.table[group].values()) // (len(budgets) - 1) for group in ("state", "working")]
    assert all(rooms[key] + sum(live) == limits[key] for key in rooms if key != "cpu")
    held = plan.table["weights"]["routed experts"] if place == "mapped" else 0
    assert rooms["cpu"] + held + sum(plan.table["process"].values()) == limits["cpu"]
    dense = sum(plan.table["weights"].values()) - plan.table["weights"]["routed experts"]
    assert dense <= sum(rooms.values())


def test_what_no_memory_has_room_for() -> None:
    with pytest.raises(MemoryPlanError, match=r"does not fit in .*'cpu' lacks \d.*it fits in .*'cpu'") as caught:
        plan_shares("kimi-k3", {0: "24GiB", "cpu": "64GiB"})
    assert caught.value.nearest.used <= caught.value.nearest.budget
    # States, latents and working set have nowhere else to go.
    with pytest.raises(MemoryPlanError, match=r"in {0: '6.00 GiB', .* 0 lacks \d.* for states and the wor") as caught:
        plan_shares("kimi-k3", {0: "6GiB", "cpu": "512GiB"}, context=262144)
    shorter = caught.value.nearest
    assert 0 < shorter.use.context < 262144 and shorter.used <= shorter.budget == 518 << 30
    assert f"with {shorter.use.context} tokens of context in what there is" in str(caught.value)
    assert plan_shares("kimi-k3", {"cpu": "24GiB"}) == plan_memory("kimi-k3", "24GiB", prefill_chunk=2048)
    assert plan_shares("kimi-k3", {"cpu": "9GiB"}, context=131072).use.prefill_chunk < 2048
    small = plan_shares("kimi-k3", {0: "6GiB", "cpu": "512GiB"}, context=65536)
    assert small.use.prefill_chunk < 2048 and small.max_memory[0] > 0
    for wrong in ({0: "24GiB"}, {"cuda:0": "24GiB", "cpu": "1GiB"}, {"cpu": "much"}):
        with pytest.raises(ValueError, match="budget"):
            plan_shares("kimi-k3", wrong)
