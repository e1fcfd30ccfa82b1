"""Cuts between accelerators: at AttnRes block borders where that costs little. Maps are the library's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.accelerate import _get_device_map

from modeling_k3 import K3ForCausalLM, persistence
from modeling_k3.block_borders import prefer_block_borders
from tests.models import build, tiny_config

LAYERS, BLOCK = 24, 4


def model_of(block: int | None = BLOCK) -> K3ForCausalLM:
    config = tiny_config("K" * LAYERS, num_experts=None, attn_res_block_size=block)
    with torch.device("meta"):
        return K3ForCausalLM(config)


def layer_bytes(model: K3ForCausalLM) -> int:
    return sum(parameter.nbytes for parameter in model.model.layers[0].parameters())


def cuts(device_map: dict[str, Any]) -> list[int]:
    """First layer of each device but the first."""
    devices = [device_map[f"model.layers.{layer}"] for layer in range(LAYERS)]
    assert devices == sorted(devices, key=lambda device: [0, 1, 2, "cpu", "disk"].index(device))
    return [devices.index(device) for device in dict.fromkeys(devices)][1:]


def plan(model: K3ForCausalLM, layers: dict[Any, int], kind: str = "sequential") -> tuple[list[int], list[int]]:
    """Cuts before and after, for devices with room for so many layers."""
    limits = {device: count * layer_bytes(model) for device, count in layers.items()}
    found = dict(_get_device_map(model, kind, dict(limits), None))
    before, names = cuts(found), set(found)
    prefer_block_borders(model, found, limits)
    assert set(found) == names
    return before, cuts(found)


def test_a_cut_inside_a_block_moves_back_to_its_border() -> None:
    assert plan(model_of(), {0: 11, 1: 20}) == ([9], [8])
    assert plan(model_of(), {0: 16, 1: 20}) == ([14], [12])


def test_cuts_move_together_where_each_makes_room_for_the_next() -> None:
    before, after = plan(model_of(), {0: 12, 1: 9, 2: 20})
    assert any(cut % BLOCK for cut in before) and after == [cut - cut % BLOCK for cut in before]


@pytest.mark.parametrize("kind", ["auto", "balanced"])
def test_balanced_maps_stay_balanced(kind: str) -> None:
    assert plan(model_of(block=11), {0: 40, 1: 40}, kind) == ([12], [11])
    assert plan(model_of(block=9), {0: 40, 1: 40}, kind) == ([12], [12])


def test_a_device_without_room_keeps_the_cut() -> None:
    # The head and the last norm stand beside the layers.
    before, after = plan(model_of(), {0: 16, 1: 11, "cpu": 100})
    assert before == after and before[0] % BLOCK


def test_a_border_far_away_costs_too_much() -> None:
    before, after = plan(model_of(block=12), {0: 40, 1: 40}, "balanced")
    assert before == after
    before, after = plan(model_of(block=20), {0: 12, 1: 40})
    assert before == after and before[0] < 20


def test_cuts_next_to_memory_and_disk_stay() -> None:
    before, after = plan(model_of(), {0: 11, "cpu": 9})
    assert before == after and len(before) == 2


def test_without_blocks_nothing_moves() -> None:
    before, after = plan(model_of(block=None), {0: 11, 1: 20})
    assert before == after == [9]


def test_loading_uses_it_for_maps_of_the_library_and_for_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no accelerators here: what is looked at is the map by which tensors would be placed."""
    build(tiny_config("K" * LAYERS, num_experts=None, attn_res_block_size=BLOCK)).save_pretrained(tmp_path)
    one, seen = layer_bytes(model_of()), []

    class Stop(Exception):
        pass

    def look(model: Any, plan: Any, load_config: Any, state: Any) -> None:
        seen.append(cuts(load_config.device_map))
        raise Stop

    monkeypatch.setattr(persistence, "fill", look)
    own = {f"model.layers.{layer}": int(layer >= 9) for layer in range(LAYERS)}
    for device_map in ("sequential", {"": 1, **own}):
        with pytest.raises(Stop):
            K3ForCausalLM.from_pretrained(tmp_path, device_map=device_map, max_memory={0: 11 * one, 1: 20 * one})
    assert seen == [[8], [9]]
