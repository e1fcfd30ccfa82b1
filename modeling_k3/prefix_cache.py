"""PrefixCache: prompts that begin alike share the work of their beginning.

    key(block i) = hash(key(block i - 1), tokens of block i)          blocks of `block_size` tokens from the start

A block holds its latents, for every MLA layer, and the state and windows at its end, for every KDA layer: both kinds
are needed to go on. At the released dimensions that is 13.5 MiB of latents for 512 tokens and 429 MiB of states, so the
size of a block decides how much memory a token of prefix costs. Source: arXiv 2607.24653 section 5.4.1.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .cache import K3Cache
from .fingerprint import fingerprint, weights_version
from .prefix_files import Block, block_key, open_blocks, write_blocks


class Binding(NamedTuple):
    """What `PrefixCache.bind` hands out: one model's right to read and store, until `clear`.

    Args:
        epoch: how often the cache had been cleared.
        devices: where each layer computes, None for the default.
    """

    epoch: int
    devices: list[torch.device] | None = None


class Prompt(NamedTuple):
    """What `PrefixCache.fill` hands out for `store`.

    Args:
        keys: for each row, of all its complete blocks.
        epoch: see `Binding`.
    """

    keys: list[list[bytes]]
    epoch: int


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
        self._bytes = self._epoch = 0
        self._counts = dict.fromkeys(
            ("lookups", "hits", "asked_tokens", "hit_tokens", "stored", "evicted", "bypassed"), 0
        )
        self._known: WeakKeyDictionary[nn.Module, tuple[object, ...]] = WeakKeyDictionary()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._blocks)

    def __bool__(self) -> bool:
        # An empty one is not the same as none.
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrefixCache":
        # Blocks are never written to, so both may hold the same ones.
        twin = PrefixCache(self.block_size, self.max_bytes, self.device)
        with self._lock:
            twin.fingerprint, twin._blocks, twin._bytes = self.fingerprint, self._blocks.copy(), self._bytes
            twin._counts = dict(self._counts)
        return twin

    def __reduce__(self) -> Any:
        raise TypeError("a PrefixCache cannot be pickled; allowed are save(path) and PrefixCache.load(path, model)")

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
            # Calls that began before this may still want to store.
            self._epoch += 1

    def bind(self, model: nn.Module) -> Binding:
        """Make sure that the blocks were computed by this model as it is now.

        Returns:
            For `fill`: with it, blocks of another model, bound by another thread after `clear`, are not mixed in.

        Raises:
            ValueError: by another model, its weights or its config have changed since, or they cannot be read; see
                `fingerprint.weights_version` for what is noticed from one call to the next.
        """
        layers = [module for module in model.modules() if hasattr(module, "starts_block")]
        devices = [_device_of(layer, torch.device("cpu")) for layer in layers]
        version = weights_version(model)
        with self._lock:
            if self.fingerprint is not None and self._known.get(model) == version:
                return Binding(self._epoch, devices)
            found = fingerprint(model)
            if self.fingerprint not in (None, found):
                raise ValueError(
                    f"prefix_cache holds states of the model {self.fingerprint}, this one is {found}: another model, "
                    "or its weights have changed; allowed is the same model, or clear() first"
                )
            self.fingerprint = found
            self._known[model] = version
            return Binding(self._epoch, devices)

    # -- one prompt ---------------------------------------------------------------------------------------------

    def keys(self, tokens: Tensor) -> list[bytes]:
        """Keys of the complete blocks of one row of tokens [T]."""
        data, keys, parent = tokens.to("cpu", torch.int64).contiguous(), [], b""
        for start in range(0, len(data) - self.block_size + 1, self.block_size):
            parent = block_key(parent, data[start : start + self.block_size])
            keys.append(parent)
        return keys

    def fill(self, cache: K3Cache, ids: Tensor, spare: int = 1, binding: Binding | None = None) -> tuple[int, Prompt]:
        """Put the longest known prefix that all rows have into an empty cache.

        Args:
            cache: an empty cache.
            ids: [B, T], no padding.
            spare: tokens at the end to leave: the one whose logits are wanted.
            binding: from `bind`; None: whatever is there belongs to the caller's model, whose layers all compute
                where `ids` are.

        Returns:
            Its length in tokens, and what `store` needs.
        """
        rows = [self.keys(row) for row in ids]
        usable = (ids.shape[1] - spare) // self.block_size
        with self._lock:
            epoch = self._epoch if binding is None else binding.epoch
            chains = [self._chain(row[:usable]) if epoch == self._epoch else [] for row in rows]
            depth = min(len(chain) for chain in chains)
            self._counts["lookups"] += len(rows)
            self._counts["asked_tokens"] += ids.numel()
            self._counts["hits"] += len(rows) * (depth > 0)
            self._counts["hit_tokens"] += depth * self.block_size * len(rows)
        if depth:
            devices = [ids.device] * len(cache.layers) if binding is None else binding.devices
            self._restore(cache, [chain[:depth] for chain in chains], devices)
            cache.ids = ids[:, : depth * self.block_size].detach().clone()
        return depth * self.block_size, Prompt(rows, epoch)

    def count_bypass(self) -> None:
        """Count a call that could not use the cache."""
        with self._lock:
            self._counts["bypassed"] += 1

    def store(self, cache: K3Cache, ids: Tensor, prompt: Prompt, stop: int) -> None:
        """Store the block that ends at `stop`, where the cache stands now, for every row that lacks it.

        Nothing is stored if `clear` was called since `fill`: the blocks may belong to another model by now.

        Args:
            cache: has seen exactly the tokens before `stop`.
            ids, prompt: as given to and returned by `fill`.
            stop: a multiple of the block size.
        """
        index, span = stop // self.block_size - 1, slice(stop - self.block_size, stop)
        linear = list(zip(cache.layers, cache.is_linear, strict=True))
        for row, keys in enumerate(prompt.keys):
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
            self._insert(keys[index], block, keys[: index + 1], prompt.epoch)

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

    def _insert(self, key: bytes, block: Block, chain: Sequence[bytes], epoch: int = 0) -> None:
        size = block.nbytes()
        with self._lock:
            orphan = block.parent and block.parent not in self._blocks
            is_too_large = self.max_bytes is not None and size > self.max_bytes
            if key in self._blocks or orphan or is_too_large or epoch != self._epoch:
                return
            self._blocks[key] = block
            self._bytes += size
            self._counts["stored"] += 1
            self._chain(chain)
            while self.max_bytes is not None and self._bytes > self.max_bytes:
                _, old = self._blocks.popitem(last=False)
                self._bytes -= old.nbytes()
                self._counts["evicted"] += 1

    def _restore(self, cache: K3Cache, chains: list[list[Block]], devices: Sequence[torch.device]) -> None:
        length, full, linear = len(chains[0]) * self.block_size, 0, 0
        for layer, is_linear, device in zip(cache.layers, cache.is_linear, devices, strict=True):
            if is_linear:
                ends = [chain[-1].states[linear] for chain in chains]
                *windows, state = (torch.cat(parts).to(device) for parts in zip(*ends, strict=True))
                layer.start_from(windows, state, length)
                linear += 1
            else:
                rows = [[torch.cat([b.latents[full][i] for b in chain], dim=2) for chain in chains] for i in range(2)]
                layer.update(*(torch.cat(row).to(device) for row in rows))
                full += 1

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
        write_blocks(path, blocks, mark)

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
        with open_blocks(path) as file:
            loaded = cls(file.block_size, max_bytes, device)
            loaded.fingerprint = file.fingerprint
            loaded.bind(model)
            for key, block in file.blocks():
                if device is not None:
                    groups = ([tuple(map(loaded._own, x)) for x in each] for each in (block.latents, block.states))
                    block = Block(block.parent, block.tokens, *groups)
                # The latest come first, so what no longer fits is what would have left first.
                if max_bytes is None or loaded._bytes + block.nbytes() <= max_bytes:
                    loaded._insert(key, block, [])
        # The file has the least recently used first.
        for key in reversed(list(loaded._blocks)):
            loaded._blocks.move_to_end(key)
        return loaded


def _device_of(layer: nn.Module, default: torch.device) -> torch.device:
    """Where a decoder layer computes: what a hook says, or where its first weight is."""
    hook = getattr(layer, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        device = getattr(each, "execution_device", None)
        if device is not None:
            return torch.device(device)
    first = next((x for x in layer.parameters() if not x.is_meta), None)
    return default if first is None else first.device
