"""The model card of an upload: what the model is, how it is loaded, what it is licensed under, what was measured."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from torch import nn

from .hub_facts import describe, parts_of, sentence, weight_forms
from .hub_source import CARD_FILE, Source

RELEASED_REPOSITORY = "moonshotai/Kimi-K3"
RELEASED_LICENSE = "kimi-k3"
_LICENSE_LINK = f"https://huggingface.co/{RELEASED_REPOSITORY}/blob/main/LICENSE"
_UNSTATED = "apache-2.0-code-weights-not-stated"
_LICENSE_FIELDS = ("license", "license_name", "license_link")
#: What a caller may say; everything else on a card is read off the model.
CARD_FIELDS = tuple(
    "title description license license_name license_link base_model derived datasets language tags figures".split()
)
#: One measurement; `what` and `value` are needed.
FIGURE_FIELDS = ("what", "value", "command", "machine", "date")
#: Fields that may be one text or several; those without an entry here or below are one text.
_TEXT_OR_TEXTS = ("base_model", "datasets", "language")
#: Widths that together are the release's: no other model has them, and fine-tuning keeps them.
_RELEASED_WIDTHS = {
    "hidden_size": 7168,
    "vocab_size": 163840,
    "kv_lora_rank": 512,
    "routed_expert_hidden_size": 3584,
    "moe_intermediate_size": 3072,
}
#: The last part of a path or of a name on the hub; a folder further up says nothing of the weights in it.
_IS_RELEASE = re.compile(r"(^|/)kimi[-_]k3([-_.][^/]*)?/*$", re.IGNORECASE)

_BODY = """
# {title}

{description}

{parts}

| | |
|---|---|
{table}

## Use

The code is in this repository{needs}:

```python
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("{repository}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{repository}", trust_remote_code=True)
```

With the package `modeling_k3` installed, `import modeling_k3` first and leave `trust_remote_code` out: the installed
code is used, and none of this repository's is run. These need the package: LoRA on packed experts; Muon,
quantisation-aware training, the callbacks for routers and `export_released`; `load_within`; and the tools (`k3 chat`,
`k3 convert`, `k3 doctor`, ...). Loading, generation, packed experts, training as such (with Trainer too) and saving do
not.

## Measured

{figures}

## Licence

{licence}
"""
_OWN_LICENCE = """The code files (`*.py`) are under [Apache-2.0](https://www.apache.org/licenses/LICENSE-2.0).
{weights}"""
_NOT_STATED = "Whoever made the weights has not stated a licence for them."
_RELEASED_LICENCE = f"""The weights are derived from [Kimi K3](https://huggingface.co/{RELEASED_REPOSITORY}) by \
Moonshot AI and are under the [Kimi K3 License]({_LICENSE_LINK}), whose text decides; this is a summary only:

- Its copyright line and permission notice go with every copy or substantial portion. There is no warranty.
- Model as a service: whoever, with affiliates, offers third parties inference or fine-tuning with meaningful control
  over inputs, parameters or training data, and whose group's total revenue exceeds 20 million US dollars over any 12
  consecutive months, needs a separate agreement with Moonshot AI before any commercial use of the model or of works
  derived from it. End-user products that embed the model in particular features or harnesses, and mere relaying to
  models hosted by others, do not count as such a service.
- Display: a commercial product or service that uses the model or works derived from it, and has more than 100 million
  monthly active users or more than 20 million US dollars monthly revenue, must show "Kimi K3" prominently on its user
  interface.
- Internal use that lets nothing of the model, its outputs or its capabilities reach third parties, and use through
  Moonshot AI's official products or certified inference partners, are exempt from the last two points."""


def check_card(card: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a caller says about a model, checked.

    Args:
        card: some of `CARD_FIELDS`, None for what is not said. Texts, but for `derived` (a bool), `tags` (a list of
            texts), `base_model`, `datasets` and `language` (a text or a list of texts), and `figures` (a list of
            dictionaries with some of `FIGURE_FIELDS`, each a text, a number or a date).

    Returns:
        What is said, without the entries that are None.

    Raises:
        TypeError: no mapping, or an entry of another type.
        ValueError: an unknown field, or a figure without `what` and `value`.
    """
    if card is not None and not isinstance(card, Mapping):
        raise TypeError(f"card={card!r} must be a dictionary with some of {list(CARD_FIELDS)}")
    unknown = sorted(map(str, set(card or {}) - set(CARD_FIELDS)))
    if unknown:
        raise ValueError(f"card has unknown entries {unknown}; allowed are {list(CARD_FIELDS)}")
    said = {name: value for name, value in (card or {}).items() if value is not None}
    for name, value in said.items():
        allowed = _breach(name, value)
        if allowed is not None:
            raise TypeError(f"card: {name}={value!r}; allowed is {allowed}")
    for figure in said.get("figures", ()):
        if not {"what", "value"} <= set(figure) <= set(FIGURE_FIELDS):
            raise ValueError(f"card: figures: {figure!r} needs 'what' and 'value'; allowed are {list(FIGURE_FIELDS)}")
        for name, value in figure.items():
            if isinstance(value, bool) or not isinstance(value, str | int | float | date):
                raise TypeError(f"card: figures: {name}={value!r}; allowed is a text, a number or a date")
    return said


def _breach(name: str, value: Any) -> str | None:
    """What is allowed for a field whose value is of another type; None where nothing is wrong."""
    is_list = isinstance(value, list | tuple)
    is_text = isinstance(value, str)
    is_texts = is_list and all(isinstance(each, str) for each in value)
    if name == "derived":
        return None if isinstance(value, bool) else "True, False, or None to see by the model"
    if name == "figures":
        return None if is_list and all(isinstance(each, Mapping) for each in value) else "a list of dictionaries"
    if name == "tags":
        return None if is_texts else "a list of texts"
    if name in _TEXT_OR_TEXTS:
        return None if is_text or is_texts else "a text or a list of texts"
    return None if is_text else "a text"


def is_derived(model: nn.Module, source: Path | None) -> bool:
    """Whether the weights come from the released ones, as far as that can be seen.

    Args:
        model: its name and its widths tell.
        source: the folder it was read from, whose licence and card tell; None if there is none.
    """
    config = model.config
    if _IS_RELEASE.search(str(getattr(model, "name_or_path", "") or "")):
        return True
    if all(getattr(config, name) == width for name, width in _RELEASED_WIDTHS.items()):
        return True
    beside = [source / name for name in ("LICENSE", CARD_FILE)] if source is not None else []
    heads = [path.read_text(encoding="utf-8", errors="replace")[:1000] for path in beside if path.is_file()]
    return any(re.search(rf"kimi k3 license|license_name: {RELEASED_LICENSE}\b", head, re.IGNORECASE) for head in heads)


def inherited(source: Source, repository: str, derived: bool, has_licence: bool) -> dict[str, Any]:
    """What a card says of where the weights come from if its maker says nothing: some of `CARD_FIELDS`.

    Args:
        source: where they were read from: its card states licence and base models.
        repository: name of what is made; on the hub a model is its own base model only elsewhere.
        derived: the weights come from the released ones, whose licence binds.
        has_licence: the maker states one.
    """
    said = {name: value for name, value in source.card().items() if name in CARD_FIELDS}
    kept = {name: value for name, value in said.items() if value and _breach(name, value) is None}
    if kept.get("license_name") in (RELEASED_LICENSE, _UNSTATED) or derived or has_licence:
        kept = {name: value for name, value in kept.items() if not name.startswith("license")}
    if source.repository is not None and source.repository != repository:
        kept["base_model"] = source.repository
    return {name: kept[name] for name in (*_LICENSE_FIELDS, "base_model") if name in kept}


def make_card(model: nn.Module, repository: str, auto: str, card: Mapping[str, Any], derived: bool) -> str:
    """The card in Markdown, with the metadata the hub reads.

    Args:
        model: what is uploaded.
        repository: its name there.
        auto: name of the Auto class that loads it.
        card: see `check_card`.
        derived: the weights come from the released ones.

    Raises:
        ValueError: another licence is given for derived weights.
    """
    licence = card.get("license") or ("other" if card.get("license_name") else None)
    if derived and not {licence, card.get("license_name")} <= {None, RELEASED_LICENSE, "other"}:
        given = licence if licence not in (RELEASED_LICENSE, "other") else card["license_name"]
        raise ValueError(
            f"card: license={given!r}, but the weights derive from {RELEASED_REPOSITORY}, whose licence "
            f"binds; allowed is {RELEASED_LICENSE!r}, or derived=False where they do not"
        )
    title = card.get("title") or repository.rpartition("/")[2]
    base = card.get("base_model") or (RELEASED_REPOSITORY if derived else None)
    bases = base if isinstance(base, str) or base is None else ", ".join(base)
    data: dict[str, Any] = {"library_name": "transformers"}
    if auto == "AutoModelForCausalLM":
        data["pipeline_tag"] = "text-generation"
    elif auto.endswith("Classification"):
        data["pipeline_tag"] = "text-classification" if "Sequence" in auto else "token-classification"
    if derived:
        data |= {"license": "other", "license_name": RELEASED_LICENSE, "license_link": _LICENSE_LINK}
    elif licence is not None:
        data |= {"license": licence, **{name: card[name] for name in _LICENSE_FIELDS if name in card}}
    else:
        # Nobody but who made the weights can license them; a card without the entry would say nothing of the code.
        data |= {"license": "other", "license_name": _UNSTATED}
    data |= {"base_model": base} if base else {}
    data |= {name: card[name] for name in ("datasets", "language") if card.get(name)}
    parts = [tag for _, tag in parts_of(model.config) if tag]
    data["tags"] = list(dict.fromkeys(["k3", *parts, *card.get("tags", ())]))
    weights = f"The weights are under {card.get('license_name') or licence}." if licence else _NOT_STATED
    _, packages = weight_forms(model)
    own = _OWN_LICENCE.format(weights="" if derived else weights).rstrip()
    body = _BODY.format(
        title=title,
        description=card.get("description") or (f"Derived from {bases}." if base else "Built with `modeling_k3`."),
        table="\n".join(f"| {name} | {value} |" for name, value in describe(model)),
        parts=sentence(model.config),
        needs=f"; loading needs `pip install {' '.join(packages)}` as well" if packages else "",
        auto=auto,
        repository=repository,
        figures=_figures(card.get("figures", ())),
        licence=f"{own}\n\n{_RELEASED_LICENCE}" if derived else own,
    )
    # JSON is YAML: nothing that a caller says can break out of its line.
    lines = [f"{name}: {_scalar(value)}" for name, value in data.items()]
    return "\n".join(["---", *lines, "---", body])


def _scalar(value: Any) -> str:
    is_plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./:-]*", value) and not value.endswith(":")
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _figures(figures: Sequence[Mapping[str, Any]]) -> str:
    if not figures:
        return "Parameters and form above were counted while saving. No other figures were given."
    # A cell is one line of text.
    rows = [[" ".join(str(figure.get(name, "")).split()) for name in FIGURE_FIELDS] for figure in figures]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    head = ["| " + " | ".join(FIGURE_FIELDS) + " |", "|" + "---|" * len(FIGURE_FIELDS)]
    return "Measured by whoever made the model.\n\n" + "\n".join(
        head + ["| " + " | ".join(row) + " |" for row in cells]
    )
