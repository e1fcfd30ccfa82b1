"""Balancing in two processes: one all-reduce a step for all routers together, and the library's Trainer across them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from modeling_k3.training.balancing import RouterBalancer
from modeling_k3.training.callback import K3TrainingCallback
from tests.integration.test_training_callback import biases, trainer_of
from tests.models import BOUNDS, build, tiny_config, token_ids


def reductions(method: str, rank: int) -> list[int]:
    """All-reduces of each of three steps of two micro-batches, in a model with three routers."""
    model = build(tiny_config("KMM", first_k_dense_replace=0)).train()
    balancer, calls, counts = RouterBalancer(model, method), [], []
    original = dist.all_reduce
    dist.all_reduce = lambda tensor, **options: calls.append(len(tensor)) or original(tensor, **options)
    try:
        for step in range(3):
            calls.clear()
            for piece in range(2):
                model(token_ids(1, 5 + rank, seed=10 * step + piece))
            balancer.step()
            counts.append(len(calls))
    finally:
        dist.all_reduce = original
    assert len(balancer.routers) == 3
    return counts


def trained(folder: Path, rows: int) -> dict[str, Any]:
    """Three steps of the library's Trainer: biases, loads of the last step, and the log."""
    callback = K3TrainingCallback("histogram")
    trainer = trainer_of(folder, 3, callback, per_device_train_batch_size=rows, save_strategy="no")
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "biases": biases(trainer.model).flatten().tolist(),
        "loads": [row["load"] for row in callback.routers.values()],
        "losses": [entry["loss"] for entry in entries],
        "violations": [entry["router_max_violation"] for entry in entries],
    }


def work(rank: int, folder: str) -> None:
    """What one of the processes does."""
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {method: reductions(method, rank) for method in ("quantile", "histogram", "sign")}
    found["trained"] = trained(Path(folder, f"run{rank}"), rows=2)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both processes report."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(work, (str(folder),), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("method", ["quantile", "histogram", "sign"])
def test_a_step_is_one_all_reduce_however_many_routers(found: list[dict[str, Any]], method: str) -> None:
    assert [each[method] for each in found] == [[1, 1, 1]] * 2


def test_two_trainers_are_one(found: list[dict[str, Any]], tmp_path: Path) -> None:
    """Two rows in each process against four in one: the same biases everywhere, the loads of all rows in the log."""
    expected = trained(tmp_path, rows=4)
    first, second = (each["trained"] for each in found)
    assert first["biases"] == second["biases"] and first["loads"] == second["loads"] == expected["loads"]
    assert sum(expected["loads"][0]) == 4 * 10 * 2 and max(map(abs, expected["biases"])) > 1e-3
    bound = BOUNDS["same_loss_fp32"].bound
    for name in ("biases", "violations", "losses"):
        assert first[name] == pytest.approx(expected[name], abs=bound), name
