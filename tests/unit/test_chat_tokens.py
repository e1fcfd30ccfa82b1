"""`apply_chat_template`: shapes, padding, loss mask, what it takes for messages and tools."""

import copy
from typing import Any

import pytest
from transformers.tokenization_utils_base import BatchEncoding

from tests.chat_data import toy_tokenizer

CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "easy"},
    {"role": "user", "content": "and 3?"},
]


def test_template_defaults_and_shapes() -> None:
    tokenizer = toy_tokenizer()
    out = tokenizer.apply_chat_template(CHAT)
    assert isinstance(out, BatchEncoding) and set(out) == {"input_ids", "attention_mask"}
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert "thinking_effort=max" in text and text.endswith("<|open|>think<|sep|>")
    assert tokenizer.apply_chat_template(CHAT, return_dict=False) == out["input_ids"]
    assert tokenizer.apply_chat_template(CHAT, return_tensors="pt")["input_ids"].tolist() == [out["input_ids"]]
    batch = tokenizer.apply_chat_template([CHAT, CHAT[:1]], padding=True, return_tensors="pt")
    assert batch["input_ids"].shape[0] == 2
    assert tokenizer.apply_chat_template([CHAT, CHAT[:1]], tokenize=False)[0] == text
    assert tokenizer.apply_chat_template([], tokenize=False, thinking=False).endswith("<|open|>response<|sep|>")
    assert tokenizer.apply_chat_template(CHAT, unknown_option=1, documents=[{"title": "x"}]) == out
    assert tokenizer.apply_chat_template(CHAT, sanitize_control_tokens=True) == out


@pytest.mark.parametrize("side", ["right", "left"])
def test_assistant_mask(side: str) -> None:
    tokenizer = toy_tokenizer()
    out = tokenizer.apply_chat_template(
        [CHAT, CHAT[:1]], padding=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"padding_side": side}
    )
    first, second = out["assistant_masks"]
    marked = [index for index, mask in zip(out["input_ids"][0], first, strict=True) if mask]
    assert tokenizer.decode(marked) == (
        "<|open|>think<|sep|>easy<|close|>think<|sep|><|open|>response<|sep|>4<|close|>response<|sep|>"
        "<|close|>message<|sep|><|end_of_msg|>"
    )
    assert not any(second) and len(second) == len(first) == len(out["input_ids"][1])
    tensors = tokenizer.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_tensors="pt")
    assert tensors["assistant_masks"].shape == tensors["input_ids"].shape
    with pytest.raises(ValueError, match="return_dict=True"):
        tokenizer.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=False)


def test_truncation_cuts_at_the_end_and_then_pads() -> None:
    tokenizer = toy_tokenizer()
    whole = tokenizer.apply_chat_template(CHAT)["input_ids"]
    out = tokenizer.apply_chat_template(
        CHAT, truncation=True, max_length=20, padding="max_length", return_assistant_tokens_mask=True
    )
    assert out["input_ids"] == whole[:20] and len(out["assistant_masks"]) == 20
    with pytest.raises(ValueError, match=r"return_offsets_mapping.*not supported"):
        tokenizer.apply_chat_template(CHAT, tokenizer_kwargs={"return_offsets_mapping": True})


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_conversation_is_truncated_to_the_limit(side: str) -> None:
    tokenizer = copy.deepcopy(toy_tokenizer())
    tokenizer.truncation_side = side
    rows = tokenizer.apply_chat_template([CHAT, CHAT[:1]])["input_ids"]
    for limit in (0, 1, len(rows[1]), len(rows[1]) + 1, len(rows[0]) + 1):
        out = tokenizer.apply_chat_template(
            [CHAT, CHAT[:1]], truncation=True, max_length=limit, return_assistant_tokens_mask=True
        )
        wanted = [row[:limit] if side == "right" else row[max(len(row) - limit, 0) :] for row in rows]
        assert out["input_ids"] == wanted
        assert [len(mask) for mask in out["assistant_masks"]] == [len(row) for row in wanted]


def test_a_final_message_can_be_continued() -> None:
    tokenizer = toy_tokenizer()
    messages = CHAT[:2]
    assert tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True).endswith("<|sep|>4")
    reasoning = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message="reasoning_content")
    assert reasoning.endswith("<|open|>think<|sep|>easy")
    with pytest.raises(ValueError, match="name"):
        tokenizer.apply_chat_template(messages, continue_final_message="name")
    with pytest.raises(ValueError, match="come last"):
        tokenizer.apply_chat_template(messages, continue_final_message=True, add_generation_prompt=True)


def get_weather(city: str) -> str:
    """
    The weather.

    Args:
        city: Where.
    """
    return city


def test_tools_may_be_functions_and_messages_may_be_objects() -> None:
    class Message:
        def model_dump(self, exclude_none: bool) -> dict[str, Any]:
            assert exclude_none
            return {"role": "user", "content": "hi"}

    class Chat:
        messages = CHAT

    tokenizer = toy_tokenizer()
    text = tokenizer.apply_chat_template([Message()], tools=[get_weather], tokenize=False)
    assert '"name":"get_weather"' in text and "<|sep|>hi<|close|>" in text
    assert tokenizer.apply_chat_template(Chat()) == tokenizer.apply_chat_template(CHAT)
    with pytest.raises(ValueError, match="conversation is a list"):
        tokenizer.apply_chat_template("hi")
