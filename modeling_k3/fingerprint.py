"""Which model, with which weights: a digest that changes with every change of either."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from .expert_pages import ExpertPages

#: Words per step of the checksum: 8 MiB.
_WORDS = 2**20
#: Mapped experts of a model are read whole up to so many bytes in all. Beyond, `_SPOTS` places of each matrix are.
_WHOLE_EXPERT_BYTES = 2**30
_SPOTS, _SPOT_BYTES = 4, 8
#: Elements of each tensor that `weights_version` looks at, about.
_LOOKED_AT = 64
_ODD = 0x2545F4914F6CDD1D


def weights_version(model: nn.Module) -> tuple[object, ...]:
    """Something cheap that differs after a change of the model: weights, adapters, the config's computing fields.

    Seen are replaced tensors, writes in place, and writes past autograd's counter (through `.data`, or in inference
    mode) that reach one of about 64 elements, evenly spread, of some tensor. Not seen: such a write to single elements
    between them, weights that hooks bring from elsewhere, and attributes set on modules by hand; `fingerprint` reads
    everything but the last.

    Raises:
        ValueError: a file with mapped experts was changed.
    """
    for _, pages in _mapped(model):
        for file in pages.files:
            file.check_unchanged()
    tensors = [*model.parameters(), *model.buffers()]
    return (
        _config_text(model),
        *((id(x), 0 if x.is_inference() else x._version, x.dtype) for x in tensors),
        *_looks(tensors),
        *(state for _, state in _adapter_states(model)),
    )


def fingerprint(model: nn.Module) -> str:
    """Digest of the config's computing fields, all weights and active adapters.

    Weights go in as checksums over all their bytes, position by position: any single change shows. So do experts that
    stay in files, up to 1 GiB in all; of more, 32 bytes at four places of every matrix go in, which tells trainings
    apart, but not a change of a few numbers between these places. Takes about a second for 500 MB on one core.

    Args:
        model: a K3 model.

    Returns:
        32 hexadecimal digits. Where the weights lie (file, folder, device) has no influence.

    Raises:
        ValueError: weights that are nowhere to be found, or a file with mapped experts that was changed.
    """
    digest = hashlib.blake2b(_config_text(model).encode(), digest_size=16)
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_checksum(tensor)}".encode())
    for name, state in _adapter_states(model):
        digest.update(f"{name} {state}".encode())
    return digest.hexdigest()


#: What `config.json` holds beside the definition of the model.
_NOT_COMPUTING = frozenset(
    "architectures auto_map transformers_version torch_dtype dtype _name_or_path name_or_path use_cache bos_token_id "
    "eos_token_id pad_token_id output_router_logits return_dict output_hidden_states released_config id2label label2id "
    "initializer_range quantization_config max_position_embeddings experts_implementation".split()
)


def _config_text(model: nn.Module) -> str:
    fields = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_COMPUTING}
    return json.dumps(fields, sort_keys=True, default=str)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named():
            yield name, _offloaded(model, name) if tensor.is_meta else tensor
    mapped = list(_mapped(model))
    is_whole = sum(pages.nbytes for _, pages in mapped) <= _WHOLE_EXPERT_BYTES
    for name, pages in mapped:
        yield from ((f"{name}.{each}", x) for each, x in (pages.named_views() if is_whole else _spots(pages)))


def _mapped(model: nn.Module) -> Iterator[tuple[str, ExpertPages]]:
    for name, module in model.named_modules():
        pages = getattr(module, "pages", None)
        if pages is not None:
            yield name, pages


def _spots(pages: ExpertPages) -> Iterator[tuple[str, Tensor]]:
    """A few bytes at even distances, first and last included, of every matrix of every expert."""
    found = torch.zeros(*pages.places.shape[:3], _SPOTS * _SPOT_BYTES, dtype=torch.uint8, device="cpu")
    for number, file in enumerate(pages.files):
        file.check_unchanged()
        here = pages.places[..., 0] == number
        start, stop = pages.places[here][:, 1:].unbind(1)
        room = (stop - start - _SPOT_BYTES).clamp(min=0)
        at = start[:, None] + room[:, None] * torch.arange(_SPOTS, device="cpu") // (_SPOTS - 1)
        at = (at[..., None] + torch.arange(_SPOT_BYTES, device="cpu")).flatten(1).minimum(stop[:, None] - 1)
        found[here] = file.bytes_at(0, int(stop.max()))[at]
    yield f"spots {sorted(pages.shapes.items())} {sorted(pages.dtypes.items())}", found


def _offloaded(model: nn.Module, name: str) -> Tensor:
    """A weight that a hook brings when its module is called, from wherever the hook finds it."""
    path = name.split(".")
    for depth in reversed(range(len(path))):
        hook = getattr(model.get_submodule(".".join(path[:depth])), "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            try:
                return each.weights_map[".".join(path[depth:])]
            except (AttributeError, KeyError, TypeError):
                continue
    raise ValueError(
        f"prefix_cache: {name} is on the meta device and no hook brings it, so the model cannot be told from another; "
        "allowed are weights in memory, in mapped files, or offloaded by device_map"
    )


def _adapter_states(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Adapters that are switched without touching a weight."""
    for name, module in model.named_modules():
        state = [
            vars(module).get(key) for key in ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
        ]
        if any(each is not None for each in state):
            yield name, str(state)


def _looks(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """A checksum over a few elements of each tensor, one number for each device."""
    seen: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for x in tensors:
        if x.is_meta or not x.numel():
            continue
        flat = x.detach()
        if not flat.is_contiguous():
            # Whatever lies between the elements is looked at too.
            flat = flat.as_strided((flat.untyped_storage().nbytes() // flat.itemsize,), (1,), 0)
        flat = flat.view(-1)
        # An odd distance, so that not every element comes from the same column.
        seen[x.device].append(flat[:: (flat.numel() // _LOOKED_AT) | 1].contiguous().view(torch.uint8))
    found = (torch.cat(parts).long() for parts in seen.values())
    return tuple(int((x * (torch.arange(len(x), device=x.device) * 2 + 1) * _ODD).sum()) for x in found)


def _checksum(tensor: Tensor) -> int:
    """Sum of the tensor's 64-bit words, each times an odd number that depends on its place, modulo 2^64."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = -data.numel() % 8
    if rest:
        data = torch.cat([data, data.new_zeros(rest)])
    if data.storage_offset() % 8:
        data = data.clone()
    words, total = data.view(torch.int64), 0
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS]
        place = torch.arange(start, start + part.numel(), device=part.device) * 2 + 1
        total = (total * 31 + int((part * (place * _ODD)).sum().item())) % 2**64
    return total
