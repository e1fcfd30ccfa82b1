"""Memory of a load and a forward in a fresh process: packed bytes stay packed, mapped ones stay in the file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from modeling_k3.conversion.tiny import make_tiny
from tests.models import experts_config

EXPERTS, WIDTH, LAYERS = 64, 512, 3
#: One layer's experts, packed at 4.25 bits and expanded to bfloat16.
STACK = EXPERTS * 3 * WIDTH * WIDTH * 17 // 32
EXPANDED = 3 * WIDTH * WIDTH * 2
#: Python objects and the allocator's rounding.
SLACK = 24 << 20

_MEASURE = r"""
import json, re, sys, torch
from modeling_k3 import K3ForCausalLM
from modeling_k3.situ import situ
def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024
def now(field):
    return int(re.search(field + r":\s+(\d+)", open("/proc/self/status").read())[1]) * 1024
def reset():
    open("/proc/self/clear_refs", "w").write("5")
torch.set_num_threads(1)
path, storage = sys.argv[1:]
with torch.no_grad():
    torch.nn.functional.linear(torch.ones(4, 64).bfloat16(), torch.ones(64, 64).bfloat16())
    # Its tables for 16-bit numbers are made once, whatever the model.
    situ(*torch.ones(2, 1, 4096).bfloat16(), 4.0, 25.0)
reset(); base, anonymous = peak(), now("RssAnon")
model = K3ForCausalLM.from_pretrained(path, expert_storage=storage)
found = {"load_peak": peak() - base, "loaded": now("RssAnon") - anonymous}
reset(); base, anonymous = peak(), now("RssAnon")
with torch.no_grad():
    model(torch.arange(6).unsqueeze(0))
found |= {"forward_peak": peak() - base, "kept": now("RssAnon") - anonymous}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = experts_config(EXPERTS, WIDTH, LAYERS)
    return make_tiny(tmp_path_factory.mktemp("memory") / "checkpoint", config, tokens=0)


def measured(checkpoint: Path, storage: str) -> dict[str, int]:
    command = [sys.executable, "-c", _MEASURE, str(checkpoint), storage]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_packed(checkpoint: Path) -> None:
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    found = measured(checkpoint, "packed")
    assert size * 0.8 < found["loaded"] <= size + SLACK
    assert found["load_peak"] <= size + STACK // EXPERTS + SLACK
    assert found["forward_peak"] <= EXPANDED + SLACK
    assert found["kept"] <= SLACK


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_mapped(checkpoint: Path) -> None:
    found = measured(checkpoint, "mapped")
    assert found["loaded"] <= SLACK
    assert found["load_peak"] <= SLACK
    # Pages of the file that the forward looked at, and one expanded expert.
    assert found["kept"] <= EXPANDED + SLACK
