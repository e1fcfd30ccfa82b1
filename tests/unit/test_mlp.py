"""SiTU-GLU in closed form, its bounds and gradients, and the MLP around it."""

import math

import pytest
import torch
from torch import Tensor

from modeling_k3.mlp import K3MLP, gated_activation
from tests.models import max_diff, randomize, tiny_config
from tests.tolerances import bound
from tests.unit.helpers import tensor


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def situ(g: float, u: float, b: float, c: float | None) -> float:
    """b tanh(g/b) sigmoid(g) times c tanh(u/c), or times u."""
    return b * math.tanh(g / b) * sigmoid(g) * (u if c is None else c * math.tanh(u / c))


def silu(g: float, u: float) -> float:
    return g * sigmoid(g) * u


POINTS = (-100.0, -20.0, -4.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 4.0, 20.0, 100.0)


def grid() -> tuple[Tensor, Tensor]:
    points = torch.tensor(POINTS, dtype=torch.float64)
    g, u = torch.meshgrid(points, points, indexing="ij")
    return g, u


@pytest.mark.parametrize(
    ("beta", "linear", "b", "c"),
    [
        (4.0, 25.0, 4.0, 25.0),
        (None, None, 1.0, None),
        (0.0, 0.0, 1.0, None),
        (2.0, None, 2.0, None),
        (None, 3.0, 1.0, 3),
    ],
)
def test_situ_in_closed_form(beta: float | None, linear: float | None, b: float, c: float | None) -> None:
    g, u = grid()
    expected = torch.tensor([[situ(x, y, b, c) for y in POINTS] for x in POINTS], dtype=torch.float64)
    y = gated_activation(g, u, kind="situ", beta=beta, linear_beta=linear)
    assert y.dtype == torch.float64
    assert ((y - expected).abs() <= bound("unit_f64_max_abs") * (1 + expected.abs())).all()


@pytest.mark.parametrize("beta", [None, 4.0])
def test_silu_in_closed_form_ignores_the_bounds_of_situ(beta: float | None) -> None:
    g, u = grid()
    expected = torch.tensor([[silu(x, y) for y in POINTS] for x in POINTS], dtype=torch.float64)
    y = gated_activation(g, u, kind="silu", beta=beta, linear_beta=beta)
    assert ((y - expected).abs() <= bound("unit_f64_max_abs") * (1 + expected.abs())).all()


def test_the_default_kind_is_situ() -> None:
    g, u = grid()
    assert torch.equal(gated_activation(g, u, beta=4.0), gated_activation(g, u, kind="situ", beta=4.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_situ_saturates_at_the_product_of_its_bounds(dtype: torch.dtype) -> None:
    """Coincident outliers: the product of the raw halves would overflow in every dtype here but the last."""
    huge = 6e4 if dtype == torch.float16 else 1e38
    g = torch.tensor([huge, huge, -huge, -huge, float("inf"), float("-inf")], dtype=dtype)
    u = torch.tensor([huge, -huge, huge, -huge, float("inf"), float("inf")], dtype=dtype)
    y = gated_activation(g, u, beta=4.0, linear_beta=25.0)
    assert y.dtype == dtype
    assert y.tolist() == [100.0, -100.0, 0.0, 0.0, 100.0, 0.0]


def test_situ_is_swiglu_near_zero_and_never_above_its_bound() -> None:
    g, u = tensor(500, scale=1e-3), tensor(500, seed=1, scale=1e-3)
    relative = (gated_activation(g, u, beta=4.0, linear_beta=25.0) / gated_activation(g, u, kind="silu") - 1).abs()
    # tanh(x)/x = 1 - x^2/3 + ...; here |x| < 4e-3 / 4.
    assert relative.max() < (4e-3 / 4) ** 2
    wide = gated_activation(g * 1e5, u * 1e5, beta=4.0, linear_beta=25.0)
    assert wide.abs().max() <= 100 and wide.abs().max() > 90


@pytest.mark.parametrize("kind", ["situ", "silu"])
@pytest.mark.parametrize("bounds", [(4.0, 25.0), (None, None)])
def test_gradients(kind: str, bounds: tuple[float | None, float | None]) -> None:
    g = torch.tensor([-20.0, -3.0, -0.1, 0.0, 0.1, 3.0, 20.0], dtype=torch.float64, requires_grad=True)
    u = tensor(7).mul(10).requires_grad_()

    def call(g: Tensor, u: Tensor) -> Tensor:
        return gated_activation(g, u, kind=kind, beta=bounds[0], linear_beta=bounds[1])

    assert torch.autograd.gradcheck(call, (g, u))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_are_finite_far_outside(dtype: torch.dtype) -> None:
    g = torch.tensor([-6e4, -100.0, 100.0, 6e4], dtype=dtype, requires_grad=True)
    u = torch.tensor([6e4, -6e4, 100.0, -100.0], dtype=dtype, requires_grad=True)
    gated_activation(g, u, beta=4.0, linear_beta=25.0).sum().backward()
    assert g.grad.isfinite().all() and u.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_wide_and_rounded_once(dtype: torch.dtype) -> None:
    g, u = tensor(400, dtype=dtype, scale=3), tensor(400, seed=1, dtype=dtype, scale=20)
    wide = gated_activation(g.double(), u.double(), beta=4.0, linear_beta=25.0)
    assert torch.equal(gated_activation(g, u, beta=4.0, linear_beta=25.0), wide.to(dtype))


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'gelu'.*situ.*silu"):
        gated_activation(torch.ones(1), torch.ones(1), kind="gelu")


@pytest.mark.parametrize("act", ["situ", "silu"])
def test_the_mlp_is_down_of_act_of_gate_and_up(act: str) -> None:
    config = tiny_config(hidden_act=act, hidden_size=6)
    mlp = K3MLP(config, 10).double()
    randomize(mlp)
    x = tensor(2, 3, 6)
    gate, up = (x @ mlp.gate_proj.weight.T).tolist(), (x @ mlp.up_proj.weight.T).tolist()
    inner = [
        [
            [situ(g, u, 4.0, 25.0) if act == "situ" else silu(g, u) for g, u in zip(*pair, strict=True)]
            for pair in zip(*rows, strict=True)
        ]
        for rows in zip(gate, up, strict=True)
    ]
    expected = torch.tensor(inner, dtype=torch.float64) @ mlp.down_proj.weight.T
    assert max_diff(mlp(x), expected) < bound("unit_f64_max_abs")


def test_the_mlp_has_three_matrices_and_no_bias() -> None:
    mlp = K3MLP(tiny_config(), 10)
    shapes = {name: tuple(p.shape) for name, p in mlp.named_parameters()}
    assert shapes == {"gate_proj.weight": (10, 64), "up_proj.weight": (10, 64), "down_proj.weight": (64, 10)}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_an_mlp_of_width_zero_adds_nothing() -> None:
    """`num_shared_experts` 0 builds one."""
    y = K3MLP(tiny_config(), 0)(tensor(2, 3, 64, dtype=torch.float32))
    assert y.shape == (2, 3, 64) and (y == 0).all()


@pytest.mark.parametrize("c", [25.0, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits_gives_the_bits_of_the_equation(dtype: torch.dtype, c: float | None) -> None:
    """Large 16-bit tensors on a CPU are looked up; views with strides and rows beyond one block included."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    gate, up = torch.stack([numbers, numbers.flip(0).roll(77)]).reshape(2, 32, 2048).roll(5, 1).unbind(0)
    wide_gate, wide_up = gate.float(), up.float()
    bent = wide_up if c is None else c * torch.tanh(wide_up / c)
    expected = (4 * torch.tanh(wide_gate / 4) * torch.sigmoid(wide_gate) * bent).to(dtype)
    both = torch.cat([gate, up], dim=-1)
    halves = both.chunk(2, dim=-1)
    for g, u in ((gate, up), halves):
        y = gated_activation(g, u, beta=4.0, linear_beta=c)
        assert torch.equal(y.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("shape", [(), (0, 6), (3,), (2, 5, 6), (40, 4000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_follow_the_equation(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    x = [tensor(size, seed=seed, dtype=dtype).reshape(shape) for seed in (0, 1, 2)]
    g, u = (each.clone().requires_grad_() for each in x[:2])
    found = torch.autograd.grad(gated_activation(g, u, beta=1.5, linear_beta=2.0), (g, u), x[2])
    g, u = (each.double().requires_grad_() for each in x[:2])
    y = 1.5 * torch.tanh(g / 1.5) * torch.sigmoid(g) * (2 * torch.tanh(u / 2))
    for mine, true in zip(found, torch.autograd.grad(y, (g, u), x[2].double()), strict=True):
        assert mine.dtype == dtype
        relative = {torch.bfloat16: 2**-8, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        assert ((mine.double() - true).abs() <= relative * (true.abs() + 1e-2)).all()


def test_only_the_inputs_are_kept_for_the_backward() -> None:
    kept: list[int] = []
    g, u = (tensor(64, 128, seed=seed).bfloat16().requires_grad_() for seed in (0, 1))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.nbytes), x)[1], lambda x: x):
        gated_activation(g, u, beta=4.0, linear_beta=25.0)
    assert sum(kept) == g.nbytes + u.nbytes
