"""The release's `tiktoken.model` -> a `tokenizer.json` that the `tokenizers` library reads without any code of ours."""

import json
import os
import random
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from modeling_k3.tokenization_k3 import K3Tokenizer
from modeling_k3.vocabulary import to_bytes, to_token

#: Written by a conversion.
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
#: Class that every version of the library has.
PLAIN_CLASS = "PreTrainedTokenizerFast"
_KEPT = ("bos_token", "eos_token", "unk_token", "pad_token", "additional_special_tokens", "added_tokens_decoder")
_SAMPLES = 2000


def convert_tokenizer(source: Path, out: Path, *, is_plain: bool = False) -> dict[str, Any]:
    """Convert the tokenizer of a released folder. Nothing is written unless all of it is.

    Args:
        source: folder with `tiktoken.model` and `tokenizer_config.json`.
        out: folder that gets the files of `FILES`; made if it is not there. It must hold none of them.
        is_plain: name the library's own class in `tokenizer_config.json`, for versions of it that refuse a class they
            do not know. `AutoTokenizer` then loads without the text mode of K3Tokenizer, also with this package.

    Returns:
        `base_tokens`, `control_tokens`, `checked` (random byte strings on which merging was compared) and `files`.

    Raises:
        FileNotFoundError: the source lacks a file.
        FileExistsError: the output holds one already.
        ValueError: the vocabulary is not Kimi K3's, or cannot be expressed.
    """
    for name in ("tiktoken.model", "tokenizer_config.json"):
        if not (source / name).is_file():
            raise FileNotFoundError(f"{source} holds no {name}")
    present = [name for name in FILES if (out / name).exists()]
    if present:
        raise FileExistsError(f"{out} holds {', '.join(present)} already; choose another folder")
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer = K3Tokenizer(
        vocab_file=str(source / "tiktoken.model"), **{key: config[key] for key in _KEPT if key in config}
    )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out) as unfinished:
        tokenizer.save_pretrained(unfinished)
        _finish_config(Path(unfinished) / "tokenizer_config.json", is_plain)
        checked = check_merging(Tokenizer.from_file(str(Path(unfinished) / "tokenizer.json")))
        for name in FILES:
            if (Path(unfinished) / name).exists():
                os.replace(Path(unfinished) / name, out / name)
    return {
        "base_tokens": tokenizer.first_control_id,
        "control_tokens": len(tokenizer) - tokenizer.first_control_id,
        "checked": checked,
        "files": [str(out / name) for name in FILES if (out / name).exists()],
    }


def _finish_config(path: Path, is_plain: bool) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    if is_plain:
        config["tokenizer_class"] = PLAIN_CLASS
    path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def merge_by_rank(piece: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """What merging means, in its plainest form: the truth that a list of merges is compared with.

    A piece that is a token is taken whole. Otherwise the adjacent parts whose concatenation has the lowest rank are
    joined, leftmost first, until no concatenation is a token. Quadratic.
    """
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[at : at + 1] for at in range(len(piece))]
    while True:
        joined = [
            (ranks[left + right], at) for at, (left, right) in enumerate(pairwise(parts)) if left + right in ranks
        ]
        if not joined:
            return [ranks[part] for part in parts]
        at = min(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def check_merging(backend: Tokenizer, samples: int = _SAMPLES, seed: int = 0) -> int:
    """Compare the merges of a tokenizer with merging by rank, on random strings of its own tokens.

    Args:
        backend: with a byte-level BPE model.
        samples: number of strings, of two to four tokens each.
        seed: of their choice.

    Returns:
        The number of strings.

    Raises:
        ValueError: naming the first string with other ids.
    """
    base = backend.get_vocab(with_added_tokens=False)
    ranks = {to_bytes(token): rank for token, rank in base.items()}
    tokens = sorted(ranks, key=lambda token: ranks[token])
    choose = random.Random(seed)
    for _ in range(samples):
        piece = b"".join(choose.choices(tokens, k=choose.randint(2, 4)))
        wanted = merge_by_rank(piece, ranks)
        got = [token.id for token in backend.model.tokenize(to_token(piece))]
        if got != wanted:
            raise ValueError(f"merging {piece!r} gives {got}, by rank it is {wanted}")
    return samples
