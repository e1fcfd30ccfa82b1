"""Memory for the gradients of large stacks: in huge pages, and kept from one step to the next.

The gradient of a stack is new memory in each step, and taking that page by page costs more than the product that
fills it. Kept pages are still the system's to take while no gradient stands in them.
"""

import mmap
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

#: Bytes of several huge pages.
_LARGE = 2**23
_HUGE_PAGES, _TAKE_IF_NEEDED = getattr(mmap, "MADV_HUGEPAGE", None), getattr(mmap, "MADV_FREE", None)


class _Place:
    """Memory for one gradient, and who stands in it: a reference that is dead when the last tensor of a step is."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.user: weakref.ref[memoryview] | None = None
        with suppress(OSError):
            self.memory.madvise(_HUGE_PAGES)

    def enter(self) -> memoryview:
        view = memoryview(self.memory)
        self.user = weakref.ref(view, self._offer)
        return view

    def is_free(self, size: int) -> bool:
        return len(self.memory) == size and (self.user is None or self.user() is None)

    def _offer(self, user: "weakref.ref[memoryview]") -> None:
        """Let the system have the pages should it need them, unless somebody has entered since."""
        with _lock, suppress(OSError):
            if self.user is user and _TAKE_IF_NEEDED is not None:
                self.memory.madvise(_TAKE_IF_NEEDED)


_kept = WeakTensorKeyDictionary()
# Entered again by the same thread where a collection inside it ends a tensor.
_lock = threading.RLock()


def gradient_like(stack: Tensor) -> Tensor:
    """Return an uninitialised contiguous tensor like `stack`.

    That of a large leaf on a CPU stands where the one before stood, unless that is still in use; the place is given up
    by `forget_gradient` or with the leaf. A system without huge pages on request gets an ordinary tensor.
    """
    if _HUGE_PAGES is None or stack.device.type != "cpu" or stack.nbytes < _LARGE:
        return torch.empty_like(stack, memory_format=torch.contiguous_format)
    with _lock:
        place = _kept.get(stack) if stack.is_leaf else None
        if place is None or not place.is_free(stack.nbytes):
            is_new, place = place is None, _Place(stack.nbytes)
            if stack.is_leaf and is_new:
                _kept[stack] = place
        view = place.enter()
    return torch.frombuffer(view, dtype=stack.dtype).view(stack.shape)


def forget_gradient(stack: Tensor) -> None:
    """Give up the place of the gradient of `stack`; a gradient that stands in it is not touched."""
    with _lock:
        _kept.pop(stack, None)
