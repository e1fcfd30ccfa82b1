"""Residency of experts: the budget holds, the right ones go, nothing waits for ever, and what fails is heard."""

import copy
import gc
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.conversion.tiny import make_tiny
from modeling_k3.expert_shelf import Item
from modeling_k3.experts import iter_experts
from modeling_k3.residency import ExpertResidency

SIZE = 100


class Disk:
    """One layer's experts; writes down what is read and dropped, and what is resident."""

    def __init__(self, layer: int = 0, slow: float = 0.0, broken: Iterable[int] = ()) -> None:
        self.layer, self.slow, self.broken = layer, slow, set(broken)
        self.read: list[int] = []
        self.dropped: list[int] = []

    def expert_nbytes(self, expert: int) -> int:
        return SIZE

    def advise(self, expert: int) -> None:
        pass

    def load(self, expert: int) -> None:
        time.sleep(self.slow)
        if expert in self.broken:
            raise OSError(f"expert {expert} cannot be read")
        self.read.append(expert)

    def drop(self, expert: int) -> None:
        self.dropped.append(expert)


def use(residency: ExpertResidency, disk: Disk, experts: list[int], guess: Any = None) -> None:
    residency.announce(disk, experts, guess)
    for expert in experts:
        residency.wait(disk, expert)
        residency.wait(disk, expert)


def settle(residency: ExpertResidency) -> None:
    deadline = time.monotonic() + 10
    while residency._is_reading and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not residency._is_reading


def test_what_is_used_is_read_once() -> None:
    disk, residency = Disk(), ExpertResidency(4 * SIZE, SIZE)
    use(residency, disk, [3, 1])
    use(residency, disk, [1, 3])
    assert disk.read == [3, 1] and disk.dropped == []
    stats = residency.stats()
    assert (stats["hits"], stats["misses"], stats["bytes_read"]) == (2, 2, 2 * SIZE)
    assert stats["resident_bytes"] == stats["peak_bytes"] == 2 * SIZE


def test_the_least_recently_used_goes_first() -> None:
    disk, residency = Disk(), ExpertResidency(3 * SIZE, SIZE)
    use(residency, disk, [0, 1, 2])
    use(residency, disk, [0])
    use(residency, disk, [5])
    assert disk.dropped == [1]


def test_layers_in_turn_keep_their_share() -> None:
    """One row for all layers would give up each expert just before its turn: no hit at all."""
    disks, residency = [Disk(layer) for layer in range(4)], ExpertResidency(6 * SIZE, SIZE)
    for _ in range(5):
        for disk in disks:
            use(residency, disk, [0, 1])
    assert residency.stats()["hits"] >= 5


@pytest.mark.parametrize("budget", [2, 3, 7, 40])
def test_any_budget_gets_through_and_holds(budget: int) -> None:
    disks, residency = [Disk(layer) for layer in range(3)], ExpertResidency(budget * SIZE, SIZE)
    for first in range(4):
        for disk in disks:
            use(residency, disk, list(range(first, 12)))
    settle(residency)
    stats = residency.stats()
    assert stats["peak_bytes"] <= budget * SIZE
    held = sum(len(disk.read) - len(disk.dropped) for disk in disks)
    assert held * SIZE == stats["resident_bytes"] <= budget * SIZE
    assert stats["bytes_read"] == SIZE * sum(len(disk.read) for disk in disks)


def test_resident_experts_late_in_a_row_do_not_block_the_first() -> None:
    disk, residency = Disk(), ExpertResidency(2 * SIZE, SIZE)
    use(residency, disk, [8, 9])
    use(residency, disk, [1, 2, 8, 9])
    assert disk.read[:4] == [8, 9, 1, 2] or disk.read[2] == 1


def test_reading_goes_on_while_the_layer_computes() -> None:
    disk, residency = Disk(slow=0.02), ExpertResidency(8 * SIZE, SIZE)
    residency.announce(disk, [0, 1, 2])
    time.sleep(0.3)
    for expert in (0, 1, 2):
        residency.wait(disk, expert)
    assert residency.stats()["seconds_stalled"] < 0.02
    residency.announce(disk, [5])
    residency.wait(disk, 5)
    assert residency.stats()["seconds_stalled"] > 0.01


def test_a_guess_is_read_behind_what_is_announced() -> None:
    disk, after, residency = Disk(), Disk(1), ExpertResidency(8 * SIZE, SIZE)
    use(residency, disk, [0, 1], lambda: [Item(after, 4), Item(after, 5)])
    settle(residency)
    assert after.read == [4, 5]
    use(residency, after, [4, 6])
    stats = residency.stats()
    assert (stats["guesses"], stats["guesses_used"], stats["hits"], stats["misses"]) == (2, 1, 1, 3)


def test_guesses_that_are_wrong_end() -> None:
    disk, after, residency = Disk(), Disk(1), ExpertResidency(6 * SIZE, SIZE)
    for turn in range(200):
        use(residency, disk, [0], lambda turn=turn: [Item(after, 10 + turn)])
        settle(residency)
    assert 40 < residency.stats()["guesses"] < 80 and residency.stats()["guesses_used"] == 0
    residency.reset_stats()
    for turn in range(3000):
        use(residency, disk, [0], lambda turn=turn: [Item(after, 1000 + turn)])
        settle(residency)
        use(residency, after, [1000 + turn])
    assert residency.stats()["guesses_used"] > 500


def test_a_guess_never_takes_what_is_needed() -> None:
    disk, after, residency = Disk(), Disk(1), ExpertResidency(2 * SIZE, SIZE)
    residency.announce(disk, [0, 1], lambda: [Item(after, expert) for expert in range(5)])
    settle(residency)
    assert disk.dropped == [] and after.read == []


@pytest.mark.parametrize("slow", [0.0, 0.02])
def test_what_cannot_be_read_is_an_error_where_it_is_used(slow: float) -> None:
    disk, residency = Disk(slow=slow, broken=[2]), ExpertResidency(8 * SIZE, SIZE)
    with pytest.raises(OSError, match="expert 2"):
        use(residency, disk, [1, 2])
    disk.broken.clear()
    use(residency, disk, [1, 2])
    assert disk.read == [1, 2] and residency.resident_bytes == 2 * SIZE


def test_a_failed_guess_is_an_error_at_the_next_call() -> None:
    disk, after, residency = Disk(), Disk(1, broken=[7]), ExpertResidency(8 * SIZE, SIZE)
    use(residency, disk, [0], lambda: [Item(after, 7)])
    settle(residency)
    with pytest.raises(OSError, match="expert 7"):
        use(residency, after, [1])
    use(residency, disk, [0], lambda: 1 // 0)
    settle(residency)
    with pytest.raises(ZeroDivisionError):
        use(residency, after, [1])


class Cache:
    """What holds bytes."""

    def __init__(self, held: int) -> None:
        self.held = held

    def nbytes(self) -> dict[str, int]:
        return {"total": self.held}


def test_experts_give_way_to_caches_and_come_back() -> None:
    disk, residency, cache = Disk(), ExpertResidency(10 * SIZE, SIZE), Cache(0)
    residency.share_with(cache)
    use(residency, disk, list(range(10)))
    for held in range(0, 8 * SIZE, SIZE // 2):
        cache.held = held
        use(residency, disk, [0])
        assert residency.resident_bytes + held <= residency.budget
    assert residency.resident_bytes == 2 * SIZE
    del cache
    gc.collect()
    use(residency, disk, list(range(10)))
    assert residency.resident_bytes == 10 * SIZE


def test_caches_that_leave_too_little_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    disk, residency, cache = Disk(), ExpertResidency(4 * SIZE, SIZE), Cache(9 * SIZE)
    residency.share_with(cache)
    use(residency, disk, [0, 1, 2])
    use(residency, disk, [0, 1, 2])
    assert residency.resident_bytes <= 2 * SIZE
    assert sum("caches hold" in record.message for record in caplog.records) == 1


def test_threads_share_it() -> None:
    disks, residency, errors = [Disk(layer, slow=0.001) for layer in range(2)], ExpertResidency(3 * SIZE, SIZE), []

    def run(seed: int) -> None:
        try:
            for turn in range(10):
                for disk in disks:
                    use(residency, disk, [(seed + turn + i) % 7 for i in range(3)])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert residency.stats()["peak_bytes"] <= 3 * SIZE
    # Nobody who is gone still needs anything.
    use(residency, Disk(5), [0])
    assert len(residency._shelf.announced) == 1


def test_the_thread_ends_with_it() -> None:
    residency = ExpertResidency(4 * SIZE, SIZE)
    use(residency, Disk(), [0])
    thread = next(iter(residency._pool._threads))
    assert thread.is_alive()
    del residency
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_reads_with_a_thread_of_its_own() -> None:
    disk, residency = Disk(), ExpertResidency(4 * SIZE, SIZE)
    use(residency, disk, [0, 1])
    child = os.fork()
    if child == 0:
        threading.Timer(10, lambda: os._exit(3)).start()
        use(residency, disk, [0, 2])
        os._exit(0 if residency.stats()["misses"] == 2 else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_copies() -> None:
    residency = ExpertResidency(4 * SIZE, SIZE)
    assert copy.deepcopy(residency) is residency
    assert copy.copy(residency).budget == 4 * SIZE


def test_forget() -> None:
    disk, residency = Disk(), ExpertResidency(4 * SIZE, SIZE)
    use(residency, disk, [0, 1])
    residency.forget()
    assert disk.dropped == [0, 1] and residency.resident_bytes == 0


def test_too_small_a_budget() -> None:
    with pytest.raises(ValueError, match="allowed are 200"):
        ExpertResidency(199, 100)


def test_a_forward_leaves_nothing_behind(tmp_path: Path) -> None:
    """What a router saw is held until the guess is made, with a budget or without one."""
    config = K3Config(vocab_size=64, num_hidden_layers=4, num_experts=16, num_experts_per_token=2,
                      moe_intermediate_size=64, routed_expert_hidden_size=64, dtype="bfloat16")  # fmt: skip
    make_tiny(tmp_path / "checkpoint", config, tokens=0)
    model = K3ForCausalLM.from_pretrained(tmp_path / "checkpoint", expert_storage="mapped")
    for budget in (None, "1MiB"):
        model.limit_expert_memory(budget)
        model(torch.tensor([[1]]))
        assert [module.pages._seen for _, module in iter_experts(model)] == [None] * 3
    residency = model.expert_residency
    residency.forget()
    settle(residency)
    residency.reset_stats()
    with torch.no_grad():
        model(torch.tensor([[1]]))
    assert residency.stats()["guesses"] > 0
