"""Compiled kernels of 16-bit products: as many as oneDNN says it makes."""

import json
import os
import subprocess
import sys

import pytest

from modeling_k3.planning import plan_memory
from modeling_k3.planning.kernels import KEPT, KERNEL, kernel_bytes
from modeling_k3.planning.shape import read_shape
from modeling_k3.planning.workload import Workload
from tests.models import tiny_config

BATCH, CONTEXT, CHUNK = 2, 160, 64

_RUN = (
    """
import json, sys, torch
from modeling_k3 import K3Cache, K3Config, K3ForCausalLM
torch.set_num_threads(1)
torch.manual_seed(0)
model = K3ForCausalLM._from_config(K3Config.from_dict(json.loads(sys.argv[1])), dtype=torch.bfloat16).eval()
ids, cache = torch.randint(0, model.config.vocab_size, (BATCH, CONTEXT)), K3Cache(model.config)
with torch.no_grad():
    for start in range(0, CONTEXT, CHUNK):
        model(ids[:, start : start + CHUNK], cache=cache, logits_to_keep=1)
    model(ids[:, :1], cache=cache)
""".replace("BATCH", str(BATCH))
    .replace("CONTEXT", str(CONTEXT))
    .replace("CHUNK", str(CHUNK))
)


@pytest.mark.parametrize("experts", [16, None])
def test_as_many_as_are_made(experts: int | None) -> None:
    config = tiny_config(hidden_size=96, intermediate_size=128, num_experts=experts)
    command = [sys.executable, "-c", _RUN, json.dumps(config.to_dict(), default=str)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "ONEDNN_VERBOSE": "profile_create"}
    )
    made = [line for line in done.stdout.splitlines() if "create:cache_miss" in line and "src:bf16" in line]
    if not made:
        pytest.skip("oneDNN makes no bfloat16 kernels on this processor")
    use = Workload(context=CONTEXT, batch=BATCH, prefill_chunk=CHUNK)
    found = kernel_bytes(read_shape(config), use) / KERNEL
    assert 0.6 < found / len(made) < 1.5, (found, len(made))


def test_what_has_none_and_where_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)
    shape = read_shape("kimi-k3")
    assert kernel_bytes(shape, Workload(dtype="float32")) == 0
    one, more = (kernel_bytes(shape, Workload(context=8192, prefill_chunk=chunk)) for chunk in (16, 2048))
    assert 0 < one < more <= KERNEL * KEPT
    step = Workload(context=65536, mode="train")
    assert kernel_bytes(shape, step) == KERNEL * KEPT
    for name, least in (("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KEPT), ("LRU_CACHE_CAPACITY", 64)):
        # Both caches keep them, so that one alone changes nothing.
        monkeypatch.setenv(name, "64")
        assert kernel_bytes(shape, step) == KERNEL * least
    plan = plan_memory("kimi-k3", "64GiB", context=8192)
    assert plan.table["process"]["compiled kernels"] == kernel_bytes(shape, plan.use) and plan.used <= plan.budget
