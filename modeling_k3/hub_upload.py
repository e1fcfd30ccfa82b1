"""One commit on the hub: what was saved goes up, weights that it replaces go, a card that is there stays."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError

from .hub_source import CARD_FILE
from .saving import is_weights

#: What may be said of an upload, with the library's meaning.
UPLOAD_OPTIONS = ("token", "private", "commit_message", "commit_description", "revision", "create_pr")
#: What may be said of a save beside its own arguments; the last two are of accelerate and older transformers.
SAVE_OPTIONS = tuple(
    "save_original_format save_peft_format distributed_checkpoint safe_serialization save_function".split()
)


def check_options(given: Mapping[str, Any], allowed: Sequence[str], is_upload: bool) -> None:
    """Refuse what would be swallowed otherwise, before anything is made.

    Args:
        given: the arguments without a parameter of their own.
        allowed: their names.
        is_upload: the files are uploaded.

    Raises:
        TypeError: an unknown name.
        ValueError: another format than safetensors, or an upload of a distributed checkpoint.
    """
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise TypeError(f"unknown arguments {', '.join(unknown)}; allowed are {', '.join(allowed)}")
    if given.get("safe_serialization") is False:
        raise ValueError("safe_serialization=False is not allowed: weights are written to safetensors files only")
    if is_upload and given.get("distributed_checkpoint"):
        raise ValueError("distributed_checkpoint=True is for resuming, and nothing else can load it; upload without it")


def open_repository(repo_id: str, options: Mapping[str, Any]) -> str:
    """Make a repository unless it is there.

    Args:
        repo_id: "owner/name", or a name alone for one's own.
        options: some of `UPLOAD_OPTIONS`.

    Returns:
        Its whole name.
    """
    api = HfApi(token=options.get("token"))
    return api.create_repo(repo_id, private=options.get("private"), exist_ok=True).repo_id


def upload(
    folder: Path, names: Sequence[str], repo: str, options: Mapping[str, Any], keeps_card: bool, variant: str | None
) -> Any:
    """Put files into a repository, in one commit.

    Args:
        folder: where they are; what else lies there stays.
        names: of files and folders in it.
        repo: a repository that is there.
        options: some of `UPLOAD_OPTIONS`; a branch that is not there begins as a copy of the main one.
        keeps_card: a card that the repository has stays as it is.
        variant: of the weights. Loaders take `model.safetensors` first, whatever lies beside it: earlier weights of
            this variant are removed if there are new ones.

    Returns:
        What the hub says about the commit.
    """
    api, revision = HfApi(token=options.get("token")), options.get("revision")
    if revision is not None and not revision.startswith("refs/pr"):
        try:
            api.create_branch(repo, branch=revision, exist_ok=True)
        except HfHubHTTPError as error:
            # Whoever may only propose a change may not make a branch either; that it is there is all that is needed.
            if not options.get("create_pr") or error.response.status_code != 403:
                raise
    held = api.list_repo_files(repo, revision=revision)
    files = {}
    for path in (folder / name for name in names):
        each = path.rglob("*") if path.is_dir() else [path]
        files |= {file.relative_to(folder).as_posix(): file for file in each if file.is_file()}
    if keeps_card and CARD_FILE in held:
        files.pop(CARD_FILE, None)
    replaces = any(is_weights(name, variant) for name in files)
    gone = [name for name in held if replaces and is_weights(name, variant) and name not in files]
    return api.create_commit(
        repo,
        [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in sorted(files.items())),
            *(CommitOperationDelete(path_in_repo=name) for name in gone),
        ],
        commit_message=options.get("commit_message") or "Upload model",
        commit_description=options.get("commit_description"),
        create_pr=options.get("create_pr"),
        revision=revision,
    )
