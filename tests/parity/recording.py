"""Runs of a model whose intermediate tensors come out under the names of the golden files.

Everything is read from outside: forward hooks on the modules (whose names are those of the released checkpoint), the
public outputs, and the cache. States are brought into the golden layout, see `cache_tensors`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, PreTrainedModel

from tests.parity.golden import Case

Record = dict[str, Tensor]


def _hidden(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return (args[0] if args else kwargs["hidden_states"]).detach().clone()


def _first(output: Any) -> Tensor:
    return (output[0] if isinstance(output, tuple) else output).detach().clone()


def feed_forward(layer: nn.Module) -> nn.Module:
    """The dense or mixture-of-experts part of a decoder layer."""
    return layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp


def _watch(module: nn.Module, name: str, record: Record) -> RemovableHandle:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        record[f"{name}.input"], record[f"{name}.output"] = _hidden(args, kwargs), _first(output)

    return module.register_forward_hook(hook, with_kwargs=True)


def _watch_router(gate: nn.Module, name: str, record: Record) -> RemovableHandle:
    def hook(_: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, weights, indices = (tensor.detach() for tensor in output)
        indices, order = indices.sort(-1)
        record[f"{name}.router_logits"] = logits.clone()
        record[f"{name}.router_indices"], record[f"{name}.router_weights"] = indices, weights.gather(-1, order)

    return gate.register_forward_hook(hook)


def _watch_bank(model: PreTrainedModel, bank: list[tuple[Tensor, ...]]) -> list[RemovableHandle]:
    """Append to `bank` the block residuals that enter each layer, then those of the output mix."""

    def layer_hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        bank.append(tuple(source.detach().clone() for source in args[1:]))

    def output_hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        bank.append(tuple(source.detach().clone() for source in args[0][:-1]))

    handles = [layer.register_forward_pre_hook(layer_hook) for layer in model.model.layers]
    if model.config.attn_res_block_size is not None:
        handles.append(model.model.output_attn_res_proj.register_forward_pre_hook(output_hook))
    return handles


def _bank_tensors(bank: list[tuple[Tensor, ...]], depth: int) -> Record:
    """How many block residuals stand after each layer, and those at the end [B, T, n, D], oldest first."""
    after = bank[1:] if len(bank) > depth else [*bank[1:], ()]
    record = {"num_block_residuals": torch.tensor([len(sources) for sources in after])}
    if after[-1]:
        record["block_residuals"] = torch.stack(after[-1], 2)
    return record


@contextmanager
def recording(model: PreTrainedModel) -> Iterator[tuple[Record, list[tuple[Tensor, ...]]]]:
    """Collect module inputs and outputs, routing, and the bank of block residuals as it grows."""
    record: Record = {}
    bank: list[tuple[Tensor, ...]] = []
    handles = _watch_bank(model, bank)
    for index, layer in enumerate(model.model.layers):
        name, ffn = f"layers.{index}", feed_forward(layer)
        watched = ((layer, name), (layer.self_attn, f"{name}.self_attn"), (ffn, f"{name}.ffn"))
        handles += [_watch(module, label, record) for module, label in watched]
        if hasattr(ffn, "gate"):
            handles.append(_watch_router(ffn.gate, name, record))
    handles.append(_watch(model.model.norm, "norm", record))
    try:
        yield record, bank
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def forced_routing(model: PreTrainedModel, record: Record) -> Iterator[None]:
    """Let the experts chosen in `record` (an earlier `run_prompt`) do the work; the model still weighs them.

    A rounding error that tips the choice between two experts is a large error without being a mistake. Forcing the
    choice leaves the arithmetic to compare.
    """
    config = model.config

    def force(gate: nn.Module, indices: Tensor) -> RemovableHandle:
        def hook(_: nn.Module, __: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            logits, weights, chosen = output
            scores = logits.sigmoid() if config.moe_router_activation_func == "sigmoid" else logits.softmax(-1)
            kept = scores.gather(-1, indices.view_as(chosen))
            if config.moe_renormalize and indices.shape[-1] > 1:
                kept = kept / (kept.sum(-1, keepdim=True) + 1e-20)
            return logits, (kept * config.routed_scaling_factor).to(weights.dtype), indices.view_as(chosen)

        return gate.register_forward_hook(hook)

    gates = {index: feed_forward(layer) for index, layer in enumerate(model.model.layers)}
    handles = [
        force(ffn.gate, record[f"layers.{index}.router_indices"])
        for index, ffn in gates.items()
        if hasattr(ffn, "gate")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def cache_tensors(model: PreTrainedModel, cache: Any, prefix: str = "") -> Record:
    """The cache's states in the golden layout.

    Recurrent states are stored key channel first [B, H, K, V] and come out value channel first. The latent cache is
    expanded with `kv_b_proj` into the keys [B, H, S, N + R] and values [B, H, S, Vd] it stands for.
    """
    record: Record = {}
    for index, layer in enumerate(model.model.layers):
        name = f"{prefix}layers.{index}"
        if model.config.layer_types[index] == "linear_attention":
            record[f"{name}.recurrent_state"] = cache.get_recurrent_state(index).transpose(-1, -2).clone()
            for state_idx, stream in enumerate("qkv"):
                record[f"{name}.conv_state_{stream}"] = cache.get_conv_state(index, state_idx=state_idx).clone()
        else:
            latent, shared = cache.layers[index].keys, cache.layers[index].values
            heads = layer.self_attn.kv_b_proj(latent.squeeze(1)).unflatten(-1, (model.config.num_attention_heads, -1))
            key, value = heads.transpose(1, 2).split([model.config.qk_nope_head_dim, model.config.v_head_dim], -1)
            record[f"{name}.key_cache"] = torch.cat([key, shared.expand(-1, key.shape[1], -1, -1)], -1)
            record[f"{name}.value_cache"] = value.clone()
    return record


@torch.no_grad()
def run_prompt(model: PreTrainedModel, case: Case) -> Record:
    """The whole prompt in one forward, with everything the golden files know about it."""
    mask = case.tensors.get("attention_mask")
    with recording(model) as (record, bank):
        output = model(
            input_ids=case.input_ids,
            attention_mask=mask,
            use_cache=True,
            output_hidden_states=True,
            output_router_logits=True,
        )
    record["logits"], record["hidden"] = output.logits, record["norm.output"]
    for name in [name for name in record if ".router_" in name]:
        record[name] = record[name].reshape(*case.input_ids.shape, -1)
    for index, state in enumerate(output.hidden_states):
        record[f"hidden_states.{index}"] = state
    for index, logits in enumerate(output.router_logits or ()):
        record[f"router_logits.{index}"] = logits.reshape(*case.input_ids.shape, -1)
    return record | _bank_tensors(bank, len(model.model.layers)) | cache_tensors(model, output.cache)


def feed(model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None, lengths: Sequence[int]) -> tuple[Tensor, Any]:
    """Run `input_ids` in pieces of the given lengths through one cache; the joined logits and the cache."""
    logits, cache, start = [], None, 0
    for length in lengths:
        stop = start + length
        output = model(
            input_ids=input_ids[:, start:stop],
            attention_mask=None if mask is None else mask[:, :stop],
            cache=cache,
            use_cache=True,
        )
        logits.append(output.logits)
        cache, start = output.cache, stop
    if start != input_ids.shape[1]:
        raise AssertionError(f"pieces of {sum(lengths)} tokens for a prompt of {input_ids.shape[1]}")
    return torch.cat(logits, 1), cache


@torch.no_grad()
def run_pieces(model: PreTrainedModel, case: Case, lengths: Sequence[int]) -> Record:
    """The prompt in pieces: logits and states under the names of the one-shot run."""
    logits, cache = feed(model, case.input_ids, case.tensors.get("attention_mask"), lengths)
    return {"logits": logits} | cache_tensors(model, cache)


@torch.no_grad()
def run_greedy(model: PreTrainedModel, case: Case, steps: int, lengths: Sequence[int] | None = None) -> Record:
    """Greedy continuation, one token per forward, after a prefill in one piece or in pieces of `lengths`."""
    mask = case.tensors.get("attention_mask")
    logits, cache = feed(model, case.input_ids, mask, lengths or [case.input_ids.shape[1]])
    chosen_from = [logits[:, -1]]
    tokens = [chosen_from[-1].argmax(-1, keepdim=True)]
    while len(tokens) < steps:
        mask = None if mask is None else torch.cat([mask, torch.ones_like(tokens[-1])], 1)
        output = model(input_ids=tokens[-1], attention_mask=mask, cache=cache, use_cache=True)
        chosen_from.append(output.logits[:, -1])
        tokens.append(chosen_from[-1].argmax(-1, keepdim=True))
        cache = output.cache
    record = {"gen.tokens": torch.cat(tokens, 1), "gen.logits": torch.stack(chosen_from, 1)}
    return record | cache_tensors(model, cache, "gen.")


@torch.no_grad()
def run_generate(model: PreTrainedModel, case: Case, steps: int) -> Record:
    """The same continuation by the library's `generate`, which an end-of-sequence id must not stop.

    `generate` fills what its argument leaves open from the model's own generation config, so that one is replaced
    while it runs. The mask is passed always: without it, `generate` would take pad ids in the prompt for padding.
    """
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        output = model.generate(
            case.input_ids,
            attention_mask=case.attention_mask,
            generation_config=GenerationConfig(
                max_new_tokens=steps, do_sample=False, output_logits=True, return_dict_in_generate=True
            ),
        )
    finally:
        model.generation_config = own
    record = {
        "gen.tokens": output.sequences[:, case.input_ids.shape[1] :],
        "gen.logits": torch.stack(output.logits, 1),
    }
    return record | cache_tensors(model, output.cache, "gen.")
