"""MXFP4: 4-bit floats with one power-of-two scale per 32, exactly as released; and products with packed matrices.

A row of `in` columns is stored as `in / 2` bytes of codes and `in / 32` bytes of scales:

    byte j of the codes      low nibble = column 2j, high nibble = column 2j + 1
    nibble                   sign (8) and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (codes 0 to 7)
    value                    element * 2^(scale byte - 127), the byte shared by 32 neighbouring columns

Every finite value is exact in bfloat16. What is not finite: scale byte 255 makes its whole group NaN, zeros included;
from 2^128 up values are infinite, which are the codes from 4 on (elements from 2) under scale byte 254 and codes 6 and
7 (elements 4 and 6) under 253. Source: OCP microscaling formats 1.0; the released `mxfp4-pack-quantized` checkpoint.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Columns that share one scale.
GROUP = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Halfway between neighbouring magnitudes, and whether the tie belongs to the upper one (the even code).
_BORDERS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
#: A bfloat16 or float32 pair of decoded values as one element of a lookup table.
_PAIR = {torch.bfloat16: torch.int32, torch.float32: torch.int64}
# Bytes looked up at a time: the index is widened to 4 bytes each and should stay in the cache.
_STEP = 1 << 20


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Bytes [..., n] -> codes [..., 2 n], uint8 from 0 to 15; the low nibble comes first."""
    _require_bytes("packed", packed)
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes [..., 2 n] -> bytes [..., n]; inverse of `unpack_nibbles`.

    Raises:
        ValueError: an odd number of columns, or a code above 15.
        TypeError: not uint8.
    """
    _require_bytes("codes", codes)
    if codes.shape[-1] % 2:
        raise ValueError(f"codes has {codes.shape[-1]} columns; allowed are even numbers")
    if codes.numel() and codes.max() > 15:
        raise ValueError(f"codes contains {codes.max().item()}; allowed are 0 to 15")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """Expand packed rows.

        value = element * 2^(scale - 127)

    Args:
        packed: [..., in / 2] uint8 codes.
        scale: [..., in / 32] uint8 exponents.
        dtype: of the result. bfloat16 and float32 hold every finite value exactly; what overflows is infinite in both,
            and wider types repeat that. float16 rounds as a cast from bfloat16 does.
        out: contiguous [..., in] of `dtype` to fill, for callers that expand one matrix after the other.

    Returns:
        [..., in] of `dtype`, on the device of `packed`.

    Raises:
        TypeError: codes or scales are not uint8.
        ValueError: shapes that do not belong together; a width that is no multiple of 32.
    """
    _check_pair(packed, scale)
    if dtype not in _PAIR:
        wide = decode(packed, scale, torch.bfloat16).to(dtype)
        return wide if out is None else out.copy_(wide)
    values = out
    if values is None:
        values = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=dtype, device=packed.device)
    pairs, steps = _tables(dtype, packed.device)
    source, target = packed.reshape(-1), values.view(-1).view(pairs.dtype)
    stride = _STEP if packed.device.type == "cpu" else max(source.numel(), 1)
    for start in range(0, source.numel(), stride):
        piece = slice(start, start + stride)
        torch.index_select(pairs, 0, source[piece].to(torch.int32), out=target[piece])
    factors = steps.index_select(0, scale.reshape(-1).to(torch.int32)).view(*scale.shape, 1)
    values.unflatten(-1, (-1, GROUP)).mul_(factors)
    return values


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows by the rule of the release.

        exponent = floor(log2(largest magnitude of the group)) - 2
        code     = nearest element of magnitude / 2^exponent, ties to the even code, clipped at 6; the sign kept

    where the largest magnitude is first rounded up to the next power of two if its mantissa is 1.75 or more. The
    exponent is held at -127 or above, and a group of zeros gets scale byte 0 (its signs are kept). On decoded values
    this is exact, and byte for byte the same where a group's largest code is 6 or 7. Magnitudes from 1.75 * 2^127 up
    are encoded as 2^128, which decodes to infinity.

    Args:
        values: [..., in], any floating dtype; `in` a multiple of 32.

    Returns:
        codes [..., in / 2] and scales [..., in / 32], both uint8.

    Raises:
        TypeError: not floating.
        ValueError: a width that is no multiple of 32; NaN or infinity, for which the format has no rounding.
    """
    if not values.is_floating_point():
        raise TypeError(f"values has dtype {values.dtype}; allowed are floating dtypes")
    if values.ndim == 0 or values.shape[-1] % GROUP:
        raise ValueError(f"values has shape {tuple(values.shape)}; the last dimension must be a multiple of {GROUP}")
    wide = values.to(torch.promote_types(values.dtype, torch.float32)).unflatten(-1, (-1, GROUP))
    magnitude = wide.abs()
    largest = magnitude.amax(dim=-1)
    if not largest.isfinite().all():
        raise ValueError("values contains NaN or infinity; allowed are finite numbers")
    mantissa, exponent = torch.frexp(largest)
    # frexp gives a mantissa in [0.5, 1): 0.875 there is 1.75 in [1, 2).
    exponent = exponent - 1 + (mantissa >= 0.875).to(exponent.dtype) - 2
    scale = torch.where(largest > 0, exponent + 127, 0).clamp(0, 254)
    scaled = magnitude.double() * torch.pow(2.0, (127 - scale).double()).unsqueeze(-1)
    code = torch.zeros_like(scaled, dtype=torch.uint8)
    for border, tie_goes_up in _BORDERS:
        code += (scaled >= border) if tie_goes_up else (scaled > border)
    code |= torch.signbit(wide).to(torch.uint8) << 3
    return pack_nibbles(code.flatten(-2)), scale.to(torch.uint8)


class Workspace:
    """One reusable buffer: matrices that are expanded one after the other need not each be allocated anew.

    What `take` returned is overwritten by the next `take`.
    """

    def __init__(self) -> None:
        self._bytes: Tensor | None = None

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised contiguous tensor that lies in the buffer."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if self._bytes is None or self._bytes.numel() < size or self._bytes.device != device:
            self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        return self._bytes[:size].view(dtype).view(*shape)


def expand(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device, space: Workspace | None = None) -> Tensor:
    """Decode matrices that stand on top of each other.

    Args:
        parts: codes and scales in turn, [out_i, in / 2] and [out_i, in / 32]; they travel to `device` packed.
        dtype, device: of the result.
        space: where to expand; None allocates.

    Returns:
        [sum of out_i, in].
    """
    rows = sum(part.shape[0] for part in parts[0::2])
    shape = (rows, 2 * parts[0].shape[-1])
    whole = torch.empty(shape, dtype=dtype, device=device) if space is None else space.take(shape, dtype, device)
    start = 0
    for packed, scale in zip(parts[0::2], parts[1::2], strict=True):
        moved = _sent(packed, device), _sent(scale, device)
        decode(*moved, dtype=dtype, out=whole[start : start + packed.shape[0]])
        start += packed.shape[0]
    return whole


def _sent(part: Tensor, device: torch.device) -> Tensor:
    """To a GPU by way of pinned memory: straight from mapped pages a copy holds up whatever comes after it."""
    if torch.device(device).type == "cuda" and part.device.type == "cpu":
        part = part.pin_memory()
    return part.to(device, non_blocking=True)


def mxfp4_linear(x: Tensor, parts: Sequence[Tensor], space: Workspace | None = None) -> Tensor:
    """x W^T with a packed W, which is expanded for this product only, and once more in the backward pass.

    The arithmetic is that of `torch.nn.functional.linear` on the expanded matrix in the dtype of `x`, bit for bit.

    Args:
        x: [tokens, in].
        parts: see `expand`. They get no gradient.
        space: where to expand; None allocates.

    Returns:
        [tokens, out] in the dtype of `x`.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _PackedLinear.apply(x, space, *parts)
    return F.linear(x, expand(parts, x.dtype, x.device, space))


class _PackedLinear(torch.autograd.Function):
    """Keeps the packed bytes for the backward pass, not the expanded matrix."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, space: Workspace | None, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.dtype = x.dtype
        return F.linear(x, expand(parts, x.dtype, x.device, space))

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = expand(ctx.saved_tensors, ctx.dtype, grad.device)
        return (grad.to(ctx.dtype) @ weight, None, *[None] * len(ctx.saved_tensors))


def _tables(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Byte -> its two decoded values as one integer [256], and scale byte -> factor [256]."""
    return _build_tables(dtype, str(device))


@lru_cache(maxsize=16)
def _build_tables(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.device("cpu"):
        elements = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=dtype)
        codes = unpack_nibbles(torch.arange(256, dtype=torch.uint8).unsqueeze(-1)).to(torch.int64)
        pairs = elements[codes].view(_PAIR[dtype]).squeeze(-1)
        factors = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - 127)
        factors[255] = float("nan")
        return pairs.to(device), factors.to(dtype).to(device)


def _require_bytes(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.uint8:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed is torch.uint8")
    if tensor.ndim == 0:
        raise ValueError(f"{name} is a scalar; allowed is [..., columns]")


def _check_pair(packed: Tensor, scale: Tensor) -> None:
    _require_bytes("packed", packed)
    _require_bytes("scale", scale)
    width = 2 * packed.shape[-1]
    if width % GROUP or packed.shape[:-1] != scale.shape[:-1] or scale.shape[-1] * GROUP != width:
        raise ValueError(
            f"packed has shape {tuple(packed.shape)} and scale {tuple(scale.shape)}; allowed are [..., in / 2] and "
            f"[..., in / {GROUP}] with `in` a multiple of {GROUP}"
        )
