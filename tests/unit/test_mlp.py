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
