"""Counters of what happens while a model runs: router load, prefix reuse, rollbacks, cache size. One object, one dict.

Nothing is counted, and nothing costs anything, unless a `K3Signals` is passed to `forward` or `generate`.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .cache import K3Cache
from .latent_moe import K3Router
from .prefix_cache import PrefixCache


class _Watch(threading.local):
    """What one thread is doing: watched blocks that it is inside of, and which of its tokens are real."""

    depth = 0
    real: Tensor | None = None


class K3Signals:
    """Collects over all calls it is passed to, from any thread; `as_dict` reports, `reset` forgets.

    Router load counts how many tokens chose each expert, without padding. For a layer with load n_e over N experts:

        entropy = -sum_e p_e log p_e / log N        p_e = n_e / sum n; 1 is even, 0 is one expert
        max_over_mean = max_e n_e / mean_e n_e      1 is even
    """

    def __init__(self) -> None:
        self._lock, self._watch = threading.Lock(), _Watch()
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        with self._lock:
            self._load: dict[int, Tensor] = {}
            #: One cache is kept alive: the last one, of which the report tells the size.
            self._last: K3Cache | None = None
            #: The counters of every cache seen, which outlive it, and how they stood when it was seen first.
            self._rollbacks: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
            self._prefix_cache: PrefixCache | None = None
            self._tokens = self._calls = 0

    @contextmanager
    def watch(self, model: nn.Module, prefix_cache: PrefixCache | None = None) -> Iterator["K3Signals"]:
        """Count what `model` does inside the block, in this thread."""
        if prefix_cache is not None:
            self._prefix_cache = prefix_cache
        if self._watch.depth:
            yield self
            return
        thread, handles = threading.get_ident(), []
        layers = [m for m in model.modules() if hasattr(m, "starts_block")]
        for index, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(self._before_layer(thread, index == 0), with_kwargs=True))
            for module in layer.modules():
                if isinstance(module, K3Router):
                    handles.append(module.register_forward_hook(self._after_router(thread, index)))
        self._watch.depth += 1
        try:
            yield self
        finally:
            self._watch.depth -= 1
            for handle in handles:
                handle.remove()
            self._watch.real = None

    def _before_layer(self, thread: int, is_first: bool) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() != thread or not is_first:
                return
            padding, cache = kwargs.get("padding_mask"), kwargs.get("cache")
            self._watch.real = None if padding is None else padding.flatten()
            count = args[0].shape[0] * args[0].shape[1] if padding is None else int(padding.sum())
            with self._lock:
                self._tokens += count
                self._calls += 1
                if cache is not None:
                    self._rollbacks.setdefault(id(cache.counters), (cache.counters, dict(cache.counters)))
                    self._last = cache

        return hook

    def _after_router(self, thread: int, layer: int) -> Any:
        def hook(module: K3Router, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
            if threading.get_ident() != thread:
                return
            real = self._watch.real
            chosen = output[2] if real is None else output[2][real]
            load = torch.bincount(chosen.flatten(), minlength=module.num_experts)
            with self._lock:
                self._load[layer] = self._load[layer] + load if layer in self._load else load

        return hook

    def as_dict(self) -> dict[str, Any]:
        """Everything counted so far.

        Returns:
            `calls` and `tokens` of the model; `router`: for each MoE layer `load` per expert, `entropy` and
            `max_over_mean`; `max_over_mean`: the worst layer's; `rollbacks`, `rolled_back_tokens`; `cache_bytes` by
            kind of the cache seen last; `prefix_cache`: its counters with `hit_rate`, where one was used.
        """
        with self._lock:
            loads, caches, last = sorted(self._load.items()), list(self._rollbacks.values()), self._last
            report: dict[str, Any] = {"calls": self._calls, "tokens": self._tokens}
        report["router"] = router = {layer: evenness(load) for layer, load in loads}
        report["max_over_mean"] = max((each["max_over_mean"] for each in router.values()), default=None)
        for name in ("rollbacks", "rolled_back_tokens"):
            report[name] = sum(counters[name] - before[name] for counters, before in caches)
        report["cache_bytes"] = None if last is None else last.nbytes()
        report["prefix_cache"] = None if self._prefix_cache is None else self._prefix_cache.stats()
        return report


def watched(
    signals: K3Signals | None, model: nn.Module, prefix_cache: PrefixCache | None = None
) -> AbstractContextManager[Any]:
    """`signals.watch`, or nothing for None.

    Raises:
        TypeError: something else (recognised by what it can do: two copies of this code may meet in one process).
    """
    if signals is None:
        return nullcontext()
    if not hasattr(signals, "watch"):
        raise TypeError(f"signals is a {type(signals).__name__}; allowed are None and a K3Signals")
    return signals.watch(model, prefix_cache)


def evenness(load: Tensor) -> dict[str, Any]:
    """`load` [N] as a list, with its `entropy` and `max_over_mean`, see `K3Signals`."""
    p = load.double() / load.sum().clamp(min=1)
    entropy = -(p * p.clamp(min=1e-300).log()).sum() / torch.tensor(float(len(load))).log().clamp(min=1e-9)
    return {"load": load.tolist(), "entropy": entropy.item(), "max_over_mean": (p.max() * len(load)).item()}
