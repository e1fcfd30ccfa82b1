"""PrefixCache: prompts that begin alike share the work of their beginning.

    key(block i) = hash(key(block i - 1), tokens of block i)          blocks of `block_size` tokens from the start

A block holds its latents, for every MLA layer, and the state and windows at its end, for every KDA layer: both kinds
are needed to go on. At the released dimensions that is 13.5 MiB of latents for 512 tokens and 429 MiB of states, so the
size of a block decides how much memory a token of prefix costs. Source: arXiv 2607.24653 section 5.4.1.
"""

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from os import PathLike, fspath
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .cache import K3Cache
from .fingerprint import fingerprint, weights_version


class Block(NamedTuple):
    """What one block adds.

    Args:
        parent: key of the block before, `b""` for none.
        tokens: [block_size] int64 on the CPU.
        latents: for each MLA layer latents [1, 1, block_size, kv_lora_rank] and shared parts [1, 1, block_size, rope].
        states: for each KDA layer at the end of the block three windows and the state, each with B = 1.
    """

    parent: bytes
    tokens: Tensor
    latents: list[tuple[Tensor, Tensor]]
    states: list[tuple[Tensor, ...]]

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        held = [self.tokens, *(x for group in (*self.latents, *self.states) for x in group)]
        return sum(x.nbytes for x in held)


class PrefixCache:
    """Blocks of known prefixes, the least recently used leave first. May be used from several threads.

    Args:
        block_size: tokens per block.
        max_bytes: budget for all tensors; None: no limit.
        device: where the tensors are kept; None: where they were computed.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self, block_size: int = 512, max_bytes: int | None = None, device: torch.device | str | None = None
    ) -> None:
        if block_size < 1 or (max_bytes is not None and max_bytes < 1):
            raise ValueError(f"block_size={block_size}, max_bytes={max_bytes}; allowed are numbers above 0")
        self.block_size, self.max_bytes, self.device = block_size, max_bytes, device
        #: Digest of the model whose states are kept; the first use sets it.
        self.fingerprint: str | None = None
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._bytes = 0
        self._counts = dict.fromkeys(
            ("lookups", "hits", "asked_tokens", "hit_tokens", "stored", "evicted", "bypassed"), 0
        )
        self._known: WeakKeyDictionary[nn.Module, tuple[object, ...]] = WeakKeyDictionary()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._blocks)

    def stats(self) -> dict[str, float]:
        """Counters: `lookups` and `hits` (rows that found a block), `asked_tokens` and `hit_tokens`, `stored` and
        `evicted` blocks, `bypassed` calls (padded batches), `blocks` and `bytes` now, `hit_rate` of the tokens.
        """
        with self._lock:
            rate = self._counts["hit_tokens"] / max(1, self._counts["asked_tokens"])
            return {**self._counts, "misses": self._counts["lookups"] - self._counts["hits"], "blocks": len(self),
                    "bytes": self._bytes, "hit_rate": rate}  # fmt: skip

    def clear(self) -> None:
        """Forget all blocks and the model they belong to; counters stay."""
        with self._lock:
            self._blocks.clear()
            self._known.clear()
            self._bytes, self.fingerprint = 0, None

    def bind(self, model: nn.Module) -> None:
        """Make sure that the blocks were computed by this model as it is now.

        Raises:
            ValueError: by another model, or its weights have changed since.
        """
        version = weights_version(model)
        with self._lock:
            if self.fingerprint is not None and self._known.get(model) == version:
                return
            found = fingerprint(model)
            if self.fingerprint not in (None, found):
                raise ValueError(
                    f"prefix_cache holds states of the model {self.fingerprint}, this one is {found}: another model, "
                    "or its weights have changed; allowed is the same model, or clear() first"
                )
            self.fingerprint = found
            self._known[model] = version

    # -- one prompt ---------------------------------------------------------------------------------------------

    def keys(self, tokens: Tensor) -> list[bytes]:
        """Keys of the complete blocks of one row of tokens [T]."""
        data, keys, parent = tokens.to("cpu", torch.int64).contiguous(), [], b""
        for start in range(0, len(data) - self.block_size + 1, self.block_size):
            parent = _key(parent, data[start : start + self.block_size])
            keys.append(parent)
        return keys

    def fill(self, cache: K3Cache, ids: Tensor, spare: int = 1) -> tuple[int, list[list[bytes]]]:
        """Put the longest known prefix that all rows have into an empty cache.

        Args:
            cache: an empty cache.
            ids: [B, T], no padding.
            spare: tokens at the end to leave: the one whose logits are wanted.

        Returns:
            Its length in tokens, and each row's keys for `store`.
        """
        rows = [self.keys(row) for row in ids]
        usable = (ids.shape[1] - spare) // self.block_size
        with self._lock:
            chains = [self._chain(row[:usable]) for row in rows]
            depth = min(len(chain) for chain in chains)
            self._counts["lookups"] += len(rows)
            self._counts["asked_tokens"] += ids.numel()
            self._counts["hits"] += len(rows) * (depth > 0)
            self._counts["hit_tokens"] += depth * self.block_size * len(rows)
        if depth:
            self._restore(cache, [chain[:depth] for chain in chains], ids.device)
        return depth * self.block_size, rows

    def count_bypass(self) -> None:
        """Count a call that could not use the cache."""
        with self._lock:
            self._counts["bypassed"] += 1

    def store(self, cache: K3Cache, ids: Tensor, rows: Sequence[Sequence[bytes]], stop: int) -> None:
        """Store the block that ends at `stop`, where the cache stands now, for every row that lacks it.

        Args:
            cache: has seen exactly the tokens before `stop`.
            ids, rows: as given to and returned by `fill`.
            stop: a multiple of the block size.
        """
        index, span = stop // self.block_size - 1, slice(stop - self.block_size, stop)
        linear = list(zip(cache.layers, cache.is_linear, strict=True))
        for row, keys in enumerate(rows):
            with self._lock:
                if keys[index] in self._blocks:
                    continue
            at = slice(row, row + 1)
            block = Block(
                keys[index - 1] if index else b"",
                ids[row, span].to("cpu", torch.int64).clone(),
                [
                    tuple(self._own(x[at, :, span]) for x in (y.keys, y.values))
                    for y, is_linear in linear
                    if not is_linear
                ],
                [tuple(self._own(x[at]) for x in (*y.windows, y.state)) for y, is_linear in linear if is_linear],
            )
            self._insert(keys[index], block, keys[: index + 1])

    def _own(self, x: Tensor) -> Tensor:
        return x.detach().to(self.device or x.device, copy=True, memory_format=torch.contiguous_format)

    def _chain(self, keys: Sequence[bytes]) -> list[Block]:
        """Known blocks from the first on; marks them as used, the first one last, so that parents outlive children."""
        found = []
        for key in keys:
            if key not in self._blocks:
                break
            found.append(key)
        for key in reversed(found):
            self._blocks.move_to_end(key)
        return [self._blocks[key] for key in found]

    def _insert(self, key: bytes, block: Block, chain: Sequence[bytes]) -> None:
        size = block.nbytes()
        with self._lock:
            orphan = block.parent and block.parent not in self._blocks
            if key in self._blocks or orphan or (self.max_bytes is not None and size > self.max_bytes):
                return
            self._blocks[key] = block
            self._bytes += size
            self._counts["stored"] += 1
            self._chain(chain)
            while self.max_bytes is not None and self._bytes > self.max_bytes:
                _, old = self._blocks.popitem(last=False)
                self._bytes -= old.nbytes()
                self._counts["evicted"] += 1

    def _restore(self, cache: K3Cache, chains: list[list[Block]], device: torch.device) -> None:
        length, full, linear = len(chains[0]) * self.block_size, 0, 0
        for layer, is_linear in zip(cache.layers, cache.is_linear, strict=True):
            if is_linear:
                ends = [chain[-1].states[linear] for chain in chains]
                *windows, state = (torch.cat(parts).to(device) for parts in zip(*ends, strict=True))
                layer.start_from(windows, state, length)
                linear += 1
            else:
                rows = [[torch.cat([b.latents[full][i] for b in chain], dim=2) for chain in chains] for i in range(2)]
                layer.update(*(torch.cat(row).to(device) for row in rows))
                full += 1
        cache.ids = torch.stack([torch.cat([block.tokens for block in chain]) for chain in chains]).to(device)

    # -- on disk ------------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike) -> None:
        """Write all blocks and the model's fingerprint as one safetensors file, whole or not at all.

        Raises:
            ValueError: no block is there.
        """
        with self._lock:
            blocks, mark = dict(self._blocks), self.fingerprint
        if not blocks or mark is None:
            raise ValueError("prefix_cache is empty: there is nothing to save")
        tensors, order = {}, {key: index for index, key in enumerate(blocks)}
        for index, block in enumerate(blocks.values()):
            tensors[f"{index}.tokens"] = block.tokens
            for name, groups in (("latents", block.latents), ("states", block.states)):
                for layer, group in enumerate(groups):
                    for part, tensor in enumerate(group):
                        tensors[f"{index}.{name}.{layer}.{part}"] = tensor.contiguous().cpu()
        parents = [order.get(block.parent, -1) for block in blocks.values()]
        about = {"fingerprint": mark, "block_size": self.block_size, "parents": parents}
        partial = f"{fspath(path)}.partial"
        save_file(tensors, partial, metadata={"k3_prefix_cache": json.dumps(about)})
        os.replace(partial, path)

    @classmethod
    def load(
        cls,
        path: str | PathLike,
        model: nn.Module,
        max_bytes: int | None = None,
        device: torch.device | str | None = None,
    ) -> "PrefixCache":
        """Read what `save` wrote.

        Args:
            path: the file.
            model: must be the model whose states it holds, with the same weights.
            max_bytes, device: as in the constructor; with device None the blocks stay on the CPU.

        Raises:
            ValueError: not such a file, a damaged one, another model or other weights.
        """
        with safe_open(fspath(path), framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("k3_prefix_cache", "null"))
            if about is None:
                raise ValueError(f"{fspath(path)} is not a prefix cache: its header does not say so")
            loaded = cls(about["block_size"], max_bytes, device)
            loaded.fingerprint = about["fingerprint"]
            loaded.bind(model)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
        keys: dict[int, bytes] = {-1: b""}
        groups: dict[tuple[int, str], dict[int, dict[int, Tensor]]] = {}
        for name, tensor in tensors.items():
            index, kind, *place = name.split(".")
            if kind != "tokens":
                layer, part = map(int, place)
                groups.setdefault((int(index), kind), {}).setdefault(layer, {})[part] = tensor
        # Parents stand behind their children, which leave the cache first.
        for index in reversed(range(len(about["parents"]))):
            parent = about["parents"][index]
            if parent not in keys:
                raise ValueError(f"{fspath(path)} is damaged: block {index} stands behind the block it follows")
            tokens = tensors[f"{index}.tokens"]
            keys[index] = _key(keys[parent], tokens)
            parts = [
                [
                    tuple(group[part] for part in sorted(group))
                    for _, group in sorted(groups.get((index, kind), {}).items())
                ]
                for kind in ("latents", "states")
            ]
            own = [[tuple(loaded._own(x) for x in group) for group in each] for each in parts] if device else parts
            block = Block(keys[parent], tokens, *own)
            # The latest come first, so what no longer fits is what would have left first.
            if max_bytes is None or loaded._bytes + block.nbytes() <= max_bytes:
                loaded._insert(keys[index], block, [])
        for index in range(len(about["parents"])):
            if keys[index] in loaded._blocks:
                loaded._blocks.move_to_end(keys[index])
        return loaded


def _key(parent: bytes, tokens: Tensor) -> bytes:
    return hashlib.blake2b(parent + tokens.numpy().tobytes(), digest_size=16).digest()
