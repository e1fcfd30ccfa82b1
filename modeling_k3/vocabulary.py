"""The released vocabulary: rank file, splitting pattern and block of control tokens, as one `tokenizers` pipeline.

    id      0 .. N - 1          ranks of `tiktoken.model`: the id of a token is also its merge priority
            N .. N + 255        control tokens, always in this order

    text -> slices of 400,000 characters -> runs of at most 25,000 -> pieces of the pattern -> bytes -> merges

The two length limits are steps of the pipeline, so a saved `tokenizer.json` gives the same ids without any code.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

#: Ids after the base ranks, all of them control tokens.
BLOCK_SIZE = 256
#: Text is cut after this many characters, and again after this many of one run of whitespace or of anything else.
SLICE_CHARACTERS = 400_000
RUN_CHARACTERS = 25_000

#: Offset in the block: name, flagged special. The three markers of the chat format are not: dropping special tokens
#: while decoding leaves them in the text. Offsets without a name are reserved.
NAMED_CONTROLS: Mapping[int, tuple[str, bool]] = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|end_of_msg|>", True),
    3: ("<|open|>", False),
    4: ("<|close|>", False),
    5: ("<|sep|>", False),
    6: ("[start_header_id]", True),
    7: ("[end_header_id]", True),
    9: ("[EOT]", True),
    18: ("<|media_begin|>", True),
    19: ("<|media_content|>", True),
    20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True),
    65: ("<osagent_mode>", True),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#: Alternatives of the splitting pattern, tried in this order. `&&` is set intersection.
ALTERNATIVES = (
    r"[\p{Han}]+",
    f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
    f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)

# Whitespace of the run limit: `str.isspace`, which has four characters more than `\s` of the pattern.
_SPACE = r"\s\x1c-\x1f"
# A search begins where the last match ended (\G) or at the first character of a run: never twice over one character.
_FULL_SLICE = rf"\G(?:(?m:.){{{SLICE_CHARACTERS // 4}}}){{4}}"
_FULL_RUN = "|".join(
    rf"(?:\G|(?<=[{other}]))[{kind}]{{{RUN_CHARACTERS}}}(?=[{kind}])"
    for kind, other in ((f"^{_SPACE}", _SPACE), (_SPACE, f"^{_SPACE}"))
)
_RUN = re.compile(r"\s+|\S+")


def printable_bytes() -> list[str]:
    """The usual byte-to-printable-character map of byte-level vocabularies, indexed by byte value.

    Visible Latin-1 characters stand for themselves; the other 68 bytes get the code points from 256 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in visible else next(substitutes)) for byte in range(256)]


_TO_PRINTABLE = printable_bytes()
_TO_BYTE = {character: byte for byte, character in enumerate(_TO_PRINTABLE)}


def to_token(token_bytes: bytes) -> str:
    """The printable name under which the library stores a base token."""
    return "".join(_TO_PRINTABLE[byte] for byte in token_bytes)


def to_bytes(token: str) -> bytes:
    """The bytes behind a printable name: the inverse of `to_token`; a name outside the map stands for itself."""
    try:
        return bytes(_TO_BYTE[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def read_ranks(path: str | Path) -> dict[bytes, int]:
    """Read a rank file: one token a line, base64 of its bytes, a space, its decimal rank. Empty lines are skipped.

    Args:
        path: `tiktoken.model` of a release.

    Returns:
        Bytes to rank, in the order of the file.

    Raises:
        ValueError: a line cannot be read, or the ranks do not make a vocabulary (see `check_ranks`).
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            encoded, rank = line.split(b" ")
            token = base64.b64decode(encoded, validate=True)
            value = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(
                f"{path}, line {number}: {line[:60]!r} is not base64, a space and a decimal rank"
            ) from None
        if token in ranks:
            raise ValueError(f"{path}, line {number}: token {token!r} has rank {ranks[token]} already, now {value}")
        ranks[token] = value
    check_ranks(ranks, str(path))
    return ranks


def write_ranks(ranks: Mapping[bytes, int], path: str | Path) -> None:
    """Write a rank file, lowest rank first. See `read_ranks`."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    Path(path).write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ordered))


def check_ranks(ranks: Mapping[bytes, int], where: str = "ranks") -> None:
    """Check that ranks are 0 .. N - 1 and that every byte value has one.

    Raises:
        ValueError: naming what is missing.
    """
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{where}: the {len(ranks)} ranks must be 0 to {len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or b"" in ranks:
        raise ValueError(f"{where}: must hold every single byte and no empty token; missing bytes: {missing[:8]}")


def last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts from which merging makes a token, or None if it never does.

    Merging joins the adjacent pair whose concatenation has the lowest rank, leftmost first. What happens inside the
    bytes of one token does not depend on what stands around them, so a token has at most one such pair, whatever the
    vocabulary: a list of these pairs in the order of their ranks is the same merging, stated pair by pair.

    Args:
        token: at least two bytes, a key of `ranks`.
        ranks: the whole vocabulary.
    """
    splits = [at for at in range(1, len(token)) if token[:at] in ranks and token[at:] in ranks]
    if len(splits) < 2:
        # With one possible pair there is nothing to find out: a pair that never comes up does no harm in the list.
        return (token[: splits[0]], token[splits[0] :]) if splits else None
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        candidates = [
            (rank, at) for at in range(len(parts) - 1) if (rank := ranks.get(parts[at] + parts[at + 1])) is not None
        ]
        if not candidates:
            return None
        at = min(candidates)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def control_tokens(first_id: int, named: Mapping[int, tuple[str, bool]] | None = None) -> list[AddedToken]:
    """The control tokens with ids `first_id` to `first_id + 255`, in order.

    Args:
        first_id: number of base ranks.
        named: id to name and special flag; ids outside the block are ignored. None for the released names.

    Returns:
        Tokens that match exactly; ids without a name are called `<|reserved_token_ID|>` and not flagged special.

    Raises:
        ValueError: two ids have one name.
    """
    if named is None:
        named = {first_id + offset: entry for offset, entry in NAMED_CONTROLS.items()}
    block = range(first_id, first_id + BLOCK_SIZE)
    entries = [named.get(index, (f"<|reserved_token_{index}|>", False)) for index in block]
    names = [name for name, _ in entries]
    if len(set(names)) < BLOCK_SIZE:
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"added_tokens_decoder: {repeated} name several ids of the block {block.start} to {block[-1]}")
    return [AddedToken(name, normalized=False, special=special) for name, special in entries]


def named_controls(config: Mapping[str, Any]) -> dict[int, tuple[str, bool]] | None:
    """The names in a `tokenizer_config.json` (its `added_tokens_decoder`), or None if it names nothing."""
    entries = config.get("added_tokens_decoder") or {}
    named = {}
    for index, entry in entries.items():
        if isinstance(entry, AddedToken):
            named[int(index)] = (entry.content, entry.special)
        else:
            named[int(index)] = (entry["content"], bool(entry.get("special", False)))
    return named or None


def build_backend(
    ranks: Mapping[bytes, int], controls: Sequence[AddedToken], *, is_byte_level: bool = False
) -> Tokenizer:
    """Make the fast tokenizer of a vocabulary.

    Args:
        ranks: base vocabulary, see `check_ranks`.
        controls: the block of control tokens, see `control_tokens`.
        is_byte_level: the vocabulary is the 256 bytes alone, so there is nothing to split or merge.

    Returns:
        Tokenizer in control mode: names of control tokens in a text become their ids.

    Raises:
        ValueError: a control token has the name of a base token.
    """
    check_ranks(ranks)
    pairs = ((last_merge(token, ranks), rank) for token, rank in ranks.items() if len(token) > 1)
    merges = [pair for pair, _ in sorted((entry for entry in pairs if entry[0]), key=lambda entry: entry[1])]
    model = models.BPE(
        vocab={to_token(token): rank for token, rank in ranks.items()},
        merges=[(to_token(left), to_token(right)) for left, right in merges],
        # A piece that is a token as a whole is taken as it is, also if no merging leads there.
        ignore_merges=True,
    )
    backend = Tokenizer(model)
    splits = [
        pre_tokenizers.Split(Regex(_FULL_SLICE), behavior="isolated"),
        pre_tokenizers.Split(Regex(_FULL_RUN), behavior="merged_with_previous"),
        pre_tokenizers.Split(Regex("|".join(ALTERNATIVES)), behavior="isolated"),
    ]
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = bytewise if is_byte_level else pre_tokenizers.Sequence([*splits, bytewise])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(controls))
    for index, control in enumerate(controls, start=len(ranks)):
        if backend.token_to_id(control.content) != index:
            raise ValueError(f"added_tokens_decoder: {control.content!r} (id {index}) is a base token as well")
    return backend


def limited(text: str) -> Iterator[str]:
    """Cut a text where the length limits do. Every part is then encoded on its own.

    The pipeline does the same between control tokens; this is for texts whose control tokens are yet to be found.
    """
    for start in range(0, len(text), SLICE_CHARACTERS):
        part = text[start : start + SLICE_CHARACTERS]
        begin = 0
        for run in _RUN.finditer(part) if len(part) > RUN_CHARACTERS else ():
            for cut in range(run.start() + RUN_CHARACTERS, run.end(), RUN_CHARACTERS):
                yield part[begin:cut]
                begin = cut
        yield part[begin:]
