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

LIMIT, TIMES, PROMPT, STEPS = 612 << 20, 4, 64, 5
EXPERTS, LAYERS, LATENT, WIDTH, TOP_K = 160, 20, 512, 1024, 8
EXPERT_MEMORY = 96 << 20
#: Bytes for `load_within`; prompt, answer and piece in tokens.
BUDGET, LONG = 1024 << 20, (400, 24, 128)
#: So that memory is about the model and not about what the backend compiles for it.
FEW_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}

#: Beginning of a child: joins the group it is given, if any, before anything is imported that takes memory.
_JOIN = r"""
import json, os, sys, time
path, target, group, amount = sys.argv[1:]
if group:
    with open(os.path.join(group, "cgroup.procs"), "w") as file:
        file.write(str(os.getpid()))
import torch
"""

_EXPECT = (
    _JOIN
    + r"""
from safetensors.torch import save_file
from modeling_k3 import K3Cache, K3ForCausalLM
from modeling_k3.planning.speed import expected_step, measure_machine
torch.set_num_threads(1)
machine = measure_machine(os.path.dirname(path), use_known=False)
options = {"expert_memory": int(amount)} if amount != "0" else {"expert_storage": "mapped"}
model = K3ForCausalLM.from_pretrained(path, **options).eval()
expected = expected_step(model, machine)
print(json.dumps({"machine": vars(machine), "expected": expected}), flush=True)
"""
)

_CHILD = (
    _EXPECT
    + r"""
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
)


_PLANNED = (
    _JOIN
    + r"""
from safetensors.torch import save_file
from modeling_k3 import K3ForCausalLM
from modeling_k3.planning import load_within
torch.set_num_threads(1)
prompt, new, piece = LONG
ids = torch.randint(0, 512, (1, prompt), generator=torch.Generator().manual_seed(3))
if group:
    model = load_within(path, int(amount), context=prompt + new, prefill_chunk=piece)
    plan, stats = model.memory_plan, model.expert_residency.stats
else:
    model = K3ForCausalLM.from_pretrained(path, expert_storage="mapped", dtype="auto")
    model.prefill_tokens, plan, stats = piece, None, dict
model.eval()
options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
found = model.generate(ids, max_new_tokens=new, output_logits=True, return_dict_in_generate=True, **options)
save_file({"ids": found.sequences, "logits": torch.stack(found.logits)}, target)
print(json.dumps({"plan": plan and plan.as_dict(), "stats": stats()}))
""".replace("LONG", str(LONG))
)


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


def run(checkpoint: Path, target: Path, group: str, memory: int, code: str = _CHILD) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", code, str(checkpoint), str(target), group, str(memory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **FEW_KERNELS})
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def set_limit(group: Path, limit: int) -> None:
    for name in ("memory.limit_in_bytes", "memory.max"):
        if (group / name).exists():
            (group / name).write_text(str(limit))


def most_counted(group: Path) -> int:
    """Bytes that the group was charged with at most; 0 where the system does not say."""
    peaks = [group / name for name in ("memory.max_usage_in_bytes", "memory.peak") if (group / name).exists()]
    return int(peaks[0].read_text()) if peaks else 0


def forget_files(checkpoint: Path) -> None:
    for path in checkpoint.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.slow
def test_a_plan_holds(group: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A prompt in pieces and an answer of some length, where twice the budget could be taken: it never is."""
    set_limit(group, 2 * BUDGET)
    forget_files(checkpoint)
    outputs = []
    for name, own in (("planned", str(group)), ("free", "")):
        command = [sys.executable, "-c", _PLANNED, str(checkpoint), str(tmp_path / name), own, str(BUDGET)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **FEW_KERNELS})
        assert done.returncode == 0, f"{name} ended with {done.returncode}: {done.stderr[-2000:]}"
        outputs.append((load_file(tmp_path / name), json.loads(done.stdout.splitlines()[-1])))
    (planned, found), (free, _) = outputs
    assert all(torch.equal(planned[name], free[name]) for name in ("ids", "logits"))
    plan, stats = found["plan"], found["stats"]
    assert plan["expert_place"] == "mapped" and plan["used_bytes"] <= BUDGET and stats["evictions"] > 0
    assert stats["peak_bytes"] <= stats["budget_bytes"] == plan["load_options"]["expert_memory"]
    peak = most_counted(group)
    print(
        f"\nbudget {BUDGET / 1e6:.0f} MB, most counted {peak / 1e6:.0f} MB\n"
        f"{json.dumps(plan['bytes'])}\n{json.dumps(stats)}"
    )
    assert 0 < peak <= BUDGET or not peak


@pytest.mark.slow
def test_four_times_more_than_memory(group: Path, checkpoint: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert size >= TIMES * LIMIT
    forget_files(checkpoint)
    greedy = subprocess.run([sys.executable, "-c", _GREEDY, str(group), str(2 * LIMIT)], capture_output=True)
    assert greedy.returncode != 0, "the limit does not bind"
    before, found = run(checkpoint, tmp_path / "limited", str(group), EXPERT_MEMORY)
    peak = most_counted(group)
    (afterwards,) = run(checkpoint, tmp_path / "limited", str(group), EXPERT_MEMORY, _EXPECT)
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
    assert peak <= LIMIT
    # What the machine gives is measured before and afterwards, for other work may begin or end in between; where it has
    # the other core, reading does not run beside the products but after them.
    seconds, each = sorted(found["steps_s"])[STEPS // 2], [part["expected"] for part in (before, afterwards)]
    slowest = max(part["compute"] + part["reading"] for part in each)
    assert 0.7 * min(part["seconds"] for part in each) <= seconds <= 1.3 * slowest, (seconds, each)
    missing = found["decode"]["misses"] / (STEPS * (LAYERS - 1) * TOP_K)
    assert abs(missing - before["expected"]["share_missing"]) < 0.3
