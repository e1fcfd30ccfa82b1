"""From a folder and a prompt to streamed text: what `k3 generate` does."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
    set_seed,
)

from modeling_k3 import register

from . import UserError
from .tokenizer import encode_text

MODEL_TYPES = ("k3", "kimi_k3")
_TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        max_new_tokens: at most this many are written.
        temperature: 0 always takes the likeliest.
        top_p: draw from the likeliest tokens that together have this probability, in (0, 1].
        seed: of the draws; None for different text every time.
    """

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p:g}.")
        if self.temperature < 0 or self.max_new_tokens < 1:
            raise UserError("temperature must be at least 0 and max_new_tokens at least 1.")

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `generate`."""
        if self.temperature == 0:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0,
        }


def require_checkpoint(path: Path) -> None:
    """Check that a folder holds a K3 model and a tokenizer before anything heavy is loaded.

    Raises:
        UserError: saying what is missing and what is expected.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a folder. Expected is one with config.json, *.safetensors and a tokenizer.")
    if not (path / "config.json").is_file():
        raise UserError(f"{path} holds no config.json. Expected is a folder written by save_pretrained, or a release.")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path / 'config.json'} is not valid JSON: {error}") from error
    if (kind := config.get("model_type")) not in MODEL_TYPES:
        raise UserError(f"{path} holds a model of type {kind!r}; allowed are {', '.join(MODEL_TYPES)}.")
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{path} holds no weights: no *.safetensors file.")
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(f"{path} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)}.")


def load(path: Path, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer of a saved K3 checkpoint through the library's Auto classes.

    Args:
        path: folder of the checkpoint.
        dtype: "auto" for the one it was saved in, or "float32", "bfloat16", "float16".

    Raises:
        UserError: the folder does not hold a K3 checkpoint.
    """
    require_checkpoint(path)
    register()
    return load_model(path, dtype), AutoTokenizer.from_pretrained(path)


def load_model(path: Path, dtype: str) -> PreTrainedModel:
    """Load the model of a checked folder; see `load`.

    Raises:
        UserError: the checkpoint is damaged or contradicts itself.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be loaded: {error}") from error
    return model.eval()


def streamer(tokenizer: PreTrainedTokenizerBase) -> TextStreamer:
    """Prints text to standard output as it comes, without the prompt; characters appear when they are complete."""
    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def stream_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    sampling: Sampling,
    streamer: TextStreamer | None = None,
) -> str:
    """Continue a prompt. Control names in it are ordinary text.

    Args:
        model, tokenizer: a pair from `load`.
        prompt: plain text; empty starts a document.
        sampling: see there.
        streamer: shown the text as it comes.

    Returns:
        The continuation, without the prompt.
    """
    ids = encode_text(tokenizer, prompt)
    if not ids:
        if tokenizer.bos_token_id is None:
            raise UserError("the prompt is empty, and this tokenizer has no token to begin with.")
        ids = [tokenizer.bos_token_id]
    if sampling.seed is not None:
        set_seed(sampling.seed)
    config = GenerationConfig.from_dict({**model.generation_config.to_dict(), **sampling.arguments()})
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    batch = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            batch, attention_mask=torch.ones_like(batch), generation_config=config, streamer=streamer
        )
    return tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
