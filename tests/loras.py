"""What the tests of adapters share: adapted models, random factors, and experts taken apart into linear layers."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn

from modeling_k3 import K3ForCausalLM, mxfp4
from modeling_k3.adapters import lora_config
from tests.checkpoints import released
from tests.models import build, tiny_config, token_ids

STORAGES = ("dense", "packed", "mapped")
ALL = pytest.mark.parametrize("storage", STORAGES)
IDS = token_ids(2, 11)
#: Logits reach 10: two orders of the same fp32 products.
SAME = 2e-4


class UnstackedExpert(nn.Module):
    """One expert as three linear layers under the released names."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        for name, weight in (("w1", gate), ("w3", up), ("w2", down)):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight.clone())
            self.add_module(name, linear)


class UnstackedExperts(nn.ModuleList):
    """Experts as peft and serving engines know them; computed expert by expert with plain autograd."""

    def __init__(self, experts: Any) -> None:
        dense = [experts.expert_weights(e, torch.float32) for e in range(experts.num_experts)]
        super().__init__(UnstackedExpert(w["gate_up_proj"].detach(), w["down_proj"].detach()) for w in dense)
        self.act = experts._apply_gate

    def forward(self, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(z)
        for number, expert in enumerate(self):
            token, place = torch.where(chosen == number)
            x = z[token]
            y = expert.w2(self.act(torch.cat([expert.w1(x), expert.w3(x)], dim=-1)))
            total = total.index_add(0, token, y * weights[token, place, None])
        return total


def unstack(model: nn.Module) -> nn.Module:
    """Take the experts of a model apart; the model is changed and returned."""
    for name, module in [(n, m) for n, m in model.named_modules() if hasattr(m, "use_storage")]:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, UnstackedExperts(module))
    return model


def load(storage: str | None, dtype: torch.dtype = torch.float32, path: Path | None = None) -> K3ForCausalLM:
    """The committed MXFP4 checkpoint, experts in the given form."""
    model = K3ForCausalLM.from_pretrained(path or released(), expert_storage=storage, dtype=dtype)
    # The committed checkpoint's head is that of a trained model; nothing here depends on its values.
    return model.eval()


def adapted(storage: str | None, preset: Any = ("attention", "experts"), **options: Any) -> Any:
    """A tiny model (None) or the committed checkpoint, with random factors."""
    model = build(tiny_config()) if storage is None else load(storage)
    model = get_peft_model(model, lora_config(preset, r=3, **options))
    fill(model)
    return model.eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def three_losses(model: nn.Module, lr: float, ids: Tensor = IDS) -> list[float]:
    """Train the factors for three steps; the loss before each."""
    optimizer = torch.optim.SGD(factors(model).values(), lr=lr)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def fill(model: nn.Module, adapter: str = "default", seed: int = 0, scale: float = 0.2) -> None:
    """Give all factors of an adapter random values, drawn by name, so that A and B both matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name and f".{adapter}." in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def factors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Everything that is trained."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextmanager
def counting_decodes() -> Iterator[Counter[tuple[int, int]]]:
    """Count decoded matrices by the place and the size of their codes in memory."""
    seen: Counter[tuple[int, int]] = Counter()
    original = mxfp4.decode

    def decode(packed: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen[packed.data_ptr(), packed.numel()] += 1
        return original(packed, *args, **kwargs)

    mxfp4.decode = decode
    try:
        yield seen
    finally:
        mxfp4.decode = original


def codes_of(experts: Any, used: list[int]) -> set[tuple[int, int]]:
    """Places of the codes of some experts, as `counting_decodes` sees them."""
    parts = [part for e in used for name in ("gate_up_proj", "down_proj") for part in experts.parts(e, name)[0::2]]
    return {(part.data_ptr(), part.numel()) for part in parts}
