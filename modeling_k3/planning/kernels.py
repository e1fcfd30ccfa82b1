"""What a CPU's backend keeps beside all tensors: one compiled kernel for each shape of a 16-bit product.

    bytes = 0.55 MiB * min(1024, shapes)        shapes = linear layers * lengths + products of an expert * token counts

oneDNN compiles a kernel when it meets a shape (tokens, out, in), and keeps the latest 1024; float32 has other kernels,
which are one for all shapes. Weights are not copied. How many tokens an expert gets is chance: of D calls that get W
tokens on average, W (1 - exp(-D / W)) different numbers are taken to come. Who has less room than that sets
ONEDNN_PRIMITIVE_CACHE_CAPACITY and LRU_CACHE_CAPACITY, both, to a lower number before Python starts; shapes beyond it
are compiled again, a few milliseconds each.
"""

import os
from math import exp

from modeling_k3.planning.components import iter_weights
from modeling_k3.planning.shape import Shape
from modeling_k3.planning.workload import Workload

#: Bytes of one kernel, measured; how many are kept.
KERNEL, KEPT = int(0.55 * 2**20), 1024


def kernel_bytes(shape: Shape, use: Workload) -> int:
    """Bytes of the compiled kernels after one prompt and some tokens, or after two training steps."""
    if use.dtype not in ("bfloat16", "float16"):
        return 0
    linear = len({weight.shape for weight, _ in iter_weights(shape) if weight.is_linear})
    trains = use.mode != "infer"
    # Its gradients are products as well: of the inputs, and of the weights.
    products = 3 if trains else 1
    chunk = use.context if trains else min(use.prefill_chunk, use.context)
    lengths = {use.batch * chunk} if trains else {use.batch * chunk, use.batch * (use.context % chunk), use.batch} - {0}
    shapes = products * linear * len(lengths)
    if shape.experts:
        mean = max(1.0, use.batch * chunk * shape.top_k / shape.experts)
        # Of the counts of a second training step about a quarter are new.
        pieces = 1.25 if trains else -(-use.context // chunk)
        calls = pieces * shape.num_moe * shape.experts
        shapes += 2 * products * mean * (1 - exp(-calls / mean))
    return KERNEL * min(kept(), round(shapes))


def kept() -> int:
    """How many kernels the backend keeps in this environment: the larger of both of its caches."""
    found = [os.environ.get(name, "") for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")]
    return min(KEPT, max(int(count) if count.isdecimal() else KEPT for count in found))
