"""Blocks of AttnRes under a device map over two devices: each travels once, however many layers stand there.

The second device is `meta`, which computes shapes and holds nothing: what is counted are the moves.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_k3 import K3Model
from tests.models import tiny_config

hooks = pytest.importorskip("accelerate.hooks")
TOKENS, FIRST_AWAY = 5, 4


class Moves(TorchDispatchMode):
    """Counts tensors of the stream's shape that go from the CPU to meta."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and isinstance(out, Tensor) and out.is_meta:
            self.count += not args[0].is_meta and tuple(out.shape) == self.shape
        return out


def test_blocks_travel_once() -> None:
    model = K3Model(tiny_config("KKKKKKKK", num_experts=None, attn_res_block_size=2)).eval()
    away = [*model.layers[FIRST_AWAY:], model.norm, model.output_attn_res_norm, model.output_attn_res_proj]
    for module in away:
        hooks.add_hook_to_module(module.to("meta"), hooks.AlignDevicesHook(execution_device=torch.device("meta")))
    with torch.no_grad(), Moves((1, TOKENS, model.config.hidden_size)) as moves:
        model(torch.arange(TOKENS).unsqueeze(0), use_cache=False)
    # Layer 4 starts a block: the blocks of layers 0 to 3 and the running sum cross the border.
    finished = FIRST_AWAY // 2
    assert moves.count <= finished + 2
