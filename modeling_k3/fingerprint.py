"""Which model, with which weights: a digest that changes with every change of either."""

import hashlib
import json
from collections.abc import Iterator

import torch
from torch import Tensor, nn

#: Words per step of the checksum: 8 MiB.
_WORDS = 2**20
#: Of experts that stay in files so many per layer are read.
_SAMPLED_EXPERTS = 4


def weights_version(model: nn.Module) -> tuple[object, ...]:
    """Something cheap that differs after weights were replaced, written to in place, or adapters switched."""
    tensors = [*model.parameters(), *model.buffers()]
    return (
        *((id(x), 0 if x.is_inference() else x._version, x.dtype) for x in tensors),
        *(state for _, state in _adapter_states(model)),
    )


def fingerprint(model: nn.Module) -> str:
    """Digest of the config's computing fields, all weights and active adapters.

    Weights go in as checksums over all their bytes, position by position: any single change shows. Experts that stay
    in files go in by their layout and a few of them. Takes about a second for 500 MB on one core.

    Args:
        model: a K3 model.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=16)
    fields = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_COMPUTING}
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
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


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, module in model.named_modules():
        pages = getattr(module, "pages", None)
        if pages is not None:
            yield f"{name}.pages", pages.places
            count = pages.num_experts
            for expert in sorted({i * (count - 1) // (_SAMPLED_EXPERTS - 1) for i in range(_SAMPLED_EXPERTS)}):
                for index, part in enumerate(pages.parts(expert, ("w1", "w2", "w3"))):
                    yield f"{name}.pages.{expert}.{index}", part


def _adapter_states(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Adapters that are switched without touching a weight."""
    for name, module in model.named_modules():
        state = [
            vars(module).get(key) for key in ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
        ]
        if any(each is not None for each in state):
            yield name, str(state)


def _checksum(tensor: Tensor) -> int:
    """Sum of the tensor's 64-bit words, each times an odd number that depends on its place, modulo 2^64."""
    if tensor.is_meta:
        # Loaded on demand by hooks: nothing to read here, its name and shape still count.
        return -1
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = -data.numel() % 8
    if rest:
        data = torch.cat([data, data.new_zeros(rest)])
    words, total = data.view(torch.int64), 0
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS]
        place = torch.arange(start, start + part.numel(), device=part.device) * 2 + 1
        total = (total * 31 + int((part * (place * 0x2545F4914F6CDD1D)).sum().item())) % 2**64
    return total
