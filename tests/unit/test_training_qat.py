"""Quantisation-aware training: the released grid in the forward pass, nothing of it anywhere else."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from modeling_k3.experts import iter_experts
from modeling_k3.mxfp4 import decode, encode
from modeling_k3.training.optimizers import build_optimizer
from modeling_k3.training.qat import export_released, fake_quantized_experts, round_mxfp4, round_mxfp8
from tests.models import build, tiny_config, token_ids

#: Widths that MXFP4 can pack.
WIDTHS = {"layers": "KKM", "routed_expert_hidden_size": 32, "moe_intermediate_size": 64, "num_experts": 8}


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """In evaluation mode, without gradients."""
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


# -- rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e-3, 1.0, 1e30])
def test_rounding_is_that_of_the_release_bit_for_bit(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    values = (torch.randn(32, 320, dtype=torch.float64) * size).to(dtype)
    values[0], values[1, :32], values[2, 5] = 0, 0, -0.0
    wanted = decode(*encode(values), dtype=dtype)
    rounded = round_mxfp4(values)
    assert torch.equal(rounded, wanted) and rounded.dtype == dtype
    assert torch.equal(rounded.signbit(), wanted.signbit())


@pytest.mark.parametrize("largest", [4.0, 6.0, 6.99, 7.0, 7.99])
def test_rounding_of_ties_and_of_what_is_clipped(largest: float) -> None:
    values = torch.arange(-largest, largest, 1 / 64)
    values = values[: len(values) // 31 * 31].reshape(-1, 31)
    values = torch.cat([torch.full((len(values), 1), largest), values], dim=1)
    assert torch.equal(round_mxfp4(values), decode(*encode(values), dtype=torch.float32))


def test_what_is_not_finite_is_refused() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or infinity"):
            round_mxfp4(torch.full((1, 32), value))


def test_mxfp8_refuses_it_as_well() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or infinity"):
            round_mxfp8(torch.ones(1, 32).index_fill_(1, torch.tensor([3]), value))


def test_mxfp8_keeps_four_bits_and_clips() -> None:
    torch.manual_seed(0)
    values = torch.randn(16, 64)
    rounded = round_mxfp8(values)
    scale = values.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    error = (rounded - values).unflatten(-1, (-1, 32)).abs()
    assert 0 < (error / scale).max() < 0.13  # the largest may be clipped from below 512 to 448
    small = values.unflatten(-1, (-1, 32)).abs() < 0.5 * scale
    assert (error / values.unflatten(-1, (-1, 32)).abs().clamp_min(1e-2))[small].max() < 1 / 15
    assert torch.equal(round_mxfp8(rounded), rounded)
    assert torch.equal(round_mxfp8(torch.zeros(1, 32)), torch.zeros(1, 32))


# -- the switch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_forward_has_the_grid_and_the_gradient_passes_through(implementation: str) -> None:
    model, rounded = build(tiny_config(**WIDTHS)), build(tiny_config(**WIDTHS))
    for each in (model, rounded):
        each.set_experts_implementation(implementation)
    with torch.no_grad():
        for _, module in iter_experts(rounded):
            for parameter in module.parameters():
                parameter.copy_(decode(*encode(parameter), dtype=torch.float32))
    ids = token_ids(2, 12)
    plain = logits(model, ids)
    with fake_quantized_experts(model):
        assert torch.equal(logits(model, ids), logits(rounded, ids))
        losses = [each.train()(input_ids=ids, labels=ids, use_cache=False).loss for each in (model, rounded)]
        for loss in losses:
            loss.backward()
    for (name, a), b in zip(model.named_parameters(), rounded.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    assert not torch.equal(plain, logits(rounded, ids))
    assert torch.equal(plain, logits(model, ids))


def test_names_and_checkpoints_do_not_notice() -> None:
    model = build(tiny_config(**WIDTHS))
    names, state = [name for name, _ in model.named_parameters()], {k: v.clone() for k, v in model.state_dict().items()}
    with fake_quantized_experts(model, activations=True):
        logits(model, token_ids(1, 5))
        assert [name for name, _ in model.named_parameters()] == names
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(isinstance(p, nn.Parameter) for _, m in iter_experts(model) for p in m._parameters.values())


def test_activations_are_rounded_on_request_only() -> None:
    model, ids = build(tiny_config(**WIDTHS)), token_ids(1, 9)
    with fake_quantized_experts(model):
        weights_only = logits(model, ids)
    with fake_quantized_experts(model, activations=True):
        both = logits(model, ids)
    with fake_quantized_experts(model):
        assert torch.equal(logits(model, ids), weights_only)
    assert 0 < (both - weights_only).abs().max() < 1.0


def test_an_error_in_the_forward_leaves_the_parameters() -> None:
    model = build(tiny_config(**WIDTHS))
    module = iter_experts(model)[0][1]
    with fake_quantized_experts(model):
        with pytest.raises((RuntimeError, ValueError)):
            module(torch.randn(3, 7), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2))
        assert all(parameter.is_leaf for parameter in module._parameters.values())
    assert not module._forward_pre_hooks and not module._forward_hooks


def test_gradient_checkpointing_sees_the_same() -> None:
    grads = []
    for checkpointing in (False, True):
        model = build(tiny_config(**WIDTHS)).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = token_ids(2, 12)
        with fake_quantized_experts(model):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "no routed experts"),
        ({**WIDTHS, "moe_intermediate_size": 48}, "width 32 and 48"),
    ],
)
def test_what_cannot_be_quantised_is_refused(changes: dict[str, Any], message: str) -> None:
    model = build(tiny_config(**changes))
    with pytest.raises(ValueError, match=message):
        fake_quantized_experts(model)


def test_packed_experts_are_refused() -> None:
    model = build(tiny_config(**WIDTHS))
    iter_experts(model)[0][1].use_storage("packed")
    with pytest.raises(ValueError, match="packed experts; allowed are dense"):
        fake_quantized_experts(model)


def test_a_second_switch_is_refused_and_the_weights_are_kept() -> None:
    model, ids = build(tiny_config(**WIDTHS)), token_ids(2, 9)
    plain, weights = logits(model, ids), list(model.parameters())
    with fake_quantized_experts(model):
        rounded = logits(model, ids)
        with pytest.raises(ValueError, match=r"experts is quantised by another fake_quantized_experts; close\(\)"):
            fake_quantized_experts(model, activations=True)
        assert torch.equal(logits(model, ids), rounded) and not torch.equal(rounded, plain)
    assert torch.equal(logits(model, ids), plain)
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    with fake_quantized_experts(model):
        assert torch.equal(logits(model, ids), rounded)


def test_experts_under_an_adapter_are_refused_and_those_beside_one_are_not() -> None:
    peft = pytest.importorskip("peft")
    from modeling_k3.adapters import lora_config

    adapted = peft.get_peft_model(build(tiny_config(**WIDTHS)), lora_config("experts"))
    with pytest.raises(ValueError, match=r"experts.base_layer is under an adapter.*merge_and_unload"):
        fake_quantized_experts(adapted)
    ids, later = token_ids(2, 9), build(tiny_config(**WIDTHS))
    with fake_quantized_experts(later), pytest.raises(ValueError, match="experts got an adapter"):
        logits(peft.get_peft_model(later, lora_config("experts")), ids)
    logits(later, ids)
    for beside in (lora_config("attention"), lora_config("attention", modules_to_save=["experts"])):
        model = peft.get_peft_model(build(tiny_config(**WIDTHS)), beside)
        plain = logits(model, ids)
        with fake_quantized_experts(model):
            assert not torch.equal(logits(model, ids), plain)
            # A copy keeps computing on the grid.
            assert torch.equal(logits(copy.deepcopy(model), ids), logits(model, ids))
        assert torch.equal(logits(model, ids), plain)


# -- export -----------------------------------------------------------------------------------------------------------


def test_the_export_computes_what_was_trained(tmp_path: Path) -> None:
    model, ids = build(tiny_config(**WIDTHS)), token_ids(2, 24)
    optimizer = build_optimizer(model, lr=1e-2, muon_lr=1e-2)
    with fake_quantized_experts(model):
        model.train()
        for _ in range(3):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = logits(model, ids)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    folder = export_released(model, tmp_path / "release")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    packed = AutoModelForCausalLM.from_pretrained(folder, expert_storage="packed")
    assert {module.storage for _, module in iter_experts(packed)} == {"packed"}
    assert packed.config.released_config is not None
    # The packed form combines expert by expert, as `eager` does; the same values in the same order.
    model.set_experts_implementation("eager")
    with fake_quantized_experts(model):
        assert torch.equal(logits(packed, ids), logits(model, ids))
    assert torch.allclose(logits(packed, ids), trained, atol=1e-4)
    assert (logits(packed, ids) - logits(model, ids)).abs().max() > 1e-2, "the grid makes no difference: a weak test"


def test_export_in_bfloat16_keeps_the_codes(tmp_path: Path) -> None:
    model = build(tiny_config(**WIDTHS))
    wide = export_released(model, tmp_path / "wide")
    narrow = export_released(model, tmp_path / "narrow", dtype=torch.bfloat16)
    states = [
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto", expert_storage="packed").state_dict()
        for folder in (wide, narrow)
    ]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value.to(states[1][name].dtype)), name
    dtypes = {name.rpartition(".")[2]: value.dtype for name, value in states[1].items()}
    assert dtypes["gate_up_proj_packed"] == torch.uint8 and dtypes["A_log"] == torch.float32
    assert states[1]["lm_head.weight"].dtype == torch.bfloat16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["narrow", "wide"]
    assert not (narrow / "conversion.json").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="exists already"):
        export_released(build(tiny_config(**WIDTHS)), tmp_path)
