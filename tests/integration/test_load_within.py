"""From a checkpoint and a budget of bytes to a model: the same numbers as resident, within what the plan says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_k3 import K3Cache, K3Config, K3ForCausalLM, PrefixCache
from modeling_k3.conversion.tiny import make_tiny
from modeling_k3.planning import MemoryPlanError, load_within, plan_memory
from tests.models import experts_config

EXPERTS, WIDTH, LAYERS, CONTEXT = 32, 256, 4, 512
ONE = 3 * WIDTH * WIDTH * 17 // 32
IDS = torch.randint(0, 512, (1, 80), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = experts_config(EXPERTS, WIDTH, LAYERS, num_experts_per_token=4)
    return make_tiny(tmp_path_factory.mktemp("within") / "checkpoint", config, tokens=0)


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with bfloat16 experts."""
    folder = tmp_path_factory.mktemp("within") / "plain"
    K3ForCausalLM.from_pretrained(checkpoint, dequantize=True).save_pretrained(folder)
    return folder


@torch.no_grad()
def run(model: Any) -> list[Tensor]:
    model.eval()
    return [model(IDS).logits, model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)]


def budget(checkpoint: Path, experts: int, context: int = CONTEXT, **use: Any) -> int:
    """Bytes in which this many experts are resident at the end of the context."""
    room = plan_memory(K3Config.from_pretrained(checkpoint), "64GiB", context=context, **use)
    return room.used - room.expert_total + experts * ONE + 6 * 1600 * EXPERTS * (LAYERS - 1)


@pytest.mark.parametrize("experts", [12, None])
@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_same_numbers_within_the_budget(kind: str, experts: int | None, checkpoint: Path, plain: Path) -> None:
    path = checkpoint if kind == "packed" else plain
    scale = 1 if kind == "packed" else 4
    limit = budget(path, experts * scale, prefill_chunk=32) if experts else "64GiB"
    model = load_within(path, limit, context=CONTEXT, prefill_chunk=32)
    plan = model.memory_plan
    assert plan.use.experts == ("mxfp4" if kind == "packed" else "full") and plan.used <= plan.budget
    assert plan.expert_place == ("mapped" if experts else "memory")
    resident = K3ForCausalLM.from_pretrained(path, expert_storage="packed" if kind == "packed" else "dense")
    assert all(torch.equal(a, b) for a, b in zip(run(model), run(resident), strict=True))
    assert (model.expert_residency is None) == (experts is None) and resident.memory_plan is None
    if experts:
        stats = model.expert_residency.stats()
        assert stats["budget_bytes"] == plan.load_options()["expert_memory"]
        assert stats["bytes_read"] > 0 and stats["peak_bytes"] <= stats["budget_bytes"] < plan.budget


def test_more_context_leaves_less_for_experts(checkpoint: Path) -> None:
    limit, held = budget(checkpoint, 10, context=2048, prefill_chunk=64), []
    for context in (1024, 1536, 2048):
        model = load_within(checkpoint, limit, context=context, prefill_chunk=64)
        cache = K3Cache(model.config, **model.memory_plan.cache_options())
        cache.reserve(context)
        with torch.no_grad():
            model(torch.zeros(1, context, dtype=torch.long), cache=cache, logits_to_keep=1)
            model(torch.zeros(1, 1, dtype=torch.long), use_cache=False)
        stats = model.expert_residency.stats()
        assert stats["resident_bytes"] + stats["cache_bytes"] <= stats["budget_bytes"]
        assert stats["limit_bytes"] + cache.nbytes()["reserved"] >= model.memory_plan.expert_bytes
        held.append(stats["limit_bytes"])
    assert held == sorted(held, reverse=True) and held[-1] < held[0]
    with pytest.raises(MemoryPlanError, match=r"in .* fit"):
        load_within(checkpoint, limit, context=1 << 20)


def test_generate_runs_prompts_in_the_pieces_of_the_plan(checkpoint: Path) -> None:
    model, lengths = load_within(checkpoint, "64GiB", context=CONTEXT, prefill_chunk=32), []
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert lengths == [32, 32, 16, 1]


def test_a_call_beyond_the_plan_is_refused_and_one_within_takes_its_bytes(checkpoint: Path) -> None:
    model, options = load_within(checkpoint, "64GiB", context=100), {"do_sample": False, "pad_token_id": 0}
    cache = K3Cache(model.config)
    for ids, more, found in (
        (IDS, {"max_new_tokens": 21}, "batch 1 with 101 tokens"),
        (IDS.expand(2, -1), {"max_new_tokens": 2}, "batch 2 with 82"),
        (IDS, {"max_new_tokens": 2, "num_beams": 3}, "batch 3 with 82"),
    ):
        with pytest.raises(ValueError, match=rf"{found}.* than the memory plan is for: batch 1 with 100"):
            model.generate(ids, cache=cache, **more, **options)
        assert cache.get_seq_length() == 0
    model.generate(IDS, cache=cache, max_new_tokens=20, eos_token_id=None, **options)
    sizes, planned = cache.nbytes(), model.memory_plan.table["state"]["MLA latent"]
    assert planned * 0.98 < sizes["latent"] + sizes["reserved"] <= planned
    model.memory_plan = None
    model.generate(IDS, max_new_tokens=21, **options)


def test_knobs_of_the_caches_come_of_the_plan(checkpoint: Path) -> None:
    model = load_within(checkpoint, "64GiB", context=CONTEXT, rollback_tokens=8, prefix_tokens=64, prefix_block=16)
    plan = model.memory_plan
    known = PrefixCache(**plan.prefix_cache_options())
    for start in (0, 1):
        model.generate(IDS[:, start:], prefix_cache=known, max_new_tokens=1, do_sample=False, pad_token_id=0)
    assert 0 < known.stats()["bytes"] <= plan.table["state"]["prefix cache"]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(IDS, max_new_tokens=9, return_dict_in_generate=True, **options)
    assert found.cache.rollback_limit >= 8
    cache = K3Cache(model.config, **plan.cache_options())
    model(IDS, cache=cache)
    model(IDS[:, :8], cache=cache)
    cache.crop(-8)
    assert cache.get_seq_length() == IDS.shape[1]


def test_too_little_is_said_before_anything_is_read(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    K3ForCausalLM.from_pretrained(checkpoint).save_pretrained(folder, max_shard_size="2MB")
    for path in folder.glob("*.safetensors"):
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size // 2)
    with pytest.raises(MemoryPlanError, match=r"does not fit in 64\.0 MiB: it needs") as caught:
        load_within(folder, "64MiB")
    assert caught.value.nearest.budget > 64 << 20 and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="truncated"):
        load_within(folder, caught.value.nearest.budget)


def test_a_dtype_that_was_not_asked_for_is_the_files(checkpoint: Path) -> None:
    assert load_within(checkpoint, "64GiB").dtype == torch.bfloat16
    model = load_within(checkpoint, "64GiB", dtype=torch.float32)
    assert model.dtype == torch.float32 and model.memory_plan.use.dtype == "float32"


def test_fewer_layers_are_planned_as_fewer(checkpoint: Path) -> None:
    whole, part = (load_within(checkpoint, "64GiB", **more) for more in ({}, {"num_hidden_layers": 2}))
    config = K3Config.from_pretrained(checkpoint, num_hidden_layers=2)
    for given in (config, str(checkpoint)):
        other = load_within(checkpoint, "64GiB", config=given).memory_plan
        assert other.expert_total == (part if given is config else whole).memory_plan.expert_total
    assert len(part.model.layers) == 2 and part.memory_plan.expert_total == whole.memory_plan.expert_total // 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_storage": "dense"}, "expert_storage beside a budget"),
        ({"device_map": "auto"}, "device_map beside a budget"),
        ({"experts": "hqq2"}, r"experts beside a budget: .* allowed are \['batch', 'context'"),
        ({"mode": "train"}, "mode beside a budget"),
        ({"context": 0}, "context=0"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_options(options: dict[str, Any], message: str, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_within(checkpoint, "64GiB", **options)


def test_a_dense_part_in_eight_bits(checkpoint: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = load_within(checkpoint, "64GiB", dense="int8")
    held = model.bytes_by_dtype()
    assert held["int8"] > 0 and held["mxfp4"] == model.memory_plan.expert_total
