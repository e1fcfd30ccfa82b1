"""What a precision run reads: one plain text, or a JSONL of one's own prompts with answers."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

#: Inputs beyond this many tokens are reported as long ones.
LONG_FROM = 2048


@dataclass(frozen=True)
class Sample:
    """One input.

    Args:
        name: where it came from.
        ids: [T].
        prompt_length: tokens before the answer; 0 for plain text, all of which counts.
        answer: the expected answer, None for plain text.
    """

    name: str
    ids: Tensor
    prompt_length: int = 0
    answer: str | None = None

    @property
    def group(self) -> str:
        """Which inputs it is reported with: "long" or "short" ones."""
        return "long" if self.ids.numel() > LONG_FROM else "short"


def read_samples(path: Path, encode: Callable[[str], list[int]], *, max_tokens: int, limit: int) -> list[Sample]:
    """Read plain text, or with the ending `.jsonl` lines with "prompt" and "answer".

    Args:
        encode: text to ids, without special tokens.
        max_tokens: plain text is cut into pieces of this length; a longer prompt with answer is refused.
        limit: samples at most.

    Raises:
        ValueError: nothing to measure, a line without the two fields, or a sample that is too long.
    """
    if path.suffix != ".jsonl":
        ids = torch.tensor(encode(path.read_text(encoding="utf-8")))
        pieces = [piece for piece in ids.split(max_tokens) if piece.numel() > 1][:limit]
        if not pieces:
            raise ValueError(f"{path} holds no text to measure: at least 2 tokens are needed")
        return [Sample(f"{path.name}[{i}]", piece) for i, piece in enumerate(pieces)]
    samples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or len(samples) == limit:
            continue
        samples.append(_sample(f"{path.name}:{number}", line, encode, max_tokens))
    if not samples:
        raise ValueError(f"{path} holds no lines to measure")
    return samples


def _sample(name: str, line: str, encode: Callable[[str], list[int]], max_tokens: int) -> Sample:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{name} is no JSON: {error}") from None
    fields = [entry.get(key) if isinstance(entry, dict) else None for key in ("prompt", "answer")]
    if not all(isinstance(value, str) and value for value in fields):
        raise ValueError(f'{name} needs the fields "prompt" and "answer", both text that is not empty')
    prompt, answer = (encode(value) for value in fields)
    if len(prompt) + len(answer) > max_tokens:
        raise ValueError(f"{name} has {len(prompt) + len(answer)} tokens; allowed are {max_tokens} (--max-tokens)")
    return Sample(name, torch.tensor(prompt + answer), len(prompt), fields[1])
