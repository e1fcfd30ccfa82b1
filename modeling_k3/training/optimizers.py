"""Which parameter is updated how: Muon for the matrices, AdamW for everything else, in one optimizer.

    optimizer = build_optimizer(model, lr=4e-3, muon_lr=6e-3)
    trainer = Trainer(model, ..., optimizer_cls_and_kwargs=(OptimizerFactory, {"lr": 4e-3, "muon_lr": 6e-3}))

The first is for a loop of one's own, the second for the library's Trainer and those built on it.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from modeling_k3.training.muon import Muon

# Rows of these are looked up, not multiplied as a whole, or decide about routing: their updates stay coordinate-wise.
_NO_MUON = re.compile(r"(embed_tokens|lm_head|score|\.gate)\.weight$")

# Gate constants, norms, the queries and keys of attention over depth, short convolutions and biases are no matrices
# that grow without bound: shrinking them changes what they say.
_NO_DECAY = re.compile(r"A_log$|dt_bias$|bias$|norm\.weight$|_res_(proj|norm)\.|conv1d\.")

_MIN_SIDE = 8


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the groups with `rule` "muon", torch's AdamW for those with "adamw": one object, one state.

    A scheduler, the Trainer and accelerate see one optimizer. The two parts work on this object's groups and state, so
    `state_dict` holds everything, and what is loaded continues to the bit.

    Args:
        groups: as made by `parameter_groups`; each names its `rule` and has all options of it.

    Raises:
        ValueError: an unknown rule.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._parts: list[torch.optim.Optimizer] = []
        super().__init__(groups, {})
        self._bind()

    def _bind(self) -> None:
        """Let both parts work on this object's groups and state."""
        self._parts = []
        for rule, make in (("muon", Muon), ("adamw", torch.optim.AdamW)):
            groups = [group for group in self.param_groups if group["rule"] == rule]
            if groups:
                # The constructor fills in the options that a group leaves out, and checks them.
                part = make(groups)
                for own, filled in zip(groups, part.param_groups, strict=True):
                    own.update(filled)
                part.param_groups, part.state = groups, self.state
                self._parts.append(part)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take in further parameters; the group names its `rule`, and what it leaves out is the rule's default.

        Raises:
            ValueError: an unknown rule, or blocks that do not fit.
        """
        if param_group.get("rule") not in ("muon", "adamw"):
            raise ValueError(f"rule={param_group.get('rule')!r} is unknown; allowed are 'muon' and 'adamw'")
        super().add_param_group(param_group)
        # While the object is made there are no parts yet, and all groups are bound together.
        if self._parts:
            try:
                self._bind()
            except Exception:
                self.param_groups.pop()
                self._bind()
                raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()


def build_optimizer(model: nn.Module, **options: Any) -> MuonAdamW:
    """Make the optimizer of a model; `options` are those of `parameter_groups`."""
    return MuonAdamW(parameter_groups(model, **options))


class OptimizerFactory:
    """`build_optimizer` in the form the library's Trainer expects: made without arguments, then called.

        Trainer(model, arguments, optimizer_cls_and_kwargs=(OptimizerFactory, {"lr": 4e-3, "muon_lr": 6e-3}))

    The rates and the decay in the arguments are then not used; their schedule is.
    """

    def __call__(self, model: nn.Module, **options: Any) -> MuonAdamW:
        return build_optimizer(model, **options)


def parameter_groups(
    model: nn.Module,
    *,
    lr: float = 4e-3,
    muon_lr: float | None = 6e-3,
    weight_decay: float = 0.1,
    per_head: bool = True,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-10,
) -> list[dict[str, Any]]:
    """Sort the trainable parameters by how they are updated.

    Muon takes the matrices (stacks of experts included); embedding, head, router and everything that is no matrix go
    to AdamW. Weight decay spares the gate constants `A_log` and `dt_bias`, norms, AttnRes queries and keys, short
    convolutions and biases.

    Args:
        model: any causal LM with the usual names.
        lr: peak rate of AdamW.
        muon_lr: peak rate of Muon; None gives everything to AdamW.
        weight_decay: per unit of learning rate.
        per_head: orthogonalise the query, key and value projections head by head, as K3 was trained.
        momentum: of Muon.
        betas, eps: of AdamW.

    Returns:
        Groups for `MuonAdamW`, or for any optimizer that ignores what it does not know.

    Raises:
        ValueError: a rate or decay that is no number from 0 up, or nothing to train.

    Source: arXiv 2607.24653 sections 2.5 and 3.3 (per-head Muon, decay 0.1).
    """
    for name, value in (("lr", lr), ("muon_lr", muon_lr), ("weight_decay", weight_decay)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r}; allowed are numbers from 0 up")
    blocks = matrix_blocks(model, per_head=per_head)
    muon: dict[tuple[int, ...] | None, list[nn.Parameter]] = {}
    plain: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_decayed = parameter.ndim >= 2 and not _NO_DECAY.search(name)
        if muon_lr is not None and is_decayed and is_matrix(name, parameter):
            muon.setdefault(blocks.get(name), []).append(parameter)
        else:
            plain[is_decayed].append(parameter)
    groups: list[dict[str, Any]] = [
        {
            "params": params,
            "rule": "muon",
            "lr": muon_lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "blocks": b,
        }
        for b, params in muon.items()
    ]
    for is_decayed, params in plain.items():
        if params:
            decay = weight_decay if is_decayed else 0.0
            common = {"rule": "adamw", "lr": lr, "weight_decay": decay, "betas": betas, "eps": eps, "fused": True}
            groups.append({"params": params, **common})
    if not groups:
        raise ValueError("the model has no parameter with requires_grad=True: there is nothing to train")
    return groups


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes a parameter: both sides at least 8, no table of rows, no router."""
    return parameter.ndim >= 2 and min(parameter.shape[-2:]) >= _MIN_SIDE and not _NO_MUON.search(name)


def matrix_blocks(model: nn.Module, *, per_head: bool = True) -> dict[str, tuple[int, ...]]:
    """Heights of the blocks that a parameter's rows are made of, where it is not one matrix.

    Args:
        model: its attention and expert modules are recognised by their attributes.
        per_head: False leaves attention projections whole.

    Returns:
        Full parameter name -> heights, repeated down the rows: (K,) for the heads of a query projection, (K, V) for
        MLA's stacked keys and values, (F, F) for an expert's gate over up.
    """
    return dict(_iter_blocks(model, per_head))


def _iter_blocks(model: nn.Module, per_head: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if hasattr(module, "use_storage"):
            yield f"{prefix}gate_up_proj", (module.intermediate_dim, module.intermediate_dim)
        heads = getattr(module, "num_heads", None)
        if not per_head or not heads or not name.endswith("self_attn"):
            continue
        for child in ("q_proj", "k_proj", "v_proj", "q_b_proj"):
            weight = getattr(getattr(module, child, None), "weight", None)
            if weight is not None and weight.shape[0] % heads == 0:
                yield f"{prefix}{child}.weight", (weight.shape[0] // heads,)
        if hasattr(module, "kv_b_proj"):
            yield f"{prefix}kv_b_proj.weight", (module.nope_dim, module.v_head_dim)
