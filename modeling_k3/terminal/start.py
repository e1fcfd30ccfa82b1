"""From a folder to a conversation: what `k3 chat` runs."""

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel, set_seed
from transformers.utils import logging

from modeling_k3 import register
from modeling_k3.demo import UserError
from modeling_k3.demo.text import load_model, require_checkpoint
from modeling_k3.tokenization_k3 import K3Tokenizer

from .loop import ChatLoop
from .screen import Screen
from .session import ChatSession, ChatSettings
from .tools import load_tools


def load(path: Path, dtype: str) -> tuple[PreTrainedModel, K3Tokenizer]:
    """Load model and tokenizer of a saved K3 checkpoint or of a release.

    Args:
        path: folder.
        dtype: "auto" for the one it was saved in, or "float32", "bfloat16", "float16".

    Raises:
        UserError: the folder holds no K3 checkpoint, or a vocabulary without the chat format.
    """
    require_checkpoint(path)
    register()
    try:
        tokenizer = K3Tokenizer.from_pretrained(path)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    model = load_model(path, dtype)
    if model.config.vocab_size < len(tokenizer):
        raise UserError(f"{path}: the model has {model.config.vocab_size} ids, the tokenizer {len(tokenizer)}.")
    return model, tokenizer


def sampling(temperature: float | None, top_p: float | None) -> dict[str, Any]:
    """Arguments of `generate`; None leaves a choice to the model's own generation config.

    Raises:
        UserError: a value out of range.
    """
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p must be above 0 and at most 1, not {top_p:g}.")
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    given = {"temperature": temperature, "top_p": top_p}
    chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    return {"do_sample": True, **chosen} if chosen else {}


def run_chat(
    path: Path, settings: ChatSettings, *, tools: str | None, system: str | None, dtype: str, seed: int | None
) -> None:
    """Talk until the user leaves.

    Args:
        path: folder of the model.
        settings: how it answers.
        tools: see `load_tools`.
        system: first system message, or None.
        dtype: see `load`.
        seed: of the draws; None for different text every time.

    Raises:
        UserError: what the user can put right.
    """
    toolbox = load_tools(tools)
    console = Console(highlight=False)
    screen = Screen(console)
    is_terminal = sys.stdin.isatty()
    if not is_terminal:
        logging.disable_progress_bar()
    model, tokenizer = load(path, dtype)
    if seed is not None:
        set_seed(seed)
    session = ChatSession(model, tokenizer, settings, toolbox.declarations)
    if system:
        session.system(system)
    if is_terminal:
        _enable_editing()
        screen.note(f"{path}, {model.num_parameters():,} parameters. /help lists the commands.")
    ChatLoop(session, screen, toolbox, lambda prompt: input(prompt if is_terminal else "")).run()


def _enable_editing() -> None:
    """Arrow keys and history, where Python has them."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
