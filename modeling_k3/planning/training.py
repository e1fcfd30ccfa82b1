"""Training: what a forward keeps for the backward, the worst moment of both, gradients and optimizer states."""

from dataclasses import dataclass

from modeling_k3.planning.activations import BLOCK, Call, slab_tokens, tile_bytes
from modeling_k3.planning.components import layer_weights, outer_weights
from modeling_k3.planning.shape import Layer, Shape

#: States per trained weight, in the weight's own number format.
OPTIMIZERS = {"adamw": 2, "muon": 1, "sgd": 0}
_SLAB, _CHUNK = 2**17, 16


@dataclass(frozen=True)
class Training:
    """What is trained, and how.

    Args:
        lora_rank: None trains every weight; otherwise low-rank pairs beside the attention's linear layers only.
        optimizer: one of `OPTIMIZERS`.
        checkpointing: layers keep their inputs only and are run again in the backward pass.
    """

    lora_rank: int | None = None
    optimizer: str = "adamw"
    checkpointing: bool = False


def saved_by_layer(shape: Shape, layer: Layer, call: Call) -> tuple[int, int]:
    """Bytes that attention and feed-forward part of one layer keep for the backward, their mixes and norms included."""
    sources = shape.num_sources(layer.index)
    before = _before(shape, call, sources), _before(shape, call, sources + layer.starts_block)
    attention = _kda(shape, call) if layer.is_kda else _mla(shape, call)
    feed_forward = _moe(shape, call) if layer.is_moe else _mlp(shape, call, call.tokens, shape.inner)
    return before[0] + attention, before[1] + feed_forward


def _before(shape: Shape, call: Call, sources: int) -> int:
    """Running sum, mixture with three numbers for each source, normalised."""
    if shape.block is None:
        return call.tokens * shape.hidden * 2 * call.item
    return call.tokens * (shape.hidden * 3 * call.item + sources * 3 * call.wide)


def _kda(shape: Shape, call: Call) -> int:
    n, width, item, wide = call.tokens, shape.kda_width, call.item, call.wide
    # Wide: q and k before and after they are normalised; v; decay: logits, sigmoid, log decay. Inputs of convolutions.
    streams = n * width * ((2 + 2 + 1 + 3) * wide + 3 * item)
    # Output, its gate, and what both give.
    output = n * width * (wide + 2 * item)
    small = n * (shape.key * item + shape.heads * 4 * wide)
    return streams + output + small + _border_states(shape, call)


def _border_states(shape: Shape, call: Call) -> int:
    """One state for each slab of chunks."""
    rows = call.rows * shape.heads
    group = min(rows, max(1, _SLAB // shape.key**2))
    step = max(1, _SLAB // (group * _CHUNK * shape.key)) * _CHUNK
    return -(-call.length // step) * rows * shape.key**2 * call.wide


def _mla(shape: Shape, call: Call) -> int:
    n, heads, item, wide = call.tokens, shape.mla_heads, call.item, call.wide
    query, value = heads * (shape.nope + shape.rope), heads * shape.value
    width, is_copied = max(query, value), query != value
    # Inputs and results of the norms; the latent's input stands beside the shared part.
    kept = n * item * (2 * shape.rank + shape.rope + 2 * (shape.q_rank or 0))
    # What the fused kernel reads and returns, all of one width, and a logarithm for each head.
    kept += n * item * (3 * width + (width if value < width else heads * (shape.nope + shape.value))) + n * heads * wide
    # The result is copied to be cut, or to bring its heads together.
    return kept + (_mla_gate(shape, call) if shape.mla_gate else n * value * item * is_copied)


def _mla_gate(shape: Shape, call: Call) -> int:
    """The result in at least float32, unless that is what the kernel returned; sigmoid; product."""
    is_copied = shape.nope + shape.rope != shape.value or call.cast > 0
    return call.tokens * shape.mla_heads * shape.value * (call.wide * (is_copied + 1) + call.item)


def _activation(shape: Shape, call: Call) -> int:
    """Bytes kept for one pair of gate and up, the product included."""
    # SiTU keeps its two inputs only; SiLU's value is kept as well.
    return (3 if shape.situ else 4) * call.item


def _mlp(shape: Shape, call: Call, tokens: int, inner: int) -> int:
    return tokens * inner * _activation(shape, call)


def _moe(shape: Shape, call: Call) -> int:
    n, width, item, wide, cast = call.tokens, shape.expert_width, call.item, call.wide, call.cast
    routed = shape.latent if shape.routes_on_latent else shape.hidden
    pairs = n * shape.top_k
    router = cast * (n + shape.experts) * routed + n * shape.experts * wide + pairs * (wide + 8) + n * wide
    # Places and tokens of the sorted pairs and their weights; neither sorted inputs nor outputs.
    kept = router + pairs * (2 * 8 + wide) + _mlp(shape, call, pairs, shape.expert_inner)
    if call.experts != "full":
        kept += pairs * width * item
    if shape.latent is not None:
        kept += n * width * item * (3 if shape.latent_norm else 2)
    if shape.shared is not None:
        kept += _mlp(shape, call, n, shape.shared * shape.expert_inner)
    return kept


def trained_bytes(shape: Shape, item: int, training: Training) -> list[tuple[int, int]]:
    """Bytes of the weights that get gradients, for each layer: in its attention, in the rest."""
    pairs = []
    for layer in shape.layers:
        found = [0, 0]
        for weight in layer_weights(shape, layer):
            is_attention = weight.component in ("KDA", "MLA")
            if training.lora_rank is None:
                found[not is_attention] += weight.nbytes(item) * weight.is_trained
            elif is_attention and weight.is_linear:
                found[0] += training.lora_rank * sum(weight.shape) * item
        pairs.append((found[0], found[1]))
    return pairs


def training_peak(shape: Shape, call: Call, training: Training) -> dict[str, int]:
    """Bytes of one training step beside the weights.

    Walks the layers back from the last one: what is kept shrinks while gradients grow.

    Returns:
        `saved`, `gradients`, `optimizer`, `adapters`; `AttnRes sources`: the block sums, which are among the saved;
        and `peak`: of activations and gradients together, beside optimizer states and adapters.
    """
    stream = call.tokens * shape.hidden * call.item
    grads = trained_bytes(shape, call.item, training)
    full = training.lora_rank is None
    outside = sum(weight.nbytes(call.item) for weight in outer_weights(shape)) * full
    embedding = shape.vocab * shape.hidden * call.item * full
    kept = [saved_by_layer(shape, layer, call) for layer in shape.layers]
    top = _before(shape, call, shape.num_sources(len(shape.layers)))
    saved = top + (len(kept) * stream if training.checkpointing else sum(map(sum, kept)))
    logits = call.tokens * shape.vocab
    # The logarithms of the softmax and the gradients of both; the logits themselves are gone by then. After that the
    # head's gradient meets theirs.
    done = outside - embedding * (not shape.tied)
    moments = [saved + logits * 3 * call.wide, saved + logits * (call.wide + (call.cast and call.item)) + done]
    below = saved - top
    for index in reversed(range(len(kept))):
        layer, (attention, feed_forward) = shape.layers[index], kept[index]
        flow = (shape.num_sources(index) + 2) * stream
        again = attention + feed_forward - 2 * stream if training.checkpointing else 0
        moments.append(below + again + flow + done + feed_forward_backward(shape, layer, call))
        below -= stream if training.checkpointing else feed_forward
        done += grads[index][1]
        again = max(0, attention - stream) if training.checkpointing else 0
        moments.append(below + again + flow + done + attention_backward(shape, layer, call))
        below -= 0 if training.checkpointing else attention
        done += grads[index][0]
    gradients = outside + sum(map(sum, grads))
    return {
        "AttnRes sources": (shape.num_sources(len(kept)) - 1) * stream,
        "saved": saved,
        "gradients": gradients,
        "optimizer": OPTIMIZERS[training.optimizer] * gradients,
        "adapters": 0 if full else gradients,
        "peak": max(*moments, gradients + stream),
    }


def feed_forward_backward(shape: Shape, layer: Layer, call: Call) -> int:
    """Bytes that the backward of a feed-forward part needs beside what is kept."""
    if not layer.is_moe:
        return _activation_backward(shape, call, call.tokens * shape.inner)
    n, width, inner, item, wide = call.tokens, shape.expert_width, shape.expert_inner, call.item, call.wide
    pairs = n * shape.top_k
    # Gradients of the outputs, of the activation and of its weighted form; then the weighted gradients of the outputs.
    leave = inner * (wide + item) + width * item + max(inner * call.cast, width * (wide + (call.cast and item)))
    routed = max(pairs * leave, _activation_backward(shape, call, pairs * inner))
    if shape.shared is None:
        return routed
    # The shared experts come first, and what they kept is gone by then.
    shared = n * shape.shared * inner
    routed += n * shape.hidden * item - shared * _activation(shape, call)
    return max(routed, _activation_backward(shape, call, shared))


def _activation_backward(shape: Shape, call: Call, count: int) -> int:
    """Gradients of the product, of gate and of up, where the product itself is gone; and what exists for one block."""
    return 2 * count * call.item + shape.situ * min(count, BLOCK) * (6 if call.cast else 8) * call.wide


def attention_backward(shape: Shape, layer: Layer, call: Call) -> int:
    """Bytes that the backward of an attention needs beside what is kept."""
    if layer.is_kda:
        width = call.tokens * shape.kda_width
        # First the norm; it is gone when a slab walks back with 16 vectors, six matrices and the share of a state.
        slab = slab_tokens(shape, call) * (16 * shape.key + 6 * _CHUNK + shape.key**2 // _CHUNK)
        return max(3 * width * call.wide, width * (call.wide - call.item) + slab * call.wide)
    n, value = call.tokens, shape.mla_heads * shape.value
    width = shape.mla_heads * max(shape.nope + shape.rope, shape.value)
    # The gradient of the result, as it comes and widened, and those of the kernel's inputs; scores and their gradient.
    kernel = 5 * n * width * call.item + 2 * tile_bytes(call)
    if not shape.mla_gate:
        return kernel
    # What the gate kept is gone when the kernel runs.
    return max(n * value * (3 * call.wide - call.item), kernel - _mla_gate(shape, call))
