"""The first layers of a checkpoint, computed from bytes at file offsets: no maps, no plan, no packed experts.

Shares the decoder layer's arithmetic with the package, and nothing of its loading: names, offsets, the codec and the
loop over experts are written again here.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling_k3 import K3Config
from modeling_k3.decoder_layer import K3DecoderLayer
from modeling_k3.mlp import gated_activation

_TYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
_ELEMENTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# A bfloat16 is the upper half of a float32. Each byte gives two: the low nibble first, that is, in the lower half.
_HALVES = np.array(_ELEMENTS, dtype=np.float32).view(np.uint32) >> 16
_BYTES = np.array([_HALVES[byte & 15] | _HALVES[byte >> 4] << 16 for byte in range(256)], dtype=np.uint32)


class OffsetReader:
    """Reads tensors of a sharded directory with `pread`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        self.headers: dict[str, tuple[int, dict[str, Any]]] = {}

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A copy of a tensor, or of its rows [first, last)."""
        file = self.files[name]
        handle = os.open(self.directory / file, os.O_RDONLY)
        try:
            if file not in self.headers:
                length = int.from_bytes(os.pread(handle, 8, 0), "little")
                self.headers[file] = 8 + length, json.loads(os.pread(handle, length, 8))
            base, header = self.headers[file]
            entry = header[name]
            start, stop = (base + offset for offset in entry["data_offsets"])
            shape = list(entry["shape"])
            if rows is not None:
                size = (stop - start) // shape[0]
                start, stop, shape[0] = start + rows[0] * size, start + rows[1] * size, rows[1] - rows[0]
            data = bytearray()
            while len(data) < stop - start:
                data += os.pread(handle, min(stop - start - len(data), 1 << 30), start + len(data))
        finally:
            os.close(handle)
        return torch.frombuffer(data, dtype=_TYPES[entry["dtype"]]).view(shape)


class OffsetExperts(nn.Module):
    """Routed experts decoded from the file, one after the other; keeps the numbers of those it was asked for."""

    def __init__(self, reader: OffsetReader, prefix: str, config: K3Config) -> None:
        super().__init__()
        self.reader, self.prefix, self.config = reader, prefix, config
        self.used: list[int] = []

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.used = top_k_index.unique().tolist()
        total = torch.zeros(hidden_states.shape, dtype=torch.float32)
        for expert in self.used:
            token, place = torch.where(top_k_index == expert)
            w1, w3, w2 = (self._decode(f"{self.prefix}{expert}.{part}") for part in ("w1", "w3", "w2"))
            gate, up = F.linear(hidden_states[token], torch.cat([w1, w3])).chunk(2, dim=-1)
            inner = gated_activation(
                gate,
                up,
                kind=self.config.hidden_act,
                beta=self.config.activation_situ_beta,
                linear_beta=self.config.activation_situ_linear_beta,
            )
            total = total.index_add(0, token, F.linear(inner, w2) * top_k_weights[token, place, None])
        return total.to(hidden_states.dtype)

    def _decode(self, stem: str) -> Tensor:
        packed, scale = self.reader.read(f"{stem}.weight_packed"), self.reader.read(f"{stem}.weight_scale")
        values = torch.from_numpy(np.take(_BYTES, packed.numpy()).view(np.int16)).view(torch.bfloat16)
        factor = torch.ldexp(torch.ones(scale.shape), scale.int() - 127).to(torch.bfloat16)
        return (values.view(*scale.shape, 32) * factor.unsqueeze(-1)).flatten(-2)


@torch.no_grad()
def first_layers(reader: OffsetReader, config: K3Config, ids: Tensor, depth: int) -> tuple[list[Tensor], list[Any]]:
    """Outputs of the first `depth` layers [1, T, D], and the experts that each of them used (None where dense)."""
    embedding = "language_model.model.embed_tokens.weight"
    p = torch.cat([reader.read(embedding, (token, token + 1)) for token in ids[0].tolist()]).unsqueeze(0)
    outputs, used, blocks = [], [], []
    for index in range(depth):
        prefix = f"language_model.model.layers.{index}."
        with torch.device("meta"):
            layer = K3DecoderLayer(config, index)
        if layer.is_sparse:
            layer.block_sparse_moe.experts = OffsetExperts(reader, f"{prefix}block_sparse_moe.experts.", config)
        for name, parameter in list(layer.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            value = reader.read(prefix + name)
            setattr(layer.get_submodule(owner), leaf, nn.Parameter(value[: parameter.shape[0]], requires_grad=False))
        after = [*blocks, p] if layer.starts_block else blocks
        p = layer.eval()(p, *blocks)
        blocks = after
        outputs.append(p)
        used.append(layer.block_sparse_moe.experts.used if layer.is_sparse else None)
    return outputs, used
