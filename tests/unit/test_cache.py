"""K3Cache as a library cache: batch operations, copies, resets and refusals, on every tensor it holds."""

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from modeling_k3 import K3Cache, K3Config
from modeling_k3.cache import logged_bytes_per_token
from modeling_k3.configuration import preset_path
from tests.models import build, max_diff, tiny_config, token_ids
from tests.tolerances import bound
from tests.unit.helpers import tensor

Batch = Callable[[K3Cache], None]
LAYOUTS = pytest.mark.parametrize("layers", ["KKKMM", "MK", "KKK", "MM"])


def filled(layers: str = "KKKMM", batch: int = 3, tokens: int = 5) -> K3Cache:
    """A cache of made-up tensors, keys and values of different widths, the state with K != V."""
    config = tiny_config(layers)
    cache = K3Cache(config)
    for i, kind in enumerate(layers):
        if kind == "K":
            windows = [tensor(batch, 48, 4, seed=10 * i + j, dtype=torch.bfloat16) for j in range(3)]
            cache.linear_layer(i).remember(windows, tensor(batch, 3, 16, 12, seed=i, dtype=torch.float32), tokens)
        else:
            latent, shared = tensor(batch, 1, tokens, 16, seed=i), tensor(batch, 1, tokens, 8, seed=i + 50)
            cache.update(latent.bfloat16(), shared.bfloat16(), i)
    return cache


def tensors(cache: K3Cache) -> dict[str, Tensor]:
    """Every tensor in the cache, by layer and role."""
    found: dict[str, Tensor | None] = {}
    for i, layer in enumerate(cache.layers):
        if cache.is_linear[i]:
            found |= {f"{i}.window.{j}": window for j, window in layer.conv_states.items()}
            found[f"{i}.state"] = layer.recurrent_states[0]
        else:
            found |= {f"{i}.latent": layer.keys, f"{i}.shared": layer.values}
    return {name: x for name, x in found.items() if x is not None}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@LAYOUTS
def test_layers_follow_the_config(layers: str) -> None:
    cache = K3Cache(tiny_config(layers))
    assert isinstance(cache, Cache) and len(cache) == len(layers)
    assert list(cache.is_linear) == [kind == "K" for kind in layers]
    assert not cache.is_compileable and cache.held_batch_size is None
    assert tensors(cache) == {}


@LAYOUTS
def test_length_is_known_for_every_layer(layers: str) -> None:
    """Also where layer 0 is KDA, and without any MLA layer; a layer that does not exist has seen nothing."""
    cache = K3Cache(tiny_config(layers))
    assert cache.get_seq_length() == 0
    cache = filled(layers)
    assert [cache.get_seq_length(i) for i in range(len(layers) + 1)] == [5] * len(layers) + [0]
    assert cache.get_seq_length() == 5 and cache.held_batch_size == 3
    assert all(cache.get_mask_sizes(2, i) == (7, 0) for i in range(len(layers)))
    more = filled(layers, tokens=1)
    if "K" in layers:
        i = layers.index("K")
        cache.linear_layer(i).remember(more.linear_layer(i).windows, more.linear_layer(i).state, 4)
        assert cache.get_seq_length(i) == 9


OPERATIONS: dict[str, tuple[Batch, list[int]]] = {
    "reorder": (lambda c: c.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
    "reorder with repeats": (lambda c: c.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    "select by number": (lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "select by mask": (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    "repeat": (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@LAYOUTS
@pytest.mark.parametrize("name", OPERATIONS)
def test_batch_operations_move_every_tensor(name: str, layers: str) -> None:
    operation, rows = OPERATIONS[name]
    cache = filled(layers)
    before = {key: x.clone() for key, x in tensors(cache).items()}
    operation(cache)
    assert same(tensors(cache), {key: x[rows] for key, x in before.items()})
    assert cache.held_batch_size == len(rows) and cache.get_seq_length() == 5


@LAYOUTS
@pytest.mark.parametrize("name", OPERATIONS)
def test_batch_operations_on_nothing_do_nothing(name: str, layers: str) -> None:
    cache = K3Cache(tiny_config(layers))
    OPERATIONS[name][0](cache)
    assert tensors(cache) == {} and cache.get_seq_length() == 0


@LAYOUTS
@pytest.mark.parametrize(
    "copy", [deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["deepcopy", "pickle"]
)
def test_copies_are_equal_and_independent(copy: Callable[[K3Cache], K3Cache], layers: str) -> None:
    cache = filled(layers)
    cache.has_padding = True
    before = {key: x.clone() for key, x in tensors(cache).items()}
    twin = copy(cache)
    assert type(twin) is K3Cache and same(tensors(twin), before)
    assert twin.has_padding and twin.get_seq_length() == 5 and twin.held_batch_size == 3
    for x in tensors(twin).values():
        x.zero_()
    twin.batch_select_indices(torch.tensor([0]))
    assert same(tensors(cache), before)


@LAYOUTS
def test_reset_forgets_everything(layers: str) -> None:
    cache = filled(layers)
    cache.has_padding = True
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.held_batch_size is None and not cache.has_padding
    assert len(cache) == len(layers) and tensors(cache) == {}


@LAYOUTS
def test_reset_does_not_reach_tensors_that_were_handed_out(layers: str) -> None:
    """A snapshot, or another cache that branched off, may hold the same tensors: they are replaced, never written."""
    cache = filled(layers)
    held = tensors(cache)
    before = {key: x.clone() for key, x in held.items()}
    cache.reset()
    assert same(held, before)


@LAYOUTS
def test_reset_after_inference_mode(layers: str) -> None:
    """Tensors made in inference mode cannot be written in place outside of it."""
    with torch.inference_mode():
        cache = filled(layers)
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("layers", ["KKKMM", "MK", "KKK"])
@pytest.mark.parametrize("amount", [-2, 2, -100])
def test_crop_is_refused_and_changes_nothing(layers: str, amount: int) -> None:
    cache = filled(layers)
    before = tensors(cache)
    kept = {key: x.clone() for key, x in before.items()}
    with pytest.raises(ValueError, match=rf"crop\({amount}\).*recurrent state.*fresh K3Cache"):
        cache.crop(amount)
    after = tensors(cache)
    assert same(after, kept) and all(after[key] is before[key] for key in before)
    assert cache.get_seq_length() == 5 and [cache.get_seq_length(i) for i in range(len(layers))] == [5] * len(layers)


def test_crop_works_where_nothing_is_recurrent() -> None:
    cache = filled("MM")
    before = {key: x.clone() for key, x in tensors(cache).items()}
    cache.crop(-2)
    assert cache.get_seq_length() == 3 and same(tensors(cache), {key: x[:, :, :3] for key, x in before.items()})


@LAYOUTS
def test_cropping_nothing_is_allowed(layers: str) -> None:
    cache, empty = filled(layers), K3Cache(tiny_config(layers))
    before = {key: x.clone() for key, x in tensors(cache).items()}
    cache.crop(0)
    empty.crop(0)
    assert same(tensors(cache), before) and empty.get_seq_length() == 0


@LAYOUTS
def test_offloading_a_layer_and_back_keeps_dtypes_and_values(layers: str) -> None:
    cache = filled(layers)
    before = {key: x.clone() for key, x in tensors(cache).items()}
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert same(tensors(cache), before)


# -- in a model ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def run(model: Any, ids: Tensor, cache: K3Cache) -> Tensor:
    return model(ids, cache=cache).logits


@pytest.fixture(scope="module")
def model() -> Any:
    return build(tiny_config("KMK"))


def test_a_forward_replaces_tensors_and_never_writes_to_them(model: Any) -> None:
    ids, cache = token_ids(2, 9), K3Cache(model.config)
    for start, stop in ((0, 5), (5, 6), (6, 8), (8, 9)):
        held = tensors(cache)
        before = {key: x.clone() for key, x in held.items()}
        run(model, ids[:, start:stop], cache)
        assert same(held, before)


def test_interleaved_requests_do_not_touch_each_other(model: Any) -> None:
    first, second = token_ids(1, 8), token_ids(1, 8, seed=1)
    alone = [run(model, ids, K3Cache(model.config)) for ids in (first, second, first)]
    assert torch.equal(alone[0], alone[2])
    caches, pieces = (K3Cache(model.config), K3Cache(model.config)), ([], [])
    for t in range(8):
        for which, ids in enumerate((first, second)):
            pieces[which].append(run(model, ids[:, t : t + 1], caches[which]))
    for which in range(2):
        assert max_diff(torch.cat(pieces[which], 1), alone[which]) < bound("unit_model_fp32_max_abs")


def test_a_copy_branches_off(model: Any) -> None:
    """Two continuations of one prefix, each equal to its own recomputation; a reset cache starts afresh."""
    prefix, cache = token_ids(1, 6), K3Cache(model.config)
    run(model, prefix, cache)
    for copy in (deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        ending = token_ids(1, 3, seed=int(copy is cache) + 2)
        whole = run(model, torch.cat([prefix, ending], 1), K3Cache(model.config))
        assert max_diff(run(model, ending, copy), whole[:, 6:]) < bound("unit_model_fp32_max_abs")
    cache.reset()
    fresh = run(model, prefix, K3Cache(model.config))
    assert torch.equal(run(model, prefix, cache), fresh)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_stay_float32_in_a_half_precision_model(dtype: torch.dtype) -> None:
    model = build(tiny_config("KMK"), dtype=dtype)
    cache = K3Cache(model.config)
    run(model, token_ids(2, 5), cache)
    for step in (
        lambda: None,
        lambda: run(model, token_ids(2, 1, seed=1), cache),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([3, 0])),
        lambda: run(model, token_ids(2, 70, seed=2), cache),
    ):
        step()
        for each in (cache, deepcopy(cache)):
            kinds = {name.split(".")[1]: x.dtype for name, x in tensors(each).items()}
            assert kinds == {"state": torch.float32, "window": dtype, "latent": dtype, "shared": dtype}


def test_rows_of_a_permuted_cache_continue_permuted(model: Any) -> None:
    ids, ending = token_ids(3, 6), token_ids(3, 4, seed=1)
    order = torch.tensor([2, 0, 1])
    plain, permuted = K3Cache(model.config), K3Cache(model.config)
    run(model, ids, plain)
    run(model, ids, permuted)
    permuted.reorder_cache(order)
    expected = run(model, ending, plain)[order]
    assert max_diff(run(model, ending[order], permuted), expected) < bound("unit_model_fp32_max_abs")


# -- memory facts -------------------------------------------------------------------------------------------------


def test_bytes_of_the_released_model() -> None:
    """27,648 bytes of bf16 latent per token and 414 MiB of fp32 state per sequence, from the released dimensions."""
    config = K3Config.from_pretrained(preset_path("kimi-k3"))
    cache, tokens = K3Cache(config), 7
    heads, width, taps = config.kda_num_heads, config.kda_head_dim, config.short_conv_kernel_size
    with torch.device("meta"), torch.no_grad():
        for i, kind in enumerate(config.layer_types):
            if kind == "linear_attention":
                windows = [torch.empty(1, heads * width, taps, dtype=torch.bfloat16) for _ in range(3)]
                cache.linear_layer(i).remember(windows, torch.empty(1, heads, width, width), tokens)
            else:
                parts = [torch.empty(1, 1, tokens, n, dtype=torch.bfloat16) for n in (512, 64)]
                cache.update(*parts, i)
    sizes = cache.nbytes()
    assert sizes["latent"] == 27_648 * tokens and sizes["state"] == 414 * 2**20
    assert sizes["window"] == 69 * 3 * heads * width * taps * 2
    assert sizes["rollback"] == sizes["reserved"] == 0
    assert sizes["total"] == sum(sizes[kind] for kind in ("latent", "state", "window"))
    config.dtype = torch.bfloat16
    assert logged_bytes_per_token(config) == 69 * 2 * (3 * heads * width + width + heads)


@LAYOUTS
def test_bytes_are_those_of_the_tensors(layers: str) -> None:
    cache = filled(layers)
    assert cache.nbytes()["total"] == sum(x.nbytes for x in tensors(cache).values())
    assert K3Cache(tiny_config(layers)).nbytes()["total"] == 0


def test_latents_grow_inside_a_reserve(model: Any) -> None:
    """A decode step writes behind what is there: the history is not copied, and views that were handed out stay."""
    ids, cache = token_ids(1, 40), K3Cache(model.config)
    run(model, ids[:, :20], cache)
    run(model, ids[:, 20:21], cache)
    layer = next(layer for layer, linear in zip(cache.layers, cache.is_linear, strict=True) if not linear)
    place, view = layer.keys.data_ptr(), layer.keys
    kept = view.clone()
    for t in range(21, 30):
        run(model, ids[:, t : t + 1], cache)
    assert layer.keys.data_ptr() == place and torch.equal(view, kept)
    assert cache.nbytes()["reserved"] > 0
    cache.keep_log(4)
    run(model, ids[:, 30:34], cache)
    held = layer.keys
    kept = held.clone()
    cache.crop(-2)
    run(model, ids[:, :3], cache)
    assert torch.equal(held, kept), "tokens after a rollback were written over a view that was handed out"
