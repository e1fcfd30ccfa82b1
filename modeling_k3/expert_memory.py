"""A budget of main memory for mapped experts and caches: where a user gives it and sees what came of it."""

from os import PathLike
from typing import Any

from .byte_sizes import parse_size
from .cache import K3Cache
from .experts import iter_experts
from .persistence import K3Persistence
from .residency import ExpertResidency


class K3ExpertMemory(K3Persistence):
    """The part of a K3 model that decides how much memory mapped experts take."""

    #: What keeps mapped experts within their budget; None: the system's page cache does as it likes.
    expert_residency: ExpertResidency | None = None
    #: The plan that `modeling_k3.planning.load_within` loaded it by; None: by none.
    memory_plan: Any = None

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike | None,
        *args: Any,
        expert_memory: int | str | None = None,
        **kwargs: Any,
    ) -> "K3ExpertMemory":
        """Load a checkpoint; see `K3Persistence.from_pretrained`.

        Args:
            expert_memory: as in `limit_expert_memory`, from the start; `expert_storage` is "mapped" with it.

        Raises:
            ValueError: no size, below two experts, experts that are not mapped; unknown and contradictory options.
        """
        if expert_memory is not None:
            kwargs["expert_memory"] = parse_size(expert_memory, "expert_memory")
            storage = kwargs.setdefault("expert_storage", "mapped")
            if storage not in (None, "mapped"):
                raise ValueError(
                    f"expert_memory={expert_memory!r} with expert_storage={storage!r}; allowed is 'mapped'"
                )
            kwargs["expert_storage"] = "mapped"
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if expert_memory is not None:
            (loaded[0] if isinstance(loaded, tuple) else loaded).limit_expert_memory(expert_memory)
        return loaded

    def limit_expert_memory(self, budget: int | str | None) -> None:
        """Keep mapped experts, and the caches that this model is called with, within a budget of main memory.

            bytes of resident experts <= budget - bytes that caches hold

        What was resident before is not counted. `expert_residency.stats()` says how it goes. The budget is about what
        the model keeps: pages that a backward pass or a save looks at are the system's to take back.

        Args:
            budget: bytes, e.g. "24GiB"; at least two experts. None: no budget, as without this call.

        Raises:
            ValueError: no size, too small, or no experts are mapped.
        """
        nbytes = None if budget is None else parse_size(budget, "expert_memory")
        found = [(name, module) for name, module in iter_experts(self) if module.pages is not None]
        if nbytes is not None and not found:
            raise ValueError(f"expert_memory={budget!r}, but no experts are mapped; load with expert_storage='mapped'")
        largest = max((module.pages.expert_nbytes(0) for _, module in found), default=0)
        residency = None if nbytes is None else ExpertResidency(nbytes, largest)
        for layer, (_, module) in enumerate(found):
            module.pages.layer, module.pages.residency = layer, residency
        if residency is not None and self.config.router_input != "latent":
            # A latent is its own layer's; the next one's router makes nothing of it.
            for layer, (name, module) in enumerate(found[1:]):
                router = self.get_submodule(name.rpartition(".")[0]).gate
                residency.following[layer] = router, module.pages
        self.expert_residency = self.base_model.expert_residency = residency

    def count_cache(self, cache: K3Cache | None) -> None:
        """Let experts give way to what a cache holds, now and as it grows."""
        if self.expert_residency is not None and cache is not None:
            self.expert_residency.share_with(cache)
