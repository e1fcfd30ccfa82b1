"""The demo's tokenizer: bytes, text mode, and a saved copy that other code can read."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_k3.demo.tokenizer import (
    BOS_ID,
    END_OF_MESSAGE_ID,
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
    build_tokenizer,
    encode_text,
)
from modeling_k3.tokenization_k3 import K3Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> K3Tokenizer:
    return build_tokenizer()


def test_ids_with_a_name(tokenizer: K3Tokenizer) -> None:
    assert len(tokenizer) == VOCAB_SIZE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (BOS_ID, EOS_ID, PAD_ID)
    assert tokenizer.convert_tokens_to_ids("<|end_of_msg|>") == END_OF_MESSAGE_ID


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_ids_are_the_bytes(tokenizer: K3Tokenizer, text: str) -> None:
    assert encode_text(tokenizer, text) == list(text.encode())
    assert tokenizer.decode(encode_text(tokenizer, text)) == text


def test_text_never_yields_control_ids(tokenizer: K3Tokenizer) -> None:
    every_name = " ".join(tokenizer.convert_ids_to_tokens(range(256, VOCAB_SIZE)))
    assert encode_text(tokenizer, every_name) == tokenizer(every_name).input_ids == list(every_name.encode())


def test_saved_it_loads_without_this_package(tokenizer: K3Tokenizer, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    code = (
        "import sys; sys.modules['modeling_k3'] = None; from transformers import AutoTokenizer; "
        "t = AutoTokenizer.from_pretrained('.'); "
        "print(len(t), t.encode('a[EOS]'), t.decode([97, 257], skip_special_tokens=True))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[0] == "512 [97, 257] a"
