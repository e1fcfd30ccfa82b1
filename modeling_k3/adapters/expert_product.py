"""Routed experts with low-rank changes: only the experts in use are expanded, one at a time, forward and backward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from modeling_k3.mxfp4 import Workspace
from modeling_k3.precision import at_least_fp32

#: The matrices of an expert by their released names, in the order of use: gate, up, down.
MATRICES = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Term:
    """One adapter on one matrix of every expert; its factors A [N, r, in] and B [N, out, r] travel beside it.

    Args:
        matrix: one of `MATRICES`.
        scaling: what the product B A is multiplied by.
        dropout: share of the inputs of A that are dropped; 0 outside of training.
    """

    matrix: str
    scaling: float
    dropout: float


class Share(NamedTuple):
    """What one expert has to do."""

    expert: int
    token: Tensor
    place: Tensor


class _Part(NamedTuple):
    """What a term left behind for its gradients: dropped input, A times that, and the mask or None."""

    term: int
    dropped: Tensor
    low: Tensor
    mask: Tensor | None


def adapted_experts(
    experts: Any, z: Tensor, chosen: Tensor, weights: Tensor, terms: Sequence[Term], factors: Sequence[Tensor]
) -> Tensor:
    """Combine the chosen experts, each matrix W replaced by W + sum over terms of scaling B A.

        s = sum_e p_e W2'_e act(W1'_e z, W3'_e z)        W' x = W x + scaling B (A drop(x))

    Nothing of an expert but its packed bytes lives from the forward to the backward pass: there its matrices are
    expanded again and the inner activations computed anew. A pass expands each matrix of each expert in use once.

    Args:
        experts: a `K3Experts` in any storage form; its own weights get no gradient.
        z: [tokens, E].
        chosen: [tokens, R] expert numbers; those from N on belong to other ranks and are left out.
        weights: p [tokens, R] in at least float32.
        terms: which changes; several on one matrix add up.
        factors: A and B of each term in turn. The low-rank products are formed in their dtype.

    Returns:
        [tokens, E] in z's dtype.

    Raises:
        ValueError: the experts' own weights want gradients, or are not in memory.
    """
    _check_stacks(experts)
    # Drawn from the global generator, so that a checkpointed layer draws it again when it is run again.
    seed = int(torch.randint(2**62, ())) if any(term.dropout for term in terms) else 0
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (z, weights, *factors)):
        stacks = tuple(experts.parameters(recurse=False))
        return _AdaptedExperts.apply(experts, tuple(terms), seed, len(factors), z, chosen, weights, *factors, *stacks)
    return _combine(experts, z, chosen, weights, terms, factors, seed)


def _check_stacks(experts: Any) -> None:
    for name, stack in experts.named_parameters(recurse=False):
        if stack.requires_grad:
            raise ValueError(
                f"experts.{name} has requires_grad=True beside an adapter, which would leave it without a gradient; "
                "allowed are frozen experts, or no adapter on them"
            )
        if stack.is_meta:
            raise ValueError(
                f"experts.{name} is not in memory (a device map put it on disk), where an adapter cannot reach it; "
                "load with expert_storage='mapped', or keep the experts on a device"
            )


def shares(chosen: Tensor, num_experts: int) -> Iterator[Share]:
    """Yield every expert in use, in order, with the tokens that chose it and the place of it among their choices."""
    order = chosen.flatten().argsort(stable=True)
    numbers, counts = chosen.flatten()[order].unique_consecutive(return_counts=True)
    tokens, places = order // chosen.shape[1], order % chosen.shape[1]
    start = 0
    for expert, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        if expert < num_experts:
            yield Share(expert, tokens[start : start + count], places[start : start + count])
        start += count


def _gather(z: Tensor, token: Tensor) -> Tensor:
    """The rows of an expert's tokens; in 16 bits on the CPU with rows of zeros, up to one of four sizes per octave.

    There the library makes code for each shape it meets and keeps it: experts have as many shapes as loads, which took
    190 MB for 96 experts of 256 tokens.
    """
    if z.device.type != "cpu" or z.dtype not in (torch.bfloat16, torch.float16):
        return z[token]
    step = 1 << max(len(token).bit_length() - 3, 0)
    rows = z.new_zeros(-(-len(token) // step) * step, z.shape[1])
    rows[: len(token)] = z[token]
    return rows


def _combine(
    experts: Any,
    z: Tensor,
    chosen: Tensor,
    weights: Tensor,
    terms: Sequence[Term],
    factors: Sequence[Tensor],
    seed: int,
) -> Tensor:
    total = z.new_zeros(z.shape, dtype=at_least_fp32(z.dtype))
    changes, space = _Changes(terms, factors, seed, z.device), Workspace()
    for share in _ahead(experts, shares(chosen, experts.num_experts)):
        x = _gather(z, share.token)
        gate_up, _ = changes.lift_both(experts.product(x, share.expert, "gate_up_proj", space), x, share.expert)
        h = experts._apply_gate(gate_up)
        y = experts.product(h, share.expert, "down_proj", space)
        y = changes.lift(y, changes.lower(h, "w2", share.expert), share.expert)[: len(share.token)]
        total.index_add_(0, share.token, (y * weights[share.token, share.place, None]).to(total.dtype))
    return total.to(z.dtype)


def _ahead(experts: Any, found: Iterator[Share]) -> Iterator[Share]:
    """Let mapped experts be read while others are computed."""
    if experts.pages is None:
        return found
    listed = list(found)
    experts.pages.prefetch([share.expert for share in listed])
    return iter(listed)


class _Changes:
    """The terms of all matrices, with a generator that draws equal masks in both passes."""

    def __init__(self, terms: Sequence[Term], factors: Sequence[Tensor], seed: int, device: torch.device) -> None:
        self.terms, self.factors = terms, factors
        has_dropout = any(term.dropout for term in terms)
        self.generator = torch.Generator(device).manual_seed(seed) if has_dropout else None

    def pair(self, term: int, expert: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [out, r] of one expert."""
        a, b = self.factors[2 * term : 2 * term + 2]
        return a[expert].to(device), b[expert].to(device)

    def lower(self, x: Tensor, matrix: str, expert: int) -> list[_Part]:
        """A drop(x) of every term on a matrix of an expert."""
        parts: list[_Part] = []
        for index, term in enumerate(self.terms):
            if term.matrix != matrix:
                continue
            a, _ = self.pair(index, expert, x.device)
            dropped, mask = x.to(a.dtype), None
            if term.dropout:
                mask = torch.empty_like(dropped).bernoulli_(1 - term.dropout, generator=self.generator)
                mask /= max(1 - term.dropout, 1e-30)
                dropped = dropped * mask
            parts.append(_Part(index, dropped, F.linear(dropped, a), mask))
        return parts

    def lift(self, y: Tensor, parts: Sequence[_Part], expert: int) -> Tensor:
        """y = W x -> W' x in y's dtype."""
        total = y
        for part in parts:
            _, b = self.pair(part.term, expert, y.device)
            total = total + F.linear(part.low, b) * self.terms[part.term].scaling
        return total.to(y.dtype)

    def lift_both(self, y: Tensor, x: Tensor, expert: int) -> tuple[Tensor, list[list[_Part]]]:
        """`lift` for w1 above w3, [S, 2F], and the parts of either."""
        parts = [self.lower(x, matrix, expert) for matrix in ("w1", "w3")]
        if not any(parts):
            return y, parts
        halves = zip(y.chunk(2, dim=-1), parts, strict=True)
        return torch.cat([self.lift(half, its_parts, expert) for half, its_parts in halves], dim=-1), parts

    def back(
        self,
        grad_x: Tensor,
        grad_y: Tensor,
        parts: Sequence[_Part],
        expert: int,
        grads: Sequence[Tensor | None],
        p: Tensor | float = 1.0,
    ) -> Tensor:
        """Add the terms' share to grad_x [S, in], and put p times the gradients of their factors into `grads`."""
        for part in parts:
            a, b = self.pair(part.term, expert, grad_y.device)
            g = grad_y.to(b.dtype) * self.terms[part.term].scaling
            grad_low = g @ b
            for target, left, right in (
                (grads[2 * part.term], grad_low, part.dropped),
                (grads[2 * part.term + 1], g, part.low),
            ):
                if target is not None:
                    target[expert] = ((left * p).to(left.dtype).mT @ right).to(target)
            share = grad_low @ a
            grad_x = (grad_x + (share if part.mask is None else share * part.mask)).to(grad_x.dtype)
        return grad_x


class _AdaptedExperts(torch.autograd.Function):
    """Keeps inputs and routing; see `adapted_experts`."""

    @staticmethod
    def forward(
        ctx: Any,
        experts: Any,
        terms: tuple[Term, ...],
        seed: int,
        num_factors: int,
        z: Tensor,
        chosen: Tensor,
        weights: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.experts, ctx.terms, ctx.seed, ctx.num_factors = experts, terms, seed, num_factors
        # The stacks ride along for autograd's check that nobody changed them in between.
        ctx.save_for_backward(z, chosen, weights, *tensors)
        return _combine(experts, z, chosen, weights, terms, tensors[:num_factors], seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, chosen, weights, *tensors = ctx.saved_tensors
        factors = tensors[: ctx.num_factors]
        wanted = ctx.needs_input_grad[7 : 7 + ctx.num_factors]
        grads = [torch.zeros_like(f) if is_wanted else None for f, is_wanted in zip(factors, wanted, strict=True)]
        with torch.autocast(grad.device.type, enabled=False):
            grad_z, grad_weights = _pull_back(ctx, grad, z, chosen, weights, factors, grads)
        none = [None] * (len(tensors) - ctx.num_factors)
        return (None, None, None, None, grad_z, None, grad_weights, *grads, *none)


def _pull_back(
    ctx: Any,
    grad: Tensor,
    z: Tensor,
    chosen: Tensor,
    weights: Tensor,
    factors: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Gradients of z and of the weights; those of the factors are written into `grads`."""
    experts, wide = ctx.experts, at_least_fp32(z.dtype)
    changes = _Changes(ctx.terms, factors, ctx.seed, z.device)
    grad_z, grad_weights = z.new_zeros(z.shape, dtype=wide), torch.zeros_like(weights)
    spaces = Workspace(), Workspace()
    for expert, token, place in _ahead(experts, shares(chosen, experts.num_experts)):
        x, g, count = _gather(z, token), _gather(grad.to(z.dtype), token), len(token)
        p = F.pad(weights[token, place, None], (0, 0, 0, len(x) - count))
        gate_up = experts.matrix(expert, "gate_up_proj", z.dtype, z.device, spaces[0])
        inner, parts = changes.lift_both(F.linear(x, gate_up), x, expert)
        with torch.enable_grad():
            inner = inner.detach().requires_grad_()
            h = experts._apply_gate(inner)
        down = experts.matrix(expert, "down_proj", z.dtype, z.device, spaces[1])
        # Of y itself only its product with g is needed, which is that of h with what g becomes on the other side.
        lows = changes.lower(h.detach(), "w2", expert)
        pulled = changes.back(g @ down, g, lows, expert, grads, p)
        grad_weights[token, place] = (h.detach().to(wide) * pulled).sum(dim=-1)[:count].to(weights.dtype)
        (grad_inner,) = torch.autograd.grad(h, inner, (pulled * p).to(h.dtype))
        grad_x = grad_inner @ gate_up
        for half, its_parts in zip(grad_inner.chunk(2, dim=-1), parts, strict=True):
            grad_x = changes.back(grad_x, half, its_parts, expert, grads)
        grad_z.index_add_(0, token, grad_x[:count].to(wide))
    return grad_z.to(z.dtype), grad_weights
