"""LoRA through peft as users call it: experts in every form, saved, loaded elsewhere, switched, merged, exported."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from modeling_k3.adapters import K3ExpertsLora, lora_config, split_experts
from tests.loras import (
    ALL,
    IDS,
    SAME,
    adapted,
    codes_of,
    counting_decodes,
    factors,
    fill,
    load,
    logits,
    three_losses,
    unstack,
)
from tests.models import build, max_diff, tiny_config


def step(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of one step by the name of the factor."""
    model.train()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: p.grad for name, p in factors(model).items()}


@ALL
def test_values_and_gradients_are_those_of_peft_s_own_layers(storage: str, tmp_path: Path) -> None:
    """The exported adapter on experts that are linear layers, computed by peft with plain autograd."""
    ours = adapted(storage)
    ours.save_pretrained(tmp_path / "ours")
    split_experts(tmp_path / "ours", tmp_path / "theirs")
    theirs = get_peft_model(unstack(load("dense")), LoraConfig.from_pretrained(tmp_path / "theirs"))
    theirs.set_adapter("default")
    saved = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert {name.replace(".default", "") for name in factors(theirs)} == saved.keys()
    # Not by peft: it knows that a model of this type stacks its experts, and would stack these.
    theirs.load_state_dict({n.replace(".weight", ".default.weight"): t for n, t in saved.items()}, strict=False)
    assert max_diff(logits(ours), logits(theirs.eval())) < SAME
    found, expected = step(ours), step(theirs)
    for name, grad in found.items():
        if ".experts." not in name:
            wanted = expected[name]
        else:
            stem, side, adapter, matrix = name.rsplit(".", 3)
            single = [f"{stem}.{e}.{matrix}.{side}.{adapter}.weight" for e in range(len(grad))]
            wanted = torch.stack(
                [torch.zeros_like(g) if (x := expected[s]) is None else x for s, g in zip(single, grad, strict=True)]
            )
        assert max_diff(grad, wanted) < 1e-4 * max(1.0, wanted.abs().max().item()), name


@pytest.mark.parametrize("storage", ["packed", "mapped"])
def test_a_model_decodes_the_routed_experts_and_no_others(storage: str) -> None:
    model = adapted(storage, "experts")
    chosen: list[tuple[K3ExpertsLora, list[int]]] = []
    for layer in [m for m in model.modules() if isinstance(m, K3ExpertsLora)]:
        layer.register_forward_pre_hook(lambda m, args: chosen.append((m, args[1].unique().tolist())))
    with counting_decodes() as forward:
        loss = model.train()(input_ids=IDS[:1, :3], labels=IDS[:1, :3], use_cache=False).loss
    places = [codes_of(layer.base_layer, used) for layer, used in chosen]
    expected = dict.fromkeys(set().union(*places), 1)
    assert forward == expected and len(expected) == sum(map(len, places)) > 0
    assert any(len(used) < layer.base_layer.num_experts for layer, used in chosen)
    with counting_decodes() as backward:
        loss.backward()
    assert backward == expected


@ALL
@pytest.mark.parametrize("matrix", ["w1", "w3", "w2"])
def test_three_steps_change_factors_and_nothing_else(storage: str, matrix: str) -> None:
    torch.manual_seed(0)
    model = get_peft_model(load(storage), lora_config("experts", r=2, matrices=(matrix,)))
    base, before = logits(model.eval()), {n: t.clone() for n, t in model.state_dict().items()}
    losses = three_losses(model, lr=0.3)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(factors(model)) and all(name.endswith(matrix) for name in changed)
    assert losses[2] < losses[1] < losses[0]
    with model.disable_adapter():
        assert torch.equal(logits(model.eval()), base)
    assert not torch.equal(logits(model), base)


@ALL
def test_several_adapters(storage: str, tmp_path: Path) -> None:
    model = adapted(storage, "experts")
    first = logits(model)
    model.add_adapter("second", lora_config(["experts", "latent"], r=2, matrices=("w2", "w3")))
    fill(model, "second", seed=1)
    assert torch.equal(logits(model), first)
    model.set_adapter("second")
    second = logits(model)
    assert max_diff(first, second) > 1e-2
    assert all(".second." in name for name in factors(model)) and factors(model)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load(storage), tmp_path / "second", adapter_name="other")
    again.load_adapter(tmp_path, "first")
    assert max_diff(logits(again.eval()), second) < SAME
    again.set_adapter("first")
    assert max_diff(logits(again), first) < SAME
    model.base_model.set_adapter(["default", "second"])
    both = logits(model)
    assert min(max_diff(both, first), max_diff(both, second)) > 1e-2
    with pytest.raises(ValueError, match="mixing is not supported"):
        model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "mix", combination_type="cat")
    model.delete_adapter("second")
    model.set_adapter("default")
    assert torch.equal(logits(model), first) and not any(".second." in name for name in model.state_dict())
    with pytest.raises(ValueError, match="adapter_names"):
        model(input_ids=IDS, adapter_names=["default", "__base__"])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("storage", ["packed", "mapped"])
def test_checkpointed_gradients(storage: str, reentrant: bool) -> None:
    plain, checkpointed = adapted(storage, lora_dropout=0.2), adapted(storage, lora_dropout=0.2)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed.enable_input_require_grads()
    torch.manual_seed(0)
    expected = step(plain)
    torch.manual_seed(0)
    found = step(checkpointed)
    for name, grad in expected.items():
        assert max_diff(found[name], grad) < 1e-5 * max(1.0, grad.abs().max().item()), name


def test_modules_to_save(tmp_path: Path) -> None:
    model = adapted("packed", "experts", modules_to_save=["lm_head", "gate"])
    grads = step(model)
    assert any("lm_head" in name for name in grads) and any(".gate." in name for name in grads)
    with torch.no_grad():
        for name, parameter in factors(model).items():
            parameter.add_(grads[name] if grads[name] is not None else 0, alpha=-0.01)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load("packed"), tmp_path).eval()
    assert max_diff(logits(again), logits(model.eval())) < SAME


def test_target_parameters_of_dense_experts(tmp_path: Path) -> None:
    """peft's own way, which forms W + B A for all experts; ours has the same function for w2."""
    config = LoraConfig(r=3, lora_alpha=6, target_parameters=["experts.down_proj"], target_modules=[])
    theirs = get_peft_model(load("dense"), config)
    ours = get_peft_model(load("dense"), lora_config("experts", r=3, matrices=("w2",)))
    fill(ours)
    wrapped = [m for m in theirs.modules() if type(m).__name__ == "ParamWrapper"]
    layers = [m for m in ours.modules() if isinstance(m, K3ExpertsLora)]
    with torch.no_grad():
        for theirs_, ours_ in zip(wrapped, layers, strict=True):
            a, b = ours_.lora_A["default"].w2, ours_.lora_B["default"].w2
            theirs_.lora_A["default"].weight.copy_(a.flatten(0, 1))
            # peft interleaves: the columns of its B are rank by rank, expert by expert within.
            theirs_.lora_B["default"].weight.copy_(b.permute(1, 2, 0).flatten(1))
    assert max_diff(logits(theirs.eval()), logits(ours.eval())) < SAME
    theirs.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load("dense"), tmp_path).eval()
    assert torch.equal(logits(again), logits(theirs))


def test_experts_have_one_kind_of_adapter() -> None:
    model = get_peft_model(load("dense"), LoraConfig(target_parameters=["experts.down_proj"], target_modules=[]))
    with pytest.raises(ValueError, match="allowed is one of the two"):
        model.add_adapter("second", lora_config("experts"))
    model = get_peft_model(load("dense"), lora_config("experts"))
    with pytest.raises(ValueError, match="allowed is one of the two"):
        model.add_adapter("second", LoraConfig(target_parameters=["experts.down_proj"], target_modules=[]))


def test_adapters_of_single_experts_are_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="stack_experts"):
        get_peft_model(load("packed"), LoraConfig(target_modules=["w1", "routed_expert_up_proj"]))


def test_every_linear_layer_uses_its_adapter() -> None:
    """One after the other: a projection whose weight is read past its adapter would leave the logits as they are."""
    model = get_peft_model(build(tiny_config()), LoraConfig(target_modules="all-linear", r=2, task_type="CAUSAL_LM"))
    base = logits(model.eval())
    names = sorted({n.split(".lora_B")[0] for n, _ in model.named_parameters() if "lora_B" in n})
    for name in names:
        weight = model.get_submodule(name).lora_B["default"].weight
        with torch.no_grad():
            weight.normal_(std=0.5)
            changed = logits(model)
            merged = model.get_submodule(name)
            merged.merge()
            same = max_diff(logits(model), changed)
            merged.unmerge()
            weight.zero_()
        assert max_diff(changed, base) > 1e-4, name
        assert same < SAME, name


@pytest.mark.parametrize("storage", ["packed", "mapped"])
def test_generation_with_an_adapter_is_recompute(storage: str) -> None:
    model = adapted(storage, "all")
    out = model.generate(input_ids=IDS, max_new_tokens=5, do_sample=False, pad_token_id=0)
    again = model.generate(input_ids=IDS, max_new_tokens=5, do_sample=False, use_cache=False, pad_token_id=0)
    assert torch.equal(out, again)
