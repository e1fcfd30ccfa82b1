"""What Windows lacks is taken away from a process on Linux, where the package is imported, saves, loads and converts.

No proof that it runs there. It shows that nothing that only Unix has is needed, and that what stands in its place
works: locks by the calls of Windows (which lock for real here), maps without flags, reading by path.
"""

from pathlib import Path

from tests.layout_source import ROOT
from tests.uploads import run

#: Before the package is imported, and after the libraries that look for the same things are.
WITHOUT_UNIX = """
import ctypes, fcntl, mmap, os, shutil, sys, types
sys.path.insert(0, sys.argv[1])
import accelerate, matplotlib.pyplot, peft, psutil, rich.console, safetensors.torch, torch, transformers, typer
from transformers import Trainer

unix, held = "fcntl resource termios tty pty pwd grp readline syslog".split(), fcntl
for name in unix:
    sys.modules[name] = None
stub = types.ModuleType("msvcrt")
stub.LK_NBLCK = 2
stub.locking = lambda handle, mode, count: held.flock(handle, held.LOCK_EX | held.LOCK_NB)
sys.modules["msvcrt"] = stub
lacking = "preadv pread pwritev sysconf posix_fadvise sched_getaffinity O_DIRECTORY fork getuid geteuid uname".split()
lacking = [*lacking, *(name for name in dir(os) if name.startswith("POSIX_FADV"))]
for name in lacking:
    if hasattr(os, name):
        delattr(os, name)
for name in [name for name in dir(mmap) if name.startswith(("MAP_", "PROT_", "MADV_"))]:
    delattr(mmap, name)
# Other libraries ask for this one by their own name for the system, which stays.
shutil._use_fd_functions = False
opened = os.open

def files_only(path, *arguments, **options):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return opened(path, *arguments, **options)

os.open = files_only

def tell(status):
    status._obj[2] = 4 << 30
    return 1

ctypes.windll = types.SimpleNamespace(kernel32=types.SimpleNamespace(GlobalMemoryStatusEx=tell))
sys.platform = "win32"
"""
USE = """
from pathlib import Path
import modeling_k3, modeling_k3.cli
from modeling_k3 import K3Config, K3ForCausalLM, K3Tokenizer
from modeling_k3.configuration import preset_path
from modeling_k3.conversion.convert import Options, convert
from modeling_k3.demo.measure import peak_memory, usable_cores
import modeling_k3.adapters, modeling_k3.planning, modeling_k3.readiness, modeling_k3.terminal, modeling_k3.training
from modeling_k3.placement import available_memory
from modeling_k3.saving import Staging

assert available_memory() == 4 << 30 and usable_cores() >= 1
home = Path.cwd()
pico = sys.argv[2]
ids = torch.arange(12)[None]
packed = K3ForCausalLM.from_pretrained(pico, dtype="auto")
wanted = packed(ids).logits
for storage in ("mapped", "dense"):
    model = K3ForCausalLM.from_pretrained(pico, dtype="auto", expert_storage=storage)
    print(storage, torch.equal(model(ids).logits.argmax(-1), wanted.argmax(-1)))
model = K3ForCausalLM.from_pretrained(pico, dtype="auto", expert_memory="2MB")
assert torch.equal(model(ids).logits, wanted) and model.expert_residency.stats()["bytes_read"] > 0
# A save that was killed has left its folder and its lock file; one that is under way keeps both.
target = home / "saved"
target.mkdir()
(target / ".saving-1-x").mkdir()
(target / ".lock.saving-1-x").touch()
with Staging(target) as other:
    packed.save_pretrained(target, with_code=True, tokenizer=K3Tokenizer.from_pretrained(pico))
    hidden = {path.name for path in target.iterdir() if path.name.startswith(".")}
    assert hidden == {other.path.name, ".lock" + other.path.name}, hidden
assert not [path.name for path in target.iterdir() if path.name.startswith(".")]
assert torch.equal(K3ForCausalLM.from_pretrained(target, dtype="auto")(ids).logits, wanted)
assert not modeling_k3.systems.OPENS_FOLDERS and modeling_k3.systems.fcntl is None
written = convert(target, home / "flat", Options(experts="bf16"))
print(sorted(path.name for path in written.iterdir() if path.suffix in (".safetensors", ".lock")))
"""


def test_nothing_that_only_unix_has_is_needed(tmp_path: Path) -> None:
    said = run(WITHOUT_UNIX + USE, str(ROOT), str(ROOT / "examples" / "pico"), home=tmp_path, HF_HUB_OFFLINE="1")
    assert said.splitlines()[:2] == ["mapped True", "dense True"]
    assert said.splitlines()[-1] == "['model.safetensors']"
