"""The slow truth: K3 in float64, one token after the other, written from section 4 of `tests/golden/README.md`.

No chunks, no cache, no masks, no batch: one row of real tokens at a time, plain loops over layers, tokens, heads and
experts. It reads released tensor names and released config keys and shares no code with the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_MLA_EPS = 1e-6
_L2_EPS = 1e-6


@dataclass
class Truth:
    """What the oracle computed for one row of T tokens.

    Args:
        logits: [T, V].
        depth_weights: one [T, L] for each AttnRes mix, in the order of computation.
        chosen: for each MoE layer, for each token, expert -> weight.
        states: for each KDA layer, the state [H, V, K] after the last token.
    """

    logits: Tensor
    depth_weights: list[Tensor] = field(default_factory=list)
    chosen: list[list[dict[int, float]]] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


class Oracle:
    """K3 by the book.

    Args:
        config: released keys, flat; `K3Config.to_dict()` has them.
        weights: released names. What is computed is differentiable with respect to them.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.config, self.linear = config, config["linear_attn_config"]
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.eps = config["rms_norm_eps"]
        self.truth = Truth(torch.empty(0))

    def run(self, ids: Tensor) -> Truth:
        """Compute the logits of one row of ids [T], section 4.2 or 4.3."""
        self.truth = Truth(torch.empty(0))
        p = [self.weights["model.embed_tokens.weight"][i] for i in ids.tolist()]
        block = self.config["attn_res_block_size"]
        finished: list[list[Tensor]] = [[] for _ in p]
        for i in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{i}."
            u = self._mix(p, finished, f"{name}self_attention_res") if block else p
            restarts = bool(block) and i % block == 0
            if restarts:
                finished = [[*done, now] for done, now in zip(finished, p, strict=True)]
            normed = [self._norm(x, f"{name}input_layernorm") for x in u]
            attend = self._kda if i + 1 in self.linear["kda_layers"] else self._mla
            a = attend(normed, f"{name}self_attn.")
            p = a if restarts else [x + y for x, y in zip(p, a, strict=True)]
            u = self._mix(p, finished, f"{name}mlp_res") if block else p
            normed = [self._norm(x, f"{name}post_attention_layernorm") for x in u]
            p = [x + y for x, y in zip(p, self._feed_forward(normed, i, name), strict=True)]
        h = self._mix(p, finished, "model.output_attn_res") if block else p
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        self.truth.logits = torch.stack([head @ self._norm(x, "model.norm") for x in h])
        return self.truth

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        return _rms(x, self.eps if eps is None else eps) * self.weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return self.weights[f"{name}.weight"] @ x

    def _mix(self, p: list[Tensor], finished: list[list[Tensor]], name: str) -> list[Tensor]:
        n, w = self.weights[f"{name}_norm.weight"], self.weights[f"{name}_proj.weight"][0]
        mixed, weights = [], []
        for now, done in zip(p, finished, strict=True):
            candidates = [*done, now]
            scores = torch.stack([(n * w * _rms(v, self.eps)).sum() for v in candidates])
            a = scores.softmax(0)
            mixed.append(sum((a_j * v for a_j, v in zip(a, candidates, strict=True)), torch.zeros_like(now)))
            weights.append(a)
        self.truth.depth_weights.append(torch.stack(weights))
        return mixed

    def _convolve(self, z: list[Tensor], name: str) -> list[Tensor]:
        taps = self.weights[f"{name}.weight"][:, 0]
        width = taps.shape[1]
        result = []
        for t in range(len(z)):
            c = torch.zeros_like(z[t])
            for j in range(width):
                if t - (width - 1) + j >= 0:
                    c = c + taps[:, j] * z[t - (width - 1) + j]
            result.append(c * torch.sigmoid(c))
        return result

    def _kda(self, x: list[Tensor], name: str) -> list[Tensor]:
        """Section 4.4."""
        heads, width = self.linear["num_heads"], self.linear["head_dim"]
        bound, rate = self.linear.get("gate_lower_bound"), self.weights[f"{name}A_log"][:heads].exp()
        streams = {
            s: self._convolve([self._linear(x_t, f"{name}{s}_proj") for x_t in x], f"{name}{s}_conv1d") for s in "qkv"
        }
        state = [torch.zeros(width, width, dtype=torch.float64) for _ in range(heads)]
        outputs = []
        for t, x_t in enumerate(x):
            q, k, v = (streams[s][t].view(heads, width) for s in "qkv")
            r = self._linear(self._linear(x_t, f"{name}f_a_proj"), f"{name}f_b_proj") + self.weights[f"{name}dt_bias"]
            r = r.view(heads, width)
            beta = torch.sigmoid(self._linear(x_t, f"{name}b_proj"))
            if self.linear.get("use_full_rank_gate"):
                gate = self._linear(x_t, f"{name}g_proj")
            else:
                gate = self._linear(self._linear(x_t, f"{name}g_a_proj"), f"{name}g_b_proj")
            gate, heads_out = gate.view(heads, width), []
            for h in range(heads):
                q_h = q[h] / torch.sqrt((q[h] ** 2).sum() + _L2_EPS) * width**-0.5
                k_h = k[h] / torch.sqrt((k[h] ** 2).sum() + _L2_EPS)
                if bound is None:
                    log_decay = -rate[h] * torch.log1p(torch.exp(r[h]))
                else:
                    log_decay = bound * torch.sigmoid(rate[h] * r[h])
                memory = state[h] * log_decay.exp()[None, :]
                error = v[h] - memory @ k_h
                state[h] = memory + beta[h] * torch.outer(error, k_h)
                o = state[h] @ q_h
                heads_out.append(_rms(o, self.eps) * self.weights[f"{name}o_norm.weight"] * torch.sigmoid(gate[h]))
            outputs.append(self._linear(torch.cat(heads_out), f"{name}o_proj"))
        self.truth.states.append(torch.stack(state))
        return outputs

    def _mla(self, x: list[Tensor], name: str) -> list[Tensor]:
        """Section 4.5."""
        c = self.config
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        keys, values, outputs = [], [], []
        for x_t in x:
            joined = self._linear(x_t, f"{name}kv_a_proj_with_mqa")
            latent, shared = joined[: c["kv_lora_rank"]], joined[c["kv_lora_rank"] :]
            expanded = self._linear(self._norm(latent, f"{name}kv_a_layernorm", _MLA_EPS), f"{name}kv_b_proj")
            expanded = expanded.view(heads, nope + c["v_head_dim"])
            keys.append([torch.cat([expanded[h, :nope], shared]) for h in range(heads)])
            values.append([expanded[h, nope:] for h in range(heads)])
            if c["q_lora_rank"] is None:
                q = self._linear(x_t, f"{name}q_proj")
            else:
                inner = self._norm(self._linear(x_t, f"{name}q_a_proj"), f"{name}q_a_layernorm", _MLA_EPS)
                q = self._linear(inner, f"{name}q_b_proj")
            q, heads_out = q.view(heads, nope + rope), []
            for h in range(heads):
                scores = torch.stack([q[h] @ keys[s][h] / (nope + rope) ** 0.5 for s in range(len(keys))])
                a = scores.softmax(0)
                heads_out.append(sum((a[s] * values[s][h] for s in range(len(keys))), torch.zeros_like(values[0][h])))
            o = torch.cat(heads_out)
            if c["mla_use_output_gate"]:
                o = o * torch.sigmoid(self._linear(x_t, f"{name}g_proj"))
            outputs.append(self._linear(o, f"{name}o_proj"))
        return outputs

    def _feed_forward(self, x: list[Tensor], layer: int, name: str) -> list[Tensor]:
        """Section 4.6."""
        c = self.config
        if c["num_experts"] is None or layer < c["first_k_dense_replace"] or layer % c["moe_layer_freq"]:
            return [self._mlp(x_t, f"{name}mlp.", "gate_proj", "up_proj", "down_proj") for x_t in x]
        moe, outputs, chosen_by_token = f"{name}block_sparse_moe.", [], []
        for x_t in x:
            has_latent = c["routed_expert_hidden_size"] is not None
            z = self._linear(x_t, f"{moe}routed_expert_down_proj") if has_latent else x_t
            chosen = self._route(z if c["router_input"] == "latent" else x_t, f"{moe}gate")
            s = torch.zeros_like(z)
            for expert, weight in chosen.items():
                s = s + weight * self._mlp(z, f"{moe}experts.{expert}.", "w1", "w3", "w2")
            if has_latent:
                s = self._norm(s, f"{moe}routed_expert_norm") if c["latent_moe_use_norm"] else s
                s = self._linear(s, f"{moe}routed_expert_up_proj")
            if c["num_shared_experts"] is not None:
                s = s + self._mlp(x_t, f"{moe}shared_experts.", "gate_proj", "up_proj", "down_proj")
            outputs.append(s)
            chosen_by_token.append({expert: weight.item() for expert, weight in chosen.items()})
        self.truth.chosen.append(chosen_by_token)
        return outputs

    def _mlp(self, x: Tensor, name: str, gate: str, up: str, down: str) -> Tensor:
        g, u = self._linear(x, f"{name}{gate}"), self._linear(x, f"{name}{up}")
        if self.config["hidden_act"] == "situ":
            b, bound = self.config["activation_situ_beta"] or 1.0, self.config["activation_situ_linear_beta"]
            u = bound * torch.tanh(u / bound) if bound else u
            inner = b * torch.tanh(g / b) * torch.sigmoid(g) * u
        else:
            inner = g * torch.sigmoid(g) * u
        return self._linear(inner, f"{name}{down}")

    def _route(self, x: Tensor, name: str) -> dict[int, Tensor]:
        """Section 4.7: expert -> weight."""
        c = self.config
        logits = self._linear(x, name)
        scores = logits.sigmoid() if c["moe_router_activation_func"] == "sigmoid" else logits.softmax(0)
        choice = (scores + self.weights[f"{name}.e_score_correction_bias"]).tolist()
        groups, kept = c["num_expert_group"], c["topk_group"]
        if groups > 1 and groups > kept:
            size = len(choice) // groups
            value = {g: sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)}
            best = sorted(value, key=value.__getitem__)[-kept:]
            choice = [v if e // size in best else float("-inf") for e, v in enumerate(choice)]
        chosen = sorted(range(len(choice)), key=choice.__getitem__)[-c["num_experts_per_token"] :]
        weights = {e: scores[e] for e in chosen}
        if c["moe_renormalize"] and len(chosen) > 1:
            total = sum(weights.values()) + 1e-20
            weights = {e: weight / total for e, weight in weights.items()}
        return {e: weight * c["routed_scaling_factor"] for e, weight in weights.items()}


def _rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean() + eps)
