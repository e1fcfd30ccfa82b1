"""Tiny K3 models for the tests: configs with every structural switch of the release, and weights worth computing with.

`tiny_config` copies the released model's shape at toy size: KDA and MLA, the last two layers both MLA, layer 0 dense,
latent experts with norm, shared experts, AttnRes, both output gates. `build` fills a model with weights in which
every part matters: no zero pseudo-query, no unit norm, a router whose choices rounding does not change.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modeling_k3 import K3Cache, K3Config, K3ForCausalLM
from tests.tolerances import Tolerance

#: Bounds of the tests that use these models: absolute differences unless the reason says otherwise.
BOUNDS: dict[str, Tolerance] = {
    "same_function_fp32": Tolerance(1e-4, "logits reach 5: two orders of the same fp32 sums differ by 1e-5 at most"),
    "same_scores_fp32": Tolerance(1e-4, "beam scores are means of log probabilities, each off by 1e-5"),
    "same_loss_fp32": Tolerance(1e-5, "losses near 6, means over a few dozen tokens: 1e-6"),
    "same_gradient_fp32": Tolerance(1e-4, "relative to the largest entry: fp32 sums in another order cost 1e-5"),
    "checkpointing_f64": Tolerance(
        1e-12,
        "relative to the largest entry: the same products, but reentrant blocks are summed in another order: 1e-14",
    ),
    "autocast_loss": Tolerance(1e-2, "relative: bf16 products move a loss near 6 by 0.5 % where no expert can change"),
    "autocast_gradient": Tolerance(
        0.1, "relative norm of all gradients of two layers: 6 %, as much as rounding the weights alone to bf16 costs"
    ),
    "sums_to_one": Tolerance(1e-6, "softmax over at most 7 sources in fp32"),
}

#: Changes to `tiny_config` that leave a part out or swap it.
VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "block_of_3": {"attn_res_block_size": 3},
    "plain_residual": {"attn_res_block_size": None},
    "softplus": {"linear": {"gate_lower_bound": None}},
    "low_rank_gate": {"linear": {"use_full_rank_gate": False}},
    "no_output_gate": {"mla_use_output_gate": False},
    "no_q_lora": {"q_lora_rank": None},
    "mla_only": {"layers": "MMM"},
    "kda_only": {"layers": "KKK"},
    "one_layer": {"layers": "K", "first_k_dense_replace": 0},
    "dense": {"num_experts": None},
    "full_width_moe": {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
    "no_shared_experts": {"num_shared_experts": None},
    "routes_on_latent": {"router_input": "latent"},
    "grouped_softmax": {
        "moe_router_activation_func": "softmax",
        "num_expert_group": 4,
        "topk_group": 2,
        "moe_renormalize": False,
        "routed_scaling_factor": 2.5,
    },
    "silu": {"hidden_act": "silu"},
}


def tiny_config(layers: str = "KKKMM", linear: Mapping[str, Any] | None = None, **changes: Any) -> K3Config:
    """Make the tiny config.

    Args:
        layers: one letter for each layer, K for KDA and M for MLA.
        linear: changes to the entries of `linear_attn_config`.
        changes: other fields.
    """
    kinds = list(enumerate(layers, start=1))
    fields: dict[str, Any] = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": len(layers),
        "attn_res_block_size": 2,
        "linear_attn_config": {
            "num_heads": 3,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "kda_layers": [i for i, kind in kinds if kind == "K"],
            "full_attn_layers": [i for i, kind in kinds if kind == "M"],
            **(linear or {}),
        },
        "num_attention_heads": 3,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 32,
        "pad_token_id": 157,
        "bos_token_id": 158,
        "eos_token_id": 159,
    }
    return K3Config(**{**fields, **changes})


def experts_config(experts: int, width: int, layers: int, **changes: Any) -> K3Config:
    """A bfloat16 model that is little but experts [width, width, width]."""
    return K3Config(
        vocab_size=512,
        num_hidden_layers=layers,
        num_experts=experts,
        moe_intermediate_size=width,
        routed_expert_hidden_size=width,
        dtype="bfloat16",
        **changes,
    )


def variant(name: str, **changes: Any) -> K3Config:
    """The config of `VARIANTS[name]`, with further changes."""
    return tiny_config(**{**VARIANTS[name], **changes})


def build(
    config: K3Config, seed: int = 0, dtype: torch.dtype = torch.float32, model_class: type = K3ForCausalLM
) -> Any:
    """Build a model in eval mode and fill it with `randomize`."""
    model = model_class(config)
    randomize(model, seed)
    return model.to(dtype).eval()


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter, by its name, with values at which each part of the model has an effect of order one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(_values(name, noise))


def _values(name: str, noise: Tensor) -> Tensor:
    """Turn standard normal noise into the values of the parameter `name`."""
    owner, leaf = name.split(".")[-2:] if "." in name else ("", name)
    if leaf == "A_log":
        return 0.5 * noise
    if leaf == "dt_bias":
        return noise - 3.0
    if leaf == "e_score_correction_bias":
        return 0.3 * noise
    if leaf == "weight" and "norm" in owner:
        return 1.0 + 0.2 * noise
    if owner.endswith("_res_proj"):
        return 0.15 * noise
    if "conv1d" in owner:
        return noise
    if owner == "embed_tokens":
        return noise
    if owner == "gate":
        return 1.5 * noise / math.sqrt(noise.shape[-1])
    if leaf == "bias":
        return 0.1 * noise
    return 1.5 * noise / math.sqrt(noise.shape[-1])


def released_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters under the released names: experts one by one, gate before up. Independent of the conversions."""
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(".experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2, dim=0)
                stem = name.removesuffix("gate_up_proj") + str(expert)
                weights[f"{stem}.w1.weight"], weights[f"{stem}.w3.weight"] = gate, up
        elif name.endswith(".experts.down_proj"):
            for expert, down in enumerate(tensor):
                weights[f"{name.removesuffix('down_proj')}{expert}.w2.weight"] = down
        else:
            weights[name] = tensor
    return weights


def token_ids(batch: int, length: int, seed: int = 0, high: int = 157) -> Tensor:
    """Random ids [batch, length] below `high`, that is, no special token of `tiny_config`."""
    return torch.randint(0, high, (batch, length), generator=torch.Generator().manual_seed(1000 + seed))


class Rows(torch.utils.data.Dataset):
    """Sixteen rows of ten random tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = token_ids(1, 10, seed=index)[0]
        return {"input_ids": row, "labels": row}


def greedy_by_hand(model: nn.Module, ids: Tensor, steps: int = 8, mask: Tensor | None = None) -> Tensor:
    """Greedy decoding by recomputing everything for every token, without any cache."""
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, attention_mask=mask, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return ids


def max_diff(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; infinity where one is not finite or the shapes differ."""
    if a.shape != b.shape:
        return math.inf
    difference = (a.double() - b.double()).abs()
    return difference.max().item() if difference.isfinite().all() and difference.numel() else math.inf


def within(a: Tensor, b: Tensor, name: str) -> bool:
    """Whether the largest difference stays below `BOUNDS[name]`."""
    return max_diff(a, b) < BOUNDS[name].bound


def close_gradients(a: nn.Module, b: nn.Module, name: str) -> bool:
    """Whether all gradients agree, each relative to its largest entry, and exist for the same parameters."""
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        if (p.grad is None) != (q.grad is None):
            return False
        if p.grad is not None and max_diff(p.grad, q.grad) > BOUNDS[name].bound * max(1.0, q.grad.abs().max().item()):
            return False
    return True


def cache_tensors(cache: K3Cache) -> list[Tensor]:
    """Copies of every tensor in a cache, in order; for the assertion that nothing was changed."""
    tensors = []
    for layer, is_linear in zip(cache.layers, cache.is_linear, strict=True):
        held = [*(layer.windows or []), layer.state] if is_linear else [layer.keys, layer.values]
        tensors += [tensor.clone() for tensor in held if tensor is not None]
    return tensors


def same_tensors(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two lists hold bit-equal tensors."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
