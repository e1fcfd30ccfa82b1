"""Where experts live: which storage form a load uses, from what the files hold, what fits, and the device map."""

import gc
import os
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .byte_sizes import parse_size
from .checkpoint import EXPERT, Checkpoint, canonical, layer_of
from .experts import iter_experts
from .low_bits import expect_low_bits
from .stored_bits import is_stored_in_bits
from .systems import memory_bound

logger = logging.get_logger(__name__)

#: Forms a user may ask for. None: mapped when the checkpoint does not fit in memory, otherwise as it is stored.
STORAGES = ("dense", "packed", "mapped")
# The rest is for activations, caches and everybody else on the machine.
_SHARE_OF_MEMORY = 0.8


@dataclass
class LoadState:
    """What one `from_pretrained` call was asked for, and what its steps tell each other.

    Args:
        strict: refuse what does not fit, see `K3PreTrainedModel.from_pretrained`.
        storage: of the experts, one of `STORAGES` or None.
        by_library: leave the whole load to the library (options that only its route knows).
        max_memory: the user's limits for the device map.
        device_map: the user's; without one everything goes to the CPU.
        path: named in messages.
        checkpoint: the opened directory, as soon as it is known.
        is_applied: the experts have the form they are loaded in.
        has_dtype: the user chose a number format.
        disk: parameters that the device map leaves on disk, by name.
        dense: the BitsAndBytesConfig that the user asks for, or None.
        file_dense: the one that config.json tells of, or None.
        file_experts: what config.json tells of experts in HQQ's bits, or None.
        expert_memory: bytes for mapped experts and caches, or None.
    """

    strict: bool = True
    storage: str | None = None
    by_library: bool = False
    max_memory: Mapping[Any, Any] | None = None
    device_map: Any = None
    path: str | os.PathLike | None = None
    checkpoint: Checkpoint | None = None
    is_applied: bool = False
    has_dtype: bool = False
    disk: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    dense: Any = None
    file_dense: Any = None
    file_experts: Any = None
    expert_memory: int | None = None

    @property
    def packs(self) -> bool:
        """Whether experts that are stored plain are rounded to MXFP4: the dense part is to be rounded as well."""
        if (self.dense is None and self.file_dense is None) or self.storage not in (None, "packed"):
            return False
        return self.checkpoint is None or not any(map(is_stored_in_bits, self.checkpoint.where))


_STATE: ContextVar[LoadState | None] = ContextVar("k3_load_state", default=None)


def current_load() -> LoadState:
    """The load this code runs in; defaults outside of one."""
    return _STATE.get() or LoadState()


@contextmanager
def loading(state: LoadState) -> Iterator[LoadState]:
    """Make `state` the current load."""
    token = _STATE.set(state)
    try:
        yield state
    finally:
        _STATE.reset(token)


@contextmanager
def collecting_later() -> Iterator[None]:
    """Hold the garbage collector back: half a million new objects make it look at all of them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def available_memory() -> int:
    """Bytes of main memory this process may still take: what the system has, within its control group's limit."""
    free = [memory_bound()]
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        free += [int(found[1]) * 1024] if found else []
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            files = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("current", "stat"))
            used, counts = (file.read_text(encoding="utf-8") for file in files)
            # Pages of files are charged as well, and given back.
            cached = re.findall(r"^(?:in)?active_file (\d+)", counts, re.MULTILINE)
            free.append(int(limit) - int(used) + sum(map(int, cached)))
    except (OSError, ValueError):
        pass
    return max(min(free), 0)


def uses_accelerator(device_map: Any) -> bool:
    """Whether a device map may put something elsewhere than in main memory or on disk."""
    if device_map is None:
        return False
    values = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    return any(str(value).partition(":")[0] not in ("cpu", "disk", "meta") for value in values)


def is_nested(device_map: Any) -> bool:
    """Whether a device map names a module and something inside it."""
    keys = list(device_map) if isinstance(device_map, Mapping) else []
    return any(_is_inside(key, other) for key in keys for other in keys)


def _is_inside(name: str, owner: str) -> bool:
    return name != owner and (owner == "" or name.startswith(f"{owner}."))


def check_covers(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Refuse a device map that has no place for some parameter.

    Raises:
        ValueError: names the first few parameters.
    """
    # A tied head goes where the embedding goes.
    tied = getattr(model, "_tied_weights_keys", None) or {} if model.config.tie_word_embeddings else {}
    homeless = [
        name
        for name, _ in model.named_parameters()
        if name not in tied and not any(name == key or _is_inside(name, key) for key in device_map)
    ]
    if homeless:
        raise ValueError(
            f"device_map={dict(device_map)!r} has no place for {len(homeless)} parameters: {', '.join(homeless[:3])}"
            f"{', ...' if len(homeless) > 3 else ''}; the key '' places all that no other key does"
        )


def disjoint(model: nn.Module, device_map: Mapping[str, Any]) -> dict[str, Any]:
    """Cut a nested device map into one whose modules lie side by side: for every module its longest key counts.

    Hooks know no exceptions from what a module is mapped to.

    Args:
        model: its modules and parameters by name.
        device_map: module name -> device; "" is the whole model.

    Raises:
        ValueError: a module would have to be cut that has parameters of its own.
    """
    result: dict[str, Any] = {}

    def place(name: str, module: nn.Module, device: Any) -> None:
        device = device_map.get(name, device)
        inner = [key for key in device_map if _is_inside(key, name)]
        if not inner:
            if device is not None:
                result[name] = device
            return
        own = [key for key, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        if own and device is not None:
            raise ValueError(
                f"device_map has {inner[0]!r} inside {name!r}, which has parameters of its own ({', '.join(own)}) and "
                "cannot be cut; allowed are keys of modules without any"
            )
        for child, part in module.named_children():
            place(f"{name}.{child}" if name else child, part, device)

    place("", model, None)
    known = dict(model.named_modules())
    # What the model does not have is the library's to complain about.
    return result | {key: device for key, device in device_map.items() if key not in known}


def fit(state: LoadState) -> int:
    """Bytes that the load may fill: main memory, or the accelerators' memory where a device map may use them."""
    if state.max_memory is not None:
        return sum(parse_size(limit, f"max_memory[{device!r}]") for device, limit in state.max_memory.items())
    if uses_accelerator(state.device_map) and torch.cuda.is_available():
        return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
    return available_memory()


def apply_storage(model: nn.Module, checkpoint: Checkpoint, state: LoadState) -> None:
    """Give every expert module the form it will be loaded in. What is packed is decided by the stored names alone.

    Args:
        model: on the meta device; changed.
        checkpoint: what will be loaded.
        state: `state.storage` is filled in where it is None.

    Raises:
        ValueError: packed experts were asked for, and some are stored dense; any form, and they are in HQQ's bits; the
            form takes more main memory than there is.
    """
    if state.is_applied:
        return
    state.is_applied = True
    if state.file_experts is not None:
        if state.storage is not None:
            raise ValueError(
                f"expert_storage={state.storage!r}, but the experts are stored in bits of HQQ ({state.file_experts}), "
                "from which there is no way back; allowed is None"
            )
        expect_low_bits(model, state.file_experts)
        return
    modules = {layer_of(canonical(name) + "."): module for name, module in iter_experts(model)}
    packed, packs = checkpoint.packed_layers, state.packs
    plain = sorted(layer for layer in modules if layer is not None and layer not in packed)
    if packs and plain:
        logger.warning(
            f"routed experts of {len(plain)} layers are stored plain and are rounded to MXFP4 (4.25 bits) while "
            "loading (expert_storage='dense' keeps them)"
        )
    if state.storage is None:
        state.storage = _choose(modules, packed, checkpoint, state)
    elif state.storage == "packed" and not packs:
        dense = [name for name in checkpoint.where if name.endswith(".w1.weight") and EXPERT.fullmatch(canonical(name))]
        layers = sorted({layer_of(canonical(name)) for name in dense} & modules.keys())
        if layers:
            raise ValueError(
                f"expert_storage='packed', but the experts of layers {layers[:5]}{', ...' if layers[5:] else ''} are "
                "stored dense, and loading packs nothing: convert the checkpoint to MXFP4 first (k3 convert), or take "
                "'dense', 'mapped' or None, which keeps what is stored"
            )
    for layer, module in modules.items():
        if state.storage == "packed" and layer not in packed and not packs:
            continue
        storage = "packed" if packs and layer in plain else state.storage
        if module.storage != storage:
            module.use_storage(storage)
    needed = sum(parameter.nbytes for module in modules.values() for parameter in module.parameters())
    if state.device_map is None and state.max_memory is None and needed > (room := available_memory()):
        raise ValueError(
            f"expert_storage={state.storage!r} takes {needed / 1e9:.2f} GB for routed experts, and {room / 1e9:.2f} GB "
            "of memory are available; allowed is 'mapped', which leaves them in the files (expert_memory='8GiB' sets "
            "how much of them is resident)"
        )


def _choose(modules: dict[int | None, Any], packed: frozenset[int], checkpoint: Checkpoint, state: LoadState) -> str:
    """Mapped when the files that are needed do not fit; otherwise as stored. Says which, where experts are packed."""
    is_packed = bool(packed & modules.keys())
    deepest = max((layer for layer in modules if layer is not None), default=-1)
    files = {file for name, file in checkpoint.where.items() if (layer_of(canonical(name)) or 0) <= deepest}
    needed, room = sum(file.path.stat().st_size for file in files if file.path.exists()), fit(state)
    fits = needed <= _SHARE_OF_MEMORY * room
    if not modules or (fits and not is_packed) or (state.device_map is not None and not is_packed):
        # A device map that puts dense layers on disk has its own way.
        return "dense"
    chosen = "packed" if fits else "mapped"
    logger.warning(
        f"routed experts are {chosen}: {needed / 1e9:.3f} GB of files, {room / 1e9:.2f} GB of memory available "
        "(expert_storage='packed', 'mapped' or 'dense' chooses)"
    )
    return chosen


class LazyTensors(Mapping[str, Tensor]):
    """Parameters that stay in the checkpoint's files: made when asked for, held by nobody."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def serve_from_disk(model: nn.Module, makers: Mapping[str, Callable[[], Tensor]]) -> None:
    """Let accelerate's hooks take parameters on "disk" from our maps.

    Its own loader opens the file and parses the header for each parameter of each forward, on maps that need the
    file's size as memory, and knows neither padding nor stacked experts.
    """
    lazy = LazyTensors(makers)
    loaders = {}
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for single in getattr(hook, "hooks", (hook,)):
            loader = getattr(getattr(single, "weights_map", None), "dataset", None)
            if loader is not None:
                loaders[id(loader)] = loader
    for loader in loaders.values():
        loader.state_dict = ChainMap(lazy, loader.state_dict)
    model._k3_disk = lazy
