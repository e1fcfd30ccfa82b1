"""Quantisation-aware training: routed experts compute with the MXFP4 values that an export will hold.

    with fake_quantized_experts(model):        # or: quantizer = fake_quantized_experts(model), then quantizer.close()
        trainer.train()
    export_released(model, "runs/mine/release", tokenizer=tokenizer)

Forward, evaluation and generation see the released grid; the gradient passes straight through to the full-precision
weights, which alone are in the optimizer, in `state_dict` and in every checkpoint. The export encodes them by the same
rule, so the packed model computes what the trained one did.

Source: arXiv 2607.24653 section 4.1.4 (experts MXFP4, their input activations MXFP8; no rounding rule is printed). The
released files hold weights only, and are used with 16-bit activations; so the activations are left alone by default.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from modeling_k3.experts import PROJECTIONS, iter_experts
from modeling_k3.mxfp4 import GROUP, decode, encode

#: The bits of a float32 that hold its exponent.
_EXPONENT = 0x7F800000
_LARGEST_FP8, _FP8_EXPONENT = 448.0, 8
_MARK = "_is_fake_quantized"


def round_mxfp4(weights: Tensor) -> Tensor:
    """The values that MXFP4 holds for these weights: `decode(encode(weights))`, without the bytes in between.

    Args:
        weights: [..., in], floating, `in` a multiple of 32.

    Returns:
        [..., in] in the same dtype.

    Raises:
        ValueError: NaN or infinity, as after a step that went wrong; a width that is no multiple of 32.
    """
    groups = weights.detach().float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    # A quarter more carries a mantissa of 1.75 and above into the next power of two; what is left of the bits is the
    # exponent of the group's largest value, two above that of its scale.
    scale = (largest.view(torch.int32) + (1 << 21)).bitwise_and_(_EXPONENT).view(torch.float32).mul_(0.25)
    # Wide, tiny, huge or broken numbers: the definition, which knows what to do with them.
    if weights.dtype == torch.float64 or not ((scale > 1e-30) & (scale < 1e30) | (largest == 0)).all():
        return decode(*encode(weights.detach()), dtype=weights.dtype)
    scaled = groups / scale.clamp_min_(1e-30)
    # Neighbouring elements lie 0.5 apart below 2, 1 below 4, then 2: half the power of two that the magnitude has.
    # Adding and subtracting 1.5 * 2^23 times that rounds to its multiples, ties to the even one, the even code.
    ruler = scaled.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32).clamp_min_(1.0).mul_(0.75 * 2**23)
    rounded = scaled.add(ruler).sub_(ruler).clamp_(-6, 6).mul_(scale)
    # A value that is rounded to zero keeps its sign, as its code does.
    return rounded.copysign_(groups).flatten(-2).to(weights.dtype)


def round_mxfp8(values: Tensor) -> Tensor:
    """The values that MXFP8 (E4M3, one power of two per 32) holds; arguments as in `round_mxfp4`.

    Source: OCP microscaling formats 1.0: exponent = floor(log2(largest)) - 8, what is above 448 is clipped.
    """
    wide = values.float().unflatten(-1, (-1, GROUP))
    largest = wide.abs().amax(dim=-1, keepdim=True)
    if not largest.isfinite().all():
        raise ValueError("values: allowed are finite ones; NaN or infinity has no power of two")
    exponent = torch.frexp(largest).exponent - 1 - _FP8_EXPONENT
    scaled = torch.ldexp(wide, -exponent).clamp(-_LARGEST_FP8, _LARGEST_FP8)
    return torch.ldexp(scaled.to(torch.float8_e4m3fn).float(), exponent).flatten(-2).to(values.dtype)


class _StraightThrough(torch.autograd.Function):
    """A rounding in the forward pass that the gradient does not see."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class fake_quantized_experts:
    """The switch: from its making until `close`, or the end of `with`, dense experts compute with MXFP4 values.

    Works by hooks on the expert modules and changes no parameter's name, so Trainer, checkpoints, resuming and
    gradient checkpointing do not notice. Tried on whole parameters only, not on sharded ones (FSDP, ZeRO-3). One at a
    time for a model. Adapters on experts compute with the experts' weights themselves and would not see the rounding:
    they are refused, and one that comes later is refused by the next forward.

    Args:
        model: with dense experts; packed ones are rounded already and cannot be trained.
        activations: also round what the experts' two products read to MXFP8.

    Raises:
        ValueError: no routed experts, experts in another form, under an adapter or quantised by another switch, or
            widths that are no multiple of 32.
    """

    def __init__(self, model: nn.Module, *, activations: bool = False) -> None:
        # Wrappers that pass on their module's attributes hold no weights of their own.
        modules = [(name, module) for name, module in iter_experts(model) if "storage" in vars(module)]
        if not modules:
            raise ValueError("the model has no routed experts: there is nothing to quantise")
        for name, module in modules:
            if module.storage != "dense":
                raise ValueError(f"{name} has {module.storage} experts; allowed are dense ones (dequantize=True)")
            if name.rpartition(".")[2] == "base_layer":
                raise ValueError(
                    f"{name} is under an adapter, which would compute without the rounding; allowed are experts "
                    "without one: call merge_and_unload() first, or train adapters on packed experts"
                )
            if _MARK in vars(module):
                raise ValueError(f"{name} is quantised by another fake_quantized_experts; close() that one first")
            if module.hidden_dim % GROUP or module.intermediate_dim % GROUP:
                raise ValueError(
                    f"{name} has experts of width {module.hidden_dim} and {module.intermediate_dim}; both must be "
                    f"multiples of {GROUP}"
                )
        self._undo: list[Callable[[], None]] = []
        for _, module in modules:
            self._attach(module, activations)
        names = [name for name, _ in modules]
        self._undo.append(model.register_forward_pre_hook(lambda model, args: _refuse_adapters(model, names)).remove)

    def _attach(self, module: nn.Module, activations: bool) -> None:
        kept: dict[str, nn.Parameter] = {}

        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            for name in PROJECTIONS:
                kept[name] = module._parameters[name]
                module._parameters[name] = _StraightThrough.apply(kept[name], round_mxfp4)
            return (_StraightThrough.apply(args[0], round_mxfp8), *args[1:]) if activations else args

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            module._parameters.update(kept)
            kept.clear()

        before = module.register_forward_pre_hook(enter)
        # Also after an error: a module that kept the rounded values would train on them.
        after = module.register_forward_hook(leave, always_call=True)
        # Two at once would keep each other's rounded values in the place of the weights.
        setattr(module, _MARK, True)
        self._undo += [before.remove, after.remove, partial(delattr, module, _MARK)]
        if activations:
            plain = module._apply_gate
            module._apply_gate = lambda gate_up: _StraightThrough.apply(plain(gate_up), round_mxfp8)
            self._undo.append(partial(delattr, module, "_apply_gate"))

    def close(self) -> None:
        """Compute with the full-precision weights again."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def __enter__(self) -> "fake_quantized_experts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refuse_adapters(model: nn.Module, names: list[str]) -> None:
    """Whether the experts still stand where they stood; an adapter that came in between goes around their hooks."""
    for name in names:
        if not getattr(model.get_submodule(name), _MARK, False):
            raise ValueError(
                f"{name} got an adapter under fake_quantized_experts, which would compute without the rounding; "
                "close() it first, or leave the experts without an adapter"
            )


def export_released(model: Any, target: str | Path, *, dtype: torch.dtype | None = None, tokenizer: Any = None) -> Path:
    """Write a trained model as a release: nested config, released names, experts packed to MXFP4.

    Args:
        model: with dense experts; it is not changed.
        target: a folder that is not there yet.
        dtype: of everything else; parameters that stay float32 do. None keeps the model's.
        tokenizer: saved beside it; None for none.

    Returns:
        `target`. Its logits are those of the model under `fake_quantized_experts`, cast to `dtype`.

    Raises:
        FileExistsError: the target is there.
        ValueError: widths that MXFP4 cannot pack.
    """
    from modeling_k3.conversion.convert import Options, convert

    target = Path(target).absolute()
    if target.exists():
        raise FileExistsError(f"{target} exists already; remove it or choose another target")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as folder:
        plain, packed = Path(folder, "plain"), Path(folder, "packed")
        # In the dtype they were trained in: rounding twice would not give the values of the training.
        model.save_pretrained(plain)
        convert(plain, packed, Options(layout="released", experts="mxfp4"))
        (packed / "conversion.json").unlink()
        finished = packed
        if dtype is not None:
            finished = Path(folder, "finished")
            narrow = type(model).from_pretrained(packed, dtype=dtype, expert_storage="packed")
            # As if built in code: what was read must not decide the number format of what is written.
            narrow._k3_layout = narrow.base_model._k3_layout = None
            narrow.save_pretrained(finished)
        if tokenizer is not None:
            tokenizer.save_pretrained(finished)
        finished.rename(target)
    return target
