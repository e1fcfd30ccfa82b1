"""Small things several unit tests share: config files as dictionaries, seeded tensors."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FLAT_CASES = ("base", "grouped_sigmoid", "grouped_softmax", "kimi_linear_like", "long")
NESTED_CASES = ("mxfp4_release", "mxfp4_release_wide")


@cache
def read_json(path: Path) -> Any:
    """The content of a JSON file; not to be changed, see `flat_dict` for copies."""
    return json.loads(path.read_text(encoding="utf-8"))


def flat_dict(case: str = "base") -> dict[str, Any]:
    """A fresh copy of a flat config file of the golden data."""
    return deepcopy(read_json(GOLDEN / case / "config.json"))


def nested_dict(case: str = "mxfp4_release") -> dict[str, Any]:
    """A fresh copy of a config file in the released layout."""
    return deepcopy(read_json(GOLDEN / case / "checkpoint" / "config.json"))


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    """Normal numbers that depend on shape and seed only; every dtype gets the same numbers, rounded."""
    generator = torch.Generator().manual_seed(seed * 1009 + sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def kda_inputs(
    *shape: int, bounded: bool = True, seed: int = 0, state: bool = True, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Inputs of a KDA path for shape (B, T, H, K, V): q, k, v, log_decay, beta, state; K and V should differ.

    Gates are spread over their whole range: close to 0 and close to -5 if `bounded`, far below -5 otherwise. Numbers
    are fp32 values in any dtype, so that results in fp32 and fp64 belong to the same inputs.
    """
    batch, length, heads, key_dim, value_dim = shape
    q, k = (tensor(batch, length, heads, key_dim, seed=seed + i) for i in (1, 2))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    gate = tensor(batch, length, heads, key_dim, seed=seed + 3, scale=3.0)
    log_decay = -5 * gate.sigmoid() if bounded else -3 * torch.nn.functional.softplus(gate)
    v, beta = tensor(batch, length, heads, value_dim, seed=seed + 4), tensor(batch, length, heads, seed=seed + 5)
    inputs = [q, k, v, log_decay, beta.mul(2).sigmoid()]
    if state:
        inputs.append(tensor(batch, heads, key_dim, value_dim, seed=seed + 6))
    return [x.float().to(dtype) for x in inputs]
