"""Start values of the K3 parts the library does not know how to start (it does linear maps, norms, embeddings)."""

import math

import torch
from torch import nn
from transformers import initialization as init

from .attn_res import K3KeyRMSNorm, K3PseudoQuery
from .experts import K3Experts
from .kda import K3DeltaAttention
from .latent_moe import K3Router
from .short_conv import K3ShortConvolution


def init_k3_module(module: nn.Module, std: float) -> None:
    """Initialise one module's own parameters; those that a checkpoint has filled are left alone.

    Args:
        module: any module of the model.
        std: standard deviation of the weight matrices, the config's `initializer_range`.

    Source: arXiv 2603.15031 section 5 (queries at zero: uniform over depth, otherwise training starts unstable);
    arXiv 2607.24653 section 2.1.1 (A = 0 for the bounded gate); gated delta nets (the other decays).
    """
    if isinstance(module, K3PseudoQuery):
        init.zeros_(module.weight)
    elif isinstance(module, K3KeyRMSNorm):
        init.ones_(module.weight)
    elif isinstance(module, K3ShortConvolution):
        bound = 1 / math.sqrt(module.kernel_size)
        init.uniform_(module.weight, -bound, bound)
    elif isinstance(module, K3Router):
        init.normal_(module.weight, mean=0.0, std=std)
        init.zeros_(module.e_score_correction_bias)
    elif isinstance(module, K3Experts) and module.storage == "dense":
        init.normal_(module.gate_up_proj, mean=0.0, std=std)
        init.normal_(module.down_proj, mean=0.0, std=std)
    elif isinstance(module, K3DeltaAttention):
        _init_decay(module)


def _init_decay(module: K3DeltaAttention) -> None:
    """A = 0 (bounded gate) or log U(1, 16); step sizes log-uniform in [1e-3, 0.1], dt_bias their inverse softplus."""
    if module.gate_lower_bound is None:
        init.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(1, 16).log())
    else:
        init.zeros_(module.A_log)
    step = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
    init.copy_(module.dt_bias, step + torch.log(-torch.expm1(-step)))
