"""QK-clip: heads of full attention whose logits grow too large get smaller query and key weights.

    clip = QKClip(model)
    ...                         # forward, backward
    optimizer.step()
    clip.step()

In the library's Trainer, `callbacks=[QKClipCallback()]` does the same.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerControl, TrainerState, TrainingArguments

from modeling_k3.attention_span import AttentionSpan

from .reporting import ReportingCallback

_TILE = 512


class QKClip:
    """Watches the largest logit of every MLA head while a model trains, and clips the weights when asked.

        gamma_h = min(1, tau / max logit of head h since the last step)
        q_nope, k_nope rows of head h *= sqrt(gamma_h)         q_rope rows of head h *= gamma_h

    Afterwards the same tokens give logits of at most tau. The key's "rope" part is shared by all heads, so the query
    bears all of its share. KDA needs no clipping: its queries and keys have unit length.

    Costs a second product of queries and keys per layer, without gradients, in tiles of 512 queries. Needs whole
    parameters, not sharded ones (FSDP, ZeRO-3); adapters on the projections are not clipped.

    Args:
        model: any model; without MLA layers nothing is done.
        threshold: tau, above 0.

    Raises:
        ValueError: a threshold that is not positive.

    Source: QK-Clip of arXiv 2507.20534, kept for K3 (arXiv 2607.24653 section 3.3).
    """

    def __init__(self, model: nn.Module, threshold: float = 100.0) -> None:
        check_threshold(threshold)
        self.threshold = threshold
        self.largest: dict[nn.Module, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            # What it holds itself: wrappers pass on the attributes of what they wrap.
            if "kv_a_proj_with_mqa" in module._modules and "kv_b_proj" in module._modules:
                self._watch(module)

    def _watch(self, attention: nn.Module) -> None:
        seen: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            return lambda module, args, output: seen.__setitem__(name, output.detach())

        query = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
        parts = {"query": query, "pair": attention.kv_a_proj_with_mqa, "latent": attention.kv_a_layernorm}
        self._handles += [module.register_forward_hook(keep(name)) for name, module in parts.items()]

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if module.training:
                packing = kwargs.get("packing")
                documents = None if packing is None else packing.documents
                span = AttentionSpan(0, real=kwargs.get("padding_mask"), documents=documents)
                largest = _largest_logits(module, **seen, span=span)
                known = self.largest.get(module)
                self.largest[module] = largest if known is None else torch.maximum(known, largest)
            seen.clear()

        self._handles.append(attention.register_forward_hook(after, with_kwargs=True))

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip after an optimizer step.

        Returns:
            `qk_max_logit` before clipping, over all heads, and `qk_clipped_heads`; empty if nothing was seen.
        """
        if not self.largest:
            return {}
        highest, clipped = -math.inf, 0
        for attention, largest in self.largest.items():
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            highest = max(highest, largest.max().item())
            gamma = (self.threshold / largest.clamp_min(self.threshold)).view(-1, 1, 1)
            if (count := int((gamma < 1).sum())) == 0:
                continue
            clipped += count
            heads, nope = attention.num_heads, attention.nope_dim
            query = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
            rows = query.weight.view(heads, -1, query.weight.shape[-1])
            rows[:, :nope].mul_(gamma.sqrt())
            rows[:, nope:].mul_(gamma)
            pairs = attention.kv_b_proj.weight
            pairs.view(heads, -1, pairs.shape[-1])[:, :nope].mul_(gamma.sqrt())
        self.largest.clear()
        return {"qk_max_logit": highest, "qk_clipped_heads": float(clipped)}

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def check_threshold(threshold: float) -> None:
    """Refuse a threshold that is not positive."""
    if not threshold > 0:
        raise ValueError(f"threshold={threshold!r}; allowed are numbers above 0")


@torch.no_grad()
def _largest_logits(attention: nn.Module, query: Tensor, pair: Tensor, latent: Tensor, span: AttentionSpan) -> Tensor:
    """The largest logit of every head [H], in float32, over the pairs of tokens that may see each other.

    Args:
        attention: an MLA module.
        query: [B, T, H * (N + R)].
        pair: [B, T, kv_lora + R], the output of the joint projection.
        latent: [B, T, kv_lora], normalised.
        span: which tokens these are.
    """
    heads, nope, length = attention.num_heads, attention.nope_dim, query.shape[1]
    q = query.float().unflatten(-1, (heads, -1)).transpose(1, 2) * attention.scaling
    w_k = attention.kv_b_proj.weight.view(heads, -1, latent.shape[-1])[:, :nope].float()
    key = torch.einsum("bsr,hnr->bhsn", latent.float(), w_k)
    shared = pair[..., attention.kv_lora_rank :].float()
    largest = q.new_full((heads,), -math.inf)
    for begin in range(0, length, _TILE):
        end = min(begin + _TILE, length)
        part = q[:, :, begin:end]
        scores = part[..., :nope] @ key[:, :, :end].mT + torch.einsum(
            "bhtn,bsn->bhts", part[..., nope:], shared[:, :end]
        )
        allowed = span.allowed(slice(begin, end), slice(0, end), q.device)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        largest = torch.maximum(largest, scores.amax(dim=(0, 2, 3)))
    return largest


class QKClipCallback(ReportingCallback):
    """`QKClip` in the library's Trainer and in those built on it.

    The log gets the largest `qk_max_logit` and `qk_clipped_heads` of all steps since its last entry; reporters get them
    too after `QKClipCallback().attach(trainer)`.

    Args:
        threshold: see `QKClip`.

    Raises:
        ValueError: a threshold that is not positive.
    """

    def __init__(self, threshold: float = 100.0) -> None:
        check_threshold(threshold)
        self.threshold = threshold
        self._clip: QKClip | None = None
        self._figures: dict[str, float] = {}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Begin to watch."""
        # A training that was interrupted has had no end.
        self._close()
        self._clip = QKClip(model, self.threshold)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Clip."""
        if self._clip is not None:
            for name, figure in self._clip.step().items():
                self._figures[name] = max(figure, self._figures.get(name, figure))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the figures since the last entry to an entry about training."""
        if logs is not None and "loss" in logs:
            self.report(logs, state, self._figures)
            self._figures = {}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop watching."""
        self._close()

    def _close(self) -> None:
        if self._clip is not None:
            self._clip.close()
        self._clip, self._figures = None, {}
