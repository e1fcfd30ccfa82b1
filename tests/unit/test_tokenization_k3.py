"""K3Tokenizer: files, the presets' vocabulary, templates of one's own, responses."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from modeling_k3.tokenization_k3 import RESPONSE_TEMPLATE, K3Tokenizer
from modeling_k3.vocabulary import read_ranks
from tests.chat_data import GOLDEN, control_names, read_golden, released_folder, toy_tokenizer

CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "easy"},
    {"role": "user", "content": "and 3?"},
]
MARKUP = "".join(control_names()[:12])


@pytest.fixture
def tokenizer(tmp_path: Path) -> K3Tokenizer:
    """One of its own, for tests that change it."""
    return K3Tokenizer.from_pretrained(released_folder(tmp_path / "release"))


def test_saving_and_loading(tokenizer: K3Tokenizer, tmp_path: Path) -> None:
    tokenizer(["a", "bc"], padding=True, truncation=True, max_length=1)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = K3Tokenizer.from_pretrained(tmp_path / "saved")
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    for other in (again, copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert other.encode(MARKUP) == tokenizer.encode(MARKUP)
        assert other(MARKUP, split_special_tokens=False) == tokenizer(MARKUP, split_special_tokens=False)
        assert other.apply_chat_template(CHAT) == tokenizer.apply_chat_template(CHAT)
        assert other.special_tokens_map == tokenizer.special_tokens_map
        assert other.extra_special_tokens == tokenizer.extra_special_tokens
    config = (tmp_path / "saved" / "tokenizer_config.json").read_text()
    assert "auto_map" not in config and "split_special_tokens" not in config
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == tokenizer.chat_template
    (path,) = tokenizer.save_vocabulary(tmp_path)
    assert read_ranks(path) == read_ranks(GOLDEN / "toy.tiktoken")


def test_wrong_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a tokenizer_object"):
        K3Tokenizer()
    with pytest.raises(ValueError, match=r"not Kimi K3's.*<\|open\|>"):
        K3Tokenizer(tokenizer_object=Tokenizer(toy_tokenizer().backend_tokenizer.model))


def test_names_of_the_config_win_and_others_are_ignored(tmp_path: Path) -> None:
    entries = read_golden("tokenizer_config.json")["added_tokens_decoder"]
    named = {**entries, "608": {**entries["600"], "content": "<extra>"}, "9999": {**entries["600"], "content": "<out>"}}
    tokenizer = K3Tokenizer(vocab_file=str(GOLDEN / "toy.tiktoken"), added_tokens_decoder=named)
    assert tokenizer.convert_tokens_to_ids("<extra>") == 608
    assert len(tokenizer) == 856 and "<out>" not in tokenizer.get_vocab()
    assert len(K3Tokenizer(vocab_file=str(GOLDEN / "toy.tiktoken"))) == 856


def test_byte_level_tokenizer_has_the_same_block() -> None:
    tokenizer = K3Tokenizer.byte_level()
    assert len(tokenizer) == 512 and tokenizer.encode("aé") == [97, 195, 169]
    toy = toy_tokenizer()
    for offset, name in enumerate(control_names()):
        own = tokenizer.convert_ids_to_tokens(256 + offset)
        assert own == name or own == f"<|reserved_token_{256 + offset}|>"
    assert tokenizer.eos_token_id == 257 and tokenizer.pad_token_id == 511
    assert tokenizer.decode(tokenizer.apply_chat_template(CHAT)["input_ids"]) == toy.apply_chat_template(
        CHAT, tokenize=False
    )
    assert "K3Tokenizer" in repr(tokenizer) and len(repr(tokenizer)) < 200


def test_a_template_of_your_own_is_rendered_by_the_library(tokenizer: K3Tokenizer) -> None:
    template = "{% for message in messages %}{{ message.content }}[EOS]{% endfor %}"
    messages = [{"role": "user", "content": "x[EOS]"}]
    eos = tokenizer.eos_token_id
    ids = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=False)
    assert ids.count(eos) == 2
    tokenizer.chat_template = template
    safe = tokenizer.apply_chat_template(messages, sanitize_control_tokens=True, return_dict=False)
    assert safe.count(eos) == 1 and tokenizer.decode(safe) == "x[EOS][EOS]"
    assert tokenizer.encode("[EOS]") != [eos], "the mode is that of the call"


def test_a_batch_of_one_is_one_output() -> None:
    tokenizer = toy_tokenizer()
    ids = tokenizer.encode("why<|close|>think<|sep|><|open|>response<|sep|>so", split_special_tokens=False)
    wanted = tokenizer.parse_output(ids)
    assert (wanted.reasoning, wanted.content) == ("why", "so")
    for output in ([ids], torch.tensor(ids), torch.tensor([ids]), np.array([ids]), tuple(ids), list(np.array(ids))):
        assert tokenizer.parse_output(output) == wanted
    assert tokenizer.parse_output([]) == tokenizer.parse_output([[]]) == tokenizer.parse_output("")
    for batch in ([ids, ids], torch.tensor([ids, ids]), [ids, []]):
        with pytest.raises(TypeError, match="one row of ids, not a batch of 2"):
            tokenizer.parse_output(batch)
    for other in (3, ["so"], [[[1]]], {"sequences": ids}, [0.5], None):
        with pytest.raises(TypeError, match="text or one row of ids"):
            tokenizer.parse_output(other)


def test_responses_become_messages() -> None:
    tokenizer = toy_tokenizer()
    output = (
        "why<|close|>think<|sep|><|open|>response<|sep|>so<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    ids = tokenizer.encode(output, split_special_tokens=False)
    wanted = {"role": "assistant", "content": "so", "reasoning_content": "why"}
    prompt = tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert tokenizer.parse_response(ids) == tokenizer.parse_response(output, prefix=prompt) == wanted
    assert tokenizer.parse_response(torch.tensor([ids, ids]), prefix=[prompt, prompt]) == [wanted] * 2
    assert tokenizer.parse_response([output], prefix=tokenizer.decode(prompt)) == [wanted]
    off = tokenizer.apply_chat_template(CHAT, thinking=False, tokenize=False)
    assert tokenizer.parse_response("so<|end_of_msg|>", prefix=off) == {"role": "assistant", "content": "so"}
    whole = f'<|open|>message role="assistant"<|sep|><|open|>think<|sep|>{output}'
    assert tokenizer.parse_response(whole, prefix="") == wanted
    by_library = tokenizer.parse_response(output, dict(RESPONSE_TEMPLATE), prefix=tokenizer.decode(prompt))
    assert by_library == wanted
