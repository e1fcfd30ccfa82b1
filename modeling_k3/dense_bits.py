"""The dense part of a model in 4 or 8 bits of bitsandbytes, beside experts that are MXFP4.

Linear layers are quantised one after the other: in a model that is there, or each as soon as its weight is read.
"""

import copy
from collections import Counter
from collections.abc import Callable
from logging import LogRecord, getLogger
from typing import Any

from torch import nn
from transformers import BitsAndBytesConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

#: On the CPU the 4-bit product wants widths (out, in) that are multiples of these.
_CPU_STEPS = (32, 64)
_SAID: set[str] = set()


def is_dense_config(config: Any) -> bool:
    """Whether this is the library's BitsAndBytesConfig, asking for 4 or 8 bits."""
    return isinstance(config, BitsAndBytesConfig) and bool(config.load_in_4bit or config.load_in_8bit)


def check_dense_config(config: Any) -> None:
    """Refuse what is no such config, or cannot be carried out.

    Raises:
        TypeError: another object.
        ImportError: without bitsandbytes.
    """
    if config is None:
        return
    if not is_dense_config(config):
        raise TypeError(f"dense={config!r}; allowed is a BitsAndBytesConfig with load_in_4bit or load_in_8bit, or None")
    library()


def read_dense_config(block: Any) -> Any:
    """A block of a config.json, or a user's dictionary, as a BitsAndBytesConfig; None stays None.

    Raises:
        ValueError: it asks for neither 4 nor 8 bits.
        ImportError: without bitsandbytes.
    """
    if block is None:
        return None
    config = BitsAndBytesConfig.from_dict({name: value for name, value in block.items() if name != "quant_method"})
    if not is_dense_config(config):
        raise ValueError(f"quantization_config.dense={block!r}; allowed are blocks of bitsandbytes for 4 or 8 bits")
    check_dense_config(config)
    return config


def form_of(config: Any) -> str:
    """The name of a config's bits: "nf4", "fp4" or "int8"."""
    return config.bnb_4bit_quant_type if config.load_in_4bit else "int8"


def library() -> Any:
    """bitsandbytes; imported when it is needed, as that takes a second."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise ImportError("4 and 8 bits for the dense part need bitsandbytes: pip install bitsandbytes") from error
    return bitsandbytes


# -- which layers ---------------------------------------------------------------------------------------------------


def layers_to_quantize(model: Any, config: Any, device_of: Callable[[str], Any]) -> tuple[list[str], int]:
    """The linear layers of a model that get fewer bits.

    What is no linear layer stays as it is: experts, routers, norms, depth queries, convolutions, everything of the
    fp32 list. So do the head, tied weights, the modules that `llm_int8_skip_modules` names, and, on the CPU, layers of
    widths that bitsandbytes has no 4-bit product for; a message counts the last.

    Args:
        model: on any device, "meta" as well.
        config: a BitsAndBytesConfig.
        device_of: name of a layer -> where its weight will be.

    Returns:
        Their names; the number of weights in linear layers that are kept.

    Raises:
        ValueError: a layer will not be in memory.
    """
    kept = {id(model.get_output_embeddings()), *_tied(model)}
    skipped = config.llm_int8_skip_modules or []
    names, misfits, weights_kept = [], [], 0
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        if id(module) in kept or any(part == name or f".{part}." in f".{name}." for part in skipped):
            weights_kept += module.weight.numel()
            continue
        device = str(device_of(name))
        if device in ("disk", "meta"):
            raise ValueError(f"{name} is on disk by the device map; a dense part in fewer bits must be in memory")
        is_misfit = any(n % step for n, step in zip(module.weight.shape, _CPU_STEPS, strict=True))
        if config.load_in_4bit and device == "cpu" and is_misfit:
            misfits.append(name)
            weights_kept += module.weight.numel()
            continue
        names.append(name)
    if misfits:
        logger.warning(
            f"{len(misfits)} linear layers keep their number format: their widths are no multiples of {_CPU_STEPS}, "
            f"which 4 bits on the CPU need ({', '.join(misfits[:3])}, ...)"
        )
    return names, weights_kept


def _tied(model: Any) -> set[int]:
    names = {end for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items() for end in pair}
    return {id(model.get_submodule(name.removesuffix(".weight"))) for name in names}


# -- quantising -----------------------------------------------------------------------------------------------------


def quantize_dense(model: Any, config: Any) -> Counter[str]:
    """Put the linear layers of a model that is in memory into 4 or 8 bits, one after the other.

    Args:
        model: changed; `layers_to_quantize` says what.
        config: a BitsAndBytesConfig.

    Returns:
        Number of weights by form: "4 bits" or "8 bits", and "kept" for linear layers that were not changed.

    Raises:
        ValueError: a layer is not in memory, or the model has a dense part in fewer bits already.
    """
    check_dense_config(config)
    check_not_quantized(model.__dict__.get("_k3_dense_bits") is not None)
    names, kept = layers_to_quantize(model, config, lambda name: model.get_submodule(name).weight.device)
    bits = "4 bits" if config.load_in_4bit else "8 bits"
    counts = Counter[str](kept=kept)
    for name in names:
        module = model.get_submodule(name)
        counts[bits] += module.weight.numel()
        model.set_submodule(name, in_fewer_bits(module, config))
    mark(model, config)
    return counts


def check_not_quantized(is_quantized: bool) -> None:
    """Refuse to round what is rounded.

    Raises:
        ValueError: it is.
    """
    if is_quantized:
        raise ValueError(
            "the dense part is in bits of bitsandbytes already, and rounding it once more is refused: load it without "
            "a BitsAndBytesConfig, or start from the checkpoint it was made of"
        )


def mark(model: Any, config: Any) -> None:
    """Tell peft, the Trainer and our saving which layers a model has."""
    for each in {id(part): part for part in (model, model.base_model)}.values():
        each.is_loaded_in_4bit, each.is_loaded_in_8bit = bool(config.load_in_4bit), not config.load_in_4bit
        each._k3_dense_bits = config


def in_fewer_bits(module: nn.Linear, config: Any) -> nn.Module:
    """A layer of bitsandbytes with the weight of a linear layer, on its device."""
    made, weight = empty_layer(module, config), module.weight.detach()
    if config.load_in_4bit:
        # The constructor's options travel with the placeholder; moving to a device is what quantises.
        options = {name: value for name, value in vars(made.weight).items() if name not in ("data", "requires_grad")}
        made.weight = library().nn.Params4bit(weight, requires_grad=False, **options).to(weight.device)
    else:
        options = {"requires_grad": False, "has_fp16_weights": config.llm_int8_has_fp16_weight}
        # Only what comes from the CPU is rounded.
        made.weight = library().nn.Int8Params(weight.cpu(), **options).to(weight.device)
    return finish_layer(made, module)


def empty_layer(module: nn.Linear, config: Any) -> Any:
    """A layer of bitsandbytes for the place of a linear layer, on the meta device."""
    layers, has_bias = library().nn, module.bias is not None
    if config.load_in_4bit:
        return layers.Linear4bit(
            module.in_features,
            module.out_features,
            bias=has_bias,
            compute_dtype=config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
            quant_storage=config.bnb_4bit_quant_storage,
            device="meta",
        )
    getLogger("bitsandbytes.autograd._functions").addFilter(_is_new)
    return layers.Linear8bitLt(
        module.in_features,
        module.out_features,
        bias=has_bias,
        has_fp16_weights=config.llm_int8_has_fp16_weight,
        threshold=config.llm_int8_threshold,
        device="meta",
    )


def _is_new(record: LogRecord) -> bool:
    """Let the library say once, and not in each layer of each forward, that activations are cast to float16."""
    is_new = record.msg not in _SAID
    _SAID.add(record.msg)
    return is_new


def finish_layer(made: Any, module: nn.Linear) -> nn.Module:
    """Give a layer that has its weight the rest of the layer it replaces, and what keeps its codes readable."""
    made.bias = module.bias
    made._is_hf_initialized = made.weight._is_hf_initialized = True
    state = getattr(made.weight, "quant_state", None)
    if state is not None and made.weight.device.type == "cpu" and made.support_avx512bf16_for_cpu:
        # Such CPUs keep the codes in another order once the layer has computed, and the scales in bfloat16.
        made._k3_scales = copy.copy(state)
        made.register_state_dict_pre_hook(_in_stored_order)
        made.register_forward_pre_hook(_in_stored_order_for_gradients)
    return made.train(module.training).requires_grad_(False)


def _in_stored_order(module: Any, *_: Any) -> None:
    """Undo the CPU's order of codes. The library's own way back leaves the scales transposed: garbage, if saved."""
    state = module.weight.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        module.weight.data, _ = library().functional._convert_weight_packed_for_cpu_inverse(module.weight.data, state)
        module.weight.quant_state = module.quant_state = copy.copy(module._k3_scales)


def _in_stored_order_for_gradients(module: Any, args: tuple[Any, ...]) -> None:
    """The product over reordered codes lets no gradient through, not even an error."""
    if module.training or args[0].requires_grad:
        _in_stored_order(module)
