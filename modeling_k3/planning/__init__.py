"""Memory planning: what a config costs, and how it runs inside a budget of bytes. Planning needs no torch.

shape         dimensions of any config, from a preset, a folder, a dictionary or a K3Config
components    weights by component
state         KDA states, windows, latents, rollback logs, prefix blocks
activations   the working set of a forward
training      what a backward needs, gradients, optimizer
kernels       what the backend keeps of 16-bit products
workload      a use of a model, and the table of all of the above
plan          from a budget to every knob that competes for it
expected      how long a plan should take
speed         what this machine's disk and memory give
load          a checkpoint loaded by its plan
devices       layers over several accelerators
shares        a budget for each of several memories
scenarios     typical machines side by side
report        tables, JSON, picture (`k3 plan`)

plan = plan_memory("kimi-k3", "24GiB", context=131072)
model = load_within(path, "24GiB", context=131072)  # makes the plan, loads by it, and has it as model.memory_plan
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from modeling_k3.planning.plan import MemoryPlan, MemoryPlanError, plan_memory
from modeling_k3.planning.workload import Workload, memory_table

__all__ = ["MemoryPlan", "MemoryPlanError", "Workload", "load_within", "memory_table", "plan_memory"]


def load_within(path: str | PathLike, budget: int | str | Mapping[Any, int | str], **options: Any) -> Any:
    """Load a checkpoint so that this process stays within a budget of main memory, at every length up to `context`.

        model = from_pretrained(path, **plan.load_options())        plan = plan_memory(its config, budget, ...)

    Numbers are those of the resident model, bit for bit, unless `dense` or `dtype` asks for others. The plan stays on
    the model: `generate` runs prompts in its pieces, makes caches with its rollback window, takes the bytes of a call's
    latents at once, and refuses calls beyond its context and batch. Caches of one's own take its options:
    `K3Cache(model.config, **plan.cache_options())`, `PrefixCache(**plan.prefix_cache_options())`.

    Args:
        path: folder, or name on the hub.
        budget: bytes, or e.g. "24GiB", for the whole process; or for each memory, {0: "80GiB", "cpu": "200GiB"}.
        options: `context` (4096), `batch` (1), `prefill_chunk`, `rollback_tokens`, `prefix_tokens`, `prefix_block`,
            `dense` ("full", "int8", "nf4", "fp4") and `dtype`, see `Workload`; `model_class`, K3ForCausalLM unless
            given; all others are for its `from_pretrained`.

    Returns:
        What `from_pretrained` returns, with `memory_plan` on the model.

    Raises:
        MemoryPlanError: it does not fit, said before any weights are read; names the nearest that does.
        ValueError, TypeError: an argument that is not allowed; an option that the plan sets.
    """
    from modeling_k3.planning.load import load

    return load(path, budget, **options)
