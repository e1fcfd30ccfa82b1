"""What AttnRes keeps for the backward pass: linear in depth, little more than plain residuals."""

import pytest
import torch
from torch import Tensor, nn

from modeling_k3.attn_res import mix_residuals
from tests.models import build, tiny_config, token_ids

TOKENS, WIDTH = 64, 64


def saved_bytes(model: nn.Module, run: object) -> tuple[int, object]:
    """Bytes that autograd keeps beside the parameters while `run()` computes, each storage once."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            # Holding the tensor keeps its address from being used again.
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), result


def saved_by(depth: int, block: int | None, **changes: object) -> int:
    config = tiny_config("M" * depth, attn_res_block_size=block, num_experts=None, **changes)
    model, ids = build(config).train(), token_ids(1, TOKENS)
    return saved_bytes(model, lambda: model(ids, labels=ids, use_cache=False).loss)[0]


@pytest.mark.parametrize("block", [2, 4])
def test_saved_memory_is_linear_in_depth(block: int) -> None:
    """With 8, 16 and 32 layers; a mixture kept source by source would grow with the square of the number of blocks."""
    eight, sixteen, thirty_two = (saved_by(depth, block) for depth in (8, 16, 32))
    slopes = [(sixteen - eight) / 8, (thirty_two - sixteen) / 16]
    weights = 2 * 3 * 4 * TOKENS * 32 / block
    assert slopes[0] <= slopes[1] <= slopes[0] + weights, "beyond weights, scores and scales of L numbers per token"
    plain = (saved_by(32, None) - saved_by(16, None)) / 16
    # Each of a layer's two norms keeps its input: the mixture, beside the running sum it was made of.
    extra = 2 * 4 * TOKENS * WIDTH
    assert plain < slopes[1] <= plain + 1.25 * extra + weights


def test_a_mix_keeps_its_sources_and_a_few_numbers_per_token() -> None:
    sources = [torch.randn(1, TOKENS, WIDTH).requires_grad_() for _ in range(9)]
    query, gain = torch.randn(WIDTH).requires_grad_(), torch.ones(WIDTH)
    size, _ = saved_bytes(nn.Module(), lambda: mix_residuals(sources, query, gain, eps=1e-5))
    assert size <= sum(source.nbytes for source in sources) + 4 * (3 * 9 * TOKENS + 4 * WIDTH)
