"""The MXFP4 codec against a slow decoder written from the format's definition, and its products."""

import math

import pytest
import torch
from torch import Tensor

from modeling_k3.mxfp4 import GROUP, Workspace, decode, encode, expand, mxfp4_linear, pack_nibbles, unpack_nibbles

ELEMENTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALES = (0, 1, 126, 127, 128, 253, 254, 255)
DTYPES = (torch.bfloat16, torch.float32)
# 2^128 is the first magnitude that neither bfloat16 nor float32 holds.
OVERFLOW = 2.0**128


def value_of(code: int, scale: int) -> float:
    """One element in Python numbers, with what the format says about NaN and overflow."""
    if scale == 255:
        return math.nan
    magnitude = ELEMENTS[code & 7] * 2.0 ** (scale - 127)
    magnitude = math.inf if magnitude >= OVERFLOW else magnitude
    return -magnitude if code & 8 else magnitude


def random_packed(*shape: int, groups: int = 2, seed: int = 0, highest: int = 252) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (*shape, groups * GROUP // 2), dtype=torch.uint8, generator=generator)
    return packed, torch.randint(0, highest + 1, (*shape, groups), dtype=torch.uint8, generator=generator)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, with the sign of zero; NaN equals NaN."""
    return bool(((a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_all_codes(scale: int, dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    values = decode(pack_nibbles(codes).unsqueeze(0), torch.tensor([[scale]], dtype=torch.uint8), dtype)
    expected = torch.tensor([[value_of(code, scale) for code in codes.tolist()]], dtype=torch.float64)
    assert values.dtype == dtype
    assert same(values.double(), expected)


def test_low_nibble_is_the_even_column() -> None:
    packed = torch.zeros(1, GROUP // 2, dtype=torch.uint8)
    packed[0, 3] = 0x71
    values = decode(packed, torch.tensor([[127]], dtype=torch.uint8))
    assert values[0, 6].item() == 0.5
    assert values[0, 7].item() == 6.0
    assert values.count_nonzero() == 2


def test_nibbles_of_every_byte() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    codes = unpack_nibbles(every)
    assert codes[0::2].tolist() == [byte % 16 for byte in range(256)]
    assert codes[1::2].tolist() == [byte // 16 for byte in range(256)]
    assert torch.equal(pack_nibbles(codes), every)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_encode_gives_the_values_back(dtype: torch.dtype) -> None:
    """Every finite group, canonical or not: small codes under large scales too."""
    packed, scale = random_packed(300, groups=3)
    packed[:100] &= 0b10111011
    packed[100:200] &= 0b10011001
    values = decode(packed, scale, dtype)
    assert same(decode(*encode(values), dtype), values)


def test_encode_gives_the_bytes_back_for_canonical_groups() -> None:
    packed, scale = random_packed(300, groups=3, seed=1)
    packed[..., :: GROUP // 2] |= 0x06
    again = encode(decode(packed, scale))
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scale)


@pytest.mark.parametrize("scale", range(0, 254))
def test_encode_is_exact_at_every_scale(scale: int) -> None:
    codes = torch.arange(6, dtype=torch.uint8).repeat(6)[:GROUP]
    for largest in range(6):
        packed = pack_nibbles(codes.clamp(max=largest)).unsqueeze(0)
        values = decode(packed, torch.tensor([[scale]], dtype=torch.uint8))
        assert same(decode(*encode(values)), values)


def test_zeros_have_scale_zero_and_keep_their_signs() -> None:
    values = torch.zeros(2, GROUP)
    values[1, ::3] = -0.0
    packed, scale = encode(values)
    assert scale.tolist() == [[0], [0]]
    assert same(decode(packed, scale, torch.float32), values)


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [(1.0, -2), (1.7421875, -2), (1.75, -1), (1.99, -1), (2.0, -1), (6.0, 0), (6.9, 0), (7.0, 1), (2.0**-127, -127)],
)
def test_the_scale_rule(largest: float, exponent: int) -> None:
    """floor(log2) - 2, after rounding a mantissa of 1.75 or more up to the next power of two; not below -127."""
    values = torch.zeros(1, GROUP)
    values[0, 5] = -largest
    assert encode(values)[1].item() == exponent + 127


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.2501, 1), (0.75, 2), (1.25, 2), (1.26, 3), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (5.01, 7)],
)
def test_ties_go_to_the_even_code(value: float, code: int) -> None:
    values = torch.zeros(1, GROUP)
    values[0, 0], values[0, 1] = 6.0, value
    assert unpack_nibbles(encode(values)[0])[0, 1].item() == code
    assert unpack_nibbles(encode(-values)[0])[0, 1].item() == code | 8


def test_rounding_is_to_the_nearest_element() -> None:
    """Within a group whose scale is 1, no other element is nearer; above 6 everything is 6."""
    values = torch.linspace(-6.99, 6.99, 32 * 40).view(40, GROUP)
    values[:, 0] = 6.0
    rounded = decode(*encode(values), torch.float32)
    grid = torch.tensor(ELEMENTS)
    nearest = (values.abs().unsqueeze(-1) - grid).abs().amin(-1)
    assert torch.equal((values.abs() - rounded.abs()).abs(), nearest)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_encode_refuses_what_is_not_finite(bad: float) -> None:
    values = torch.ones(2, GROUP)
    values[1, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        encode(values)


def test_wrong_shapes_and_types() -> None:
    packed, scale = random_packed(2)
    with pytest.raises(ValueError, match=r"multiple of 32"):
        decode(packed[:, :-1], scale)
    with pytest.raises(ValueError, match=r"packed has shape"):
        decode(packed, scale[:1])
    with pytest.raises(TypeError, match=r"scale has dtype torch.int32"):
        decode(packed, scale.int())
    with pytest.raises(ValueError, match=r"multiple of 32"):
        encode(torch.ones(2, GROUP + 16))
    with pytest.raises(TypeError, match=r"floating"):
        encode(torch.ones(2, GROUP, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"even"):
        pack_nibbles(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"17"):
        pack_nibbles(torch.full((2,), 17, dtype=torch.uint8))


def test_any_leading_shape_and_strides() -> None:
    packed, scale = random_packed(6, 4)
    whole = decode(packed, scale)
    assert whole.shape == (6, 4, 64)
    assert torch.equal(decode(packed[::2, 1], scale[::2, 1]), whole[::2, 1])
    assert decode(packed[:0], scale[:0]).shape == (0, 4, 64)
    assert torch.equal(decode(packed, scale, torch.float16), whole.half())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_linear_is_linear_on_the_expanded_matrix(dtype: torch.dtype) -> None:
    """Bit for bit, in parts that stand on top of each other too, with and without a gradient."""
    upper, lower = random_packed(8, highest=130), random_packed(24, highest=130, seed=1)
    weight = torch.cat([decode(*upper, dtype), decode(*lower, dtype)])
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    expected = torch.nn.functional.linear(x, weight)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    (truth,) = torch.autograd.grad(expected, x, grad)
    space = Workspace()
    for _ in range(2):
        y = mxfp4_linear(x, (*upper, *lower), space)
        assert torch.equal(y, expected)
        assert torch.equal(torch.autograd.grad(y, x, grad)[0], truth)
    with torch.no_grad():
        assert torch.equal(mxfp4_linear(x, (*upper, *lower)), expected)


def test_the_backward_pass_keeps_bytes_only() -> None:
    parts = random_packed(64, highest=130)
    x = torch.randn(3, 64, requires_grad=True)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mxfp4_linear(x, parts)
    assert {tensor.dtype for tensor in kept} == {torch.uint8}


def test_a_workspace_is_reused_and_grows() -> None:
    space = Workspace()
    small, large = random_packed(4), random_packed(16)
    first = expand(small, torch.float32, torch.device("cpu"), space)
    address = expand(large, torch.float32, torch.device("cpu"), space).data_ptr()
    again = expand(small, torch.float32, torch.device("cpu"), space)
    assert again.data_ptr() == address
    assert first.shape == again.shape == (4, 64)
    assert torch.equal(again, decode(*small, torch.float32))


def test_inference_mode_does_not_leak_into_training() -> None:
    """The tables are made once; made under inference_mode they would break a later backward."""
    from modeling_k3 import mxfp4

    mxfp4._build_tables.cache_clear()
    parts = random_packed(4, highest=130)
    with torch.inference_mode():
        decode(*parts)
    x = torch.randn(2, 64, requires_grad=True)
    mxfp4_linear(x, tuple(part.clone() for part in parts)).sum().backward()
    assert x.grad is not None
