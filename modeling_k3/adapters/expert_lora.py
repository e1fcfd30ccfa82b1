"""LoRA on the routed experts of a layer, in whatever form they are stored: dense, packed or mapped MXFP4."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from modeling_k3.adapters.expert_config import Rank, check_expert_config, matrix_ranks
from modeling_k3.adapters.expert_merge import Change, add_to_dense, add_to_packed
from modeling_k3.adapters.expert_product import Term, adapted_experts

try:
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import check_adapters_to_merge
except ImportError as error:
    raise ImportError("LoRA on experts needs peft: pip install peft") from error


class ExpertFactors(nn.Module):
    """One factor of an adapter for all experts of a layer: parameters `w1`, `w3`, `w2`, each [N, rows, columns]."""

    def __init__(self, shapes: dict[str, tuple[int, int, int]]) -> None:
        super().__init__()
        for matrix, shape in shapes.items():
            self.register_parameter(matrix, nn.Parameter(torch.empty(shape)))


class K3ExpertsLora(nn.Module, LoraLayer):
    """peft's layer around a `K3Experts`.

        W'_e = W_e + scaling B_e A_e        for w1, w3 and w2 of every expert e, each with factors of its own

    Factors: `lora_A.<adapter>.<matrix>` [N, r, in] and `lora_B.<adapter>.<matrix>` [N, out, r]. Only the experts that
    tokens chose are computed, see `adapted_experts`. Several active adapters add up. Merging changes dense experts;
    packed ones only through `merge_into_packed`, which quantises the sum; mapped ones never.
    """

    adapter_layer_names = ("lora_A", "lora_B")
    other_param_names = ("r", "lora_alpha", "scaling", "lora_dropout", "use_rslora", "ratios")

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        #: Scaling of each matrix as a multiple of the adapter's `scaling`, which peft's methods change.
        self.ratios: dict[str, dict[str, float]] = {}
        self.may_requantize = False
        #: What merging into packed experts cost, by adapter; filled where it was allowed.
        self.errors: dict[str, dict[str, float]] = {}
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, kwargs["r"], kwargs["lora_alpha"], config, target_name=kwargs["target_name"])

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.hidden_dim, module.hidden_dim

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: float, config: Any, target_name: str = "experts", **kwargs: Any
    ) -> None:
        """Add an adapter.

        Args:
            adapter_name: its name.
            r, lora_alpha: of the layer as a whole; `config` may say otherwise for a matrix.
            config: peft's LoraConfig.
            target_name: full name of the module, for the patterns.

        Raises:
            ValueError: an option that experts cannot honour.
        """
        check_expert_config(config)
        ranks = {m: rank for m, rank in matrix_ranks(config, target_name).items() if rank.r}
        # A layer of rank 0 has matrices of other ranks.
        self.r[adapter_name], self.lora_alpha[adapter_name] = r or 1, lora_alpha or 1
        self.use_rslora[adapter_name] = config.use_rslora
        self.scaling[adapter_name] = _scaling(Rank(r or 1, lora_alpha or 1), config.use_rslora)
        self.ratios[adapter_name] = {
            m: _scaling(rank, config.use_rslora) / self.scaling[adapter_name] for m, rank in ranks.items()
        }
        dropout = nn.Dropout(config.lora_dropout) if config.lora_dropout else nn.Identity()
        self.lora_dropout[adapter_name] = dropout
        n, sizes = self.base_layer.num_experts, self._sizes()
        self.lora_A[adapter_name] = ExpertFactors({m: (n, rank.r, sizes[m][1]) for m, rank in ranks.items()})
        self.lora_B[adapter_name] = ExpertFactors({m: (n, sizes[m][0], rank.r) for m, rank in ranks.items()})
        self.reset_lora_parameters(adapter_name, config.init_lora_weights)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Matrix -> (out, in)."""
        width, inner = self.base_layer.hidden_dim, self.base_layer.intermediate_dim
        return {"w1": (inner, width), "w3": (inner, width), "w2": (width, inner)}

    @torch.no_grad()
    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool | str) -> None:
        """Start anew as peft's linear layers do: A uniform (or Gaussian) by its width, B zero; False: both random."""
        for matrix, a in self.lora_A[adapter_name].named_parameters():
            b = self.lora_B[adapter_name].get_parameter(matrix)
            if init_lora_weights == "gaussian":
                a.normal_(std=1 / a.shape[1])
            else:
                a.uniform_(-(a.shape[2] ** -0.5), a.shape[2] ** -0.5)
            b.uniform_(-(b.shape[2] ** -0.5), b.shape[2] ** -0.5) if init_lora_weights is False else b.zero_()

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        # Mapped experts have no device of their own: their factors stay where they were made, and follow the model.
        stack = next(self.base_layer.parameters(recurse=False), None)
        device = device or (None if stack is None else stack.device)
        for factors in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
            if not any(parameter.is_meta for parameter in factors.parameters()):
                factors.to(device, self.base_layer.dense_dtype)

    @property
    def pages(self) -> Any:
        """Those of the experts inside: `K3LatentMoE` tells them what the router has seen. None unless mapped."""
        return self.base_layer.pages

    # -- forward ------------------------------------------------------------------------------------------------

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **kwargs: Any) -> Tensor:
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError("adapter_names (another adapter for each row) is not supported by LoRA on experts")
        if self.disable_adapters and self.merged:
            self.unmerge()
        terms, factors = ([], []) if self.disable_adapters or self.merged else self._terms()
        if not terms:
            return self.base_layer(hidden_states, top_k_index, top_k_weights, **kwargs)
        kind, z = hidden_states.device.type, hidden_states
        if torch.is_autocast_enabled(kind) and z.dtype != torch.float64:
            z = z.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            s = adapted_experts(self.base_layer, z, top_k_index, top_k_weights, terms, factors)
        return s.to(hidden_states.dtype)

    def _terms(self) -> tuple[list[Term], list[Tensor]]:
        terms, factors = [], []
        for adapter in self.active_adapters:
            if adapter not in self.lora_A:
                continue
            dropout = self.lora_dropout[adapter]
            share = dropout.p if self.training and isinstance(dropout, nn.Dropout) else 0.0
            for matrix, ratio in self.ratios[adapter].items():
                terms.append(Term(matrix, self.scaling[adapter] * ratio, share))
                factors += self._pair(adapter, matrix)
        return terms, factors

    def _pair(self, adapter: str, matrix: str) -> list[Tensor]:
        return [side[adapter].get_parameter(matrix) for side in (self.lora_A, self.lora_B)]

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Whether peft may ask for one weight of the layer: there is none."""
        return False

    # -- merge --------------------------------------------------------------------------------------------------

    def check_merge(self) -> None:
        """Refuse, before anything is changed, to merge into experts that cannot take it.

        Raises:
            ValueError: packed experts without `merge_into_packed`, or mapped experts.
        """
        storage = self.base_layer.storage
        if storage == "mapped":
            raise ValueError(
                "mapped experts stand in the checkpoint's files and cannot be changed: load with "
                "expert_storage='packed' or 'dense' to merge"
            )
        if storage == "packed" and not self.may_requantize:
            raise ValueError(
                "packed experts hold 4-bit numbers, and merging would round the adapter's change: load with "
                "expert_storage='dense' to merge exactly, or call modeling_k3.adapters.merge_into_packed, which "
                "quantises again and reports the error"
            )

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put active or named adapters into the weights; see `check_merge`."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        self.check_merge()
        for name in names:
            changes = self._changes(name, 1.0)
            if safe_merge and any(not change.is_finite() for change in changes.values()):
                raise ValueError(f"adapter {name!r} is broken: a product of its factors is not finite")
            if self.base_layer.storage == "packed":
                self.errors[name] = add_to_packed(self.base_layer, changes)
            else:
                add_to_dense(self.base_layer, changes)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Take merged adapters out of the weights again; not out of packed ones, whose old numbers are gone."""
        if self.merged and self.base_layer.storage != "dense":
            raise ValueError("experts that were quantised with an adapter cannot be unmerged: load them again")
        while self.merged_adapters:
            add_to_dense(self.base_layer, self._changes(self.merged_adapters.pop(), -1.0))

    def _changes(self, adapter: str, sign: float) -> dict[str, Change]:
        return {
            matrix: Change(*self._pair(adapter, matrix), sign * self.scaling[adapter] * ratio)
            for matrix, ratio in self.ratios[adapter].items()
        }


def _scaling(rank: Rank, use_rslora: bool) -> float:
    return rank.alpha / (math.sqrt(rank.r) if use_rslora else rank.r)
