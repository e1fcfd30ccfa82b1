"""Routed experts behind one interface, in three storage forms: dense stacked, packed stacked, mapped.

    dense    one tensor per projection over all N experts, in the model's dtype; what is trained
    packed   the same stacks as MXFP4 bytes: 4.25 bits for each weight
    mapped   nothing in memory: each expert's bytes stand where the checkpoint's files have them, and are read when
             a token chooses the expert

Packed and mapped experts are expanded one at a time, for one product, with the arithmetic of the dense definition.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .configuration_k3 import K3Config
from .expert_groups import combine_groups
from .expert_pages import ExpertPages
from .gradient_memory import forget_gradient
from .mlp import gated_activation
from .mxfp4 import GROUP, Workspace, expand, mxfp4_linear
from .precision import at_least_fp32

#: The two products of an expert, in the order of use.
PROJECTIONS = ("gate_up_proj", "down_proj")


class K3Experts(nn.Module):
    """N gated MLPs of width F on the latent (or hidden) width E.

        s = sum over the chosen experts e of  p_e W2_e act(W1_e z, W3_e z)

    Dense: `gate_up_proj` [N, 2F, E] stacks the released w1 (gate) over w3 (up), `down_proj` [N, E, F] is w2. Packed:
    `<name>_packed` [..., in / 2] and `<name>_scale` [..., in / 32], uint8, in their place. Mapped: neither, `pages`
    says where the experts stand. `eager` is the definition; for dense experts `experts_implementation` selects
    batched or grouped products of the library instead; on a CPU grouped ones are those of `expert_groups`. Weights p
    are at least float32, hence so is the sum over experts; one cast at the end.
    """

    # What the library's implementations ask about the layout of the weights.
    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_concatenated, is_transposed = True, False

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.config = config
        self._is_expert_parallel = False
        self.num_experts = config.num_experts
        self.hidden_dim = config.routed_expert_hidden_size or config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.hidden_act = config.hidden_act
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        self.storage, self._dense_dtype, self._stack_device = "dense", torch.get_default_dtype(), torch.device("cpu")
        self.pages: ExpertPages | None = None
        for name, shape in self.stack_shapes().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def stack_shapes(self) -> dict[str, tuple[int, int, int]]:
        """Shapes [N, out, in] of the dense stacks."""
        n, e, f = self.num_experts, self.hidden_dim, self.intermediate_dim
        return {"gate_up_proj": (n, 2 * f, e), "down_proj": (n, e, f)}

    # -- storage ------------------------------------------------------------------------------------------------

    def use_storage(self, storage: str, pages: ExpertPages | None = None) -> None:
        """Change the form of the experts; the new parameters are uninitialised, on the device of the old ones.

        Args:
            storage: "dense", "packed" or "mapped".
            pages: where mapped experts stand; may follow later.

        Raises:
            ValueError: an unknown form, or a width that MXFP4 cannot pack.
        """
        if storage not in ("dense", "packed", "mapped"):
            raise ValueError(f"storage={storage!r} is unknown; allowed are 'dense', 'packed' and 'mapped'")
        if storage == "packed" and (self.hidden_dim % GROUP or self.intermediate_dim % GROUP):
            raise ValueError(
                f"experts of width {self.hidden_dim} and {self.intermediate_dim} cannot be packed; both must be "
                f"multiples of {GROUP}"
            )
        old = list(self._parameters.values())
        # Bytes do not say which number format they stand for, nor mapped experts where they belong: remembered for
        # the way back.
        self._stack_device = old[0].device if old else self._stack_device
        self._dense_dtype = next((p.dtype for p in old if p.is_floating_point()), self._dense_dtype)
        self._parameters.clear()
        for name, (n, rows, columns) in self.stack_shapes().items() if storage != "mapped" else ():
            if storage == "dense":
                stack = torch.empty(n, rows, columns, dtype=self._dense_dtype, device=self._stack_device)
                self.register_parameter(name, nn.Parameter(stack))
                continue
            for suffix, width in (("packed", columns // 2), ("scale", columns // GROUP)):
                stack = torch.empty(n, rows, width, dtype=torch.uint8, device=self._stack_device)
                self.register_parameter(f"{name}_{suffix}", nn.Parameter(stack, requires_grad=False))
        self.storage, self.pages = storage, pages if storage == "mapped" else None

    def count_weights(self) -> int:
        """Number of weights the experts have, whatever form they are in."""
        return 3 * self.num_experts * self.hidden_dim * self.intermediate_dim

    @property
    def dense_dtype(self) -> torch.dtype:
        """The number format of dense experts; of packed and mapped ones the format the model was loaded in."""
        return next((p.dtype for p in self.parameters(recurse=False) if p.is_floating_point()), self._dense_dtype)

    def mapped_bytes(self) -> int:
        """Bytes of mapped experts in the checkpoint's files; 0 for the other forms."""
        return 0 if self.pages is None else self.pages.nbytes

    def parts(self, expert: int, name: str) -> tuple[Tensor, ...]:
        """One expert's matrix as it is stored, nothing expanded.

        Args:
            expert: its number.
            name: "gate_up_proj" or "down_proj".

        Returns:
            Matrices that stand on top of each other: dense ones, or codes and scales in turn.
        """
        if self.storage == "dense":
            return (self._parameters[name][expert],)
        if self.storage == "packed":
            return self._parameters[f"{name}_packed"][expert], self._parameters[f"{name}_scale"][expert]
        if self.pages is None:
            raise ValueError("mapped experts without pages: the model was built but its checkpoint was not loaded")
        return self.pages.parts(expert, ("w1", "w3") if name == "gate_up_proj" else ("w2",))

    def expert_weights(self, expert: int, dtype: torch.dtype, device: torch.device | None = None) -> dict[str, Tensor]:
        """One expert, expanded: `gate_up_proj` [2F, E] and `down_proj` [E, F] in `dtype`."""
        return {name: self.matrix(expert, name, dtype, device) for name in PROJECTIONS}

    def matrix(
        self,
        expert: int,
        name: str,
        dtype: torch.dtype,
        device: torch.device | None = None,
        space: Workspace | None = None,
    ) -> Tensor:
        """One matrix of one expert, expanded.

        Args:
            expert, name: see `parts`.
            dtype, device: of the result; None leaves it where it is.
            space: where to expand what is packed; None allocates.

        Returns:
            [out, in]; of dense experts a view where `dtype` and `device` are theirs.
        """
        parts = self.parts(expert, name)
        device = parts[0].device if device is None else device
        if parts[0].dtype == torch.uint8:
            return expand(parts, dtype, device, space)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(device, dtype)

    def train(self, mode: bool = True) -> "K3Experts":
        """Switch to training or evaluation; the latter keeps no memory for gradients to come."""
        for stack in () if mode else self.parameters(recurse=False):
            forget_gradient(stack)
        return super().train(mode)

    # -- forward ------------------------------------------------------------------------------------------------

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Combine the chosen experts by the implementation in use.

        Args:
            hidden_states: z [tokens, E].
            top_k_index: [tokens, R] expert numbers.
            top_k_weights: [tokens, R] in at least float32.

        Returns:
            [tokens, E] in z's dtype.
        """
        implementation = self.config._experts_implementation
        is_plain = implementation in ("eager", None) or self.storage != "dense"
        if is_plain or hidden_states.dtype == torch.float64:
            # The grouped kernels know no float64 and no packed weights; the definition does.
            return self.eager(hidden_states, top_k_index, top_k_weights)
        if implementation == "grouped_mm" and hidden_states.device.type == "cpu" and not torch.compiler.is_compiling():
            # Torch has no grouped product for a CPU, only a loop over experts; ours keeps and copies less.
            stacks = (self.gate_up_proj, self.down_proj)
            return combine_groups(hidden_states, top_k_index, top_k_weights, *stacks, self._apply_gate)
        combine = ALL_EXPERTS_FUNCTIONS.get_interface(implementation, None)
        return combine(self, hidden_states, top_k_index, top_k_weights)

    def eager(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Combine the chosen experts, expert by expert: the definition. Arguments as in `forward`."""
        total = hidden_states.new_zeros(hidden_states.shape, dtype=at_least_fp32(hidden_states.dtype))
        # Under expert parallelism a number beyond the local experts marks a token of another rank.
        used = [expert for expert in top_k_index.unique().tolist() if expert < self.num_experts]
        if self.pages is not None:
            self.pages.prefetch(used)
        space = Workspace()
        # Taken apart once: backward then fills one stack of gradients, where indexing would add up one per expert.
        dense = {name: stack.unbind() for name, stack in self._parameters.items()} if self.storage == "dense" else {}
        for expert in used:
            token, place = torch.where(top_k_index == expert)
            gate_up, down = ((dense[name][expert],) if dense else self.parts(expert, name) for name in PROJECTIONS)
            y = self._apply_gate(self._product(hidden_states[token], gate_up, space))
            y = self._product(y, down, space)
            total = total.index_add(0, token, (y * top_k_weights[token, place, None]).to(total.dtype))
        return total.to(hidden_states.dtype)

    def product(self, x: Tensor, expert: int, name: str, space: Workspace) -> Tensor:
        """x W^T for one matrix of one expert, in the dtype and on the device of x."""
        return self._product(x, self.parts(expert, name), space)

    def _product(self, x: Tensor, parts: Sequence[Tensor], space: Workspace) -> Tensor:
        if parts[0].dtype == torch.uint8:
            return mxfp4_linear(x, parts, space)
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        return nn.functional.linear(x, weight if self.storage == "dense" else weight.to(x.device, x.dtype))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """[S, 2F] -> [S, F]; the hook through which the library's implementations apply the activation."""
        gate, up = gate_up.chunk(2, dim=-1)
        return gated_activation(gate, up, kind=self.hidden_act, beta=self.beta, linear_beta=self.linear_beta)

    # -- state dict ---------------------------------------------------------------------------------------------

    def released(self, tensors: dict[str, Tensor], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield the experts one by one under their released names, as views.

        Args:
            tensors: a state dict of this module, in any form; its entries below `prefix` are read.
            prefix: what the names start with, in `tensors` and in the result.
        """
        for suffix, ending in (("", "weight"), ("_packed", "weight_packed"), ("_scale", "weight_scale")):
            for name in PROJECTIONS:
                stack = tensors.get(f"{prefix}{name}{suffix}")
                for expert in range(self.num_experts) if stack is not None else ():
                    rows = stack[expert].chunk(2) if name == "gate_up_proj" else (stack[expert],)
                    for part, matrix in zip(("w1", "w3") if len(rows) == 2 else ("w2",), rows, strict=True):
                        yield f"{prefix}{expert}.{part}.{ending}", matrix
        for name in [name for name in tensors if name.startswith(prefix) and name[len(prefix) :][:1].isdigit()]:
            yield name, tensors[name]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.pages is not None:
            destination.update((prefix + name, view) for name, view in self.pages.named_views())

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take stacks, and experts one by one under their released names, all of them or some."""
        own = {name: parameter.detach() for name, parameter in self._parameters.items()}
        targets = dict(self.released({prefix + name: stack for name, stack in own.items()}, prefix))
        if self.pages is not None:
            targets = {prefix + name: view for name, view in self.pages.named_views()}
        given = [name for name in targets if name in state_dict]
        for name in given:
            # Looked at, not taken out: the caller's dictionary may be in use elsewhere.
            source, target = state_dict[name], targets[name]
            if source.shape != target.shape or (source.dtype == torch.uint8) != (target.dtype == torch.uint8):
                error_msgs.append(f"{name} is {source.dtype} {tuple(source.shape)}; the model has {target.dtype} "
                                  f"{tuple(target.shape)}")  # fmt: skip
            elif self.pages is None:
                with torch.no_grad():
                    target.copy_(source)
            elif source.data_ptr() != target.data_ptr() and not torch.equal(source, target):
                error_msgs.append(f"{name} differs from the checkpoint's file, and mapped experts cannot be changed")
        if strict and given and len(given) < len(targets):
            missing_keys.extend(name for name in targets if name not in state_dict)
        plain = {name: value for name, value in state_dict.items() if name not in targets}
        absent: list[str] = []
        super()._load_from_state_dict(plain, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs)
        if not given:
            missing_keys.extend(absent if own else targets)

    def extra_repr(self) -> str:
        size = f"{self.num_experts} experts, {self.hidden_dim} -> {self.intermediate_dim} -> {self.hidden_dim}"
        if self.storage == "dense":
            return size
        stored = self.mapped_bytes() or sum(parameter.nbytes for parameter in self._parameters.values())
        return f"{size}, {self.storage}: {self.count_weights()} weights in {stored} bytes"


def iter_experts(model: nn.Module) -> Sequence[tuple[str, Any]]:
    """The expert modules of a model by name, recognised by what they can do (two copies of this code may meet)."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "use_storage")]
