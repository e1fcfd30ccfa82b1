"""Saving and loading as users do it: Auto classes, shards, both layouts, damaged checkpoints, no optional package."""

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from modeling_k3 import K3ForCausalLM, K3ForSequenceClassification, K3ForTokenClassification, K3Model
from tests.models import build, max_diff, released_weights, tiny_config, token_ids
from tests.tolerances import bound

IDS = token_ids(2, 9)
FP32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
MOE = "model.layers.1.block_sparse_moe."


@pytest.fixture(scope="module")
def tiny() -> K3ForCausalLM:
    """The tiny model; tests do not change it."""
    return build(tiny_config()).requires_grad_(False)


@pytest.fixture(scope="module")
def saved(tiny: K3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it was saved, in one file."""
    path = tmp_path_factory.mktemp("tiny")
    tiny.save_pretrained(path)
    return path


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory; a name in two files is an error."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found = load_file(file)
        assert not tensors.keys() & found.keys()
        tensors |= found
    return tensors


def write(directory: Path, config: Any, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint directory of one file."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have bit-equal states."""
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(x[k].dtype == y[k].dtype and torch.equal(x[k], y[k]) for k in x)


# -- Auto classes and names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auto", "model_class"),
    [
        (AutoModel, K3Model),
        (AutoModelForCausalLM, K3ForCausalLM),
        (AutoModelForSequenceClassification, K3ForSequenceClassification),
        (AutoModelForTokenClassification, K3ForTokenClassification),
    ],
)
def test_auto_classes(auto: Any, model_class: type, tiny: K3ForCausalLM, saved: Path, tmp_path: Path) -> None:
    model = auto.from_pretrained(saved)
    assert type(model) is model_class and not model.training
    decoder = model if model_class is K3Model else model.model
    assert same(decoder, tiny.model)
    model.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path)
    assert type(again) is model_class and same(again, model)


def test_a_classifier_for_other_labels(saved: Path, tmp_path: Path) -> None:
    """Another number of labels needs the library's `ignore_mismatched_sizes`, which then is enough."""
    AutoModelForSequenceClassification.from_pretrained(saved, num_labels=3).save_pretrained(tmp_path)
    options = {"num_labels": 5, "ignore_mismatched_sizes": True}
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path, **options)(IDS).logits.shape == (2, 5)


def test_names_on_disk_are_the_released_ones(tiny: K3ForCausalLM, saved: Path) -> None:
    tensors, expected = tensors_in(saved), released_weights(tiny)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    assert {f"{MOE}experts.7.w1.weight", f"{MOE}shared_experts.down_proj.weight"} <= tensors.keys()
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["K3ForCausalLM"] and config["model_type"] == "k3"
    assert str(saved) not in "".join(file.read_text() for file in saved.glob("*.json"))


def test_shards(tiny: K3ForCausalLM, saved: Path, tmp_path: Path) -> None:
    tiny.save_pretrained(tmp_path, max_shard_size="20KB")
    index, whole = json.loads((tmp_path / "model.safetensors.index.json").read_text()), tensors_in(saved)
    tensors = tensors_in(tmp_path)
    assert tensors.keys() == whole.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    holders = {file for name, file in index["weight_map"].items() if f"{MOE}experts." in name}
    assert len(holders) > 1
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path), tiny)
    (tmp_path / sorted(holders)[0]).unlink()
    with pytest.raises((OSError, ValueError), match=sorted(holders)[0]):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("options", [{"device_map": "cpu"}, {"device_map": "auto"}, {"low_cpu_mem_usage": True}])
def test_ways_to_place_a_model(options: dict[str, Any], tiny: K3ForCausalLM, saved: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved, **options)
    assert same(model, tiny) and not any(p.is_meta for p in model.parameters()) and not list(model.buffers())


def test_built_without_memory() -> None:
    with torch.device("meta"):
        model = K3ForCausalLM(tiny_config())
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    model.init_weights()
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_first_layers_only(tiny: K3ForCausalLM, saved: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved, num_hidden_layers=2)
    assert model.config.layer_types == ["linear_attention"] * 2 and len(model.model.layers) == 2
    expected = {n: t for n, t in tiny.state_dict().items() if not re.search(r"layers\.[2-9]\.", n)}
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(t, expected[n]) for n, t in model.state_dict().items())
    model.save_pretrained(tmp_path)
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    with pytest.raises(ValueError, match="num_hidden_layers=6"):
        AutoModelForCausalLM.from_pretrained(saved, num_hidden_layers=6)


def test_the_path_by_its_name_in_the_library(tiny: K3ForCausalLM, saved: Path) -> None:
    assert same(K3ForCausalLM.from_pretrained(pretrained_model_name_or_path=saved), tiny)
    made = K3ForCausalLM.from_pretrained(
        pretrained_model_name_or_path=None, config=tiny.config, state_dict=tiny.state_dict()
    )
    assert same(made, tiny)


@pytest.mark.parametrize("model_class", [K3Model, K3ForCausalLM, K3ForSequenceClassification])
def test_a_checkpoint_under_our_own_names(model_class: type, tmp_path: Path) -> None:
    """What the library writes when it is told not to use the released names is read as well."""
    model = build(tiny_config("KM"), model_class=model_class)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in tensors_in(tmp_path))
    assert same(model_class.from_pretrained(tmp_path), model)
    tensors = tensors_in(tmp_path)
    del tensors[next(name for name in tensors if name.endswith("experts.down_proj"))]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"experts\.down_proj"):
        model_class.from_pretrained(tmp_path)


# -- the released layout ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["A_log as it is", "A_log padded"])
def test_released_layout_in_and_out(padded: bool, tiny: K3ForCausalLM, tmp_path: Path) -> None:
    """Dense bf16 experts under the prefix, beside vision tensors: loaded, and written back under the same names."""
    flat = tiny.config.to_dict()
    inner = {k: v for k, v in flat.items() if k not in ("released_config", "architectures", "transformers_version")}
    config = {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"},
        "text_config": {**inner, "model_type": "kimi_linear"},
        "vision_config": {"hidden_size": 32},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    text = {f"language_model.{n}": t if n.endswith(FP32) else t.bfloat16() for n, t in released_weights(tiny).items()}
    if padded:
        text = {n: torch.cat([t, torch.zeros(13)]) if n.endswith("A_log") else t for n, t in text.items()}
    vision = {"vision_tower.patch_embed.weight": torch.ones(2, 2), "mm_projector.proj.0.weight": torch.ones(2, 2)}
    source = write(tmp_path / "source", config, {**text, **vision})
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    assert type(model) is K3ForCausalLM and model.dtype == torch.bfloat16
    expected = build(tiny_config(), dtype=torch.bfloat16)
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    model.save_pretrained(tmp_path / "copy")
    copy = tensors_in(tmp_path / "copy")
    assert copy.keys() - vision.keys() == text.keys()
    assert all(copy[n].dtype == t.dtype and torch.equal(copy[n], t) for n, t in text.items())
    written = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert written["model_type"] == "kimi_k3" and written["vision_config"] == config["vision_config"]
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "copy"), model)


# -- damaged checkpoints ----------------------------------------------------------------------------------------


def drop(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def add(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: torch.zeros(3)})


def widen(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: torch.cat([tensors[name], torch.ones_like(tensors[name])])})


def rename(old: str, new: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no norm": (drop("model.norm.weight"), "model.norm.weight"),
    "no head": (drop("lm_head.weight"), "lm_head.weight"),
    "no decay": (drop("model.layers.0.self_attn.A_log"), "layers.0.self_attn.A_log"),
    "no bias": (drop(f"{MOE}gate.e_score_correction_bias"), "gate.e_score_correction_bias"),
    "no w1 of an expert": (drop(f"{MOE}experts.3.w1.weight"), "experts.3.w1"),
    "no w2 of the last expert": (drop(f"{MOE}experts.7.w2.weight"), "experts.7.w2"),
    "one expert too many": (add(f"{MOE}experts.8.w1.weight"), "experts.8.w1"),
    "w1 under another number": (rename(f"{MOE}experts.3.w1.weight", f"{MOE}experts.9.w1.weight"), "experts.[39].w1"),
    "w1 packed by name only": (rename(f"{MOE}experts.3.w1.weight", f"{MOE}experts.3.w1.weight_packed"), "experts.3.w1"),
    "unknown tensor in a layer": (add("model.layers.2.foo.weight"), "layers.2.foo.weight"),
    "unknown tensor": (add("foo"), "foo"),
    "norm too wide": (widen("model.norm.weight"), "model.norm.weight"),
    "decay of more heads": (widen("model.layers.0.self_attn.A_log"), "layers.0.self_attn.A_log"),
    "w1 too high": (widen(f"{MOE}experts.2.w1.weight"), "experts.2.w1"),
    "w2 transposed": (lambda t: t.update({(n := f"{MOE}experts.2.w2.weight"): t[n].T.contiguous()}), "experts.2.w2"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name(case: str, saved: Path, tmp_path: Path) -> None:
    change, name = DAMAGE[case]
    tensors = tensors_in(saved)
    change(tensors)
    path = write(tmp_path / "damaged", json.loads((saved / "config.json").read_text()), tensors)
    with pytest.raises(ValueError, match=name):
        AutoModelForCausalLM.from_pretrained(path)


def test_without_strict_the_library_decides(tiny: K3ForCausalLM, saved: Path, tmp_path: Path) -> None:
    tensors, config = tensors_in(saved), json.loads((saved / "config.json").read_text())
    del tensors["model.norm.weight"]
    path = write(tmp_path / "damaged", config, {**tensors, "foo": torch.zeros(3)})
    model, info = AutoModelForCausalLM.from_pretrained(path, strict=False, output_loading_info=True)
    assert info["missing_keys"] == {"model.norm.weight"} and info["unexpected_keys"] == {"foo"}
    assert model.model.norm.weight.eq(1).all() and torch.equal(model.lm_head.weight, tiny.lm_head.weight)
    tensors["model.norm.weight"] = torch.ones(65)
    path = write(tmp_path / "damaged", config, tensors)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(path, strict=False)
    model = AutoModelForCausalLM.from_pretrained(path, strict=False, ignore_mismatched_sizes=True)
    assert model.model.norm.weight.eq(1).all()


# -- without the package, without optional packages -------------------------------------------------------------


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds the package."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_without_importing_the_package_the_library_does_not_know_k3(saved: Path) -> None:
    code = """
        import sys
        from transformers import AutoModelForCausalLM
        AutoModelForCausalLM.from_pretrained(sys.argv[1])
    """
    result = run_python(code, str(saved))
    assert result.returncode != 0 and "model type `k3`" in result.stderr


def test_no_optional_package_is_needed(tiny: K3ForCausalLM, saved: Path, tmp_path: Path) -> None:
    code = """
        import sys
        for name in ("fla", "triton", "flash_attn", "bitsandbytes", "peft", "accelerate", "compressed_tensors"):
            sys.modules[name] = None
        import torch
        import modeling_k3
        from safetensors.torch import load_file, save_file
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
        ids = load_file(sys.argv[2] + "/ids")["ids"]
        save_file({"logits": model(ids).logits.detach()}, sys.argv[2] + "/logits")
        model.save_pretrained(sys.argv[2])
    """
    save_file({"ids": IDS}, tmp_path / "ids")
    result = run_python(code, str(saved), str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert max_diff(load_file(tmp_path / "logits")["logits"], tiny(IDS).logits) < bound("other_process_logits")
