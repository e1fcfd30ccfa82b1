"""The memory model against the real model: bytes are equal wherever they can be."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling_k3 import K3Cache, K3Config, K3ForCausalLM, PrefixCache
from modeling_k3.configuration import preset_names, preset_path
from modeling_k3.conversion.convert import with_experts, wrapped
from modeling_k3.experts import iter_experts
from modeling_k3.planning.activations import Call, forward_peak
from modeling_k3.planning.components import weight_bytes
from modeling_k3.planning.shape import read_shape
from modeling_k3.planning.sizes import format_bytes
from modeling_k3.planning.state import prefix_block_bytes, state_sizes
from modeling_k3.planning.training import Training, training_peak
from modeling_k3.planning.workload import Workload, memory_table
from tests.models import VARIANTS, tiny_config, token_ids

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOSTLY_MLA = {"layers": "MMM", "num_attention_heads": 16, "num_experts": None, "intermediate_size": 64}


def parameter_bytes(config: K3Config, dtype: torch.dtype, packed: bool = False) -> int:
    with torch.device("meta"):
        model = K3ForCausalLM._from_config(config, dtype=dtype)
    for _, module in iter_experts(model) if packed else ():
        module.use_storage("packed")
    return sum(parameter.nbytes for parameter in model.parameters())


def highest_allocated(run: Callable[[], None]) -> int:
    """Bytes of all tensors at the worst moment of a second run: tables are made once in a process, by the first."""
    run()
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = highest = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        highest = max(highest, alive)
    return highest


@pytest.mark.parametrize("name", preset_names())
def test_weights_of_every_preset_are_exact(name: str) -> None:
    config = K3Config.from_pretrained(preset_path(name))
    shape = read_shape(name)
    assert sum(weight_bytes(shape, 2).values()) == parameter_bytes(config, torch.bfloat16)
    assert sum(weight_bytes(shape, 2, experts="mxfp4").values()) == parameter_bytes(config, torch.bfloat16, packed=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_every_variant_are_exact(variant: str, dtype: str) -> None:
    config = tiny_config(**VARIANTS[variant])
    found = sum(weight_bytes(read_shape(config), DTYPES[dtype].itemsize).values())
    assert found == parameter_bytes(config, DTYPES[dtype])


def test_a_tied_head_is_counted_once() -> None:
    config = tiny_config(tie_word_embeddings=True)
    assert sum(weight_bytes(read_shape(config), 4).values()) == parameter_bytes(config, torch.float32)


@pytest.mark.parametrize("layout", ["name", "folder", "dict", "released", "config"])
def test_every_way_to_give_a_config_reads_the_same(layout: str, tmp_path: Path) -> None:
    config = K3Config.from_pretrained(preset_path("tiny"))
    source: Any = {"name": "tiny", "folder": preset_path("tiny"), "config": config}.get(layout)
    if layout == "dict":
        source = config.to_dict()
    if layout == "released":
        source = with_experts(wrapped(config), "mxfp4")
        source = source if isinstance(source, dict) else source.to_dict()
    shape = read_shape(source)
    assert shape.packed == (layout == "released")
    assert weight_bytes(shape, 2) == weight_bytes(read_shape("tiny"), 2)


def test_a_config_that_makes_no_model_is_refused() -> None:
    good = K3Config.from_pretrained(preset_path("tiny")).to_dict()
    with pytest.raises(ValueError, match="hidden_size"):
        read_shape({name: value for name, value in good.items() if name != "hidden_size"})
    with pytest.raises(TypeError, match="kv_lora_rank='16' must be an integer"):
        read_shape({**good, "kv_lora_rank": "16"})
    with pytest.raises(FileNotFoundError, match="no preset"):
        read_shape("no-such-preset")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["tiny", "kda_only", "mla_only"])
def test_states_and_latents_are_exact(variant: str, dtype: str) -> None:
    config = tiny_config(**VARIANTS[variant])
    model = K3ForCausalLM._from_config(config, dtype=DTYPES[dtype]).eval()
    config.dtype = DTYPES[dtype]
    cache = K3Cache(config, rollback_tokens=4)
    with torch.no_grad():
        for length in (7, 4, 4):
            model(torch.randint(0, config.vocab_size, (2, length)), cache=cache)
    held, sizes = cache.nbytes(), state_sizes(read_shape(config), 2, DTYPES[dtype].itemsize)
    assert (held["state"], held["window"]) == (sizes.state, sizes.window)
    assert held["latent"] == 15 * sizes.latent_per_token
    assert held["reserved"] <= sizes.reserved(15)
    # The log holds 4 to 8 tokens.
    assert sizes.rollback(2) <= held["rollback"] <= sizes.rollback(4)


def test_a_prefix_block_is_exact() -> None:
    model = K3ForCausalLM(tiny_config()).eval()
    known = PrefixCache(block_size=16)
    # No padding among them: what stands behind a mask is not kept.
    ids = token_ids(1, 40)
    model.generate(ids, prefix_cache=known, max_new_tokens=1, do_sample=False)
    assert known.stats()["blocks"] == 2
    assert known.stats()["bytes"] == 2 * prefix_block_bytes(read_shape(model.config), 16, 4)


def test_gradients_and_states_are_exact() -> None:
    model = K3ForCausalLM(tiny_config()).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, model.config.vocab_size, (2, 24))
    model(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    found = training_peak(read_shape(model.config), Call(2, 24), Training())
    assert found["gradients"] == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert found["optimizer"] == sum(value.nbytes for value in states)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_act": "silu"},
        MOSTLY_MLA,
        {**MOSTLY_MLA, "v_head_dim": 40},
        {**MOSTLY_MLA, "v_head_dim": 24, "mla_use_output_gate": False},
    ],
)
def test_what_a_backward_keeps_is_counted_within_three_percent(changes: dict[str, Any], dtype: str) -> None:
    config = tiny_config(**{"hidden_size": 128, "intermediate_size": 256, **changes})
    model = K3ForCausalLM._from_config(config, dtype=DTYPES[dtype]).train()
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    ids = torch.randint(0, config.vocab_size, (2, 256))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(ids, labels=ids, use_cache=False).loss
    measured = sum(storage.nbytes() for storage in kept.values())
    call = Call(2, 256, item=DTYPES[dtype].itemsize, caches=False)
    found = training_peak(read_shape(config), call, Training())["saved"]
    assert loss.isfinite() and abs((found + ids.numel() * config.vocab_size * 4) / measured - 1) < 0.03


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_working_set_is_what_the_model_allocates(dtype: str) -> None:
    # Large beside the constant buffers of KDA, so that lengths show.
    config = tiny_config(hidden_size=128, intermediate_size=512)
    model = K3ForCausalLM._from_config(config, dtype=DTYPES[dtype]).eval()
    ids = torch.randint(0, config.vocab_size, (2, 512))

    def forward() -> None:
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)

    highest = highest_allocated(forward)
    call = Call(2, 512, item=DTYPES[dtype].itemsize, caches=False)
    assert abs(forward_peak(read_shape(config), call)["peak"] / highest - 1) < 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [{}, MOSTLY_MLA])
def test_a_training_step_needs_what_was_predicted(changes: dict[str, Any], dtype: str) -> None:
    config = tiny_config(**{"hidden_size": 128, "intermediate_size": 256, **changes})
    model = K3ForCausalLM._from_config(config, dtype=DTYPES[dtype]).train()
    ids = token_ids(2, 512)

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        # Not in the next run, whose record would begin with what it frees.
        model.zero_grad(set_to_none=True)

    call = Call(2, 512, item=DTYPES[dtype].itemsize, caches=False)
    found = training_peak(read_shape(config), call, Training())
    assert abs(found["peak"] / highest_allocated(step) - 1) < 0.1


def test_lora_trains_less_and_checkpointing_keeps_less() -> None:
    shape = read_shape("pico")
    tables = {
        name: memory_table(shape, Workload(dtype="float32", context=512, **changes))
        for name, changes in {
            "train": {"mode": "train"},
            "again": {"mode": "train", "checkpointing": True},
            "lora": {"mode": "lora"},
        }.items()
    }
    assert tables["lora"]["training"]["gradients"] < tables["train"]["training"]["gradients"] / 10
    kept = {name: table["working"]["activations and logits"] for name, table in tables.items()}
    assert kept["again"] < kept["train"] / 2
    with pytest.raises(ValueError, match="allowed is mode='lora'"):
        Workload(mode="train", experts="mxfp4")


def test_sizes_are_written_with_three_digits() -> None:
    assert [format_bytes(n) for n in (5, 1536, 24 << 30, 1561 * 10**9)] == ["5 B", "1.50 KiB", "24.0 GiB", "1.42 TiB"]


def test_planning_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys, time; sys.argv = [sys.argv[1]]\n"
        "from modeling_k3.planning import plan_memory\n"
        "start = time.perf_counter(); plan_memory('kimi-k3', '24GiB', context=131072)\n"
        "print(time.perf_counter() - start, 'torch' in sys.modules)"
    )
    script = Path(sys.executable).parent / "k3"
    if not script.is_file():
        pytest.skip("the k3 script is not installed beside this interpreter")
    done = subprocess.run([sys.executable, "-c", code, str(script)], capture_output=True, text=True, check=True)
    seconds, torch_is_there = done.stdout.split()
    # CPU seconds elsewhere on the machine count as well; alone it takes 0.03.
    assert torch_is_there == "False" and float(seconds) < 0.2, time.strftime("%X")
