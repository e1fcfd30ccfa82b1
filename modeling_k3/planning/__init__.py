"""Memory planning: what a config costs, and how it runs inside a budget of bytes. Nothing here needs torch.

shape         dimensions of any config, from a preset, a folder, a dictionary or a K3Config
components    weights by component
state         KDA states, windows, latents, rollback logs, prefix blocks
activations   the working set of a forward
training      what a backward needs, gradients, optimizer
workload      a use of a model, and the table of all of the above
plan          from a budget to every knob that competes for it
devices       layers over several accelerators
scenarios     typical machines side by side
report        tables, JSON, picture (`k3 plan`)

plan = plan_memory("kimi-k3", "24GiB", context=131072)
model = K3ForCausalLM.from_pretrained(path, **plan.load_options())
model.generate(ids, **plan.generate_options())
"""

from modeling_k3.planning.plan import MemoryPlan, MemoryPlanError, plan_memory
from modeling_k3.planning.workload import Workload, memory_table

__all__ = ["MemoryPlan", "MemoryPlanError", "Workload", "memory_table", "plan_memory"]
