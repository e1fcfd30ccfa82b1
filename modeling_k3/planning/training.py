"""Training: what a forward keeps for the backward, the worst moment of both, gradients and optimizer states."""

from dataclasses import dataclass

from modeling_k3.planning.activations import Call, is_fused
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
    before = _before(shape, call)
    attention = _kda(shape, call) if layer.is_kda else _mla(shape, call)
    feed_forward = _moe(shape, call) if layer.is_moe else _mlp(shape, call, call.tokens, shape.inner)
    return before + attention, before + feed_forward


def _before(shape: Shape, call: Call) -> int:
    """Running sum, mixture (as its norm reads it), normalised, weighted."""
    mixture = call.wide if shape.block is not None or call.cast else 0
    return call.tokens * shape.hidden * (call.item + mixture + 2 * call.item)


def _kda(shape: Shape, call: Call) -> int:
    n, width, item, wide = call.tokens, shape.kda_width, call.item, call.wide
    # q and k: convolved, before SiLU, after it, normalised; v: without the last; decay: logits, sigmoid, log decay.
    streams = n * width * wide * (4 + 4 + 3 + 3)
    output = n * width * (4 * wide + item)
    small = n * (shape.key * item + shape.heads * 2 * wide)
    return streams + output + small + _border_states(shape, call)


def _border_states(shape: Shape, call: Call) -> int:
    """One state for each slab of chunks."""
    rows = call.rows * shape.heads
    group = min(rows, max(1, _SLAB // shape.key**2))
    step = max(1, _SLAB // (group * _CHUNK * shape.key)) * _CHUNK
    return -(-call.length // step) * rows * shape.key**2 * call.wide


def _mla(shape: Shape, call: Call) -> int:
    n, heads, item, wide, cast = call.tokens, shape.mla_heads, call.item, call.wide, call.cast
    query, value = heads * (shape.nope + shape.rope), heads * shape.value
    normed = cast or wide
    kept = n * shape.rank * (normed + 2 * item)
    if shape.q_rank is not None:
        kept += n * shape.q_rank * (normed + 2 * item)
    if is_fused(shape):
        kept += n * item * (2 * query + heads * (shape.nope + shape.value) + value)
    else:
        # Scaled queries and keys, values, and the softmax.
        kept += n * (2 * query + value) * wide + call.rows * heads * call.length**2 * wide
    if shape.mla_gate:
        kept += n * value * (2 * wide + item)
    return kept + (0 if shape.mla_gate and not cast else n * value * item)


def _activation(shape: Shape, call: Call) -> int:
    """Bytes kept for one pair of gate and up, the product included."""
    if not shape.situ:
        return 4 * call.item
    # tanh and its multiple, sigmoid, their product, and the linear part; bounded, that is a tanh and its multiple.
    return 5 * call.wide + (call.wide if shape.linear_bound else 0) + call.item


def _mlp(shape: Shape, call: Call, tokens: int, inner: int) -> int:
    return tokens * inner * _activation(shape, call)


def _moe(shape: Shape, call: Call) -> int:
    n, width, item, wide, cast = call.tokens, shape.expert_width, call.item, call.wide, call.cast
    routed = shape.latent if shape.routes_on_latent else shape.hidden
    router = cast * (n + shape.experts) * routed + n * shape.experts * wide + n * shape.top_k * (4 * wide + 8)
    pairs = n * shape.top_k
    experts = pairs * (4 * 8 + wide) + 2 * pairs * width * item + _mlp(shape, call, pairs, shape.expert_inner)
    kept = router + experts
    if shape.latent is not None:
        kept += n * width * item
        kept += n * width * ((cast or wide) + 2 * item) if shape.latent_norm else n * width * item
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
    top = _before(shape, call)
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
    if layer.is_moe:
        pairs = call.tokens * shape.top_k
        return pairs * (3 * shape.expert_inner * call.wide + shape.expert_width * (call.item + call.wide))
    return call.tokens * shape.inner * 3 * call.wide


def attention_backward(shape: Shape, layer: Layer, call: Call) -> int:
    """Bytes that the backward of an attention needs beside what is kept."""
    if layer.is_kda:
        return 3 * call.tokens * shape.kda_width * call.wide
    if is_fused(shape):
        return call.tokens * shape.mla_heads * (2 * (shape.nope + shape.rope) + shape.value) * call.item
    scores = 2 * call.rows * shape.mla_heads * call.length**2 * call.wide
    # What the gate kept is gone by then.
    return scores - shape.mla_gate * call.tokens * shape.mla_heads * shape.value * (2 * call.wide + call.item)
