"""Routed experts in 8, 4, 3 or 2 bits of HQQ, for machines that the release's 4.25 bits are too many for.

    W ~ scale (codes - zero)        one scale and one zero for `group` neighbouring weights, found without data

    model = K3ForCausalLM.from_pretrained(path, expert_storage="mapped")
    quantize_experts(model, bits=3)

One expert is read at a time, so memory never holds more than the result. It is saved as it is, as stacks under names of
their own, and config.json tells of it (`quantization_config.experts`); loading needs HQQ again. Products expand a
matrix each time it is used, in the library's torch code. Scales make it 8.5, 4.5, 3.7 and 2.5 bits for each weight. On
examples/pico (`benchmarks/low_bits.py`) 8 and 4 bits cost nothing that can be measured, 3 bits a hundredth and 2 bits a
twelfth of what the routed experts are worth; larger models that rely on them more lose more.
Source: HQQ (Badri and Shaji 2023).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .experts import K3Experts, iter_experts

logger = logging.get_logger(__name__)

BITS = (8, 4, 3, 2)
#: What a stack of matrices is kept as.
_PARTS = ("codes", "scale", "zero")


def _quantizer() -> Any:
    try:
        from hqq.core.quantize import Quantizer
    except ImportError as error:
        raise ImportError("experts in other bits than the release's need HQQ: pip install hqq") from error
    return Quantizer


class K3LowBitExperts(K3Experts):
    """Experts whose matrices are codes of HQQ; see `quantize_experts`.

    Parameters: `<name>_codes` [N, ...] as HQQ packs them (8, 4 and 2 bits in bytes, ten times 3 bits in an int32),
    `<name>_scale` [N, groups, 1] bfloat16, `<name>_zero` [N, groups, 1] float16.
    """

    def __init__(self, source: Any, bits: int, group: int, *, is_empty: bool = False) -> None:
        with torch.device("meta"):
            super().__init__(source.config)
        self._parameters.clear()
        self.bits, self.group, self.storage = bits, group, f"hqq{bits}"
        self._dense_dtype = source.dense_dtype
        for name, shape in self.stack_shapes().items():
            if is_empty:
                for part, (size, dtype) in zip(_PARTS, _layout(shape, bits, group), strict=True):
                    value = torch.empty(size, dtype=dtype, device="meta")
                    self.register_parameter(f"{name}_{part}", nn.Parameter(value, requires_grad=False))
                continue
            rounded = [_round(source.matrix(expert, name, torch.float32), bits, group) for expert in range(shape[0])]
            for part, tensors in zip(_PARTS, zip(*rounded, strict=True), strict=True):
                self.register_parameter(f"{name}_{part}", nn.Parameter(torch.stack(tensors), requires_grad=False))
        self.train(source.training)

    @property
    def dense_dtype(self) -> torch.dtype:
        """The number format that matrices are expanded to."""
        return self._dense_dtype

    def parts(self, expert: int, name: str) -> tuple[Tensor, ...]:
        """One expert's matrix, expanded; see `K3Experts.parts`."""
        codes, scale, zero = (self._parameters[f"{name}_{part}"][expert] for part in _PARTS)
        meta = _meta(self.bits, self.group, self.stack_shapes()[name][1:])
        meta |= {"scale": scale.float(), "zero": zero.float()}
        return (_quantizer().dequantize(codes, meta).to(self._dense_dtype),)

    def use_storage(self, storage: str, pages: Any = None) -> None:
        """Refused: there is no way back from fewer bits.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"experts in {self.bits} bits cannot become {storage!r}: load the checkpoint again")

    def released(self, tensors: dict[str, Tensor], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield the stacks as they are: the release's names are for single matrices of other forms."""
        yield from ((name, tensor) for name, tensor in tensors.items() if name.startswith(prefix))


def quantize_experts(model: nn.Module, bits: int, group: int = 64) -> None:
    """Put all routed experts of a model into fewer bits, in place.

    Args:
        model: loaded, its experts in any form.
        bits: for each code: 8, 4, 3 or 2.
        group: weights that share a scale and a zero, which take 32 bits; a multiple of 8.

    Raises:
        ValueError: another number; a group that does not divide the matrices; experts that are there in HQQ's bits,
            under an adapter, or not in memory; a model without experts.
        ImportError: without hqq.
    """
    if bits not in BITS:
        raise ValueError(f"bits={bits!r}; allowed are {list(BITS)}")
    _quantizer()
    found = iter_experts(model)
    if not found:
        raise ValueError("the model has no routed experts to quantise")
    for name, module in found:
        if isinstance(module, K3LowBitExperts) or not hasattr(module, "stack_shapes"):
            raise ValueError(f"{name} is a {type(module).__name__}; allowed are experts as they are loaded")
        if any(parameter.is_meta for parameter in module.parameters()):
            raise ValueError(f"{name} is on the meta device; allowed are experts in memory, or mapped")
        for stack, (_, rows, columns) in module.stack_shapes().items():
            if group < 8 or group % 8 or rows * columns % group:
                raise ValueError(f"group={group} must be a multiple of 8 that divides {rows * columns}, {name}.{stack}")
    for name, module in found:
        model.set_submodule(name, K3LowBitExperts(module, bits, group))
    logger.warning(model.weight_report())


def expert_bits(model: nn.Module) -> dict[str, int] | None:
    """What config.json says about experts in HQQ's bits: {"bits": ..., "group": ...}; None where there are none."""
    found = [module for _, module in iter_experts(model) if hasattr(module, "bits")]
    return {"bits": found[0].bits, "group": found[0].group} if found else None


def expect_low_bits(model: nn.Module, form: Any) -> None:
    """Give a model on the meta device the experts that a checkpoint in HQQ's bits fills.

    Args:
        model: changed.
        form: what `expert_bits` returned when it was saved.

    Raises:
        ValueError: something else.
        ImportError: without hqq.
    """
    is_known = isinstance(form, dict) and form.keys() == {"bits", "group"} and form["bits"] in BITS
    if not is_known or type(form["group"]) is not int or form["group"] < 8 or form["group"] % 8:
        raise ValueError(f"quantization_config.experts={form!r}; allowed are bits of {list(BITS)} and a group")
    _quantizer()
    for name, module in iter_experts(model):
        model.set_submodule(name, K3LowBitExperts(module, form["bits"], form["group"], is_empty=True))


def _layout(shape: tuple[int, int, int], bits: int, group: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and number format of codes, scales and zeros of a stack, as HQQ packs them."""
    groups = shape[1] * shape[2] // group
    rows = -(-groups // 10) if bits == 3 else groups * bits // 8
    sizes = [(shape[0], rows, group), (shape[0], groups, 1), (shape[0], groups, 1)]
    return list(zip(sizes, (torch.int32 if bits == 3 else torch.uint8, torch.bfloat16, torch.float16), strict=True))


def _round(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero of one matrix."""
    largest = weight.abs().max()
    if not largest.isfinite():
        raise ValueError("an expert has weights that are not finite; allowed are finite numbers")
    # HQQ takes groups that span less than 1e-4 for constant.
    unit = torch.ldexp(torch.ones(()), torch.frexp(largest)[1]).to(weight) if largest > 0 else torch.ones_like(largest)
    meta = _meta(bits, group, tuple(weight.shape))
    wanted = {"nbits": bits, "group_size": group, "axis": 1, "optimize": True, "device": str(weight.device)}
    codes, found = _quantizer().quantize(weight / unit, round_zero=bits == 4, **wanted)
    if found["packing"] != meta["packing"]:
        raise ValueError(f"this version of hqq packs {bits} bits as {found['packing']!r}; known is {meta['packing']!r}")
    return codes, (found["scale"] * unit).bfloat16(), found["zero"].half()


def _meta(bits: int, group: int, shape: tuple[int, ...]) -> dict[str, Any]:
    return {
        "nbits": bits,
        "group_size": group,
        "axis": 1,
        "shape": shape,
        "packing": _quantizer().bit_to_packing[bits],
        "compute_dtype": torch.float32,
        "view_as_float": False,
    }
