"""Which kinds of cache `generate` can use, and for how many layers."""

from copy import copy

from transformers.cache_utils import StaticCache

from .configuration_k3 import K3Config


def check_cache_choice(name: str | None, cache: object = None) -> None:
    """Refuse the library's kinds of cache that have no place for a recurrent state, or for latents.

    Args:
        name: of `cache_implementation`.
        cache: one that is given, or None.

    Raises:
        ValueError: a kind that K3 does not have.
        TypeError: the library's own cache of fixed size.
    """
    if name not in (None, "dynamic", "static"):
        raise ValueError(
            f"cache_implementation={name!r} is not supported; allowed are None or 'dynamic' (a K3Cache) and 'static' "
            "(a K3StaticCache)"
        )
    if isinstance(cache, StaticCache):
        raise TypeError(
            "cache is a StaticCache of the library, which has no place for MLA's latents; allowed is "
            "K3StaticCache(model.config, max_cache_len=...), or cache_implementation='static'"
        )


def first_layers(config: K3Config, count: int | None) -> K3Config:
    """The config of a model's first layers; the given one stays as it is.

    Raises:
        ValueError: more layers than there are, or none.
    """
    if count is None:
        return config
    if not 0 < count <= config.num_hidden_layers:
        raise ValueError(f"exit_layer={count}; allowed are None and 1 to {config.num_hidden_layers} layers")
    part = copy(config)
    part.num_hidden_layers = count
    return part
