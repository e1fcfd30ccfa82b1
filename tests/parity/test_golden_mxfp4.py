"""The released-layout golden cases: every stored tensor, in every storage form of the experts, and what was decoded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.parity.golden import Case, check, discover, names_of
from tests.parity.recording import Record, run_generate, run_greedy, run_prompt

CASES = [case for case in discover() if not case.is_dense]
STORAGES = ("dense", "packed", "mapped")

pytestmark = pytest.mark.skipif(not CASES, reason="no case in the released layout")
Load = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def load() -> Load:
    models: dict[Any, PreTrainedModel] = {}

    def loaded(case: Case, storage: str, **options: Any) -> PreTrainedModel:
        key = (case.name, storage, *((name, str(value)) for name, value in options.items()))
        if key not in models:
            models[key] = AutoModelForCausalLM.from_pretrained(
                case.directory / case.spec["checkpoint"],
                dtype=case.compute_dtype,
                expert_storage=storage,
                experts_implementation="eager",
                **options,
            )
        return models[key]

    return loaded


def cases() -> list:
    return [pytest.param(case, id=case.name) for case in CASES]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("case", cases())
def test_prompt(case: Case, storage: str, load: Load) -> None:
    check(case, run_prompt(load(case, storage), case), names_of(case, "prompt"))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("case", cases())
def test_greedy(case: Case, storage: str, load: Load) -> None:
    steps = case.tensors["gen.tokens"].shape[1] if "gen.tokens" in case.names else 0
    if not steps:
        pytest.skip("the case stores no continuation")
    check(case, run_greedy(load(case, storage), case, steps), names_of(case, "gen"))


@pytest.mark.parametrize("case", cases())
def test_generate_with_mapped_experts(case: Case, load: Load) -> None:
    if "gen.tokens" not in case.names:
        pytest.skip("the case stores no continuation")
    steps = case.tensors["gen.tokens"].shape[1]
    check(case, run_generate(load(case, "mapped"), case, steps), names_of(case, "gen"))


@pytest.mark.parametrize("case", cases())
def test_storage_forms_agree_bit_for_bit(case: Case, load: Load) -> None:
    dense, *others = (run_prompt(load(case, storage), case) for storage in STORAGES)
    for other in others:
        assert [name for name in dense if not torch.equal(dense[name], other[name])] == []


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, {"": "disk"}], ids=str)
@pytest.mark.parametrize("case", cases())
def test_device_maps_agree_bit_for_bit(case: Case, device_map: Any, load: Load) -> None:
    resident: Record = run_prompt(load(case, "packed"), case)
    placed = run_prompt(load(case, "packed", device_map=device_map), case)
    # States and block residuals are read by hooks; the cache's keys need kv_b_proj, which "disk" fetches when called.
    assert [name for name in resident if not torch.equal(resident[name], placed[name])] == []


@pytest.mark.parametrize("case", cases())
def test_decoded_experts(case: Case, load: Load) -> None:
    """`dequant.<name>`: the expert matrices as the reference decodes them."""
    wanted = [name for name in case.names if name.startswith("dequant.")]
    assert wanted
    for storage in STORAGES:
        model = load(case, storage)
        for name in wanted:
            path, expert, matrix, _ = name.removeprefix("dequant.").removeprefix("language_model.").rsplit(".", 3)
            weights = model.get_submodule(path).expert_weights(int(expert), torch.float32)
            gate, up = weights["gate_up_proj"].chunk(2)
            found = {"w1": gate, "w3": up, "w2": weights["down_proj"]}[matrix]
            assert torch.equal(found, case.tensors[name].float()), name
