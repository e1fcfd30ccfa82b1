"""The rank file, the merges rebuilt from it, the control block, the length limits."""

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from modeling_k3.conversion.tokenizer import check_merging, merge_by_rank
from modeling_k3.vocabulary import (
    BLOCK_SIZE,
    NAMED_CONTROLS,
    RUN_CHARACTERS,
    SLICE_CHARACTERS,
    build_backend,
    check_ranks,
    control_tokens,
    last_merge,
    limited,
    named_controls,
    printable_bytes,
    read_ranks,
    to_bytes,
    to_token,
    write_ranks,
)
from tests.chat_data import GOLDEN, toy_tokenizer

BYTES = {bytes([byte]): byte for byte in range(256)}


def random_ranks(seed: int, size: int = 120) -> dict[bytes, int]:
    """A vocabulary that no training would give: tokens of random letters at random ranks."""
    choose = random.Random(seed)
    tokens = list(BYTES)
    while len(tokens) < 256 + size:
        token = bytes(choose.choices(b"abc", k=choose.randint(2, 6)))
        if token not in tokens:
            tokens.append(token)
    choose.shuffle(tokens)
    return {token: rank for rank, token in enumerate(tokens)}


@pytest.mark.parametrize("seed", range(8))
def test_merges_are_exact_for_any_vocabulary(seed: int) -> None:
    ranks = random_ranks(seed)
    backend = build_backend(ranks, control_tokens(len(ranks)))
    choose = random.Random(seed)
    for _ in range(400):
        piece = bytes(choose.choices(b"abcd", k=choose.randint(1, 24)))
        assert [token.id for token in backend.model.tokenize(to_token(piece))] == merge_by_rank(piece, ranks)
    assert check_merging(backend, samples=200) == 200


def test_a_wrong_merge_is_found() -> None:
    ranks = random_ranks(0)
    good = build_backend(ranks, control_tokens(len(ranks)))
    text = good.to_str()
    begin = text.index('"merges":[') + len('"merges":[')
    broken = Tokenizer.from_str(text[:begin] + text[text.index("]]", begin) + 1 :])
    with pytest.raises(ValueError, match="by rank it is"):
        check_merging(broken)


def test_a_token_that_merging_never_makes_is_still_taken_whole() -> None:
    # "xy" is joined first, and from "w", "xy", "z" no pair is a token.
    ranks = {**BYTES, b"xy": 256, b"yz": 257, b"wxyz": 258}
    assert last_merge(b"wxyz", ranks) is None
    backend = build_backend(ranks, control_tokens(len(ranks)))
    assert backend.encode("wxyz").ids == [258]
    assert backend.encode("wxyzw").ids == merge_by_rank(b"wxyzw", ranks)


def test_rank_files_are_read_and_written(tmp_path: Path) -> None:
    ranks = read_ranks(GOLDEN / "toy.tiktoken")
    write_ranks(ranks, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (GOLDEN / "toy.tiktoken").read_bytes()
    (tmp_path / "gaps").write_bytes(b"\n" + (GOLDEN / "toy.tiktoken").read_bytes().replace(b"\n", b"\n\n"))
    assert read_ranks(tmp_path / "gaps") == ranks


@pytest.mark.parametrize(
    ("lines", "pattern"),
    [
        (b"IQ== x", "line 1"),
        (b"!! 0", "line 1"),
        (b"IQ==  0", "line 1"),
        (b"IQ== 0\nIQ== 1", "line 2.*rank 0 already"),
        (b"IQ== 0\nIg== 2", "0 to 1, each once"),
        (b"IQ== 0", "every single byte"),
        (b"", "every single byte"),
    ],
)
def test_bad_rank_files_are_refused(tmp_path: Path, lines: bytes, pattern: str) -> None:
    (tmp_path / "ranks").write_bytes(lines)
    with pytest.raises(ValueError, match=pattern):
        read_ranks(tmp_path / "ranks")


def test_empty_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="no empty token"):
        check_ranks({**BYTES, b"": 256})


def test_printable_names() -> None:
    assert len(set(printable_bytes())) == 256
    for token in (b"a", b" \n", bytes(range(256))):
        assert to_bytes(to_token(token)) == token
    assert to_bytes("a token") == b"a token"


def test_control_block() -> None:
    tokens = control_tokens(1000)
    assert len(tokens) == BLOCK_SIZE
    assert [tokens[offset].content for offset in NAMED_CONTROLS] == [name for name, _ in NAMED_CONTROLS.values()]
    assert tokens[8].content == "<|reserved_token_1008|>" and not tokens[8].special
    assert [token.content for token in tokens if not token.special][:3] == ["<|open|>", "<|close|>", "<|sep|>"]
    assert control_tokens(1000, {1001: ("x", True), 5: ("outside", True)})[1].content == "x"
    with pytest.raises(ValueError, match="name several ids"):
        control_tokens(1000, {1001: ("x", True), 1002: ("x", True)})


def test_names_come_from_the_tokenizer_config() -> None:
    assert named_controls({}) is None
    entries: Mapping[str, object] = {"7": {"content": "x", "special": True}, "8": AddedToken("y", special=False)}
    assert named_controls({"added_tokens_decoder": entries}) == {7: ("x", True), 8: ("y", False)}


def test_a_control_name_must_not_be_a_base_token() -> None:
    ranks = {**BYTES, b"[EOS]": 256}
    with pytest.raises(ValueError, match=r"'\[EOS\]'.*base token"):
        build_backend(ranks, control_tokens(len(ranks)))


def plainly_limited(text: str) -> list[str]:
    """The length limits, character by character."""
    parts = []
    for start in range(0, len(text), SLICE_CHARACTERS):
        part, begin, count, before = text[start : start + SLICE_CHARACTERS], 0, 0, None
        for at, character in enumerate(part):
            count = count + 1 if character.isspace() == before else 1
            before = character.isspace()
            if count > RUN_CHARACTERS:
                parts.append(part[begin:at])
                begin, count = at, 1
        parts.append(part[begin:])
    return parts


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab \n\x1c中"), st.sampled_from([1, 2, 24_999, 25_000, 25_001, 60_000])), max_size=9
    )
)
def test_length_limits(runs: list[tuple[str, int]]) -> None:
    text = "".join(character * count for character, count in runs)
    parts = list(limited(text))
    assert parts == plainly_limited(text)
    # The pipeline itself cuts in the same places.
    tokenizer = toy_tokenizer()
    assert tokenizer.encode(text) == [index for part in parts for index in tokenizer.encode(part)]


def test_slices_come_before_runs() -> None:
    text = "x" * 10 + " " * 399_995 + "ab"
    assert list(limited(text)) == plainly_limited(text)
    assert toy_tokenizer().encode(text) == [i for part in limited(text) for i in toy_tokenizer().encode(part)]


def test_byte_level_backend_has_no_merges() -> None:
    backend = build_backend(BYTES, control_tokens(256), is_byte_level=True)
    assert backend.encode("aé<|open|>").ids == [97, 195, 169, 259]
