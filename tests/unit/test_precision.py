"""What stays float32 in a half-precision model, whatever way it became one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from modeling_k3 import K3ForCausalLM
from modeling_k3.precision import KEEP_IN_FP32, Float32Parameters, at_least_fp32, upcast
from tests.models import tiny_config

#: A value whose last bit only float32 holds: a detour through bf16 or fp16 makes it 1.
FINE = 1 + 2**-20
#: The five kinds of tensor that the release stores in float32.
KINDS = (
    "self_attn.A_log",
    "self_attn.dt_bias",
    "self_attn.q_conv1d.weight",
    "self_attn.k_conv1d.weight",
    "self_attn.v_conv1d.weight",
    "self_attn.o_norm.weight",
    "block_sparse_moe.gate.e_score_correction_bias",
)
CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "to-dtype": lambda m: m.to(torch.bfloat16),
    "to-device-and-dtype": lambda m: m.to("cpu", torch.float16),
    "twice": lambda m: m.half().bfloat16(),
    "down-and-up-and-down": lambda m: m.half().float().half(),
}


class Kept(Float32Parameters):
    """One parameter that is listed, one that is not, and a child."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), FINE))
        self.other = nn.Parameter(torch.full((3,), FINE))
        self.child = nn.Linear(3, 3)


def is_kept(name: str) -> bool:
    return name.endswith(KINDS)


def dtypes(model: nn.Module) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Dtypes of the five kinds, and of everything else."""
    named = dict(model.named_parameters())
    return {p.dtype for n, p in named.items() if is_kept(n)}, {p.dtype for n, p in named.items() if not is_kept(n)}


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_widening_never_narrows(dtype: torch.dtype, wide: torch.dtype) -> None:
    x = torch.tensor([1.5, -2.0], dtype=dtype)
    assert at_least_fp32(dtype) == wide
    assert upcast(x).dtype == wide and torch.equal(upcast(x).to(dtype), x)
    assert (upcast(x) is x) == (dtype == wide)


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "inside another module"])
def test_narrowing_keeps_the_bits_of_listed_parameters(cast: Callable[[nn.Module], nn.Module], wrapped: bool) -> None:
    kept = Kept()
    cast(nn.Sequential(nn.Linear(3, 3), kept) if wrapped else kept)
    assert kept.weight.dtype == torch.float32 and (kept.weight == FINE).all()
    assert kept.other.element_size() == 2 and (kept.other == 1).all()
    assert kept.child.weight.element_size() == 2
    assert isinstance(kept.weight, nn.Parameter) and kept.weight.requires_grad


def test_widening_works_as_usual() -> None:
    kept = Kept().double()
    assert {p.dtype for p in kept.parameters()} == {torch.float64}
    kept.float()
    assert {p.dtype for p in kept.parameters()} == {torch.float32} and (kept.weight == FINE).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrowing_a_float64_model_stops_at_float32(dtype: torch.dtype) -> None:
    """`.double()` for a check and then `.bfloat16()` for the run must not end below float32."""
    kept = Kept().double().to(dtype)
    assert kept.weight.dtype == torch.float32 and (kept.weight == FINE).all()
    assert kept.other.dtype == dtype


def test_gradients_stay_as_wide_as_their_parameter() -> None:
    kept = Kept()
    (kept.weight.sum() * FINE + kept.other.sum()).backward()
    kept.bfloat16()
    assert kept.weight.grad.dtype == torch.float32 and (kept.weight.grad == FINE).all()
    assert kept.other.grad.dtype == torch.bfloat16


def test_moving_to_another_device_keeps_the_width() -> None:
    kept = Kept().to("meta", torch.bfloat16)
    assert kept.weight.is_meta and kept.weight.dtype == torch.float32
    assert kept.other.is_meta and kept.other.dtype == torch.bfloat16


def test_an_absent_parameter_is_no_obstacle() -> None:
    kept = Kept()
    kept.weight = None
    assert kept.bfloat16().other.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_model_keeps_exactly_the_five_kinds(dtype: torch.dtype) -> None:
    model = K3ForCausalLM(tiny_config())
    found = {kind for kind in KINDS for name, _ in model.named_parameters() if name.endswith(kind)}
    assert found == set(KINDS)
    assert dtypes(model.to(dtype)) == ({torch.float32}, {dtype})


def test_the_loading_patterns_name_the_same_parameters() -> None:
    """The library matches whole components of a name against these patterns."""
    with torch.device("meta"):
        names = [name for name, _ in K3ForCausalLM(tiny_config()).named_parameters()]
    by_pattern = {name for name in names if set(KEEP_IN_FP32) & set(name.split("."))}
    assert by_pattern == {name for name in names if is_kept(name)}


def test_loading_and_saving_in_bf16_keeps_bits_and_choices(tmp_path: Path) -> None:
    """Two biases 1e-6 apart decide the choice; as bf16 they would be equal."""
    model = K3ForCausalLM(tiny_config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_kept(name):
                parameter.fill_(FINE)
        gate = model.model.layers[1].block_sparse_moe.gate
        gate.weight.zero_()
        gate.e_score_correction_bias.copy_(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1 + 2e-6, 1 + 1e-6]))
    model.save_pretrained(tmp_path / "first")
    loaded = K3ForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.bfloat16)
    loaded.save_pretrained(tmp_path / "second")
    again = K3ForCausalLM.from_pretrained(tmp_path / "second", dtype=torch.bfloat16)
    for each in (loaded, again):
        assert dtypes(each) == ({torch.float32}, {torch.bfloat16})
        state = model.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in each.state_dict().items() if is_kept(name))
        _, _, chosen = each.model.layers[1].block_sparse_moe.gate(torch.ones(1, 64, dtype=torch.bfloat16))
        assert sorted(chosen[0].tolist()) == [6, 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_built_in_half_precision_keeps_the_five_kinds(dtype: torch.dtype) -> None:
    """From-scratch models get their dtype as the default dtype of construction, not by a cast."""
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=dtype)
    assert dtypes(model) == ({torch.float32}, {dtype})
