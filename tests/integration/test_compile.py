"""torch.compile: a decode step is one graph for all lengths, and computes what the eager step computes."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from modeling_k3 import K3Cache
from tests.models import build, max_diff, tiny_config, token_ids
from tests.tolerances import bound

LENGTH, PROMPT = 24, 9


def run_compiled(model: Any, backend: str, masked: bool = False) -> tuple[torch.Tensor, dict[str, int]]:
    """Logits of single steps after an eager prompt, and what the compiler counted."""
    torch._dynamo.reset()
    counters.clear()
    ids, cache = token_ids(2, LENGTH), K3Cache(model.config)
    mask = torch.ones(2, LENGTH).long()
    if masked:
        mask[0, :3] = 0
    step = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT] if masked else None, cache=cache)
        logits = [
            step(
                ids[:, i : i + 1], attention_mask=mask[:, : i + 1] if masked else None, cache=cache, use_cache=True
            ).logits
            for i in range(PROMPT, LENGTH)
        ]
        whole = model(ids, attention_mask=mask if masked else None).logits[:, PROMPT:]
    assert max_diff(torch.cat(logits, dim=1), whole) < bound("unit_model_fp32_max_abs")
    assert cache.get_seq_length() == LENGTH
    torch._dynamo.reset()
    return whole, {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


@pytest.mark.parametrize(("layers", "masked"), [("KM", False), ("KK", False), ("MM", False), ("KM", True)])
def test_a_decode_step_is_one_graph(layers: str, masked: bool) -> None:
    """Without a break, and the same graph for every length: one for the first step, one or two with symbols for it."""
    model = build(tiny_config(layers, experts_implementation="batched_mm")).requires_grad_(False)
    _, counted = run_compiled(model, "eager", masked)
    assert counted["breaks"] == 0 and counted["graphs"] <= 3


@pytest.mark.slow
def test_a_decode_step_through_inductor() -> None:
    model = build(tiny_config("KKM", experts_implementation="batched_mm")).requires_grad_(False)
    _, counted = run_compiled(model, "inductor")
    assert counted["breaks"] == 0 and counted["graphs"] <= 2


def test_packed_documents_are_seen_by_a_compiled_forward() -> None:
    """A graph does not branch on positions, it checks them: documents are never mixed without a word."""
    model = build(tiny_config("MM", num_experts=None)).requires_grad_(False)
    forward = torch.compile(model, backend="eager")
    ids = token_ids(1, 6)
    with torch.no_grad():
        plain = forward(ids, position_ids=torch.arange(6)[None], use_cache=False).logits
        assert max_diff(plain, model(ids).logits) < bound("unit_model_fp32_max_abs")
        with pytest.raises(RuntimeError, match="packed sequences cannot be compiled"):
            forward(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)
    torch._dynamo.reset()
