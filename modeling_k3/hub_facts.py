"""What a model card says that can be read off the model: its parts, its size, the form of its weights."""

from typing import Any

from torch import nn

from .experts import iter_experts
from .stored_bits import stored_bytes


def parts_of(config: Any) -> list[tuple[str, str]]:
    """The parts a config switches on, each with the tag that stands for it (or none)."""
    found = []
    if "linear_attention" in config.layer_types:
        found.append(("Kimi Delta Attention", "linear-attention"))
    if "full_attention" in config.layer_types:
        gated = "gated " if config.mla_use_output_gate else ""
        found.append((f"{gated}multi-head latent attention without positions", ""))
    if config.attn_res_block_size is not None:
        found.append(("attention over depth", ""))
    if "sparse" in config.mlp_layer_types:
        where = " computed in a latent" if config.routed_expert_hidden_size is not None else ""
        found.append((f"a mixture of experts{where}", "mixture-of-experts"))
    return found


def sentence(config: Any) -> str:
    """What a model is, in one sentence."""
    names = [name for name, _ in parts_of(config)]
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"A decoder with {listed}."


def describe(model: nn.Module) -> list[tuple[str, str]]:
    """Name and value of what can be counted on a model."""
    config = model.config
    total = model.num_parameters()
    kinds = config.layer_types
    rows = [
        ("parameters", f"{total:,}, of which {active_parameters(model):,} work on each token"),
        (
            "layers",
            f"{len(kinds)}: {kinds.count('linear_attention')} KDA, {kinds.count('full_attention')} MLA",
        ),
        ("hidden width", f"{config.hidden_size:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
    ]
    experts = iter_experts(model)
    if experts:
        shared = config.num_shared_experts or 0
        width = config.routed_expert_hidden_size or config.hidden_size
        rows.append(
            (
                "experts",
                f"{config.num_experts} in each of {len(experts)} layers, {config.num_experts_per_token} chosen per "
                f"token, {shared} shared; width {width:,}",
            )
        )
    forms, _ = weight_forms(model)
    dtype = str(model.dtype).removeprefix("torch.")
    rows.append(("format", ", ".join([*forms, f"the rest {dtype}" if forms else dtype])))
    rows.append(("weights", model.weight_report().replace(" (in files)", "").replace(" of weights", "")))
    return rows


def weight_forms(model: nn.Module) -> tuple[list[str], list[str]]:
    """What is stored in few bits and how, and the packages that reading it needs."""
    forms, packages = [], set()
    for form in sorted({_form_of_experts(module) for _, module in iter_experts(model)} - {""}):
        forms.append(f"routed experts {form}")
        packages |= {"hqq"} if "HQQ" in form else set()
    linear = {form for module in model.modules() for form in stored_bytes(module)} - {"scales"}
    if linear:
        forms.append(f"linear layers {' and '.join(sorted(form.upper() for form in linear))} (bitsandbytes)")
        packages.add("bitsandbytes")
    return forms, sorted(packages)


def _form_of_experts(module: Any) -> str:
    """How experts are stored, mapped ones by what the files hold; empty for plain numbers."""
    if module.storage.startswith("hqq"):
        return f"in {module.bits} bits (HQQ)"
    kind = module.pages.kind if module.storage == "mapped" else module.storage
    return "MXFP4" if kind == "packed" else ""


def active_parameters(model: nn.Module) -> int:
    """Parameters that work on one token: all but the experts that are not chosen."""
    config = model.config
    idle = sum(
        module.count_weights() * (config.num_experts - config.num_experts_per_token) // config.num_experts
        for _, module in iter_experts(model)
    )
    return model.num_parameters() - idle
