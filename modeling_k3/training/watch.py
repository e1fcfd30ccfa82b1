"""Looking on while a model trains: which forward passes count, and which tokens of them are real."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class TrainingWatch:
    """Tells forward passes of training from all others. Subclasses put their hooks beside these.

    Open between the start and the end of a forward that wants gradients: gradient checkpointing repeats layers after
    that, and a repeated token must not count twice. Without a decoder around them, parts of a model are always open.

    Args:
        model: any model; wrappers (adapters, parallel ones) may stand around it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._handles: list[RemovableHandle] = []
        #: [B * T] bool of the current forward, False at padding; None: no padding.
        self.real: Tensor | None = None
        # What they hold themselves: wrappers pass on the attributes of what they wrap.
        decoders = [m for m in model.modules() if "layers" in m._modules and "has_attn_res" in vars(m)]
        self._inside = not decoders
        for decoder in decoders:
            self._handles.append(decoder.register_forward_pre_hook(self._begin))
            self._handles.append(decoder.register_forward_hook(self._end, always_call=True))
            self._handles.append(decoder.layers[0].register_forward_pre_hook(self._read_padding, with_kwargs=True))

    @property
    def is_open(self) -> bool:
        """Whether what happens now is training, seen for the first time."""
        return self._inside

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, decoder: nn.Module, args: tuple[Any, ...]) -> None:
        self._inside, self.real = decoder.training and torch.is_grad_enabled(), None

    def _end(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._inside, self.real = False, None

    def _read_padding(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        padding = kwargs.get("padding_mask")
        if self._inside and padding is not None:
            self.real = padding.flatten()
