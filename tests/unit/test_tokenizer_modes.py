"""Text mode and control mode, in every way to encode and decode that the library has."""

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TextIteratorStreamer

from modeling_k3.tokenization_k3 import K3Tokenizer
from modeling_k3.vocabulary import to_token
from tests.chat_data import FIRST_CONTROL, GOLDEN, control_names, released_folder, texts, toy_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> K3Tokenizer:
    """One of its own, for tests that change it."""
    return K3Tokenizer.from_pretrained(released_folder(tmp_path / "release"))


@settings(max_examples=200, deadline=None)
@given(texts())
def test_text_mode_never_gives_a_control_token(text: str) -> None:
    tokenizer = toy_tokenizer()
    ids = tokenizer.encode(text)
    assert all(index < FIRST_CONTROL for index in ids)
    assert tokenizer(text)["input_ids"] == tokenizer([text, "x"])["input_ids"][0] == ids
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode(text, split_special_tokens=False)) == text


@pytest.mark.parametrize("name", control_names())
def test_every_name_is_text_by_default_and_an_id_on_request(name: str) -> None:
    tokenizer = toy_tokenizer()
    assert tokenizer.encode(name, split_special_tokens=False) == [tokenizer.convert_tokens_to_ids(name)]
    assert max(tokenizer.encode(name)) < FIRST_CONTROL


@given(st.lists(st.integers(0, FIRST_CONTROL + 255), max_size=30))
def test_decoding_is_that_of_the_bytes(ids: list[int]) -> None:
    tokenizer = toy_tokenizer()
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert tokenizer.decode(ids) == joined.decode("utf-8", "replace")
    assert tokenizer.batch_decode([ids, ids]) == [tokenizer.decode(ids)] * 2


@pytest.mark.parametrize("name", ["<é>", "‹é>", "üé", "Ġ<|ü|>", "<中😀>"])
@pytest.mark.parametrize("special", [True, False])
def test_names_beyond_ascii_decode_to_themselves(name: str, special: bool) -> None:
    entries = {str(FIRST_CONTROL + 40): {"content": name, "special": special}}
    names = {600: "[BOS]", 601: "[EOS]", 602: "<|end_of_msg|>", 603: "<|open|>", 604: "<|close|>", 605: "<|sep|>"}
    entries |= {str(index): {"content": text, "special": index < 603} for index, text in names.items()}
    tokenizer = K3Tokenizer(vocab_file=str(GOLDEN / "toy.tiktoken"), added_tokens_decoder=entries)
    index = FIRST_CONTROL + 40
    assert tokenizer.decode([index]) == tokenizer.decode(index) == name
    single = [tokenizer.convert_tokens_to_ids(to_token(bytes([byte]))) for byte in "é".encode()]
    ids = [600, *single, index, single[0], index, *single, 605]
    assert tokenizer.decode(ids) == f"[BOS]é{name}\ufffd{name}é<|sep|>"
    shown = "" if special else name
    # What is skipped is as if it had never been there: its neighbours are one text.
    assert tokenizer.decode([600, single[0], index, single[1], 605], skip_special_tokens=True) == (
        "é<|sep|>" if special else f"\ufffd{name}\ufffd<|sep|>"
    )
    assert tokenizer.decode([index, *single, index], skip_special_tokens=True) == f"{shown}é{shown}"
    assert tokenizer.encode(name, split_special_tokens=False) == [index]


def test_added_names_beyond_ascii_decode_to_themselves(tokenizer: K3Tokenizer) -> None:
    tokenizer.add_tokens(["<é>"])
    assert tokenizer.decode([856]) == "<é>" and tokenizer.batch_decode([[856], []]) == ["<é>", ""]


def test_skipping_special_tokens_leaves_the_markers() -> None:
    tokenizer = toy_tokenizer()
    ids = tokenizer.encode(
        "[BOS]<|open|>x<|sep|><|end_of_msg|>[EOS][PAD][UNK]<|media_pad|>", split_special_tokens=False
    )
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|open|>x<|sep|>"
    assert not {"<|open|>", "<|close|>", "<|sep|>"} & set(tokenizer.all_special_tokens)
    assert {"<|end_of_msg|>", "[EOT]"} <= set(tokenizer.all_special_tokens)


@pytest.mark.parametrize("wrong", [-1, FIRST_CONTROL + 256])
def test_ids_outside_the_vocabulary_are_refused(wrong: int) -> None:
    for use in (toy_tokenizer().decode, lambda ids: toy_tokenizer().token_bytes(ids[0])):
        with pytest.raises(ValueError, match=rf"id {wrong} .*0 to 855"):
            use([wrong, 1])


@pytest.mark.parametrize("text", ["👨‍👩‍👧‍👦 and 😀", "你好世界", "é中😀 a\nb"])
@pytest.mark.parametrize("skip", [True, False])
def test_streaming_one_id_at_a_time(text: str, skip: bool) -> None:
    tokenizer = toy_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(to_token(bytes([byte]))) for byte in text.encode()]
    ids.append(tokenizer.convert_tokens_to_ids("<|end_of_msg|>"))
    streamer = TextIteratorStreamer(tokenizer, skip_special_tokens=skip)
    for index in ids:
        streamer.put(torch.tensor([index]))
    streamer.end()
    pieces = list(streamer)
    assert "".join(pieces) == text + ("" if skip else "<|end_of_msg|>")
    assert not any("\ufffd" in piece for piece in pieces)


def test_calls_pad_truncate_and_give_offsets() -> None:
    tokenizer = toy_tokenizer()
    out = tokenizer(["hello you", "x <|open|>"], padding=True, return_tensors="pt")
    assert out["input_ids"].shape == out["attention_mask"].shape
    row = int(out["attention_mask"].sum(1).argmin())
    assert out["input_ids"][row, -1] == tokenizer.pad_token_id and not out["attention_mask"][row, -1]
    left = tokenizer(["hello you", "x"], padding=True, padding_side="left")
    assert left["input_ids"][1][0] == tokenizer.pad_token_id and left["attention_mask"][1][-1] == 1
    assert tokenizer("hello you", truncation=True, max_length=2)["input_ids"] == tokenizer.encode("hello you")[:2]
    assert tokenizer.encode("hello you") == tokenizer("hello you")["input_ids"], "state of an earlier call"
    text = "né 中<|sep|>"
    spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    assert [text[begin:end] for begin, end in spans[:2]] == ["n", "é"] and spans[-1][1] == len(text)
    assert (
        tokenizer("a", "b")["input_ids"] == tokenizer.encode("a", "b") == tokenizer.encode("a") + tokenizer.encode("b")
    )
    assert tokenizer(["a", "b"], is_split_into_words=True)["input_ids"] == tokenizer.encode("a") + tokenizer.encode("b")


def test_encode_pads_and_truncates_like_the_library() -> None:
    tokenizer = toy_tokenizer()
    ids = tokenizer.encode("hello")
    assert tokenizer.encode("hello", max_length=2) == ids[:2]
    assert tokenizer.encode("hello", padding="max_length", max_length=9)[len(ids) :] == [855] * (9 - len(ids))
    assert tokenizer.encode("hello", return_tensors="pt").tolist() == [ids]


def test_control_mode_beyond_the_length_limits() -> None:
    tokenizer = toy_tokenizer()
    text = "b" + "a" * 24_994 + "<|open|>" + "a" * 10
    ids = tokenizer.encode(text, split_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids("<|open|>") not in ids, "the cut goes through the name"
    out = tokenizer([text, "x"], split_special_tokens=False, padding=True, return_tensors="pt")
    assert out["input_ids"][0].tolist() == ids
    cut = tokenizer(text, split_special_tokens=False, truncation=True, max_length=5)
    assert cut["input_ids"] == ids[:5]
    masked = tokenizer(text, split_special_tokens=False, return_attention_mask=False)
    assert set(masked) == {"input_ids"} and masked["input_ids"] == ids


@pytest.mark.parametrize(
    "name", ["return_offsets_mapping", "return_overflowing_tokens", "return_special_tokens_mask", "return_length"]
)
def test_what_cut_texts_cannot_give_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        toy_tokenizer()("a" * 25_001, split_special_tokens=False, **{name: True})
    assert toy_tokenizer()("a", split_special_tokens=False, **{name: False})["input_ids"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncating_a_cut_text_keeps_at_most_the_limit(tokenizer: K3Tokenizer, side: str) -> None:
    tokenizer.truncation_side = side
    texts = ["b" + "a" * 25_000, "hello you"]
    rows = [tokenizer.encode(text, split_special_tokens=False) for text in texts]
    for limit in (1, len(rows[1]) + 1, 2 * len(rows[1]) - 1, len(rows[0]) - 1, len(rows[0]) + 1):
        cut = tokenizer(texts, split_special_tokens=False, truncation=True, max_length=limit)["input_ids"]
        assert cut == [row[:limit] if side == "right" else row[-limit:] for row in rows]


def test_nothing_is_added_at_the_ends_unless_asked(tokenizer: K3Tokenizer) -> None:
    assert tokenizer.encode("x", add_special_tokens=True) == tokenizer.encode("x", add_special_tokens=False)
    tokenizer.add_bos_token = True
    assert tokenizer.encode("x")[0] == tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer.encode_text("x") == tokenizer.encode("x", add_special_tokens=False)


def test_tokens_of_your_own(tokenizer: K3Tokenizer) -> None:
    before = tokenizer.encode("<mine>")
    assert tokenizer.add_tokens(["<mine>"]) == 1 and tokenizer.add_tokens(["<special>"], special_tokens=True) == 1
    assert tokenizer.encode("<mine>") == tokenizer("<mine>")["input_ids"] == [856] != before
    assert 857 not in tokenizer.encode("<special>")
    assert tokenizer.encode("<special>", split_special_tokens=False) == [857]
    assert tokenizer.token_bytes(856) == b"<mine>"


@pytest.mark.parametrize("unit", [" ", "a", "中", "\n", "1", "!", "aB", "a ", "'s"])
def test_a_million_characters_take_no_time(unit: str) -> None:
    tokenizer, text = toy_tokenizer(), unit * (1_000_000 // len(unit))
    began = time.process_time()
    ids = tokenizer.encode(text)
    # Time of the processor, which other work on the machine does not stretch; a quadratic loop would take hours.
    assert time.process_time() - began < 4
    assert tokenizer.decode(ids) == text
