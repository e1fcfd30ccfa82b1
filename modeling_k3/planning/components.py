"""Weights by component: every parameter of the model counted from the config, in the bytes it is held in."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from modeling_k3.planning.shape import Layer, Shape

#: Components in the order of the table.
COMPONENTS = (
    "embedding",
    "KDA",
    "MLA",
    "dense MLP",
    "routed experts",
    "shared experts",
    "routers",
    "latent projections",
    "norms and AttnRes",
    "head",
)
#: How linear layers outside the experts may be held. The last three are bitsandbytes' formats.
DENSE_FORMS = ("full", "int8", "nf4", "fp4")
#: How routed experts may be held. The last four are what `low_bits.quantize_experts` makes.
EXPERT_FORMS = ("full", "mxfp4", "hqq8", "hqq4", "hqq3", "hqq2")
#: Numbers that share a scale: MXFP4, bitsandbytes' 4-bit formats, HQQ.
_MXFP4_GROUP, _FOUR_BIT_GROUP, _HQQ_GROUP = 32, 64, 64
#: Widths (out, in) that 4 bits on the CPU need; layers of others keep their number format.
_FOUR_BIT_STEPS = (32, 64)


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Args:
        component: one of `COMPONENTS`.
        shape: of one of them.
        is_linear: bitsandbytes would quantise it.
        is_wide: it is never held below float32 (`precision.KEEP_IN_FP32`).
        is_expert: it is a stack [N, out, in] of routed experts.
        is_trained: gradients flow into it.
    """

    component: str
    shape: tuple[int, ...]
    is_linear: bool = False
    is_wide: bool = False
    is_expert: bool = False
    is_trained: bool = True

    @property
    def numel(self) -> int:
        """Number of weights."""
        return prod(self.shape)

    def nbytes(self, item: int, dense: str = "full", experts: str = "full") -> int:
        """Bytes it is held in.

        Args:
            item: bytes per number of the model's dtype.
            dense, experts: one of `DENSE_FORMS`, one of `EXPERT_FORMS`.
        """
        form = experts if self.is_expert else dense if self.is_linear else "full"
        is_misfit = any(n % step for n, step in zip(self.shape[-2:], _FOUR_BIT_STEPS, strict=False))
        if form == "full" or (form in ("nf4", "fp4") and is_misfit):
            return self.numel * (max(item, 4) if self.is_wide else item)
        if form == "mxfp4":
            return self.numel // 2 + self.numel // _MXFP4_GROUP
        if form == "int8":
            # One float32 scale for each row.
            return self.numel + 4 * self.numel // self.shape[-1]
        if form.startswith("hqq"):
            return self.shape[0] * low_bit_bytes(self.numel // self.shape[0], int(form.removeprefix("hqq")))
        # Codes, one float32 scale for 64 of them, and the 16 values that codes stand for.
        return self.numel // 2 + 4 * (self.numel // _FOUR_BIT_GROUP) + 64


def low_bit_bytes(numel: int, bits: int) -> int:
    """One matrix of HQQ: codes, ten times 3 bits to an int32, and 16 bits each for scale and zero of a group."""
    groups = numel // _HQQ_GROUP
    codes = 4 * _HQQ_GROUP * -(-groups // 10) if bits == 3 else numel * bits // 8
    return codes + 4 * groups


def iter_weights(shape: Shape) -> Iterator[tuple[Weight, int]]:
    """Yield every kind of parameter of K3ForCausalLM and how many there are; a tied head is none of its own."""
    for weight in outer_weights(shape):
        yield weight, 1
    for layer, count in shape.kinds.values():
        for weight in layer_weights(shape, layer):
            yield weight, count


def outer_weights(shape: Shape) -> Iterator[Weight]:
    """Yield the parameters outside the layers."""
    yield Weight("embedding", (shape.vocab, shape.hidden))
    if shape.block is not None:
        yield Weight("norms and AttnRes", (shape.hidden,))
        yield Weight("norms and AttnRes", (1, shape.hidden))
    yield Weight("norms and AttnRes", (shape.hidden,))
    if not shape.tied:
        yield Weight("head", (shape.vocab, shape.hidden))


def layer_weights(shape: Shape, layer: Layer) -> Iterator[Weight]:
    """Yield the parameters of one decoder layer."""
    yield from _kda(shape) if layer.is_kda else _mla(shape)
    yield from _moe(shape) if layer.is_moe else _mlp("dense MLP", shape.hidden, shape.inner)
    for _ in range(2):
        yield Weight("norms and AttnRes", (shape.hidden,))
        if shape.block is not None:
            yield Weight("norms and AttnRes", (shape.hidden,))
            yield Weight("norms and AttnRes", (1, shape.hidden))


def _linear(component: str, out: int, width: int) -> Weight:
    return Weight(component, (out, width), is_linear=True)


def _kda(s: Shape) -> Iterator[Weight]:
    width = s.kda_width
    for _ in range(3):
        yield _linear("KDA", width, s.hidden)
        yield Weight("KDA", (width, 1, s.taps), is_wide=True)
    yield _linear("KDA", s.key, s.hidden)
    yield _linear("KDA", width, s.key)
    yield _linear("KDA", s.heads, s.hidden)
    yield Weight("KDA", (s.heads,), is_wide=True)
    yield Weight("KDA", (width,), is_wide=True)
    if s.full_gate:
        yield _linear("KDA", width, s.hidden)
    else:
        yield _linear("KDA", s.key, s.hidden)
        yield _linear("KDA", width, s.key)
    yield Weight("KDA", (s.key,), is_wide=True)
    yield _linear("KDA", s.hidden, width)


def _mla(s: Shape) -> Iterator[Weight]:
    query = s.mla_heads * (s.nope + s.rope)
    if s.q_rank is None:
        yield _linear("MLA", query, s.hidden)
    else:
        yield _linear("MLA", s.q_rank, s.hidden)
        yield Weight("MLA", (s.q_rank,))
        yield _linear("MLA", query, s.q_rank)
    yield _linear("MLA", s.rank + s.rope, s.hidden)
    yield Weight("MLA", (s.rank,))
    yield _linear("MLA", s.mla_heads * (s.nope + s.value), s.rank)
    if s.mla_gate:
        yield _linear("MLA", s.mla_heads * s.value, s.hidden)
    yield _linear("MLA", s.hidden, s.mla_heads * s.value)


def _mlp(component: str, hidden: int, inner: int) -> Iterator[Weight]:
    yield _linear(component, inner, hidden)
    yield _linear(component, inner, hidden)
    yield _linear(component, hidden, inner)


def _moe(s: Shape) -> Iterator[Weight]:
    width = s.expert_width
    yield Weight("routers", (s.experts, width if s.routes_on_latent else s.hidden))
    yield Weight("routers", (s.experts,), is_wide=True, is_trained=False)
    yield Weight("routed experts", (s.experts, 2 * s.expert_inner, width), is_expert=True)
    yield Weight("routed experts", (s.experts, width, s.expert_inner), is_expert=True)
    if s.latent is not None:
        yield _linear("latent projections", s.latent, s.hidden)
        yield _linear("latent projections", s.hidden, s.latent)
        if s.latent_norm:
            yield Weight("norms and AttnRes", (s.latent,))
    if s.shared is not None:
        yield from _mlp("shared experts", s.hidden, s.shared * s.expert_inner)


def weight_bytes(shape: Shape, item: int, dense: str = "full", experts: str = "full") -> dict[str, int]:
    """Bytes of all weights by component, zero where a model has none of it."""
    totals = Counter(dict.fromkeys(COMPONENTS, 0))
    for weight, count in iter_weights(shape):
        totals[weight.component] += count * weight.nbytes(item, dense, experts)
    return dict(totals)


def one_expert_bytes(shape: Shape, item: int, experts: str) -> int:
    """Bytes of one routed expert as it is held."""
    stacks = [weight for weight in _moe(shape) if weight.is_expert]
    return sum(weight.nbytes(item, experts=experts) for weight in stacks) // max(1, shape.experts)


def largest_layer_bytes(shape: Shape, item: int, dense: str) -> int:
    """Bytes of the largest layer (or head) without its routed experts: what must be in memory at once."""
    layers = [
        sum(w.nbytes(item, dense) for w in layer_weights(shape, layer) if not w.is_expert)
        for layer, _ in shape.kinds.values()
    ]
    return max(*layers, shape.vocab * shape.hidden * item)
