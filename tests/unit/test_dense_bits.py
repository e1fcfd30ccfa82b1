"""The dense part in 4 or 8 bits beside packed experts: what is changed, what is kept, what a layer then computes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import BitsAndBytesConfig

from modeling_k3 import K3ForCausalLM, K3Mxfp4Config
from modeling_k3.adapters import lora_config
from modeling_k3.dense_bits import quantize_dense
from modeling_k3.mxfp4 import decode, encode
from modeling_k3.planning.components import weight_bytes
from modeling_k3.planning.shape import read_shape
from modeling_k3.training import export_released
from tests.checkpoints import change, edit_config, read_directory, released
from tests.loras import factors, fill, load, three_losses
from tests.models import build, max_diff, tiny_config, token_ids

pytest.importorskip("bitsandbytes")

#: Widths that the 4-bit product of the CPU takes, but for the beta projection of two heads.
WIDE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "routed_expert_hidden_size": 64, "moe_intermediate_size": 64,
    "num_attention_heads": 2, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "linear": {"num_heads": 2, "head_dim": 64},
}  # fmt: skip
FORMS = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
    "fp4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32),
    "double": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                 bnb_4bit_compute_dtype=torch.float32),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}  # fmt: skip
#: Relative error of a product of Gaussian weights: half a step of the format, and a bit of rounding.
ERROR = {"nf4": 0.11, "fp4": 0.16, "double": 0.11, "int8": 0.02}
IDS = token_ids(2, 9)


def wide() -> K3ForCausalLM:
    return build(tiny_config(**WIDE))


@pytest.mark.parametrize("form", list(FORMS))
def test_linear_layers_are_rounded_and_nothing_else(form: str) -> None:
    model, plain = wide(), wide()
    counts = quantize_dense(model, FORMS[form])
    is_int8 = form == "int8"
    for name, module in plain.named_modules():
        found = model.get_submodule(name)
        is_kept = name == "lm_head" or (not is_int8 and name.endswith("b_proj") and module.weight.shape[0] == 2)
        if type(module) is not nn.Linear or is_kept:
            assert type(found) is type(module), name
            continue
        assert type(found).__name__ == ("Linear8bitLt" if is_int8 else "Linear4bit"), name
        x = torch.randn(3, 5, module.in_features)
        with torch.no_grad():
            error = (found(x) - module(x)).norm() / module(x).norm()
        assert ERROR[form] / 4 < error < 1.5 * ERROR[form], (name, error)
    for name, parameter in plain.named_parameters():
        if type(plain.get_submodule(name.rpartition(".")[0])) is not nn.Linear:
            assert torch.equal(parameter, model.get_parameter(name)), name
    bits = "8 bits" if is_int8 else "4 bits"
    assert counts[bits] > 5 * (counts["kept"] - model.lm_head.weight.numel()) and len(counts) == 2
    assert model(IDS).logits.isfinite().all()


def test_layers_can_be_left_out() -> None:
    model, config = wide(), BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["self_attn", "layers.2"])
    quantize_dense(model, config)
    found = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert (
        "model.layers.0.self_attn.q_proj" in found and "model.layers.2.block_sparse_moe.shared_experts.up_proj" in found
    )
    assert "model.layers.1.block_sparse_moe.shared_experts.up_proj" not in found


@pytest.mark.parametrize("way", ["natural", "composed"])
@pytest.mark.parametrize("storage", ["packed", "mapped"])
def test_over_a_release(way: str, storage: str, tmp_path: Path) -> None:
    """Both calls, and training LoRA on all of it; the experts' bytes stay what they were."""
    eight = FORMS["int8"]
    config = eight if way == "natural" else K3Mxfp4Config(dense=eight, expert_storage=storage)
    options = {"expert_storage": storage} if way == "natural" else {}
    model = K3ForCausalLM.from_pretrained(released(), dtype=torch.float32, quantization_config=config, **options)
    kinds = {type(m).__name__ for n, m in model.named_modules() if n.endswith(("q_proj", "routed_expert_up_proj"))}
    assert kinds == {"Linear8bitLt"} and model.is_loaded_in_8bit and not model.is_loaded_in_4bit
    assert {m.storage for m in model.modules() if hasattr(m, "use_storage")} == {storage}
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "saved")
    stored, before = read_directory(tmp_path / "saved"), read_directory(released())
    bytes_of_experts = {
        name: raw for name, raw in before.items() if ".experts." in name and not name.endswith("_shape")
    }
    assert bytes_of_experts.items() <= stored.items()
    again = K3ForCausalLM.from_pretrained(tmp_path / "saved", expert_storage=storage, dtype=torch.float32)
    assert torch.equal(again(IDS).logits, expected)
    from peft import PeftModel, get_peft_model

    adapted = get_peft_model(model, lora_config("all", r=2))
    adapted.train()(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    names = {type(m).__name__ for m in adapted.modules() if hasattr(m, "lora_A")}
    assert names == {"Linear8bitLt", "K3ExpertsLora"}
    # B is zero at the beginning, so A gets nothing yet.
    assert all(p.grad is not None and p.grad.isfinite().all() for p in factors(adapted).values())
    assert any(p.grad.any() for n, p in factors(adapted).items() if ".experts.lora_B" in n)
    fill(adapted, scale=0.05)
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        base = load("packed")(input_ids=IDS).logits
        of_eight = adapted.eval()(input_ids=IDS).logits
        same = PeftModel.from_pretrained(again, tmp_path / "adapter").eval()(input_ids=IDS).logits
        plain = PeftModel.from_pretrained(load("packed"), tmp_path / "adapter").eval()(input_ids=IDS).logits
    assert torch.equal(same, of_eight)
    # Some tokens choose other experts on rounded hidden states.
    assert (plain - of_eight).norm() < 0.4 * (plain - base).norm()


def test_four_bits_beside_packed_experts_train_refuse_to_merge_and_load_again(tmp_path: Path) -> None:
    """From an MXFP4 checkpoint on disk to its adapter on disk."""
    from peft import PeftModel, get_peft_model

    export_released(wide(), tmp_path / "mxfp4", dtype=torch.float32)
    options = {"dtype": torch.float32, "quantization_config": FORMS["nf4"]}
    adapted = get_peft_model(K3ForCausalLM.from_pretrained(tmp_path / "mxfp4", **options), lora_config("all", r=2))
    kinds = {type(m).__name__ for m in adapted.modules() if hasattr(m, "lora_A")}
    assert kinds == {"Linear4bit", "Linear", "K3ExpertsLora"}
    assert {m.storage for m in adapted.modules() if hasattr(m, "use_storage")} == {"packed"}
    losses = three_losses(adapted, lr=0.5, ids=IDS)
    assert losses[2] < losses[0]
    with torch.no_grad():
        expected = adapted.eval()(input_ids=IDS).logits
        with pytest.raises(ValueError, match="merge_into_packed"):
            adapted.merge_and_unload()
        assert torch.equal(adapted(input_ids=IDS).logits, expected)
        adapted.save_pretrained(tmp_path / "adapter")
        base = K3ForCausalLM.from_pretrained(tmp_path / "mxfp4", **options)
        assert max_diff(base(input_ids=IDS).logits, expected) > 1e-3
        again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert torch.equal(again(input_ids=IDS).logits, expected)


def test_pefts_preparation_for_few_bits_leaves_packed_experts_alone(tmp_path: Path) -> None:
    from peft import get_peft_model, prepare_model_for_kbit_training

    model = K3ForCausalLM.from_pretrained(saved(tmp_path), quantization_config=FORMS["nf4"])
    before = {name: p.detach().clone() for name, p in model.named_parameters() if ".experts." in name}
    prepared = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert prepared.is_gradient_checkpointing and not any(p.requires_grad for p in prepared.parameters())
    assert {p.dtype for n, p in prepared.named_parameters() if ".experts." not in n} == {torch.float32, torch.uint8}
    losses = three_losses(get_peft_model(prepared, lora_config("all", r=2)), lr=0.5, ids=IDS)
    assert losses[2] < losses[0]
    after = {name: p for name, p in model.named_parameters() if name.replace(".base_layer", "") in before}
    assert len(after) == len(before) > 0
    assert all(torch.equal(p, before[name.replace(".base_layer", "")]) for name, p in after.items())


def saved(tmp_path: Path, name: str = "plain") -> Path:
    """The model in bf16 as a flat checkpoint."""
    wide().to(torch.bfloat16).save_pretrained(tmp_path / name)
    return tmp_path / name


@torch.no_grad()
@pytest.mark.parametrize("form", list(FORMS))
def test_a_bf16_checkpoint_is_really_in_few_bits_and_stays_so(form: str, tmp_path: Path) -> None:
    """Experts too; what is read again is what was saved, bit for bit, before the first forward and after it.

    Without gradients, as there some CPUs rearrange what they hold.
    """
    folder = saved(tmp_path)
    plain = K3ForCausalLM.from_pretrained(folder)
    model = K3ForCausalLM.from_pretrained(folder, quantization_config=FORMS[form])
    counts = model.bytes_by_dtype()
    experts = {name: module for name, module in model.named_modules() if hasattr(module, "use_storage")}
    for name, module in experts.items():
        stored = sum(parameter.nbytes for parameter in module.parameters())
        assert all(parameter.dtype == torch.uint8 for parameter in module.parameters())
        assert stored * 8 == 4.25 * module.count_weights()
        matrix = plain.get_submodule(name).matrix(3, "down_proj", torch.float32)
        assert torch.equal(module.matrix(3, "down_proj", torch.float32), decode(*encode(matrix), dtype=torch.float32))
    for name, parameter in plain.named_parameters():
        if type(plain.get_submodule(name.rpartition(".")[0])) is not nn.Linear and ".experts." not in name:
            kept = model.get_parameter(name)
            assert kept.dtype == parameter.dtype and torch.equal(kept, parameter), name
    model.save_pretrained(tmp_path / "first")
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "second")
    assert torch.equal(model(IDS).logits, expected)
    files = [tmp_path / name / "model.safetensors" for name in ("first", "second")]
    assert files[0].read_bytes() == files[1].read_bytes()
    again = K3ForCausalLM.from_pretrained(tmp_path / "first")
    assert again.bytes_by_dtype() == counts
    assert torch.equal(again(IDS).logits, expected)
    # Some CPUs compute with scales of their own beside those that are saved.
    assert sum(counts.values()) <= sum(again.bytes_by_dtype().values()) < 1.04 * sum(counts.values())
    assert again.is_loaded_in_8bit == (form == "int8") and again.is_loaded_in_4bit == (form != "int8")
    names = read_directory(tmp_path / "first").keys()
    ending = "SCB" if form == "int8" else f"weight.quant_state.bitsandbytes__{form.replace('double', 'nf4')}"
    assert f"model.layers.0.self_attn.q_proj.{ending}" in names
    assert ("model.layers.0.self_attn.q_proj.weight.nested_absmax" in names) == (form == "double")
    block = json.loads((tmp_path / "first" / "config.json").read_text())["quantization_config"]
    assert block["quant_method"] == "k3_mxfp4" and block["format"] == "mxfp4-pack-quantized"
    assert block["dense"]["load_in_8bit"] == (form == "int8")


def test_plain_experts_stay_plain_if_asked_and_no_block_tells_of_mxfp4(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    model = K3ForCausalLM.from_pretrained(folder, quantization_config=FORMS["nf4"], expert_storage="dense")
    assert {m.storage for m in model.modules() if hasattr(m, "use_storage")} == {"dense"}
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "saved")
    block = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert block.keys() == {"quant_method", "dense"}
    again = K3ForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(IDS).logits, expected)
    assert {m.storage for m in again.modules() if hasattr(m, "use_storage")} == {"dense"}


def test_bytes_by_dtype_and_one_line_after_loading(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(tmp_path)
    plain = K3ForCausalLM.from_pretrained(folder).bytes_by_dtype()
    assert plain.keys() == {"bfloat16", "float32"} and sum(plain.values()) == sum(
        len(raw.data) for raw in read_directory(folder).values()
    )
    transformers.utils.logging.enable_propagation()
    model = K3ForCausalLM.from_pretrained(folder, quantization_config=FORMS["nf4"])
    transformers.utils.logging.disable_propagation()
    counts = model.bytes_by_dtype()
    assert counts.keys() == {"nf4", "mxfp4", "bfloat16", "float32"} and counts["float32"] == plain["float32"]
    experts = [module for module in model.modules() if hasattr(module, "use_storage")]
    assert counts["mxfp4"] == sum(module.count_weights() for module in experts) * 17 // 32
    layers = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    numbers = sum(module.in_features * module.out_features for module in layers)
    # 16 float32 of quant_map for each layer beside one scale for 64 codes.
    assert counts["nf4"] == numbers // 2 + numbers // 16 + 64 * len(layers)
    assert sum("of weights: " in record.message and "mxfp4" in record.message for record in caplog.records) == 1
    mapped = K3ForCausalLM.from_pretrained(released(), expert_storage="mapped").bytes_by_dtype()
    packed = K3ForCausalLM.from_pretrained(released(), expert_storage="packed").bytes_by_dtype()
    assert mapped.pop("mxfp4 (in files)") == packed.pop("mxfp4") and mapped == packed


def test_gradients_flow_after_an_evaluation() -> None:
    """The CPU's own order of codes, taken in evaluation, has no backward pass; saving then must not change anything."""
    model = wide().to(torch.bfloat16)
    quantize_dense(model, FORMS["nf4"])
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        before = layer(x)
        layer.state_dict()
        assert torch.equal(layer(x), before)
    y = layer.train()(x.requires_grad_())
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.any() and (y - before).norm() < 0.02 * before.norm()


def test_double_quantisation_is_refused(tmp_path: Path) -> None:
    model = K3ForCausalLM.from_pretrained(saved(tmp_path), quantization_config=FORMS["int8"])
    with pytest.raises(ValueError, match="already"):
        quantize_dense(model, FORMS["nf4"])
    model.save_pretrained(tmp_path / "int8")
    for given in (FORMS["nf4"], FORMS["int8"], FORMS["nf4"].to_dict(), K3Mxfp4Config(dense=FORMS["nf4"])):
        with pytest.raises(ValueError, match="already, and rounding it once more is refused"):
            K3ForCausalLM.from_pretrained(tmp_path / "int8", quantization_config=given)
    folder = saved(tmp_path, "of_library")
    edit_config(folder, lambda config: config.update(quantization_config=FORMS["int8"].to_dict()))
    with pytest.raises(ValueError, match="already"):
        K3ForCausalLM.from_pretrained(folder, quantization_config=FORMS["nf4"])


def test_what_is_stored_must_be_whole_and_told_of(tmp_path: Path) -> None:
    K3ForCausalLM.from_pretrained(saved(tmp_path), quantization_config=FORMS["nf4"]).save_pretrained(tmp_path / "nf4")
    untold = shutil.copytree(tmp_path / "nf4", tmp_path / "untold")
    edit_config(untold, lambda config: config["quantization_config"].pop("dense"))
    with pytest.raises(ValueError, match=r"no quantization_config\.dense"):
        K3ForCausalLM.from_pretrained(untold)
    other = shutil.copytree(tmp_path / "nf4", tmp_path / "other")
    edit_config(other, lambda config: config["quantization_config"].update(dense=FORMS["fp4"].to_dict()))
    with pytest.raises(ValueError, match="bitsandbytes__fp4"):
        K3ForCausalLM.from_pretrained(other)
    change(tmp_path / "nf4", lambda name, raw: {} if name.endswith("0.self_attn.q_proj.weight") else {name: raw})
    with pytest.raises(ValueError, match=r"q_proj lacks \['weight'\]"):
        K3ForCausalLM.from_pretrained(tmp_path / "nf4")


def test_refusals() -> None:
    with pytest.raises(TypeError, match="allowed is a BitsAndBytesConfig"):
        K3Mxfp4Config(dense="nf4")
    with torch.device("meta"):
        model = K3ForCausalLM(tiny_config())
    with pytest.raises(ValueError, match="is on disk by the device map"):
        quantize_dense(model, FORMS["int8"])


@pytest.mark.parametrize("form", ["nf4", "fp4", "int8"])
def test_the_plan_counts_the_bytes_there_are(form: str, tmp_path: Path) -> None:
    """Experts and dense part, misfits and scales included, to the byte."""
    model = K3ForCausalLM.from_pretrained(saved(tmp_path), quantization_config=FORMS[form])
    predicted = weight_bytes(read_shape(model.config), 2, dense=form, experts="mxfp4")
    measured = model.bytes_by_dtype()
    assert sum(predicted.values()) == sum(measured.values())
    assert predicted["routed experts"] == measured["mxfp4"]
