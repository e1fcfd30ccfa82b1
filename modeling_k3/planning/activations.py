"""The working set of one forward without gradients: what is alive at the worst moment of each part.

Each function counts the tensors that the code of its part holds at once. Below float32 many of them exist twice, since
sums, gates and states are computed in float32: `_narrow` says whether they do.
"""

from dataclasses import dataclass
from math import ceil

from modeling_k3.planning.shape import Layer, Shape

#: How much more than its even share of tokens the busiest expert is taken to get.
LOAD = 4
#: Tiles of `kda_chunk`, `mla_forms`: elements of a slab, keys per block, scores per tile and per absorbed block.
_SLAB, _CHUNK = 2**17, 16
_KEY_BLOCK, _TILE_SCORES, _BLOCK_SCORES = 1024, 2**18, 2**22
#: Keys that a thread of torch's fused kernel for a CPU reads at once.
_KERNEL_KEYS = 512
#: Elements of a block in which a gated activation is computed.
BLOCK = 2**16
#: Tokens up to which KDA runs token by token on a CPU.
_RECURRENT_UP_TO = 4


@dataclass(frozen=True)
class Call:
    """One forward.

    Args:
        rows, length: B and T.
        past: tokens in the cache.
        item: bytes per number of the activations.
        caches: a K3Cache is filled.
        logits: positions per row for which logits are wanted.
        experts: how routed experts are held; "full" uses grouped products over all experts.
    """

    rows: int
    length: int
    past: int = 0
    item: int = 4
    caches: bool = True
    logits: int = 1
    experts: str = "full"

    @property
    def tokens(self) -> int:
        """B T."""
        return self.rows * self.length

    @property
    def wide(self) -> int:
        """Bytes per number of what is never computed below float32."""
        return max(4, self.item)

    @property
    def cast(self) -> int:
        """Bytes per number of a float32 copy; 0 where the activations are as wide already."""
        return self.wide if self.item < self.wide else 0


def forward_peak(shape: Shape, call: Call) -> dict[str, int]:
    """Bytes at the worst moment of a forward, beside weights, states and latents.

    Returns:
        `AttnRes sources`: the finished blocks and the embedding at that moment; `prefill peak`: everything else that
        is alive in the worst layer; `logits peak`: the same for the head; `peak`: of both moments.
    """
    stream = call.tokens * shape.hidden * call.item
    worst, sources, mixes = 0, 0, shape.block is not None
    # Among layers of one kind the last one reads most sources.
    for layer, _ in shape.kinds.values():
        blocks = shape.num_sources(layer.index)
        blocks += shape.block is None and layer.index > 0
        inside = max(
            _mix(shape, call) + stream,
            (1 + mixes) * stream + max(_norm(call, shape.hidden), attention_peak(shape, layer, call)),
            (2 + mixes - layer.starts_block) * stream + _mix(shape, call),
            (3 + mixes - layer.starts_block) * stream
            + max(_norm(call, shape.hidden), feed_forward_peak(shape, layer, call)),
        )
        if blocks * stream + inside > worst + sources * stream:
            worst, sources = inside, blocks
    logits = call.rows * call.logits * shape.vocab * call.item + stream
    head = shape.num_sources(len(shape.layers)) * stream + max(logits, _norm(call, shape.hidden))
    return {
        "AttnRes sources": sources * stream,
        "prefill peak": worst,
        "logits peak": head,
        "peak": max(head, worst + sources * stream),
    }


def _mix(shape: Shape, call: Call) -> int:
    if shape.block is None:
        return 0
    return call.tokens * shape.hidden * (2 * call.cast + call.wide)


def _norm(call: Call, width: int, tokens: int | None = None) -> int:
    return (call.tokens if tokens is None else tokens) * width * 2 * call.wide


def activation_peak(shape: Shape, call: Call, count: int) -> int:
    """Bytes of a gated activation over `count` pairs, its inputs included."""
    if not shape.situ:
        return count * 4 * call.item
    # Wide numbers exist for one block: with 16 bits the places in the tables and both factors, else the steps of one.
    return count * 3 * call.item + min(count, BLOCK) * (4 if call.cast else 5) * call.wide


def mlp_peak(shape: Shape, call: Call, inner: int) -> int:
    """Bytes of a dense MLP or of the shared experts, beside the input."""
    pairs = call.tokens * inner
    return max(activation_peak(shape, call, pairs), 3 * pairs * call.item + call.tokens * shape.hidden * call.item)


def feed_forward_peak(shape: Shape, layer: Layer, call: Call) -> int:
    """Bytes of the feed-forward part of a layer, beside its input."""
    if not layer.is_moe:
        return mlp_peak(shape, call, shape.inner)
    n, width, item, wide = call.tokens, shape.expert_width, call.item, call.wide
    held = n * (width * item if shape.latent else 0)
    routed = shape.latent if shape.routes_on_latent else shape.hidden
    router = call.cast * (n + shape.experts) * routed + n * shape.experts * wide
    router = max(router, 3 * n * shape.experts * wide)
    held_after = held + n * shape.experts * wide + n * shape.top_k * (wide + 8)
    combined = n * width * (wide + (call.cast and item)) + held_after
    out = n * shape.hidden * item
    steps = [held + router, held_after + experts_peak(shape, call), combined + out]
    if shape.latent_norm:
        steps.append(combined + _norm(call, width))
    if shape.shared is not None:
        steps.append(held_after + n * width * item + out + mlp_peak(shape, call, shape.shared * shape.expert_inner))
    return max(steps)


def experts_peak(shape: Shape, call: Call) -> int:
    """Bytes of the routed experts, beside their input."""
    n, width, inner, item, wide = call.tokens, shape.expert_width, shape.expert_inner, call.item, call.wide
    if call.experts == "full":
        pairs = n * shape.top_k
        # Rows sorted by expert, their two products, the activation, the outputs, the weighted outputs, the sums.
        ids = pairs * (2 * 8 + wide)
        steps = (
            pairs * (width + 2 * inner) * item,
            activation_peak(shape, call, pairs * inner),
            pairs * (inner * item + width * (item + wide)),
            pairs * (inner * item + width * wide) + n * width * (wide + (call.cast and item)),
        )
        return ids + max(steps)
    share = min(n, ceil(LOAD * n * shape.top_k / max(1, shape.experts)))
    expanded = 2 * inner * width * item
    one = share * width * (2 * item + wide) + activation_peak(shape, call, share * inner)
    return expanded + one + 2 * n * width * wide


def attention_peak(shape: Shape, layer: Layer, call: Call) -> int:
    """Bytes of a layer's attention, beside its input."""
    return kda_peak(shape, call) if layer.is_kda else mla_peak(shape, call)


def kda_peak(shape: Shape, call: Call) -> int:
    """Bytes of a KDA layer: inputs, convolved streams, decay, normalised q and k, output, slabs and states."""
    n, width, item, wide, cast = call.tokens, shape.kda_width, call.item, call.wide, call.cast
    inputs = n * (3 * width + shape.key + shape.heads) * item
    state = call.rows * shape.heads * shape.key**2 * wide
    windows = 3 * call.rows * width * shape.taps * item
    conv = n * width * (2 * item + item + cast + 2 * wide + (cast and item))
    core = n * width * (3 * item + item + wide + 2 * wide + cast)
    if call.length <= _RECURRENT_UP_TO:
        core += n * width * 6 * wide + 2 * state
    else:
        core += n * width * wide + 2 * state + slab_bytes(shape, call)
    gate = n * width * (wide + item + 3 * wide)
    return inputs + windows + max(conv, core, state + gate)


def slab_bytes(shape: Shape, call: Call) -> int:
    """Bytes of the buffers of one slab of the chunk form; they do not grow with the length."""
    # x (two), k_in, k_out, g, the decay it is made from, o; and six matrices of 16 columns for each 16 tokens.
    return (7 * shape.key + 6 * _CHUNK) * slab_tokens(shape, call) * call.wide


def slab_tokens(shape: Shape, call: Call) -> int:
    """Tokens of a slab, those of each head counted."""
    rows = min(call.rows * shape.heads, max(1, _SLAB // shape.key**2))
    tokens = min(-(-call.length // _CHUNK), max(1, _SLAB // (rows * _CHUNK * shape.key))) * _CHUNK
    return rows * tokens


def mla_peak(shape: Shape, call: Call) -> int:
    """Bytes of an MLA layer: projections, then the fused kernel on a first piece, or tiles over a history."""
    n, heads, item, wide, cast = call.tokens, shape.mla_heads, call.item, call.wide, call.cast
    query, value = heads * (shape.nope + shape.rope), heads * shape.value
    held = n * item * (query + 2 * shape.rank + shape.rope)
    gated = n * value * (item + cast + 2 * wide) * shape.mla_gate
    out = n * item * (value + shape.hidden)
    if call.past:
        return held + max(_over_history(shape, call), gated, out)
    # A CPU gets queries, keys and values of one width, and a result as wide, which is cut.
    width, expanded = max(query, value), heads * (shape.nope + shape.value)
    pads_query, pads_value = query < width, value < width
    states = n * item * (width * (1 + pads_query) + (width if pads_value else expanded))
    padding = n * item * (expanded + query + width * (2 * pads_query + pads_value))
    result = n * item * (width + value * (query != value))
    return held + max(padding, states + max(result, n * item * width + tile_bytes(call), gated, out))


def tile_bytes(call: Call) -> int:
    """Bytes of the scores that one thread of the fused kernel holds."""
    rows = 256 if call.length >= 768 else 64 if call.length >= 192 else 32
    return min(rows, call.length) * min(_KERNEL_KEYS, call.length) * (call.wide + (call.cast and call.item))


def _over_history(shape: Shape, call: Call) -> int:
    n, heads, item, wide, cast = call.tokens, shape.mla_heads, call.item, call.wide, call.cast
    total = call.past + call.length
    more = 2 * shape.rank - (shape.nope + shape.value)
    absorbed = call.length * more <= shape.rank * (shape.nope + shape.value)
    wide_query = n * heads * (shape.nope + shape.rope) * wide
    if absorbed:
        block = max(_KEY_BLOCK, _BLOCK_SCORES // (n * heads))
        block = min(block, 8 * _KEY_BLOCK if cast else total, total)
        keys = call.rows * block * (shape.rank + shape.rope) * cast
        scores = 3 * n * heads * block * wide
        sums = n * heads * shape.rank * wide * (total > block)
        return n * heads * (shape.rank + shape.rope) * wide + keys + scores + sums
    block = min(_KEY_BLOCK, total)
    tile = min(call.length, max(1, _TILE_SCORES // (call.rows * heads * block)))
    keys = call.rows * block * ((shape.rank + shape.rope) * cast + heads * (shape.nope + shape.value) * wide)
    weights = heads * (shape.nope + shape.value) * shape.rank * cast
    scores = 3 * call.rows * heads * tile * block * wide
    # The keys of a block are dropped when those of the next one are there.
    keys *= 1 + (total > block)
    return wide_query + keys + weights + scores + n * heads * shape.value * (2 * wide + item)
