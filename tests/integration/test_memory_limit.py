"""A checkpoint four times larger than a hard limit on memory: prefill and decode run, with the same bits.

The limit is a control group's, made for one child process below the group of the tests. It counts everything that is
charged to it: Python's and torch's own memory, activations, and every page of the files that is in memory.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modeling_k3 import K3Config
from modeling_k3.conversion.tiny import make_tiny

LIMIT, TIMES, PROMPT, STEPS = 480 << 20, 4, 4, 5
EXPERTS, LAYERS, LATENT, WIDTH, TOP_K = 128, 20, 512, 1024, 8
EXPERT_MEMORY = 128 << 20

_CHILD = r"""
import json, os, sys, time
path, target, group, memory = sys.argv[1:]
if group:
    with open(os.path.join(group, "cgroup.procs"), "w") as file:
        file.write(str(os.getpid()))
import torch
from safetensors.torch import save_file
from modeling_k3 import K3Cache, K3ForCausalLM
from modeling_k3.planning.speed import expected_step, measure_machine
torch.set_num_threads(1)
machine = measure_machine(os.path.dirname(path), use_known=False)
options = {"expert_memory": int(memory)} if memory != "0" else {"expert_storage": "mapped"}
model = K3ForCausalLM.from_pretrained(path, **options).eval()
expected = expected_step(model, machine)
print(json.dumps({"machine": vars(machine), "expected": expected}), flush=True)
prompt, steps = PROMPT, STEPS
ids = torch.randint(0, 512, (1, prompt + steps), generator=torch.Generator().manual_seed(3))
cache, times, logits = K3Cache(model.config), [], []
with torch.no_grad():
    start = time.perf_counter()
    logits.append(model(ids[:, :prompt], cache=cache).logits[0])
    prefill = time.perf_counter() - start
    if model.expert_residency:
        first = model.expert_residency.stats()
        model.expert_residency.reset_stats()
    for i in range(prompt, prompt + steps):
        start = time.perf_counter()
        logits.append(model(ids[:, i : i + 1], cache=cache).logits[0])
        times.append(time.perf_counter() - start)
save_file({"logits": torch.cat(logits)}, target)
found = {"prefill_s": prefill, "steps_s": times}
if model.expert_residency:
    found |= {"prefill": first, "decode": model.expert_residency.stats()}
print(json.dumps(found), flush=True)
""".replace("= PROMPT, STEPS", f"= {PROMPT}, {STEPS}")


_GREEDY = """
import os, sys
with open(os.path.join(sys.argv[1], "cgroup.procs"), "w") as file:
    file.write(str(os.getpid()))
bytearray(b"x") * int(sys.argv[2])
"""


def own_group() -> tuple[Path, str] | None:
    """Where this process's memory is counted, and the file that sets its limit; None where nobody can tell."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, kinds, name = line.split(":", 2)
        if "memory" in kinds.split(","):
            return Path(f"/sys/fs/cgroup/memory{name}"), "memory.limit_in_bytes"
        if not kinds and Path("/sys/fs/cgroup/cgroup.controllers").is_file():
            return Path(f"/sys/fs/cgroup{name}"), "memory.max"
    return None


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with the limit, below our own; gone afterwards."""
    found = own_group()
    if found is None:
        pytest.skip("no control groups that count memory on this system")
    parent, limit = found
    child = parent / f"k3-test-{os.getpid()}"
    try:
        child.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (child / limit).write_text(str(LIMIT))
        except OSError as error:
            pytest.skip(f"the control group's memory cannot be limited here: {error}")
        yield child
    finally:
        for _ in range(50):
            try:
                child.rmdir()
                break
            except OSError:
                time.sleep(0.1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = K3Config(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
        num_experts_per_token=TOP_K,
        moe_intermediate_size=WIDTH,
        routed_expert_hidden_size=LATENT,
        dtype="bfloat16",
    )
    return make_tiny(tmp_path_factory.mktemp("limit") / "checkpoint", config, tokens=0)


def run(checkpoint: Path, target: Path, group: str, memory: int) -> tuple[dict[str, Any], dict[str, Any]]:
    command = [sys.executable, "-c", _CHILD, str(checkpoint), str(target), group, str(memory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    before, after = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return before, after


@pytest.mark.slow
def test_four_times_more_than_memory(group: Path, checkpoint: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert size >= TIMES * LIMIT
    for path in checkpoint.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    greedy = subprocess.run([sys.executable, "-c", _GREEDY, str(group), str(2 * LIMIT)], capture_output=True)
    assert greedy.returncode != 0, "the limit does not bind"
    before, found = run(checkpoint, tmp_path / "limited", str(group), EXPERT_MEMORY)
    peaks = [group / name for name in ("memory.max_usage_in_bytes", "memory.peak") if (group / name).exists()]
    peak = int(peaks[0].read_text()) if peaks else 0
    _, free = run(checkpoint, tmp_path / "free", "", 0)
    limited, unlimited = (load_file(tmp_path / name)["logits"] for name in ("limited", "free"))
    assert torch.equal(limited, unlimited)
    for stats in (found["prefill"], found["decode"]):
        assert stats["peak_bytes"] <= EXPERT_MEMORY and stats["bytes_read"] > 0
        assert stats["misses"] > 0 and stats["seconds_stalled"] > 0
    assert found["decode"]["hits"] + found["decode"]["misses"] == STEPS * (LAYERS - 1) * TOP_K
    step, expected = sum(found["steps_s"]) / STEPS, before["expected"]["seconds"]
    read = found["decode"]["bytes_read"] / STEPS
    print(
        f"\n{size / 1e6:.0f} MB of files, limit {LIMIT / 1e6:.0f} MB, most counted {peak / 1e6:.0f} MB\n"
        f"prefill {found['prefill_s']:.2f} s, step {step:.3f} s (expected {expected:.3f}), "
        f"unlimited step {sum(free['steps_s']) / STEPS:.3f} s\n"
        f"read per step {read / 1e6:.0f} MB (expected {before['expected']['bytes_read'] / 1e6:.0f}) "
        f"{before}\n{json.dumps(found['prefill'])}\n{json.dumps(found['decode'])}"
    )
    assert 0 < peak <= LIMIT or not peaks
    # Seconds are another matter on a machine that does other work as well: `benchmarks/offload.py`.
    missing = found["decode"]["misses"] / (STEPS * (LAYERS - 1) * TOP_K)
    assert abs(missing - before["expected"]["share_missing"]) < 0.3
