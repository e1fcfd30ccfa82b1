"""What a model's weights take, counted by what they really are: packed, mapped, in 4 or 8 bits, or plain numbers."""

from collections import Counter
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from .experts import iter_experts
from .stored_bits import stored_bytes


class WeightReport(PreTrainedModel):
    """Counting that knows experts and layers which hold fewer bits than their parameters seem to."""

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count weights, packed and mapped ones too, each as one; see the library's method."""
        total = super().num_parameters(only_trainable, exclude_embeddings)
        for _, module in iter_experts(self):
            if module.storage != "dense" and not only_trainable:
                total += module.count_weights() - sum(stack.numel() for stack in module.parameters(recurse=False))
        return total

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of all parameters (and buffers), with mapped experts at their size in the files.

        What is mapped is dropped by the system when memory is short: this is what the model reads, not what it holds.
        """
        return super().get_memory_footprint(return_buffers) + sum(m.mapped_bytes() for _, m in iter_experts(self))

    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of all weights by what they are, the largest first.

        "mxfp4", "nf4", "fp4", "int8" and "hqq3" are codes and scales together; other keys are torch's number formats.
        What is read when it is used, and not held, ends in " (in files)".
        """
        counts = Counter[str]()
        seen: set[int] = set()
        for module in self.modules():
            own = stored_bytes(module)
            scales = own.pop("scales", 0)
            counts.update({form: count + scales for form, count in own.items()})
            if hasattr(module, "mapped_bytes") and module.mapped_bytes():
                form = "mxfp4" if module.pages.kind == "packed" else str(module.dense_dtype).removeprefix("torch.")
                counts[f"{form} (in files)"] += module.mapped_bytes()
            storage = getattr(module, "storage", "")
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if id(tensor) in seen or (own and name == "weight"):
                    continue
                seen.add(id(tensor))
                form = str(tensor.dtype)[6:]
                if storage.startswith("hqq") or (storage == "packed" and tensor.dtype == torch.uint8):
                    form = storage.replace("packed", "mxfp4")
                counts[form + " (in files)" * tensor.is_meta] += tensor.nbytes
        return dict(counts.most_common())

    def weight_report(self) -> str:
        """`bytes_by_dtype` in one line: "29.1 MB of weights: mxfp4 18.3 MB (63 %), ..."."""
        counts: dict[str, Any] = self.bytes_by_dtype()
        whole = sum(counts.values())
        parts = [f"{form} {_size(count)} ({count / max(whole, 1):.0%})" for form, count in counts.items()]
        return f"{_size(whole)} of weights: {', '.join(parts)}"


def _size(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
