"""Proof that the golden comparison can fail: small errors of the kinds ports make must be caught.

Each mutation is one wrong constant, switch or weight in a model that otherwise passes, and must be reported on the
tensor named beside it, so that a mutation which fails for another reason (a crash, a wrong shape) does not count.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import modeling_k3
from tests.parity.conftest import LoadCase
from tests.parity.golden import COMMITTED, Case, check, discover, kind_of, names_of
from tests.parity.recording import Record, run_greedy, run_prompt

CASES = {case.name: case for case in discover(COMMITTED)}


def run_mutant(
    case: Case, directory: Path, patch: Callable[[PreTrainedModel], Any] | None = None, **changes: Any
) -> None:
    """Load `case` with a changed configuration or a patched model and compare it. Raises what `check` raises.

    Loading is not strict: a switch turned off leaves its weights over, and it is the comparison that is on trial.
    """
    model = modeling_k3.K3ForCausalLM.from_pretrained(
        case.materialise(directory, **changes), dtype=torch.float32, strict=False
    ).eval()
    with torch.no_grad():
        if patch is not None:
            patch(model)
    check(case, run_prompt(model, case), names_of(case, "prompt"))


@pytest.mark.parametrize("name", ["base", "grouped_sigmoid"])
def test_without_a_mutation_the_check_passes(name: str, tmp_path: Path) -> None:
    """The harness itself changes nothing."""
    run_mutant(CASES[name], tmp_path)


CONFIG_MUTATIONS = [
    ("base", "logits", {"rms_norm_eps": 1e-6}),
    ("base", "layers.3.self_attn.output", {"mla_norm_eps": 1e-5}),
    ("base", "layers.0.self_attn.output", {"linear_attn_config": {"gate_lower_bound": -4.9}}),
    ("base", "layers.0.self_attn.output", {"linear_attn_config": {"gate_lower_bound": None}}),
    ("base", "num_block_residuals", {"attn_res_block_size": 2}),
    ("base", "num_block_residuals", {"attn_res_block_size": 4}),
    ("base", "layers.0.ffn.output", {"activation_situ_linear_beta": None}),
    ("base", "layers.0.ffn.output", {"activation_situ_beta": None}),
    ("base", "layers.0.ffn.output", {"hidden_act": "silu"}),
    ("base", "layers.1.ffn.output", {"latent_moe_use_norm": False}),
    ("base", "layers.1.router_weights", {"moe_router_activation_func": "softmax"}),
    ("base", "layers.3.self_attn.output", {"mla_use_output_gate": False}),
    ("grouped_sigmoid", "layers.2.router_weights", {"moe_renormalize": True}),
    ("grouped_sigmoid", "layers.2.router_weights", {"routed_scaling_factor": 2.499}),
    ("grouped_sigmoid", "layers.2.router_indices", {"num_expert_group": 1, "topk_group": 1}),
    ("grouped_sigmoid", "layers.2.router_indices", {"topk_group": 3}),
]


@pytest.mark.parametrize(
    ("name", "tensor", "changes"),
    [pytest.param(*row, id=f"{row[0]}-{'-'.join(row[2])}-{index}") for index, row in enumerate(CONFIG_MUTATIONS)],
)
def test_wrong_configuration_is_caught(name: str, tensor: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """One configuration value off."""
    with pytest.raises(AssertionError, match=rf"\n  {tensor}: "):
        run_mutant(CASES[name], tmp_path, **changes)


def leak_router_bias(model: PreTrainedModel) -> None:
    """Weights from the biased scores that only choose."""
    gate = model.model.layers[2].block_sparse_moe.gate

    def hook(module: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, indices = output
        return logits, weights + module.e_score_correction_bias[indices] * model.config.routed_scaling_factor, indices

    gate.register_forward_hook(hook)


def drop_router_bias(model: PreTrainedModel) -> None:
    """The choice without the correction bias."""
    model.model.layers[2].block_sparse_moe.gate.e_score_correction_bias.zero_()


def drop_shared_key_channels(model: PreTrainedModel) -> None:
    """The never rotated "rope" channels left out of the dot product."""
    model.model.layers[3].self_attn.kv_a_proj_with_mqa.weight[model.config.kv_lora_rank :] = 0


def reverse_convolution(model: PreTrainedModel) -> None:
    """Taps in the order of a convolution instead of a correlation."""
    weight = model.model.layers[0].self_attn.q_conv1d.weight
    weight.copy_(weight.flip(-1))


def swap_gate_and_up(model: PreTrainedModel) -> None:
    """The two inputs of the gated activation exchanged."""
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def drop_shared_experts(model: PreTrainedModel) -> None:
    """The routed part alone."""
    model.model.layers[2].block_sparse_moe.shared_experts.down_proj.weight.zero_()


def swap_depth_queries(model: PreTrainedModel) -> None:
    """AttnRes queries of the two sub-layers of one layer exchanged."""
    layer = model.model.layers[1]
    layer.self_attention_res_proj, layer.mlp_res_proj = layer.mlp_res_proj, layer.self_attention_res_proj


def normalise_depth_values(model: PreTrainedModel) -> None:
    """AttnRes keys used as values: the mixture of normalised sources."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        sources = [nn.functional.rms_norm(source, source.shape[-1:], eps=1e-5) for source in args[0]]
        return (sources, *args[1:])

    model.model.layers[1].self_attention_res_proj.register_forward_pre_hook(hook)


def misplace_l2_epsilon(model: PreTrainedModel) -> None:
    """The L2 norm's epsilon added to the mean of squares instead of their sum: 16 times too large for 16 channels."""
    attention = model.model.layers[0].self_attn

    def hook(_: nn.Module, __: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        heads = output[0].unflatten(-1, (attention.num_heads, -1))
        square = heads.square().sum(-1, keepdim=True)
        return (heads * torch.sqrt((square + 1e-6) / (square + 16e-6))).flatten(-2), output[1]

    attention.k_conv1d.register_forward_hook(hook)


PATCHES = [
    ("grouped_sigmoid", "layers.2.router_weights", leak_router_bias),
    ("grouped_sigmoid", "layers.2.router_indices", drop_router_bias),
    ("base", "layers.3.key_cache", drop_shared_key_channels),
    ("base", "layers.0.self_attn.output", reverse_convolution),
    ("base", "layers.0.recurrent_state", misplace_l2_epsilon),
    ("base", "layers.0.ffn.output", swap_gate_and_up),
    ("base", "layers.2.output", drop_shared_experts),
    ("base", "layers.1.self_attn.input", swap_depth_queries),
    ("base", "layers.1.self_attn.input", normalise_depth_values),
]


@pytest.mark.parametrize(("name", "tensor", "patch"), [pytest.param(*row, id=row[2].__name__) for row in PATCHES])
def test_wrong_part_is_caught(name: str, tensor: str, patch: Callable[[PreTrainedModel], None], tmp_path: Path) -> None:
    """One module wrong in one layer."""
    with pytest.raises(AssertionError, match=rf"\n  {tensor}: "):
        run_mutant(CASES[name], tmp_path, patch)


@pytest.mark.parametrize("name", names_of(CASES["base"], "prompt"))
def test_one_wrong_element_is_caught(name: str, prompt_record: Callable[[Case], Record]) -> None:
    """A deviation just above the bound in one element of one tensor is reported, and NaN is never equal."""
    case, record = CASES["base"], dict(prompt_record(CASES["base"]))
    kind = kind_of(name)
    exact = not record[name].is_floating_point()
    for error in (1,) if exact else (2.1 * case.bound(f"{kind}_max_abs"), torch.nan, torch.inf):
        changed = record[name].clone(memory_format=torch.contiguous_format)
        changed.view(-1)[-1] += error
        with pytest.raises(AssertionError, match=rf"\n  {name}: max"):
            check(case, record | {name: changed}, [name])


def test_missing_data_fails(tmp_path: Path, prompt_record: Callable[[Case], Record]) -> None:
    """Nothing passes for want of something to compare: no folder, no file, no tensor, no name, another shape."""
    case = CASES["base"]
    record = prompt_record(case)
    with pytest.raises(FileNotFoundError):
        discover(tmp_path)
    with pytest.raises(FileNotFoundError):
        _ = replace(case, directory=tmp_path).names
    with pytest.raises(FileNotFoundError):
        replace(case, directory=tmp_path).materialise(tmp_path / "model")
    with pytest.raises(AssertionError, match="hidden: not produced"):
        check(case, {name: value for name, value in record.items() if name != "hidden"}, ["hidden"])
    with pytest.raises(AssertionError, match="nothing to compare"):
        check(case, record, [])
    with pytest.raises(AssertionError, match="shape"):
        check(case, record | {"hidden": record["hidden"][:1]}, ["hidden"])
    with pytest.raises(KeyError, match="no known kind"):
        kind_of("layers.0.surprise")


def test_padding_is_ignored_and_nothing_else(prompt_record: Callable[[Case], Record]) -> None:
    """Values at padded positions carry nothing; values at real positions do."""
    case = CASES["padded"]
    record = prompt_record(case)
    for position, is_real in ((0, False), (-1, True)):
        assert bool(case.attention_mask[0, position]) == is_real
        changed = record["hidden"].clone()
        changed[0, position] = torch.nan
        if is_real:
            with pytest.raises(AssertionError, match="hidden: max inf"):
                check(case, record | {"hidden": changed}, ["hidden"])
        else:
            check(case, record | {"hidden": changed}, ["hidden"])


def test_generation_without_the_mask_is_caught(load_case: LoadCase) -> None:
    """A continuation that attends to padding is not the padded case's continuation."""
    case = CASES["padded"]
    blind = replace(case, stored={name: case.tensors[name] for name in case.names - {"attention_mask"}})
    with pytest.raises(AssertionError, match=r"gen\.logits: max"):
        check(blind, run_greedy(load_case(case), blind, 32), names_of(case, "gen"))
