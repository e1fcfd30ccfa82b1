"""What a folder needs besides weights to be used without this package: code, class map, card, both end tokens.

A plain `save_pretrained` writes none of it, so that checkpoints stay what the release looks like. `push_to_hub` always
does, `save_pretrained(..., with_code=True)` does, and so does every save of a class that was registered to carry its
code (`register_for_auto_class`), as the library does itself after it loaded a class from the hub.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import logging

from .class_maps import label_code, tokenizer_reference
from .configuration_k3 import K3Config
from .hub_card import check_card, inherited, is_derived, make_card
from .hub_source import CARD_FILE, Source, source_of
from .hub_upload import SAVE_OPTIONS, check_options, open_repository, upload
from .markup import ENDS
from .tokenization_k3 import K3Tokenizer

logger = logging.get_logger(__name__)

#: Model class -> Auto class, for models of the two files that an upload holds.
_AUTO = {
    "K3Model": "AutoModel",
    "K3ForCausalLM": "AutoModelForCausalLM",
    "K3ForSequenceClassification": "AutoModelForSequenceClassification",
    "K3ForTokenClassification": "AutoModelForTokenClassification",
}


def _reference(module: str, name: str) -> str:
    return f"{module.rpartition('.')[2]}.{name}"


def auto_class_of(model: nn.Module) -> str:
    """Name of the Auto class that loads a model: what it was registered for, or what ours are."""
    own = next((base.__name__ for base in type(model).__mro__ if base.__name__ in _AUTO), "K3Model")
    # Every class that the library loads from the hub is registered, a causal model through AutoModel too.
    registered = type(model).__dict__.get("_auto_class")
    return registered if registered is not None and type(model).__name__ not in _AUTO else _AUTO[own]


def class_map(model: nn.Module, with_tokenizer: bool) -> dict[str, Any]:
    """The `auto_map` of config.json: where which class is.

    Args:
        model: what is saved; a class of the user's own is listed under its Auto class.
        with_tokenizer: tokenizer files are there too.
    """
    shared = next(base for base in type(model).__mro__ if base.__name__ == "K3PreTrainedModel").__module__
    found: dict[str, Any] = {
        "AutoConfig": _reference(K3Config.__module__, "K3Config"),
        "AutoModel": _reference(shared, "K3Model"),
        "AutoModelForCausalLM": _reference(shared, "K3ForCausalLM"),
    }
    found[auto_class_of(model)] = _reference(type(model).__module__, type(model).__name__)
    if with_tokenizer:
        found["AutoTokenizer"] = [_reference(K3Tokenizer.__module__, "K3Tokenizer"), None]
    return found


def set_class_map(folder: Path, found: Mapping[str, Any] | None) -> None:
    """Write the class map into config.json, or take out one whose files would not be there."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.pop("auto_map", None) is None and found is None:
        return
    if found is not None:
        config = {**config, "auto_map": dict(found)}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class HubUpload:
    """`push_to_hub` for models: weights, code, card, and the tokenizer in one commit."""

    def push_to_hub(
        self,
        repo_id: str,
        *,
        tokenizer: Any = None,
        card: Mapping[str, Any] | None = None,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str | None = "50GB",
        tags: Sequence[str] | None = None,
        **save_options: Any,
    ) -> Any:
        """Upload so that the repository can be used with `trust_remote_code=True` and nothing installed.

        Args:
            repo_id: "owner/name"; made if it is not there.
            tokenizer: uploaded along; generation then stops at both end tokens of the chat format.
            card: what the model card says besides what can be counted, see `hub_card.check_card`. Without, a card that
                the repository has already stays as it is.
            commit_message, commit_description, private, token, revision, create_pr, max_shard_size, tags: as in the
                library.
            save_options: of `save_pretrained`: `variant`, `vision`, `state_dict` and `hub_upload.SAVE_OPTIONS`.

        Returns:
            What the hub says about the commit; None in a process that does not write.

        Raises:
            ValueError, TypeError: an unknown argument, an entry of `card` that is not allowed, a licence other than the
                one that binds, or a tokenizer or class that cannot go along; before anything is created.
        """
        more = check_card({"tags": tags}).get("tags", ())
        check_options(save_options, ("variant", "vision", "state_dict", *SAVE_OPTIONS), is_upload=True)
        given = code_options(self, repo_id, True, True, tokenizer, card, {"repository": repo_id})["card"]
        given["tags"] = [*given.get("tags", ()), *more, *(self.model_tags or ())]
        options = {
            "commit_message": commit_message,
            "commit_description": commit_description,
            "private": private,
            "token": token,
            "revision": revision,
            "create_pr": create_pr,
        }
        repo = open_repository(repo_id, options)
        save_options["max_shard_size"] = max_shard_size
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(
                folder, with_code=True, tokenizer=tokenizer, card=given, repository=repo, **save_options
            )
            if not self.should_save_on_this_rank(True):
                return None
            names = os.listdir(folder)
            return upload(Path(folder), names, repo, options, not card, save_options.get("variant"))


def code_options(
    model: nn.Module,
    save_directory: str | os.PathLike,
    is_usual: bool,
    with_code: bool | None,
    tokenizer: Any,
    card: Any,
    options: dict[str, Any],
) -> dict[str, Any] | None:
    """Check and collect what a save is told about code, before anything is written; None for a save without.

    Args:
        model: what is saved.
        save_directory: names the repository where `options` do not.
        is_usual: whether the code goes along if nothing is said.
        with_code: what is said, or None.
        tokenizer, card: go along with it.
        options: of the save; `repository` is taken out.

    Raises:
        ValueError: a tokenizer or a card without code; a class without a file; see `check_card` and `make_card`.
        TypeError: a tokenizer whose code does not go along; see `check_card`.
    """
    repository = options.pop("repository", None) or options.get("repo_id") or Path(save_directory).resolve().name
    if is_usual if with_code is None else with_code:
        given = check_card(card)
        _card_text(model, repository, given)
        module = type(model).__module__
        if module == "__main__" or not hasattr(sys.modules[module], "__file__"):
            raise ValueError(f"{type(model).__name__} has no file of its own to upload; put the class into a module")
        # By name: a tokenizer of the hub's copy of the code is another class.
        if tokenizer is not None and "K3Tokenizer" not in {base.__name__ for base in type(tokenizer).__mro__}:
            raise TypeError(f"tokenizer is a {type(tokenizer).__name__}; allowed is a K3Tokenizer, or None")
        return {"repository": repository, "tokenizer": tokenizer, "card": given}
    if tokenizer is not None or card is not None:
        raise ValueError("tokenizer and card go along with code only; allowed is with_code=True beside them")
    return None


def write_code(
    folder: Path, model: nn.Module, target: Path, repository: str, tokenizer: Any, card: Mapping[str, Any]
) -> None:
    """Complete a folder that has config.json and generation_config.json.

    Args:
        folder: where the model is being saved.
        model: what is saved.
        target: where the files will be; a card that is there stays unless `card` says something.
        repository: its name, for the card.
        tokenizer: saved along, with its code; None for none.
        card: what the card says besides what can be counted, as `hub_card.check_card` returns it.

    Raises:
        ValueError: see `make_card`.
    """
    text, derived, source = _card_text(model, repository, card)
    custom_object_save(model, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder, with_code=True)
        _end_with(folder / "generation_config.json", tokenizer)
    label_code(folder)
    set_class_map(folder, class_map(model, tokenizer is not None or tokenizer_reference(target) is not None))
    if card or not (target / CARD_FILE).is_file():
        (folder / CARD_FILE).write_text(text, encoding="utf-8")
    _carry_notices(folder, source, derived)


def _card_text(model: nn.Module, repository: str, card: Mapping[str, Any]) -> tuple[str, bool, Source]:
    """The card, whether the weights derive from the released ones, and where they were read from."""
    source = source_of(model)
    derived = is_derived(model, source.folder) if card.get("derived") is None else bool(card["derived"])
    card = {**inherited(source, repository, derived, any(name.startswith("license") for name in card)), **card}
    return make_card(model, repository, auto_class_of(model), card, derived), derived, source


def _end_with(path: Path, tokenizer: Any) -> None:
    """Let generation stop at both end tokens of the chat format, as the release says."""
    if not path.is_file():
        return
    generation = json.loads(path.read_text(encoding="utf-8"))
    own = generation.get("eos_token_id")
    listed = own if isinstance(own, list) else [] if own is None else [own]
    ends = [tokenizer.convert_tokens_to_ids(name) for name in ENDS]
    # Ids from the model's config would be taken from there again while loading.
    generation.pop("_from_model_config", None)
    generation["eos_token_id"] = [*ends, *(token for token in listed if token not in ends)]
    path.write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _carry_notices(folder: Path, source: Source, derived: bool) -> None:
    """Take the licence and the notices along, which have to go with every copy."""
    found = source.notices()
    for path in found:
        if not (folder / path.name).exists() or not path.samefile(folder / path.name):
            shutil.copyfile(path, folder / path.name)
    if derived and not any(path.name.upper().startswith("LIC") for path in found):
        logger.warning(
            "The weights derive from Kimi K3, and no LICENSE file was found beside the ones that were loaded: its "
            "copyright line and permission notice have to go with every copy. Add the file before you pass it on."
        )
