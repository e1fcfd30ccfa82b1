"""How far is the fast path of a whole model from its exact path, on one's own text?

    exact    KDA in its attention form, the reference
    fast     the path under test, as it would run
    forced   the path under test, with the experts of the exact run: arithmetic alone

Compared are the distributions of the next token: KL(exact || other) in nats, agreement of the most likely token,
perplexity; how KL grows over the position; and each KDA layer alone on the inputs of the exact run.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modeling_k3.readiness.routes import Routes, changed_share, force_routes, record_routes
from modeling_k3.readiness.texts import Sample

#: Mean forced KL that passes when nothing was calibrated, several times what these dtypes cost on trained models.
THRESHOLDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
#: A calibrated threshold is this many times the largest noise floor.
MARGIN = 4.0
_ROWS = 512
NUM_BINS = 24


@dataclass
class Comparison:
    """One run against the exact one, per position: KL, agreement of the most likely token, log probabilities."""

    kl: Tensor
    agree: Tensor
    exact_loss: Tensor
    other_loss: Tensor


@dataclass
class GroupReport:
    """The short or the long inputs together."""

    group: str
    samples: int
    tokens: int
    kl: float
    kl_max: float
    forced_kl: float
    forced_kl_max: float
    top1: float
    forced_top1: float
    perplexity_exact: float
    perplexity_fast: float
    route_changes: float
    drift: list[tuple[int, float, float]] = field(default_factory=list)


@dataclass
class PrecisionReport:
    """What a run found.

    Args:
        layers: relative RMS error of each KDA layer on the inputs of the exact run, by layer number; the worst sample.
        threshold: bound on the mean forced KL of each group.
        noise: mean forced KL of the exact path against itself under one rounding of the embeddings, one for each
            seed; empty unless calibrated.
        answers: for prompts with answers: shares of equal and of expected greedy answers.
    """

    fast: str
    dtype: str
    groups: list[GroupReport]
    layers: dict[int, float]
    threshold: float
    noise: list[float] = field(default_factory=list)
    answers: dict[str, float] | None = None

    @property
    def passed(self) -> bool:
        """Whether every group stays below the threshold."""
        return all(group.forced_kl <= self.threshold for group in self.groups)


@torch.no_grad()
def measure_precision(
    model: Any,
    samples: Sequence[Sample],
    *,
    fast: str = "auto",
    threshold: float | None = None,
    calibration_seeds: int = 0,
) -> PrecisionReport:
    """Compare the path `fast` with the exact path over all samples.

    Args:
        model: a K3ForCausalLM in eval mode.
        fast: an implementation of KDA other than "exact".
        threshold: on the mean forced KL; None for the one of the dtype, or of the calibration.
        calibration_seeds: derive the threshold from so many noise runs on the first samples; 0 for none.
    """
    dtype = model.lm_head.weight.dtype
    layers: dict[int, float] = defaultdict(float)
    found: dict[str, list[tuple[Sample, Comparison, Comparison, float]]] = defaultdict(list)
    noise: list[float] = []
    for number, sample in enumerate(samples):
        ids = sample.ids.to(model.device)[None]
        with record_routes(model) as routes, _compare_layers(model, fast, layers):
            exact = _hidden(model, ids, "exact")
        with record_routes(model) as fast_routes:
            free = _hidden(model, ids, fast)
        with force_routes(model, routes):
            forced = _hidden(model, ids, fast)
        found[sample.group].append(
            (
                sample,
                compare_hidden(model, exact, free, sample),
                compare_hidden(model, exact, forced, sample),
                changed_share(routes, fast_routes),
            )
        )
        if number < 2:
            noise += [_noise(model, sample, ids, exact, routes, seed) for seed in range(calibration_seeds)]
    if threshold is None:
        threshold = MARGIN * max(noise) if noise else THRESHOLDS[dtype]
    groups = [_summarize(group, entries) for group, entries in sorted(found.items(), reverse=True)]
    return PrecisionReport(fast, str(dtype).removeprefix("torch."), groups, dict(layers), threshold, noise)


def _hidden(model: Any, ids: Tensor, path: str, embeds: Tensor | None = None) -> Tensor:
    """Last hidden states [T, D] of one row."""
    given = {"input_ids": ids} if embeds is None else {"inputs_embeds": embeds}
    return model.model(**given, use_cache=False, kda_implementation=path).last_hidden_state[0]


def compare_hidden(model: Any, exact: Tensor, other: Tensor, sample: Sample) -> Comparison:
    """Compare the distributions behind two sets of hidden states [T, D], a few hundred rows of logits at a time.

    Positions that predict a token of the prompt are left out.
    """
    first = max(sample.prompt_length - 1, 0)
    targets = sample.ids.to(exact.device)[first + 1 :]
    parts: list[tuple[Tensor, ...]] = []
    for start in range(first, sample.ids.numel() - 1, _ROWS):
        stop = min(start + _ROWS, sample.ids.numel() - 1)
        p, q = (model.lm_head(x[start:stop]).double().log_softmax(-1) for x in (exact, other))
        target = targets[start - first : stop - first, None]
        kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
        parts.append((kl, p.argmax(-1) == q.argmax(-1), -p.gather(1, target)[:, 0], -q.gather(1, target)[:, 0]))
    return Comparison(*(torch.cat(column) for column in zip(*parts, strict=True)))


@contextmanager
def _compare_layers(model: nn.Module, fast: str, worst: dict[int, float]) -> Iterator[None]:
    """Inside, every KDA layer also runs on the path `fast`, on the same input; its largest error is kept."""
    inside = False

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Any]) -> None:
        nonlocal inside
        if inside:
            return
        inside = True
        try:
            other, _ = module(*args, **{**kwargs, "kda_implementation": fast})
        finally:
            inside = False
        error = ((other.double() - output[0].double()).norm() / output[0].double().norm().clamp_min(1e-30)).item()
        worst[module.layer_idx] = max(worst[module.layer_idx], error)

    layers = [module for module in model.modules() if hasattr(module, "kda_guard")]
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _noise(model: Any, sample: Sample, ids: Tensor, exact: Tensor, routes: Routes, seed: int) -> float:
    """Mean KL of the exact path against itself when every embedding is off by up to one rounding of its dtype."""
    embeds = model.get_input_embeddings()(ids)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.rand(embeds.shape, generator=generator).to(embeds.device) * 2 - 1
    step = torch.finfo(embeds.dtype).eps
    moved = (embeds.double() * (1 + signs.double() * step)).to(embeds.dtype)
    with force_routes(model, routes):
        other = _hidden(model, ids, "exact", moved)
    return compare_hidden(model, exact, other, sample).kl.mean().item()


def _summarize(group: str, entries: list[tuple[Sample, Comparison, Comparison, float]]) -> GroupReport:
    free, forced = (
        {name: torch.cat([getattr(entry[i], name) for entry in entries]) for name in ("kl", "agree", "other_loss")}
        for i in (1, 2)
    )
    exact_loss = torch.cat([entry[1].exact_loss for entry in entries])
    return GroupReport(
        group=group,
        samples=len(entries),
        tokens=exact_loss.numel(),
        kl=free["kl"].mean().item(),
        kl_max=free["kl"].max().item(),
        forced_kl=forced["kl"].mean().item(),
        forced_kl_max=forced["kl"].max().item(),
        top1=free["agree"].double().mean().item(),
        forced_top1=forced["agree"].double().mean().item(),
        perplexity_exact=exact_loss.mean().exp().item(),
        perplexity_fast=free["other_loss"].mean().exp().item(),
        route_changes=sum(entry[3] for entry in entries) / len(entries),
        drift=_drift(entries),
    )


def _drift(entries: list[tuple[Sample, Comparison, Comparison, float]]) -> list[tuple[int, float, float]]:
    """(first position of a bin, mean KL, mean forced KL) over bins of growing width."""
    longest = max(entry[0].ids.numel() for entry in entries)
    positions = torch.cat([torch.arange(e[0].ids.numel() - e[1].kl.numel(), e[0].ids.numel()) for e in entries])
    borders = torch.logspace(0, torch.tensor(float(longest)).log10().item(), NUM_BINS + 1).long().unique()
    free, forced = (torch.cat([e[i].kl for e in entries]).cpu() for i in (1, 2))
    rows = []
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        inside = (positions >= start) & (positions < stop)
        if inside.any():
            rows.append((start, free[inside].mean().item(), forced[inside].mean().item()))
    return rows


@torch.no_grad()
def compare_answers(model: Any, tokenizer: Any, samples: Sequence[Sample], *, fast: str = "auto") -> dict[str, float]:
    """Greedy answers by both paths: how many are equal, and how many begin with what was expected.

    The model's implementations are put back afterwards.
    """
    before = {m: m.implementation for m in model.modules() if hasattr(m, "kda_guard")}
    texts: dict[str, list[str]] = {}
    try:
        for path in ("exact", fast):
            for module in before:
                module.implementation = path
            texts[path] = [_answer(model, tokenizer, sample) for sample in samples]
    finally:
        for module, implementation in before.items():
            module.implementation = implementation
    expected = [(sample.answer or "").strip() for sample in samples]
    equal = [a == b for a, b in zip(texts["exact"], texts[fast], strict=True)]
    shares = {"equal": sum(equal) / len(equal)}
    for path in ("exact", fast):
        hits = [text.strip().startswith(answer) for text, answer in zip(texts[path], expected, strict=True)]
        shares[f"expected, {path}"] = sum(hits) / len(hits)
    return shares


def _answer(model: Any, tokenizer: Any, sample: Sample) -> str:
    prompt = sample.ids[: sample.prompt_length].to(model.device)[None]
    count = sample.ids.numel() - sample.prompt_length
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)
    return tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)
