"""How K3 generates: prefill in pieces, prefix reuse, rollback for drafts, and which kinds of cache are possible."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.candidate_generator import AssistedCandidateGenerator, CandidateGenerator

from .cache import K3Cache
from .cache_choice import check_cache_choice, first_layers
from .cache_layers import DEFAULT_ROLLBACK
from .configuration_k3 import K3Config
from .masks import IMAGE_ARGUMENTS
from .prefix_cache import PrefixCache
from .signals import K3Signals, watched
from .static_cache import K3StaticCache


class _K3EarlyExit(AssistedCandidateGenerator):
    """Drafts with the model's first layers: as an argument of each call, for the config belongs to all threads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Out of the drafts' own options: they would draft themselves otherwise.
        self.assistant_kwargs["exit_layer"] = self.generation_config.assistant_early_exit
        self.generation_config.assistant_early_exit = None


class K3GenerationMixin(GenerationMixin):
    """`generate` for K3. Arguments beyond the library's:

    Args:
        prefix_cache: a `PrefixCache`: reuses the longest known prefix of the prompt and stores its new blocks.
        signals: a `K3Signals` that counts what happens.
    """

    #: Tokens (rows times length) that a prefill puts through the model at once, unless `prefill_chunk_size` says
    #: otherwise: the working set of AttnRes and KDA grows with them, the work does not.
    prefill_tokens: int = 2048

    def generate(self, *args: Any, signals: K3Signals | None = None, **kwargs: Any) -> Any:
        """Generate; see the library's method for all other arguments, and the class.

        Raises:
            TypeError: `signals` or `prefix_cache` is something else.
        """
        known = kwargs.get("prefix_cache")
        if known is not None and not hasattr(known, "bind"):
            raise TypeError(f"prefix_cache is a {type(known).__name__}; allowed are None and a PrefixCache")
        if kwargs.get("cache_implementation") == "hybrid":
            # The library takes this name for its default.
            check_cache_choice("hybrid")
        images = [name for name in IMAGE_ARGUMENTS if kwargs.get(name) is not None]
        if images:
            raise ValueError(f"{', '.join(images)}: image input is not supported; allowed is text, as in forward")
        with watched(signals, self, known):
            return super().generate(*args, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: K3Cache | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        prefix_cache: PrefixCache | None = None,
        exit_layer: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Cut out what the cache has not seen yet; a verification step also widens the rollback window to its size."""
        if next_sequence_length is None and is_first_iteration and cache is not None and cache.get_seq_length():
            # The first step of assisted decoding, whose prompt `_assisted_decoding` has run already.
            next_sequence_length = input_ids.shape[1] - cache.get_seq_length()
        if next_sequence_length is not None and hasattr(cache, "keep_log") and cache.is_croppable:
            cache.keep_log(next_sequence_length)
        if exit_layer is not None:
            kwargs["exit_layer"] = exit_layer
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            cache=cache,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    # -- prefill ------------------------------------------------------------------------------------------------

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        is_first_iteration: bool = True,
    ) -> Any:
        """Run the prompt: from a known prefix if there is one, in pieces if it is long."""
        cache, inputs_embeds = model_kwargs.get("cache"), model_kwargs.get("inputs_embeds")
        if not hasattr(cache, "linear_layer"):
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        by_embeds = inputs_embeds is not None and is_first_iteration
        prompt = _unseen(inputs_embeds if by_embeds else input_ids, generation_config, model_kwargs, by_embeds)
        return self._run_prompt(prompt, generation_config.prefill_chunk_size, model_kwargs, by_embeds)

    def _run_prompt(
        self,
        prompt: Tensor,
        chunk_size: int | None,
        model_kwargs: dict[str, Any],
        by_embeds: bool = False,
        spare: int = 1,
    ) -> Any:
        """Run new tokens [B, T] or embeddings [B, T, D] in pieces; return the last piece's outputs.

        Args:
            spare: tokens at the end that must be run, whatever is known of the prompt.
        """
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"prefill_chunk_size={chunk_size}; allowed are None and numbers above 0")
        cache, prefix_cache = model_kwargs["cache"], model_kwargs.get("prefix_cache")
        begin, length, rows = cache.get_seq_length(), prompt.shape[1], None
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        cache.reserve(begin + length)
        start = 0
        # Hidden states, maps or router logits of the whole prompt are wanted.
        wants_all = any(value for key, value in model_kwargs.items() if key.startswith("output_"))
        if prefix_cache is not None and (by_embeds or begin or wants_all or (mask is not None and not mask.all())):
            prefix_cache.count_bypass()
        elif prefix_cache is not None:
            start, rows = prefix_cache.fill(cache, prompt, spare, prefix_cache.bind(self))
        if chunk_size is None:
            chunk_size = length if wants_all else max(1, self.prefill_tokens // prompt.shape[0])
        outputs = None
        while start < length:
            stop = min(start + chunk_size, length)
            if rows is not None:
                # A block can be stored where the recurrence stands at its end, so pieces end there too.
                border = (start // prefix_cache.block_size + 1) * prefix_cache.block_size
                stop = min(stop, border)
            del outputs
            kwargs = {**model_kwargs, "attention_mask": None if mask is None else mask[:, : begin + stop]}
            if positions is not None:
                kwargs["position_ids"] = positions[..., positions.shape[-1] - length :][..., start:stop]
            piece = prompt[:, start:stop]
            if by_embeds:
                kwargs["inputs_embeds"] = piece
                piece = piece.new_zeros(piece.shape[:2], dtype=torch.long)
            own = {"is_first_iteration": by_embeds, "next_sequence_length": stop - start}
            outputs = self(**self.prepare_inputs_for_generation(piece, **own, **kwargs), return_dict=True)
            if rows is not None and stop % prefix_cache.block_size == 0:
                prefix_cache.store(cache, prompt, rows, stop)
            start = stop
        return outputs

    # -- drafts -------------------------------------------------------------------------------------------------

    def _assisted_decoding(
        self, input_ids: Tensor, *args: Any, generation_config: GenerationConfig, **kwargs: Any
    ) -> Any:
        """Decode with drafts: all but the prompt's last token is run first, in pieces, then the library's loop."""
        if generation_config.output_attentions:
            raise ValueError(
                "output_attentions=True with drafts is not possible: the maps of a verification step are split by "
                "token, and a layer may have none; generate without drafts"
            )
        cache = kwargs.get("cache")
        if hasattr(cache, "linear_layer"):
            drafted = max(generation_config.num_assistant_tokens or 0, generation_config.prompt_lookup_num_tokens or 0)
            cache.keep_log(max(DEFAULT_ROLLBACK, drafted + 1))
            if kwargs.get("inputs_embeds") is not None:
                raise ValueError("inputs_embeds with assisted decoding is not possible; allowed is input_ids")
            new = _unseen(input_ids, generation_config, kwargs, is_whole=True)
            if new.shape[1] > 1:
                before = dict(kwargs)
                for name in ("attention_mask", "position_ids"):
                    if kwargs.get(name) is not None:
                        before[name] = kwargs[name][..., :-1]
                self._run_prompt(new[:, :-1], generation_config.prefill_chunk_size, before, spare=0)
        kwargs.pop("prefix_cache", None)
        return super()._assisted_decoding(input_ids, *args, generation_config=generation_config, **kwargs)

    def _get_candidate_generator(
        self,
        generation_config: GenerationConfig,
        input_ids: Tensor,
        inputs_tensor: Tensor,
        logits_processor: Any,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> CandidateGenerator:
        """Make the source of drafts: the library's, or the model's own first layers."""
        depth = generation_config.assistant_early_exit
        given = (generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs)
        if depth is None:
            return super()._get_candidate_generator(*given, *args, **kwargs)
        if not 0 < depth < self.config.num_hidden_layers:
            raise ValueError(
                f"assistant_early_exit={depth}; allowed are 1 to {self.config.num_hidden_layers - 1} layers"
            )
        return _K3EarlyExit(input_ids, self, generation_config, model_kwargs, inputs_tensor, logits_processor)

    # -- cache --------------------------------------------------------------------------------------------------

    def _prepare_static_cache(
        self,
        cache_implementation: str,
        batch_size: int,
        max_cache_len: int,
        prefill_chunk_size: int | None,
        model_kwargs: dict[str, Any],
    ) -> K3StaticCache:
        """Make a cache of fixed size; never a shorter one than before, so that compiled steps serve it too."""
        self._previous_max_cache_length = max(max_cache_len, getattr(self, "_previous_max_cache_length", 1))
        config = first_layers(self.config, model_kwargs.get("exit_layer"))
        return K3StaticCache(config, self._previous_max_cache_length)

    def create_masks_for_generate(
        self, config: K3Config, inputs_embeds: Tensor, attention_mask: Tensor | None, cache: K3Cache, **kwargs: Any
    ) -> Tensor | None:
        """The mask of a step with a static cache: as wide as all that there is room for, so that its shape stays."""
        if attention_mask is None or cache.max_cache_len is None:
            return attention_mask
        return F.pad(attention_mask, (0, cache.max_cache_len - attention_mask.shape[1]), value=1)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Make `generate` use a K3Cache, and refuse the kinds of cache that cannot hold a recurrent state."""
        cache, plan = model_kwargs.get("cache"), self.memory_plan
        given = cache is not None
        if plan is not None:
            _check_planned(plan, generation_config, batch_size, max_cache_length + 1)
        check_cache_choice(generation_config.cache_implementation, cache)
        if given and hasattr(cache, "check_room"):
            # Whatever is left of the prompt: the sequence ends there at the latest.
            cache.check_room(max(0, max_cache_length - cache.get_seq_length()))
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if not given and type(model_kwargs.get("cache")) is DynamicCache:
            options = {} if plan is None else plan.cache_options()
            model_kwargs["cache"] = K3Cache(first_layers(self.config, model_kwargs.get("exit_layer")), **options)
        cache = model_kwargs.get("cache")
        if plan is not None and hasattr(cache, "linear_layer"):
            # Latents that grow as they come take up to an eighth more, and twice their bytes while they move.
            cache.reserve(max_cache_length + 1)
        if cache is None and model_kwargs.get("prefix_cache") is not None:
            raise ValueError("prefix_cache with use_cache=False is not possible: it fills the cache")
        if generation_config.is_assistant and hasattr(cache, "keep_log"):
            # The verifier may take back all that one round drafts.
            cache.keep_log(max(DEFAULT_ROLLBACK, (generation_config.max_new_tokens or 0) + 2))


def _check_planned(plan: Any, generation_config: GenerationConfig, batch_size: int, tokens: int) -> None:
    """Refuse more rows or tokens than the memory plan that the model was loaded by has room for.

    Raises:
        ValueError: says what the plan is for.
    """
    rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    if tokens > plan.use.context or rows > plan.use.batch:
        raise ValueError(
            f"batch {rows} with {tokens} tokens, prompt and max_new_tokens, is more than the memory plan is for: batch "
            f"{plan.use.batch} with {plan.use.context}; load with load_within(..., context=, batch=) for it, or set "
            "model.memory_plan = None and watch memory yourself"
        )


def _unseen(
    prompt: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], is_whole: bool
) -> Tensor:
    """The tokens of a prompt that the cache has not seen.

    Args:
        prompt: the whole sequence, or only what is new; the mask's length tells, which always covers the whole.
        is_whole: the prompt must be the whole sequence.

    Raises:
        ValueError: nothing is new, the cache holds other tokens, or the lengths of prompt, mask and cache do not fit
            together.
    """
    past, length = model_kwargs["cache"].get_seq_length(), prompt.shape[1]
    if not past:
        return prompt
    mask = model_kwargs.get("attention_mask")
    total = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", length)
    if is_whole or total == length:
        if length <= past:
            raise ValueError(
                f"the input has {length} tokens and the cache has seen {past}; allowed is the whole sequence with at "
                "least one new token, or the new tokens with an attention_mask over the whole sequence"
            )
        if prompt.ndim == 2 and not model_kwargs["cache"].begins_like(prompt):
            raise ValueError(
                f"the cache holds {past} tokens that are not the first ones of the input; allowed is the sequence it "
                "was filled with, continued, or a fresh K3Cache"
            )
        return prompt[:, past:]
    if total != past + length:
        raise ValueError(f"attention_mask covers {total} tokens, the cache has {past} and the input {length} more")
    return prompt
