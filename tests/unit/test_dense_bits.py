"""The dense part in 4 or 8 bits beside packed experts: what is changed, what is kept, what a layer then computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig

from modeling_k3 import K3ForCausalLM, K3Mxfp4Config
from modeling_k3.adapters import lora_config
from modeling_k3.dense_bits import quantize_dense
from tests.checkpoints import released
from tests.loras import factors, fill, load
from tests.models import build, tiny_config, token_ids

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
    with pytest.raises(ValueError, match="bits of bitsandbytes"):
        model.save_pretrained(tmp_path)
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
    plain = PeftModel.from_pretrained(load("packed"), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert plain(input_ids=IDS).logits.shape == adapted.eval()(input_ids=IDS).logits.shape


def test_four_bits_train_and_merge_is_refused_beside_packed_experts() -> None:
    from peft import get_peft_model

    model = wide()
    quantize_dense(model, FORMS["nf4"])
    adapted = get_peft_model(model, lora_config("all", r=2))
    assert {type(m).__name__ for m in adapted.modules() if hasattr(m, "lora_A")} == {
        "Linear4bit",
        "Linear",
        "K3ExpertsLora",
    }
    optimizer = torch.optim.SGD(factors(adapted).values(), lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = adapted.train()(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]


def test_refusals() -> None:
    with pytest.raises(TypeError, match="allowed is a BitsAndBytesConfig"):
        K3Mxfp4Config(dense="nf4")
    with torch.device("meta"):
        model = K3ForCausalLM(tiny_config())
    with pytest.raises(ValueError, match="is on disk by the device map"):
        quantize_dense(model, FORMS["int8"])
