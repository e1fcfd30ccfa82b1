"""The miniature release of the load and offload benchmarks: a small dense part, experts of 1.7 MB packed."""

from typing import Any

from modeling_k3 import K3Config


def miniature(layers: int, **sizes: Any) -> K3Config:
    """A config with experts of 1024 x 1024 x 1024 in all layers but the first.

    Args:
        layers: how many.
        sizes: the fields that the benchmarks differ in: vocabulary, dense width, experts, experts per token.
    """
    return K3Config(
        hidden_size=1024,
        num_hidden_layers=layers,
        attn_res_block_size=4,
        linear_attn_config={"num_heads": 8, "head_dim": 128},
        num_attention_heads=8,
        q_lora_rank=512,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        moe_intermediate_size=1024,
        routed_expert_hidden_size=1024,
        dtype="bfloat16",
        **sizes,
    )
