"""Adapters that leave the process or the model: saved and loaded elsewhere, merged, quantised anew, exported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from modeling_k3.adapters import K3ExpertsLora, merge_into_packed, split_experts, stack_experts
from tests.checkpoints import released
from tests.loras import (
    IDS,
    SAME,
    adapted,
    load,
    logits,
)
from tests.models import max_diff

#: In float64: merged and taken out again, every weight is rounded twice more.
TWICE = 1e-9


def run(code: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CLEAN = """
import sys, torch
from peft import PeftModel
from modeling_k3 import K3ForCausalLM
base = K3ForCausalLM.from_pretrained(sys.argv[1], expert_storage=sys.argv[2], dtype=torch.float32)
model = PeftModel.from_pretrained(base, sys.argv[3]).eval()
ids = torch.load(sys.argv[4] + "/ids", weights_only=True)
torch.save(model(input_ids=ids, use_cache=False).logits.detach(), sys.argv[4] + "/logits")
"""


def test_saved_and_loaded_in_a_clean_process_in_another_form(tmp_path: Path) -> None:
    model = adapted("packed")
    model.save_pretrained(tmp_path / "adapter")
    torch.save(IDS, tmp_path / "ids")
    run(CLEAN, str(released()), "mapped", str(tmp_path / "adapter"), str(tmp_path))
    assert max_diff(torch.load(tmp_path / "logits", weights_only=True), logits(model)) < SAME
    assert max_diff(logits(model), logits(load("packed"))) > 0.1


IMPORTS = """
import importlib.util, sys
import modeling_k3
assert "peft" not in sys.modules
assert importlib.util.find_spec("peft") is not None
import peft
from modeling_k3.adapters import K3LoraModel
assert peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING[peft.PeftType.LORA] is K3LoraModel
assert importlib.util.find_spec("peft").loader.__class__.__module__.startswith("_frozen")
assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_AfterPeft"]
"""
BLOCKED = """
import sys
sys.modules["peft"] = None
import modeling_k3
from modeling_k3.adapters import lora_config
try:
    lora_config("experts")
except ImportError as error:
    assert "pip install peft" in str(error)
else:
    raise SystemExit("no error")
"""


@pytest.mark.parametrize("code", [IMPORTS, BLOCKED])
def test_peft_is_wired_whenever_it_is_imported_and_not_needed(code: str) -> None:
    run(code)


def test_every_way_of_loading(tmp_path: Path) -> None:
    """peft without memory for a start, the model's own method, and the Auto class on the adapter's directory."""
    expected = adapted("packed", "all")
    expected.save_pretrained(tmp_path)
    frugal = PeftModel.from_pretrained(load("mapped"), tmp_path, low_cpu_mem_usage=True)
    own = load("packed")
    own.load_adapter(str(tmp_path))
    auto = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for model in (frugal, own, auto):
        assert max_diff(logits(model.eval()), logits(expected)) < SAME


def test_merged_and_taken_out_again_dense() -> None:
    # Adding and taking away again rounds twice; in float64 that cannot be taken for something else.
    model = adapted("dense", "all").double()
    with model.disable_adapter():
        base = logits(model)
    expected = logits(model)
    model.merge_adapter()
    assert max_diff(logits(model), expected) < TWICE
    model.unmerge_adapter()
    assert max_diff(logits(model), expected) < TWICE
    merged = model.merge_and_unload(safe_merge=True)
    assert not any("lora" in name for name, _ in merged.named_modules())
    assert max_diff(logits(merged), expected) < TWICE < SAME < max_diff(base, expected)


def test_a_merged_model_that_is_disabled_is_the_base() -> None:
    model = adapted("dense", "experts")
    with model.disable_adapter():
        base = logits(model)
    model.merge_adapter()
    with model.disable_adapter():
        assert max_diff(logits(model), base) < SAME


def test_merging_something_broken_changes_nothing() -> None:
    model = adapted("dense", "experts")
    last = [m for m in model.modules() if isinstance(m, K3ExpertsLora)][-1]
    with torch.no_grad():
        last.lora_B["default"].w2[3, 0, 0] = float("nan")
    before = last.base_layer.down_proj.clone()
    with pytest.raises(ValueError, match="not finite"):
        last.merge(safe_merge=True)
    assert torch.equal(last.base_layer.down_proj, before)


def test_packed_experts_are_not_merged_without_being_asked() -> None:
    model = adapted("packed")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="merge_into_packed"):
            merge()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_packed_experts_are_quantised_anew_on_request() -> None:
    model = adapted("packed")
    expected = logits(model)
    dense = adapted("dense").merge_and_unload()
    truth = {n: m for n, m in dense.named_modules() if hasattr(m, "use_storage")}
    merged, report = merge_into_packed(model)
    experts = {n: m for n, m in merged.named_modules() if hasattr(m, "use_storage")}
    assert report.keys() == experts.keys() == truth.keys()
    for name, module in experts.items():
        assert module.storage == "packed"
        lost = kept = 0.0
        for e in range(module.num_experts):
            found, wanted = (m.expert_weights(e, torch.float32) for m in (module, truth[name]))
            lost += sum(float((found[k] - wanted[k]).square().sum()) for k in found)
            kept += sum(float(wanted[k].square().sum()) for k in found)
        error = report[name]["default"]
        assert error["of_weights"] == pytest.approx((lost / kept) ** 0.5, rel=1e-3)
        assert 0.01 < error["of_weights"] < 0.2 and error["of_weights"] < error["of_change"]
    base = logits(load("packed"))
    # Closer to the adapted model than the base is: the change outweighs the rounding here.
    assert (logits(merged) - expected).norm() < 0.7 * (base - expected).norm()


def test_mapped_experts_are_never_merged() -> None:
    with pytest.raises(ValueError, match="mapped experts stand in the checkpoint"):
        merge_into_packed(adapted("mapped"))


def test_export_and_back(tmp_path: Path) -> None:
    model = adapted("packed", ["experts", "latent"], matrices=("w1", "w2"), expert_r=2, alpha_pattern={"experts.w2": 9})
    model.save_pretrained(tmp_path / "ours")
    split_experts(tmp_path / "ours", tmp_path / "engine", text_prefix="language_model.")
    split = load_file(tmp_path / "engine" / "adapter_model.safetensors")
    experts = [name for name in split if ".experts." in name]
    layer = "base_model.model.language_model.model.layers.1.block_sparse_moe."
    assert layer + "experts.0.w1.lora_A.weight" in experts and split[experts[0]].ndim == 2
    assert layer + "routed_expert_down_proj.lora_A.weight" in split
    config = json.loads((tmp_path / "engine" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {"w1", "w2", "routed_expert_down_proj", "routed_expert_up_proj"}
    assert config["rank_pattern"] == {r"experts\.\d+\.w[123]": 2}
    stack_experts(tmp_path / "engine", tmp_path / "back")
    a, b = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "back"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    again = PeftModel.from_pretrained(load("mapped"), tmp_path / "back").eval()
    assert max_diff(logits(again), logits(model)) < SAME


def test_export_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no saved adapter"):
        split_experts(tmp_path, tmp_path / "x")
    adapted("packed", "experts").save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="is the source"):
        split_experts(tmp_path / "ours", tmp_path / "ours")
    split_experts(tmp_path / "ours", tmp_path / "split")
    with pytest.raises(ValueError, match="num_experts=3, but"):
        stack_experts(tmp_path / "split", tmp_path / "x", num_experts=3)
