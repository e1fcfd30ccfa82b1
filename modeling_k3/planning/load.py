"""From a checkpoint and a budget to a model: the plan is made for its config, and every knob is set as it says."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.checkpoint import Checkpoint
from modeling_k3.hub_files import HUB_OPTIONS
from modeling_k3.planning.plan import MemoryPlan, plan_memory
from modeling_k3.planning.shape import read_shape
from modeling_k3.planning.shares import plan_shares
from modeling_k3.planning.workload import Workload

Budget = int | str | Mapping[Any, int | str]
#: Fields of a workload that are training's, or come of the files.
_FIXED = {"mode", "lora_rank", "optimizer", "checkpointing", "experts"}
#: Those that a user chooses here.
_USE = {field.name for field in fields(Workload)} - _FIXED
#: Options of `from_pretrained` that the plan sets.
_PLANNED = "expert_storage expert_memory dequantize quantization_config device_map max_memory torch_dtype".split()


def load(path: str | PathLike, budget: Budget, model_class: type = K3ForCausalLM, **options: Any) -> Any:
    """Load a checkpoint by a plan; see `modeling_k3.planning.load_within`, which is this without its imports."""
    if given := sorted(options.keys() & {*_PLANNED, *_FIXED}):
        raise ValueError(f"{', '.join(given)} beside a budget: the plan chooses; allowed are {sorted(_USE)} and what "
                         "else from_pretrained takes")  # fmt: skip
    use = {name: options.pop(name) for name in _USE & options.keys()}
    dtype = use.pop("dtype", None)
    if dtype not in (None, "auto"):
        use["dtype"] = str(dtype).removeprefix("torch.")
    plan = plan_checkpoint(path, budget, options, use)
    wanted = plan.load_options()
    if "dtype" not in use:
        # A dtype that was asked for is also what a save writes; what the files have is not asked for.
        wanted["dtype"] = "auto"
    loaded = model_class.from_pretrained(path, **wanted, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.memory_plan = plan
    if model.can_generate():
        model.prefill_tokens = plan.use.batch * plan.use.prefill_chunk
    return loaded


def plan_checkpoint(path: str | PathLike, budget: Budget, options: dict[str, Any], use: dict[str, Any]) -> MemoryPlan:
    """The plan for a folder or a name on the hub, of which the config alone is read, and the names of the tensors.

    Args:
        path, budget: see `load_within`.
        options: for `from_pretrained`; those that are fields of the config count.
        use: fields of `Workload`.

    Raises:
        MemoryPlanError: it does not fit; names what would.
    """
    hub = {name: options[name] for name in HUB_OPTIONS if options.get(name) is not None}
    given = options.get("config")
    is_config = hasattr(given, "linear_attn_config")
    config = deepcopy(given) if is_config else K3Config.from_pretrained(path if given is None else given, **hub)
    for name in options.keys() - hub.keys() - {"config"}:
        if hasattr(config, name):
            setattr(config, name, options[name])
    shape, experts = read_shape(config), "auto"
    if shape.experts and Path(path).is_dir():
        # Stored names decide, as they do in loading.
        stored = Checkpoint.from_directory(path, options.get("subfolder") or "", options.get("variant"))
        has_all = all(layer.index in stored.packed_layers for layer in shape.layers if layer.is_moe)
        experts = "mxfp4" if has_all else "full"
    return (plan_shares if isinstance(budget, Mapping) else plan_memory)(config, budget, experts=experts, **use)
