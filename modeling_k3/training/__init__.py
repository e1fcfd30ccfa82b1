"""Training tools: what K3's authors did in training, for the library's Trainer and for a loop of one's own.

    optimizers   Muon for matrices (head by head), AdamW for the rest, in one optimizer; `muon` has the rule
    schedule     linear warm-up and a cosine
    balancing    the routers' biases, quantile by quantile; `callback` brings it and its figures into Trainer
    collator     documents packed into rows
    qk_clip      full attention's logits held below a bound
    qat          routed experts on the MXFP4 grid, and the export to the released layout

Names are imported when they are asked for, so that `import modeling_k3.training` costs nothing.
"""

import importlib

_HOME = {
    "MuonAdamW": "optimizers",
    "OptimizerFactory": "optimizers",
    "build_optimizer": "optimizers",
    "parameter_groups": "optimizers",
    "Muon": "muon",
    "cosine_schedule": "schedule",
    "RouterBalancer": "balancing",
    "K3TrainingCallback": "callback",
    "PackingCollator": "collator",
    "QKClip": "qk_clip",
    "QKClipCallback": "qk_clip",
    "fake_quantized_experts": "qat",
    "export_released": "qat",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
