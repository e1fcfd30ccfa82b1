"""Kimi Linear, K3's predecessor: the published config in our classes, and logits equal to transformers' own model."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling_k3 import K3Config, K3ForCausalLM
from tests.integration.test_save_load import tensors_in
from tests.models import build, max_diff, token_ids
from tests.tolerances import bound

#: config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct: its numbers and switches.
PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_kimi.KimiLinearConfig",
        "AutoModel": "modeling_kimi.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
    },
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
#: The same switches at toy size.
TINY: dict[str, Any] = {
    **PUBLISHED,
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 16,
    "linear_attn_config": {
        "full_attn_layers": [3, 5],
        "head_dim": 16,
        "kda_layers": [1, 2, 4],
        "num_heads": 3,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 4096,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "vocab_size": 160,
    "bos_token_id": 157,
    "eos_token_id": 158,
    "pad_token_id": 159,
}
#: transformers' own model: reads argv[1], writes its logits into argv[2] and itself into argv[3].
NATIVE = """
import sys
# Where they can be imported, the library takes their kernels, which need a GPU.
sys.modules["triton"] = sys.modules["fla"] = None
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert type(model).__module__ == "transformers.models.kimi_linear.modeling_kimi_linear", type(model)
assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
ids = load_file(sys.argv[2] + "/ids")["ids"]
tokens = model.generate(ids[:1], max_new_tokens=8, do_sample=False)
save_file({"logits": model(ids).logits.detach(), "tokens": tokens}, sys.argv[2] + "/found")
model.save_pretrained(sys.argv[3])
"""


def native(source: Path, folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """What transformers' own model makes of a checkpoint, in a process without triton and fla."""
    folder.mkdir()
    save_file({"ids": IDS}, folder / "ids")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(NATIVE), str(source), str(folder), str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(folder / "found")


IDS = token_ids(2, 70, high=150)


def test_the_published_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = K3Config.from_pretrained(tmp_path)
    assert config.layer_types.count("linear_attention") == 20 and config.layer_types[26] == "full_attention"
    assert config.mlp_layer_types == ["dense", *["sparse"] * 26]
    assert config.attn_res_block_size is None and config.routed_expert_hidden_size is None
    assert config.gate_lower_bound is None and not config.use_full_rank_gate and not config.mla_use_output_gate
    assert config.max_position_embeddings == 1048576 and not hasattr(config, "auto_map")
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    # 48B-A3B, with the embedding and the head.
    assert 48e9 < model.num_parameters() < 50e9
    names = set(model.state_dict())
    assert {"model.layers.0.self_attn.g_b_proj.weight", "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"} <= names
    assert not [name for name in names if "_res_" in name or "routed_expert" in name]


def write(model: K3ForCausalLM, folder: Path) -> Path:
    """A checkpoint as published: released names, the decay as [1, 1, H, 1]."""
    model.save_pretrained(folder)
    tensors = tensors_in(folder)
    tensors = {name: t.view(1, 1, -1, 1) if name.endswith("A_log") else t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def test_both_models_agree_on_the_same_weights(tmp_path: Path) -> None:
    """Ours, the library's and ours again on what the library saved: names, shapes, bytes and logits."""
    model = build(K3Config.from_dict(TINY))
    published = write(model, tmp_path / "published")
    found = native(published, tmp_path / "results", tmp_path / "again")
    ours = K3ForCausalLM.from_pretrained(published)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), model.parameters(), strict=True))
    assert max_diff(ours(IDS).logits, found["logits"]) < bound("native_kimi_linear_logits")
    assert torch.equal(ours.generate(IDS[:1], max_new_tokens=8, do_sample=False), found["tokens"])
    # The way back: what the library wrote, in our class; and what we write, byte for byte what was published.
    again = K3ForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(IDS).logits, ours(IDS).logits)
    ours.save_pretrained(tmp_path / "ours")
    first, last = tensors_in(published), tensors_in(tmp_path / "ours")
    assert first.keys() == last.keys()
    assert all(first[n].shape == last[n].shape and torch.equal(first[n], last[n]) for n in first)


def test_a_decay_of_other_heads_is_refused(tmp_path: Path) -> None:
    folder = write(build(K3Config.from_dict(TINY)), tmp_path / "published")
    tensors = tensors_in(folder)
    name = "model.layers.0.self_attn.A_log"
    tensors[name] = torch.zeros(1, 1, 4, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.A_log \[1, 1, 4, 1\] instead of \[3\]"):
        K3ForCausalLM.from_pretrained(folder)


def test_the_names_through_load_state_dict(tmp_path: Path) -> None:
    """A state dict with the decay as published is taken as it is, too."""
    model = build(K3Config.from_dict(TINY))
    state = {n: t.view(1, 1, -1, 1) if n.endswith("A_log") else t for n, t in model.state_dict().items()}
    other = K3ForCausalLM(K3Config.from_dict(TINY))
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
