"""The K3 model: embedding, decoder layers that read a mixture over depth, output mix, norm, head."""

from collections.abc import Iterable
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attn_res import K3KeyRMSNorm, K3PseudoQuery
from .cache import K3Cache
from .cache_choice import first_layers
from .call_masks import CallMasks, read_call
from .checkpoint import VISION_TENSORS, register_conversions
from .configuration_k3 import K3Config
from .decoder_layer import K3DecoderLayer, brought_to
from .expert_memory import K3ExpertMemory
from .generation import K3GenerationMixin
from .head_checks import check_labels, check_logits_to_keep
from .initialization import init_k3_module
from .kda import K3DeltaAttention, check_kda_implementation
from .latent_moe import K3Router, active_router, balance_loss
from .masks import PACKING_ARGUMENTS, check_cache, check_inputs, is_tracing
from .norms import K3RMSNorm
from .outputs import K3CausalLMOutput, K3LayerWeights, K3ModelOutput
from .precision import KEEP_IN_FP32
from .quantizer import register_quantizer
from .signals import watched

register_conversions()
register_quantizer()


class K3PreTrainedModel(K3ExpertMemory):
    """What all K3 models share: how they are initialised, loaded and split."""

    config: K3Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["K3DecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # K3Cache can take tokens back, so that drafts can be verified.
    _is_stateful = False
    _keep_in_fp32_modules_strict = list(KEEP_IN_FP32)
    _keys_to_ignore_on_load_unexpected = list(VISION_TENSORS)
    _can_record_outputs = {
        "hidden_states": K3DecoderLayer,
        "attentions": K3LayerWeights,
        "router_logits": OutputRecorder(K3Router, index=0),
        "depth_weights": OutputRecorder(K3PseudoQuery, index=1),
    }

    def __init__(self, config: K3Config, *args: Any, **kwargs: Any) -> None:
        config.validate()
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike | None,
        *args: Any,
        kda_implementation: str | None = None,
        **kwargs: Any,
    ) -> "K3PreTrainedModel":
        """Load a checkpoint; see `K3ExpertMemory.from_pretrained` and `K3Persistence.from_pretrained`.

        Args:
            kda_implementation: as in `set_kda_implementation`, from the start; None leaves "auto".

        Raises:
            ValueError: an unknown name, before anything is loaded.
        """
        if kda_implementation is not None:
            check_kda_implementation(kda_implementation)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if kda_implementation is not None:
            (loaded[0] if isinstance(loaded, tuple) else loaded).set_kda_implementation(kda_implementation)
        return loaded

    def set_kda_implementation(self, name: str, layers: Iterable[int] | None = None) -> None:
        """Choose how KDA is evaluated ("auto", "chunk", "recurrent", "exact", "fla"), everywhere or in some layers.

        A choice of the moment that is not saved; one call can override it: `model(..., kda_implementation=...)`.

        Raises:
            ValueError: unknown name, or a layer without KDA.
        """
        check_kda_implementation(name)
        found = {m.layer_idx: m for m in self.modules() if isinstance(m, K3DeltaAttention)}
        wanted = list(found if layers is None else layers)
        unknown = [i for i in wanted if i not in found]
        if unknown:
            raise ValueError(f"layers={unknown} have no KDA; allowed are {sorted(found)}")
        for i in wanted:
            found[i].implementation = name

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_k3_module(module, self.config.initializer_range)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # The library looks for the attention interface in this file's source; it is used in mla.py.
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # Likewise: experts.py.
        return True


class K3Model(K3PreTrainedModel):
    """The decoder without a head.

        p = embed(ids)      B = []                               AttnRes stream: running sum and finished blocks
        for layer l:        h = mix(B + [p]);  if l starts a block: B += [p], p = 0
                            p = p + attention_l(norm(h))         KDA or gated MLA by layer_types[l]
                            p = p + feed_forward_l(norm(mix(B + [p])))
        hidden = norm(mix(B + [p]))                              K3ForCausalLM: logits = lm_head(hidden)

    One source mixes to itself, so layer 0 needs no special case. Nothing of the stream lives beyond one call.
    Source: arXiv 2607.24653 section 2; released `KimiLinearModel`.
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__(config)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([K3DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.has_attn_res = config.attn_res_block_size is not None
        if self.has_attn_res:
            self.output_attn_res_norm = K3KeyRMSNorm(config.hidden_size)
            self.output_attn_res_proj = K3PseudoQuery(config.hidden_size)
        self.norm = K3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: K3Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        exit_layer: int | None = None,
        **kwargs: Any,
    ) -> K3ModelOutput:
        """Run the decoder.

        Args:
            input_ids: [B, T], or `inputs_embeds` [B, T, D] instead.
            attention_mask: [B, seen + T], 1 for real tokens and 0 for padding, on any side; over everything the
                cache has seen and the new tokens. Or the same as causal attention per pair of tokens.
            position_ids: K3 has no positions; where they restart at 0 another document begins, which sees nothing of
                the one before. `cu_seq_lens_q` and `seq_idx` say the same.
            cache: a K3Cache to continue and update; a call that fails leaves it as it was.
            use_cache: make one if none is given; never for packed documents or under gradient checkpointing.
            exit_layer: run only so many layers, the first ones; a cache is one for these. Drafts use it.
            kwargs: also `signals`, a `K3Signals` that counts during this call.

        Raises:
            ValueError, TypeError: see `masks`; before anything is computed or the cache is changed.
        """
        check_inputs(self.config, input_ids, inputs_embeds, kwargs)
        batch = (input_ids if input_ids is not None else inputs_embeds).shape[0]
        config = first_layers(self.config, exit_layer)
        if cache is not None:
            check_cache(cache, batch, config)
        checkpoints = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if checkpoints and cache is not None:
            raise ValueError(
                "cache is given under gradient checkpointing, which would update it twice; allowed is None"
            )
        p = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        masks = read_call(config, p, attention_mask, position_ids, cache, kwargs)
        if use_cache and cache is None and masks.packing is None and not checkpoints:
            cache = K3Cache(config)
        with watched(kwargs.pop("signals", None), self):
            if cache is None or is_tracing():
                return self._decode(p, masks, cache, exit_layer, kwargs)
            marks = cache.mark()
            cache.note_ids(input_ids, *p.shape[:2], p.device)
            try:
                return self._decode(p, masks, cache, exit_layer, kwargs)
            except BaseException:
                cache.restore(marks)
                raise

    def _decode(
        self, p: Tensor, masks: CallMasks, cache: K3Cache | None, exit_layer: int | None, kwargs: dict[str, Any]
    ) -> K3ModelOutput:
        """Run the layers over the embeddings p [B, T, D]."""
        padding = masks.padding
        if padding is not None:
            # Selected away, not multiplied: padding may hold anything. From here on it stays exactly zero.
            p = p.masked_fill(~padding.unsqueeze(-1), 0)
        if cache is not None:
            cache.note_padding(padding, *p.shape[:2], p.device)
        for name in PACKING_ARGUMENTS:
            kwargs.pop(name, None)
        self.count_cache(cache)
        common = {"padding_mask": padding, "packing": masks.packing, "span": masks.span, "cache": cache, **kwargs}
        common.setdefault("output_attentions", self.config.output_attentions)

        blocks: tuple[Tensor, ...] = ()
        for layer in self.layers[: exit_layer or self.config.num_hidden_layers]:
            blocks = brought_to(layer, blocks)
            blocks_after = (*blocks, p) if layer.starts_block else blocks
            p = layer(p, *blocks, attention_mask=masks.full, **common)
            blocks = blocks_after
        if self.has_attn_res:
            p, _ = self.output_attn_res_proj([*blocks, p], self.output_attn_res_norm(), eps=self.config.rms_norm_eps)
        return K3ModelOutput(last_hidden_state=self.norm(p), cache=cache)


def label_count(
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
    ignore_index: int = -100,
    **kwargs: Any,
) -> Tensor:
    """Return what the summed loss is divided by: the labels that count, at least 1, so that none at all gives 0."""
    if num_items_in_batch is None:
        counted = labels[..., 1:] if shift_labels is None else shift_labels
        num_items_in_batch = (counted != ignore_index).sum()
    return torch.as_tensor(num_items_in_batch, device=labels.device).clamp(min=1)


class K3ForCausalLM(K3PreTrainedModel, K3GenerationMixin):
    """K3 with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: K3Config) -> None:
        super().__init__(config)
        self.model = K3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: K3Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> K3CausalLMOutput:
        """Predict the next token.

        Args:
            labels: [B, T]; the loss is the mean cross entropy of token t + 1 at position t, -100 is left out.
                `num_items_in_batch` replaces the mean's denominator; without any label the loss is 0. In training with
                `router_balancing="aux_loss"` the weighted balancing loss is added. It is returned as `aux_loss`, also
                without labels where `output_router_logits` asks for it.
            logits_to_keep: only the last n positions, or a tensor of positions; 0 keeps all (labels need all).
            others: see `K3Model.forward`.
        """
        inputs = input_ids if input_ids is not None else inputs_embeds
        if isinstance(inputs, Tensor):
            check_logits_to_keep(logits_to_keep, tuple(inputs.shape[:2]))
        if labels is not None:
            check_labels(labels, inputs, logits_to_keep, self.config)
        balances = labels is not None and self.training and self.config.router_balancing == "aux_loss"
        if balances:
            kwargs["output_router_logits"] = True
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = aux_loss = None
        if labels is not None:
            kwargs["num_items_in_batch"] = label_count(labels, **kwargs)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if self.config.router_balancing == "aux_loss" and outputs.router_logits:
            routers = [active_router(layer.block_sparse_moe.gate) for layer in self.model.layers if layer.is_sparse]
            aux_loss = balance_loss(routers[: len(outputs.router_logits)], outputs.router_logits, attention_mask)
        if balances and aux_loss is not None:
            # Accumulated micro-batches count by their labels, as the rest of the loss does.
            own = label_count(labels, **{**kwargs, "num_items_in_batch": None})
            loss = loss + self.config.router_aux_loss_coef * aux_loss * (own / kwargs["num_items_in_batch"])
        return K3CausalLMOutput(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            depth_weights=outputs.depth_weights,
        )
