"""The demo's tokenizer: bytes, the release's block of control tokens, and text mode."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from modeling_k3.demo.tokenizer import (
    BOS_ID,
    END_OF_MESSAGE_ID,
    EOS_ID,
    PAD_ID,
    UNK_ID,
    VOCAB_SIZE,
    build_tokenizer,
    control_tokens,
    encode_text,
)

# Offsets in the release's block of 256, which begins at 163584 there and at 256 here.
RELEASED = {
    163584: "[BOS]",
    163585: "[EOS]",
    163586: "<|end_of_msg|>",
    163587: "<|open|>",
    163588: "<|close|>",
    163589: "<|sep|>",
    163590: "[start_header_id]",
    163591: "[end_header_id]",
    163593: "[EOT]",
    163602: "<|media_begin|>",
    163603: "<|media_content|>",
    163604: "<|media_end|>",
    163605: "<|media_pad|>",
    163649: "<osagent_mode>",
    163838: "[UNK]",
    163839: "[PAD]",
}
MARKERS = {"<|open|>", "<|close|>", "<|sep|>"}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_control_tokens_have_the_released_offsets_and_names(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size + 256 == VOCAB_SIZE
    for offset in range(256):
        ours = 256 + offset
        expected = RELEASED.get(163584 + offset, f"<|reserved_token_{ours}|>")
        assert tokenizer.convert_ids_to_tokens(ours) == expected
        assert tokenizer.encode(expected) == [ours]
        assert tokenizer.decode([ours]) == expected


def test_markers_and_reserved_ids_are_not_special(tokenizer):
    assert {name for name, special in control_tokens() if special} == set(RELEASED.values()) - MARKERS
    ids = tokenizer.convert_tokens_to_ids(sorted(MARKERS))
    assert tokenizer.decode([EOS_ID, *ids, END_OF_MESSAGE_ID, PAD_ID], skip_special_tokens=True) == "".join(
        sorted(MARKERS)
    )


def test_named_ids(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOS_ID)
    assert (tokenizer.unk_token_id, tokenizer.pad_token_id) == (UNK_ID, PAD_ID)


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_ids_are_the_bytes(tokenizer, text):
    assert encode_text(tokenizer, text) == list(text.encode())
    assert tokenizer.decode(encode_text(tokenizer, text)) == text


def test_every_byte_value_decodes(tokenizer):
    for byte in range(128):
        assert tokenizer.decode([byte]) == chr(byte)
    assert tokenizer.decode([0xE2, 0x82, 0xAC]) == "€"
    assert tokenizer.decode([0xE2, 0x82]) == "\ufffd"


def test_nothing_is_added_at_the_ends(tokenizer):
    assert tokenizer("ab").input_ids == [97, 98]
    assert tokenizer.encode("") == encode_text(tokenizer, "") == []


def test_text_mode_never_yields_control_ids(tokenizer):
    every_name = " ".join(name for name, _ in control_tokens())
    assert max(tokenizer.encode(every_name)) >= 256
    assert encode_text(tokenizer, every_name) == list(every_name.encode())


def test_the_librarys_switch_leaves_out_the_markers(tokenizer):
    # The reason why `encode_text` exists. Should this ever fail, the library has become safer than we assume.
    ids = tokenizer.encode("[BOS]<|open|>", split_special_tokens=True)
    assert ids == [*b"[BOS]", tokenizer.convert_tokens_to_ids("<|open|>")]


def test_saved_it_loads_without_this_package(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "if x:\n\treturn 'ä€'[EOS]<|open|>"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.pad_token_id == PAD_ID
    code = (
        "import sys; sys.modules['modeling_k3'] = None; from transformers import AutoTokenizer; "
        "t = AutoTokenizer.from_pretrained('.'); "
        "print(len(t), t.encode('a[EOS]'), t.decode([97, 257], skip_special_tokens=True))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[0] == "512 [97, 257] a"
