"""The dense part of a model in 4 or 8 bits of bitsandbytes, beside experts that stay MXFP4."""

from collections import Counter
from typing import Any

from torch import nn
from transformers import BitsAndBytesConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

#: On the CPU the 4-bit product wants widths (out, in) that are multiples of these.
_CPU_STEPS = (32, 64)


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
    _layers()


def _layers() -> Any:
    """bitsandbytes' layers; imported when they are needed, as that takes a second."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise ImportError("4 and 8 bits for the dense part need bitsandbytes: pip install bitsandbytes") from error
    return bitsandbytes.nn


def quantize_dense(model: Any, config: Any) -> Counter[str]:
    """Put the linear layers of a loaded model into 4 or 8 bits, one after the other.

    What is no linear layer stays as it is: experts, routers, norms, depth queries, convolutions, everything of the
    fp32 list. So do the head, tied weights, the modules that `llm_int8_skip_modules` names, and, on the CPU, layers of
    widths that bitsandbytes has no 4-bit product for; a message counts the last.

    Args:
        model: loaded; changed.
        config: a BitsAndBytesConfig.

    Returns:
        Number of weights by form: "4 bits" or "8 bits", and "kept" for linear layers that were not changed.

    Raises:
        ValueError: a layer is not in memory.
    """
    check_dense_config(config)
    kept = {id(model.get_output_embeddings()), *_tied(model)}
    skipped = config.llm_int8_skip_modules or []
    counts, misfits = Counter[str](), []
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        if id(module) in kept or any(part == name or f".{part}." in f".{name}." for part in skipped):
            counts["kept"] += module.weight.numel()
            continue
        if module.weight.is_meta:
            raise ValueError(f"{name} is on disk by the device map; a dense part in fewer bits must be in memory")
        is_cpu = module.weight.device.type == "cpu"
        if config.load_in_4bit and is_cpu and any(
            n % step for n, step in zip(module.weight.shape, _CPU_STEPS, strict=True)
        ):  # fmt: skip
            misfits.append(name)
            counts["kept"] += module.weight.numel()
            continue
        model.set_submodule(name, _in_four_bits(module, config) if config.load_in_4bit else _in_eight(module, config))
        counts["4 bits" if config.load_in_4bit else "8 bits"] += module.weight.numel()
    if misfits:
        logger.warning(
            f"{len(misfits)} linear layers keep their number format: their widths are no multiples of {_CPU_STEPS}, "
            f"which 4 bits on the CPU need ({', '.join(misfits[:3])}, ...)"
        )
    # What peft and the Trainer ask to know which layers these are.
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bool(config.load_in_4bit), not config.load_in_4bit
    model._k3_dense_bits = config
    return counts


def _tied(model: Any) -> set[int]:
    names = {end for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items() for end in pair}
    return {id(model.get_submodule(name.removesuffix(".weight"))) for name in names}


def _in_four_bits(module: nn.Linear, config: Any) -> nn.Module:
    made = _layers().Linear4bit(
        module.in_features,
        module.out_features,
        bias=module.bias is not None,
        compute_dtype=config.bnb_4bit_compute_dtype,
        compress_statistics=config.bnb_4bit_use_double_quant,
        quant_type=config.bnb_4bit_quant_type,
        quant_storage=config.bnb_4bit_quant_storage,
        device="meta",
    )
    # The constructor's options travel with the placeholder; moving to a device is what quantises.
    options = {name: value for name, value in vars(made.weight).items() if name not in ("data", "requires_grad")}
    weight = module.weight.detach()
    made.weight = _layers().Params4bit(weight, requires_grad=False, **options).to(weight.device)
    made.bias = module.bias
    return made.requires_grad_(False)


def _in_eight(module: nn.Linear, config: Any) -> nn.Module:
    made = _layers().Linear8bitLt(
        module.in_features,
        module.out_features,
        bias=module.bias is not None,
        has_fp16_weights=config.llm_int8_has_fp16_weight,
        threshold=config.llm_int8_threshold,
        device="meta",
    )
    weight = module.weight.detach()
    made.weight = (
        _layers()
        .Int8Params(weight, requires_grad=False, has_fp16_weights=config.llm_int8_has_fp16_weight)
        .to(weight.device)
    )
    made.bias = module.bias
    return made.requires_grad_(False)
