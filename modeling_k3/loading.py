"""From files to parameters, one after the other: zero-copy, filled in place, or left in the file.

A parameter is a zero-copy view where file and model agree on the number format, is filled expert by expert where
experts are stacked, is rounded to fewer bits as soon as it is read, and stays in the file where the device map says
"disk".
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.accelerate import get_device
from transformers.utils import logging

from .checkpoint import Checkpoint, canonical, is_vision, layer_of
from .dense_bits import check_not_quantized, in_fewer_bits, layers_to_quantize, mark
from .expert_pages import ENDINGS, ExpertPages
from .experts import iter_experts
from .load_plan import Place, Plan, expert_name, stored_kind
from .mxfp4 import GROUP, decode, encode
from .placement import LoadState, check_covers, uses_accelerator
from .stored_bits import from_stored

logger = logging.get_logger(__name__)


def fill(model: nn.Module, plan: Plan, load_config: Any, state: LoadState) -> None:
    """Make every parameter that the plan has tensors for, and put it where the device map says.

    Args:
        model: on the meta device, experts in the form they are loaded in; changed.
        plan: checked.
        load_config: the library's: device map, dtype and the names kept in float32.
        state: `state.disk` receives what stays on disk.

    Raises:
        ValueError: the device map has no place for some parameter.
    """
    device_map = {"": "cpu"} if load_config.device_map is None else load_config.device_map
    check_covers(model, device_map)
    travelling = 0
    for name, module in iter_experts(model):
        places = plan.experts.get(layer_of(canonical(name) + "."))
        if not places:
            continue
        device = str(get_device(device_map, f"{name}.down_proj_packed"))
        is_away = device == "disk" or (device == "cpu" and uses_accelerator(device_map))
        if module.storage == "packed" and is_away and stored_kind(places) == "packed":
            # Hooks would bring the whole stack of a layer; mapped experts travel one by one.
            module.use_storage("mapped")
            travelling += 1
        if module.storage == "mapped":
            module.use_storage("mapped", ExpertPages(stored_kind(places), module.num_experts, places))
        module._is_hf_initialized = True
    if travelling:
        logger.warning(
            f"packed experts of {travelling} layers are mapped: the device map has them on disk, or in main memory "
            "beside an accelerator, from where they are read one by one as they are used (expert_memory limits them)"
        )
    rounded = _fill_bits(model, plan, device_map, state)
    makers = {name: (make, sources) for name, make, sources in _makers(model, plan)}
    tied = list((getattr(model, "all_tied_weights_keys", None) or {}).items())
    for name, (make, sources) in logging.tqdm(makers.items(), desc="Loading weights"):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        old = getattr(module, leaf)
        dtype = _target_dtype(name, old, load_config)
        others = {short: (place, dtype) for short, place in sources.items() if place[1].torch_dtype != dtype}
        plan.layout.recast |= others
        # A parameter that several modules share may be on disk for one of them and in memory for another.
        twins = [other for pair in tied if name in pair for other in pair if other != name]
        devices = {each: get_device(device_map, each) for each in (name, *twins)}
        on_disk = [each for each, device in devices.items() if device == "disk" and leaf in module._parameters]
        own = [each for each in on_disk if each == name or each not in makers]
        state.disk |= dict.fromkeys(own, _bind(make, dtype, "cpu"))
        if len(on_disk) == len(devices):
            # Hooks cast to the placeholder's number format.
            value = torch.empty(old.shape, dtype=dtype, device="meta")
        else:
            device = next((device for device in devices.values() if device != "disk"), "cpu")
            value = make(dtype, device)
        if leaf in module._parameters:
            value = nn.Parameter(value, requires_grad=old.requires_grad)
        value._is_hf_initialized = True
        setattr(module, leaf, value)
        if leaf == "weight" and owner in rounded:
            model.set_submodule(owner, in_fewer_bits(module, state.dense or state.file_dense))
            plan.layout.recast.pop(canonical(name), None)


def _fill_bits(model: nn.Module, plan: Plan, device_map: Any, state: LoadState) -> set[str]:
    """Make the layers that are stored in 4 or 8 bits, and name those that are to be rounded to them.

    Raises:
        ValueError: they would be rounded once more, or config.json does not tell of them.
    """
    config = state.dense or state.file_dense
    check_not_quantized(bool(plan.bits) and state.dense is not None)
    if plan.bits and config is None:
        raise ValueError(
            f"checkpoint {str(state.path)!r} has {len(plan.bits)} layers in 4 or 8 bits of bitsandbytes, and its "
            "config.json has no quantization_config.dense: they are not of one save"
        )
    if config is None:
        return set()
    mark(model, config)

    def device_of(name: str) -> Any:
        return get_device(device_map, f"{name}.weight")

    names = {canonical(f"{name}.weight").removesuffix(".weight"): name for name, _ in model.named_modules()}
    for short, places in plan.bits.items():
        name = names.get(short)
        if name is None:
            continue
        if str(device_of(name)) == "disk":
            raise ValueError(f"{name} is on disk by the device map; a dense part in fewer bits must be in memory")
        tensors = {part: file.view(entry) for part, (file, entry) in places.items()}
        module = model.get_submodule(name)
        model.set_submodule(name, from_stored(name, module, tensors, config, device_of(name)))
    return set() if plan.bits else set(layers_to_quantize(model, config, device_of)[0])


def _bind(make: Callable[[torch.dtype, Any], Tensor], dtype: torch.dtype, device: str) -> Callable[[], Tensor]:
    return lambda: make(dtype, device)


def _target_dtype(name: str, old: Tensor, load_config: Any) -> torch.dtype:
    """The number format a parameter is loaded in: bytes stay bytes, the fp32 list stays float32."""
    for pattern, dtype in (load_config.dtype_plan or {}).items():
        if old.is_floating_point() and pattern in name.split("."):
            return dtype
    return old.dtype


def _makers(
    model: nn.Module, plan: Plan
) -> Iterable[tuple[str, Callable[[torch.dtype, Any], Tensor], dict[str, Place]]]:
    """Yield (parameter name, function of dtype and device, plain tensors it is made of by canonical name)."""
    wrong = {name for name, _, _ in plan.shape}
    # Not the state dict: it would make a view of every mapped expert.
    for name, parameter in chain(model.named_parameters(remove_duplicate=False), model.named_buffers()):
        place = plan.places.get(canonical(name))
        if place is not None and name not in wrong:
            yield name, _plain(place, tuple(parameter.shape)), {canonical(name): place}
    for name, module in iter_experts(model):
        layer = layer_of(canonical(name) + ".")
        places = plan.experts.get(layer)
        if not places:
            continue
        for stack, shape in module.stack_shapes().items():
            matrices = ("w1", "w3") if stack == "gate_up_proj" else ("w2",)
            if module.storage == "dense":
                plain = {key: place for key, place in places.items() if key[1] in matrices and key[2] == "weight"}
                sources = {expert_name(layer, key): place for key, place in plain.items()}
                yield f"{name}.{stack}", _dense_stack(places, matrices, shape), sources
            elif module.storage == "packed" and stored_kind(places) == "dense":
                encoded = _encoded_stack(places, matrices, shape)
                for suffix in ("_packed", "_scale"):
                    yield f"{name}.{stack}{suffix}", encoded(suffix), {}
            elif module.storage == "packed":
                for ending in ENDINGS["packed"]:
                    suffix = ending.removeprefix("weight")
                    yield f"{name}.{stack}{suffix}", _byte_stack(places, matrices, ending, shape), {}


def _plain(place: Place, shape: tuple[int, ...]) -> Callable[[torch.dtype, Any], Tensor]:
    def make(dtype: torch.dtype, device: Any) -> Tensor:
        view = place[0].view(place[1])
        if tuple(view.shape) != shape:
            # The padded tail: copied, because a save and a cast must not see it.
            view = view.reshape(-1)[: shape[0]].clone()
        return view.to(device=device, dtype=dtype)

    return make


def _dense_stack(
    places: dict[tuple[int, str, str], Place], matrices: tuple[str, ...], shape: tuple[int, int, int]
) -> Callable[[torch.dtype, Any], Tensor]:
    """Stack plain or packed experts as dense matrices, one expert at a time."""
    packed = stored_kind(places) == "packed"

    def make(dtype: torch.dtype, device: Any) -> Tensor:
        stack = torch.empty(shape, dtype=dtype, device="cpu")
        for expert, rows in enumerate(stack):
            for matrix, part in zip(matrices, rows.chunk(len(matrices)), strict=True):
                stored = [places[expert, matrix, ending] for ending in ENDINGS["packed" if packed else "dense"]]
                if packed:
                    decode(*(file.read(entry) for file, entry in stored), dtype=dtype, out=part)
                elif stored[0][1].torch_dtype == dtype:
                    stored[0][0].read_into(stored[0][1], part)
                else:
                    part.copy_(stored[0][0].read(stored[0][1]))
        return stack.to(device)

    return make


def _byte_stack(
    places: dict[tuple[int, str, str], Place], matrices: tuple[str, ...], ending: str, shape: tuple[int, int, int]
) -> Callable[[torch.dtype, Any], Tensor]:
    """Stack the codes or the scales of packed experts, read straight into their place."""
    width = shape[2] // (2 if ending == "weight_packed" else GROUP)

    def make(dtype: torch.dtype, device: Any) -> Tensor:
        stack = torch.empty(*shape[:2], width, dtype=torch.uint8, device="cpu")
        for expert, rows in enumerate(stack):
            for matrix, part in zip(matrices, rows.chunk(len(matrices)), strict=True):
                file, entry = places[expert, matrix, ending]
                file.read_into(entry, part)
        return stack.to(device)

    return make


def _encoded_stack(
    places: dict[tuple[int, str, str], Place], matrices: tuple[str, ...], shape: tuple[int, int, int]
) -> Callable[[str], Callable[[torch.dtype, Any], Tensor]]:
    """Round plain experts to MXFP4, one matrix at a time; codes and scales come of one reading."""
    done: dict[str, Tensor] = {}

    def read() -> None:
        for suffix, width in (("_packed", shape[2] // 2), ("_scale", shape[2] // GROUP)):
            done[suffix] = torch.empty(*shape[:2], width, dtype=torch.uint8, device="cpu")
        for expert in range(shape[0]):
            rows = [done[suffix][expert].chunk(len(matrices)) for suffix in ("_packed", "_scale")]
            for matrix, codes, scales in zip(matrices, *rows, strict=True):
                file, entry = places[expert, matrix, "weight"]
                for target, source in zip((codes, scales), encode(file.view(entry)), strict=True):
                    target.copy_(source)

    def of(suffix: str) -> Callable[[torch.dtype, Any], Tensor]:
        def make(dtype: torch.dtype, device: Any) -> Tensor:
            if suffix not in done:
                read()
            return done.pop(suffix).to(device)

        return make

    return of


def report_vision(checkpoint: Checkpoint) -> None:
    """Say in one line that a checkpoint has vision tensors and that they stay in their files."""
    count = sum(1 for name in checkpoint.where if is_vision(name))
    if count:
        logger.warning(f"{count} vision and projector tensors are left in their files: this is the text model")
