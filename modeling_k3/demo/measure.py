"""What the report is made of: bits per byte, tokens per second, memory, sizes."""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from modeling_k3.experts import iter_experts

try:
    import resource
except ImportError:
    # Windows.
    resource = None

WINDOW = 1024
_BATCH = 4


@torch.no_grad()
def bits_per_byte(
    model: PreTrainedModel, stream: Tensor, num_bytes: int, watch: Callable[[float], None] = lambda share: None
) -> float:
    """Bits the model needs for a stream of ids, per byte of text in it.

    The stream is read in windows of 1024 that overlap by one id, so every id but the first is predicted exactly once.
    Control ids are paid for as well, but do not count as text.

    Args:
        model: causal LM; its training mode is restored.
        stream: [n] ids.
        num_bytes: text bytes in the stream.
        watch: told the share that is done, after every few windows.

    Returns:
        Bits per byte; log2 of the vocabulary size for a model that knows nothing.
    """
    starts = range(0, len(stream) - 1, WINDOW)
    full = [stream[start : start + WINDOW + 1] for start in starts if start + WINDOW < len(stream)]
    batches = [torch.stack(full[i : i + _BATCH]) for i in range(0, len(full), _BATCH)]
    if (rest := (len(stream) - 1) % WINDOW) > 0:
        batches.append(stream[-rest - 1 :].unsqueeze(0))
    nats = 0.0
    for done, batch in enumerate(batches, start=1):
        nats += _nats(model, batch.long())
        watch(done / len(batches))
    return nats / math.log(2) / num_bytes


@torch.no_grad()
def bits_per_id(model: PreTrainedModel, windows: Tensor) -> float:
    """Mean bits per id over windows [n, T + 1]: a quick look at a sample of the held-out text."""
    nats = sum(_nats(model, batch.long()) for batch in windows.split(_BATCH))
    return nats / math.log(2) / (windows.shape[0] * (windows.shape[1] - 1))


@torch.no_grad()
def sampled_bits_per_byte(
    model: PreTrainedModel, windows: Tensor, watch: Callable[[float], None] = lambda share: None
) -> float:
    """`bits_per_byte` over a sample: windows [n, T + 1] of byte ids, in which ids from 256 on are no text."""
    nats, parts = 0.0, windows.split(_BATCH)
    for done, batch in enumerate(parts, start=1):
        nats += _nats(model, batch.long())
        watch(done / len(parts))
    return nats / math.log(2) / int((windows[:, 1:] < 256).sum())


def sample_windows(stream: Tensor, count: int, length: int = 513) -> Tensor:
    """Windows [count, length] spread evenly over a stream, the same every time; fewer and shorter from a short one."""
    length = min(length, len(stream))
    count = max(min(count, len(stream) // length), 1)
    stride = (len(stream) - length) // max(count - 1, 1)
    return torch.stack([stream[i * stride : i * stride + length] for i in range(count)])


def _nats(model: PreTrainedModel, ids: Tensor) -> float:
    """Summed cross-entropy of ids [B, T + 1], each predicted from those before it in its row."""
    was_training = model.training
    model.eval()
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    model.train(was_training)
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum").item()


@torch.no_grad()
def speed(model: PreTrainedModel, prompt: Tensor, *, new_tokens: int = 64, repeats: int = 3) -> dict[str, Any]:
    """Tokens per second of reading a prompt and of writing, one sequence at a time.

    Args:
        model: causal LM in evaluation mode.
        prompt: [T] ids.
        new_tokens: how many tokens are written.
        repeats: the median of this many runs counts, after one that does not.

    Returns:
        `prefill_tokens_per_second`, `decode_tokens_per_second` and the two lengths.
    """
    ids = prompt.long().unsqueeze(0)
    prefill, decode = [], []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        read = time.perf_counter()
        # One token at a time through `generate`, with all that a user of it pays for.
        model.generate(
            ids[:, :16],
            attention_mask=torch.ones_like(ids[:, :16]),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )
        decode.append(time.perf_counter() - read)
        prefill.append(read - begin)
        del output
    return {
        "prefill_tokens_per_second": round(len(prompt) / statistics.median(prefill[1:]), 1),
        "decode_tokens_per_second": round(new_tokens / statistics.median(decode[1:]), 1),
        "prefill_tokens": len(prompt),
        "decode_tokens": new_tokens,
    }


def peak_memory() -> int:
    """Bytes this process has had in memory at most since it started."""
    if resource is None:
        # Comes with accelerate.
        import psutil

        return psutil.Process().memory_info().peak_wset
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def usable_cores() -> int:
    """CPU cores this process may keep busy: what its affinity allows, or a container's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        # No such file, or the quota is "max": nothing is limited.
        pass
    return max(cores, 1)


def count_parameters(model: PreTrainedModel) -> dict[str, int]:
    """All weights, and those that one token passes through (of the routed experts, only the chosen share).

    Packed experts count as the weights they hold, not as bytes.
    """
    total = model.num_parameters()
    experts = sum(module.count_weights() for _, module in iter_experts(model))
    config = model.config
    share = config.num_experts_per_token / config.num_experts if experts else 1.0
    return {"total": total, "active": total - experts + round(experts * share)}
