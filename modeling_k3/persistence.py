"""How K3 models are loaded: the library's entrances, and our reading. Saving is in `model_saving`."""

import copy
import json
import os
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.accelerate import get_max_memory
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .block_borders import prefer_block_borders
from .checkpoint import TEXT_PREFIX, Checkpoint, check_loaded
from .dense_bits import check_dense_config
from .hub_files import HUB_OPTIONS, fetch_part
from .load_plan import check_plan, has_stacks, holds_heads, make_plan
from .loading import fill, report_vision
from .model_saving import K3Saving
from .placement import (
    LoadState,
    apply_storage,
    collecting_later,
    current_load,
    disjoint,
    is_nested,
    loading,
    serve_from_disk,
)
from .quantizer import check_storage, is_released_block, loading_options, own_block, split_dense

logger = logging.get_logger(__name__)

#: Options of the loader that are attributes of a config as well.
_LOADER = "dtype torch_dtype quantization_config".split()
#: Options with which the library loads in its own way.
_BY_LIBRARY = "state_dict gguf_file key_mapping tp_plan tp_size distributed_config device_mesh".split()


class K3Persistence(K3Saving):
    """Loading and saving of all K3 models."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.register_load_state_dict_pre_hook(_take_released_names)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike | None,
        *args: Any,
        strict: bool = True,
        expert_storage: str | None = None,
        dequantize: bool = False,
        config: Any = None,
        quantization_config: Any = None,
        **kwargs: Any,
    ) -> "K3Persistence":
        """Load a checkpoint in the released or the flat layout; see the library's method for all other arguments.

        Args:
            strict: refuse a checkpoint that lacks a tensor of the model, or has one the model does not know, instead
                of starting from random values with a warning. Exempt: layers beyond `num_hidden_layers`, vision
                tensors, the language-model head where the class has none, and new classification heads.
            expert_storage: "packed" (MXFP4 in memory), "mapped" (MXFP4 in the files, read when used), "dense"
                (expanded), or None: as stored if the checkpoint fits in memory, mapped otherwise.
            dequantize: expand MXFP4 experts to the model's dtype; the same as `expert_storage="dense"`.
            config: a config, or a name or path of one.
            quantization_config: a K3Mxfp4Config, or its dictionary, states `expert_storage` and `dequantize` as well.
                A BitsAndBytesConfig is for the linear layers beside the experts; experts that are stored plain become
                MXFP4 with it, unless `expert_storage` says otherwise.

        Raises:
            ValueError: `strict` and the tensors do not match (names the first few); a broken file; an unknown or
                contradictory option.
            FileNotFoundError: no safetensors files.
        """
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False is not allowed: weights are read from safetensors files only")
        options = loading_options(quantization_config)
        if options is not None:
            expert_storage = expert_storage or options.expert_storage
            dequantize, quantization_config = dequantize or options.dequantize, None
        check_storage(expert_storage, dequantize)
        path = pretrained_model_name_or_path
        state = LoadState(
            strict=strict,
            storage="dense" if dequantize else expert_storage,
            by_library=path is None or any(kwargs.get(name) is not None for name in _BY_LIBRARY),
            max_memory=kwargs.get("max_memory"),
            device_map=kwargs.get("device_map"),
            path=path,
            dense=None if options is None else options.dense,
            expert_memory=kwargs.pop("expert_memory", None),
            has_dtype=any(kwargs.get(name) not in (None, "auto") for name in ("dtype", "torch_dtype")),
        )
        if not state.by_library:
            config = _own_config(cls, path, config, kwargs)
            if quantization_config is not None:
                state.dense, quantization_config = split_dense(quantization_config, config)
                check_dense_config(state.dense)
            if config is not None and (block := own_block(vars(config).get("quantization_config"), state)) is not None:
                config.quantization_config = block
            if not os.path.isdir(path) and config is not None:
                path = fetch_part(path, config.num_hidden_layers, cls.can_generate(), kwargs) or path
            if os.path.isdir(path) and not (Path(path) / "adapter_config.json").is_file():
                subfolder = kwargs.get("subfolder") or ""
                state.checkpoint = Checkpoint.from_directory(path, subfolder, kwargs.get("variant"))
            kwargs["use_safetensors"] = True
            if is_nested(state.device_map) and config is not None:
                with torch.device("meta"):
                    shell = cls(copy.deepcopy(config))
                kwargs["device_map"] = state.device_map = disjoint(shell, state.device_map)
        else:
            _check_library_can(cls, path, config, state, kwargs)
        if quantization_config is not None:
            kwargs["quantization_config"] = quantization_config
        wants_info = kwargs.pop("output_loading_info", False)
        with loading(state), collecting_later():
            model, info = super().from_pretrained(path, *args, config=config, output_loading_info=True, **kwargs)
        if path != pretrained_model_name_or_path:
            model.name_or_path = model.config.name_or_path = pretrained_model_name_or_path
        if state.disk:
            serve_from_disk(model, state.disk)
        if strict:
            check_loaded(info, model, path)
        if state.dense is not None or state.file_dense is not None:
            logger.warning(model.weight_report())
        return (model, info) if wants_info else model

    @staticmethod
    def _load_pretrained_model(
        model: PreTrainedModel,
        state_dict: dict[str, Any] | None,
        checkpoint_files: list[str] | None,
        load_config: Any,
        expected_keys: list[str] | None = None,
    ) -> tuple[Any, dict[str, Any] | None]:
        """Read files by our plan; leave state dicts, sharded devices and quantisation while loading to the library."""
        state = current_load()
        quantizer = load_config.hf_quantizer
        is_foreign = quantizer is not None and not is_released_block(quantizer.quantization_config)
        # The library names the keys it expects where it loads an adapter into a model that is there.
        is_other = is_foreign or is_deepspeed_zero3_enabled() or expected_keys is not None
        by_library = state.by_library or is_other or state_dict is not None
        if checkpoint_files and not by_library:
            state.checkpoint = state.checkpoint or Checkpoint.from_files(checkpoint_files)
            by_library = has_stacks(state.checkpoint)
        if by_library or not checkpoint_files or load_config.device_mesh is not None:
            if expected_keys is None and (state.dense is not None or state.file_dense is not None):
                raise ValueError("4 or 8 bits for the dense part: allowed where our own code reads the files, that is, "
                                 f"without {', '.join(_BY_LIBRARY)} and ZeRO-3")  # fmt: skip
            return PreTrainedModel._load_pretrained_model(
                model, state_dict, checkpoint_files, load_config, expected_keys
            )
        apply_storage(model, state.checkpoint, state)
        plan = make_plan(model, state.checkpoint)
        info = check_plan(plan, model, state)
        if isinstance(state.device_map, str) and load_config.device_map is not None:
            prefer_block_borders(model, load_config.device_map, get_max_memory(state.max_memory))
        report_vision(state.checkpoint)
        fill(model, plan, load_config, state)
        info.missing_keys -= set(state.disk) - set(plan.tied)
        plan.layout.keeps_dtypes = not state.has_dtype
        plan.layout.is_nested = model.config.released_config is not None
        model._k3_layout = model.base_model._k3_layout = plan.layout
        for file in state.checkpoint.files:
            file.forget_header()
        has_disk = "disk" in map(str, (load_config.device_map or {}).values())
        # Empty where only mapped experts are on disk, for which the library needs no folder.
        return info, {name: {} for name in state.disk} if has_disk else None


def _own_config(cls: type, path: str | PathLike, config: Any, kwargs: dict[str, Any]) -> Any:
    """Return a config of our own to change, as the library would make it; None where only the library knows how."""
    if config is not None and not isinstance(config, (str, os.PathLike)):
        return copy.deepcopy(config)
    source = path if config is None else config
    adapter = Path(source) / "adapter_config.json"
    if adapter.is_file() and not (Path(source) / "config.json").is_file():
        source = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    hub = {name: kwargs[name] for name in HUB_OPTIONS if kwargs.get(name) is not None}
    own = cls.config_class.from_pretrained(source, **hub)
    # Attributes of the config may be given beside the path, as in the library.
    for name in [name for name in kwargs if hasattr(own, name) and name not in (*_LOADER, *hub)]:
        setattr(own, name, kwargs.pop(name))
    return own


def _check_library_can(cls: type, path: Any, config: Any, state: LoadState, kwargs: dict[str, Any]) -> None:
    """Refuse the options that leave a load to the library where only our own reading gives what is asked for."""
    used = [name for name in _BY_LIBRARY if kwargs.get(name) is not None] or ["no path"]
    if state.storage in ("packed", "mapped"):
        raise ValueError(f"expert_storage={state.storage!r} with {', '.join(used)}: allowed is 'dense' or None")
    if path is not None and not kwargs.get("gguf_file"):
        config = _own_config(cls, path, config, dict(kwargs))
    if config is not None and is_released_block(vars(config).get("quantization_config")):
        raise ValueError(
            f"{', '.join(used)} with MXFP4 experts: the library, which reads then, cannot; load without, or convert "
            "the checkpoint to bf16 first (k3 convert)"
        )


def _take_released_names(module: PreTrainedModel, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    """Let `load_state_dict` read what `save_pretrained` wrote, as resumed training does: prefix and padding."""
    if prefix:
        return
    for name in [name for name in state_dict if name.startswith(TEXT_PREFIX)]:
        state_dict[name.removeprefix(TEXT_PREFIX)] = state_dict.pop(name)
    for name, parameter in module.named_parameters():
        given = state_dict.get(name)
        is_decay = name.endswith(".A_log") and given is not None and given.shape != parameter.shape
        if is_decay and holds_heads(given.shape, len(parameter)) and not given.reshape(-1)[len(parameter) :].any():
            state_dict[name] = given.reshape(-1)[: len(parameter)]
