"""Quantile balancing: after every step the routers' biases are moved so that all experts get an equal share of tokens.

    alpha_i = (R + 1)-th largest of s_i + b            what a token's scores had to beat to be chosen
    b_j     = - quantile_{1 - R/N} over tokens of (s_ij - alpha_i),      then minus the mean over j

With the cutoffs alpha held fixed, exactly the share R/N of all tokens stays above an expert's quantile. The bias takes
part in choosing only, and what is learned from one batch is used for the next.
"""

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class QuantileBalancer:
    """Watches the routers of a model while it trains, and moves their biases when asked.

    Args:
        model: any model with K3 routers; one without is left alone.
        memory: share of the old bias that is kept, which smooths over the noise of small batches.

    Source: arXiv 2607.24653 section 2.3.3 and appendix C.
    """

    def __init__(self, model: nn.Module, memory: float = 0.0) -> None:
        self.memory = memory
        self._handles: list[RemovableHandle] = []
        self._wanted: dict[nn.Module, Tensor] = {}
        for module in model.modules():
            # With all experts chosen there is nothing to balance.
            if hasattr(module, "e_score_correction_bias") and module.top_k < module.num_experts:
                self._handles.append(module.register_forward_hook(self._watch))

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def step(self) -> None:
        """Move every bias towards what the last training batch asked for."""
        for router, bias in self._wanted.items():
            router.e_score_correction_bias.data.lerp_(bias, 1 - self.memory)
        self._wanted.clear()

    @torch.no_grad()
    def _watch(self, router: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        if router.training:
            logits = output[0].detach()
            scores = logits.sigmoid() if router.scoring == "sigmoid" else logits.softmax(dim=-1)
            self._wanted[router] = balanced_bias(scores, router.e_score_correction_bias, router.top_k)


def balanced_bias(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The bias under which every expert would be chosen equally often.

    Args:
        scores: s [tokens, N], without the bias.
        bias: b [N], the one the tokens were routed with.
        top_k: R, below N.

    Returns:
        [N], with mean zero.
    """
    cutoff = (scores + bias).topk(top_k + 1, dim=-1).values[:, -1:]
    wanted = -torch.quantile(scores - cutoff, 1 - top_k / scores.shape[-1], dim=0)
    return wanted - wanted.mean()
