"""Reading model output: repairs, streaming, text in place of ids."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_k3.chat_reader import OutputReader, ParsedOutput
from modeling_k3.markup_reader import CHANNELS, Event, MarkupReader, ParsedCall
from modeling_k3.vocabulary import to_token
from tests.chat_data import control_names, toy_tokenizer

_TAGS = [
    *(f"<|{kind}|>{name}<|sep|>" for kind in ("open", "close") for name in (*CHANNELS, "message", "call", "argument")),
    '<|open|>call tool="f"<|sep|>',
    '<|open|>argument key="a" type="number"<|sep|>',
    '<|open|>json type="object"<|sep|>',
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "[EOS]",
    "text",
    " \n",
    "é😀",
    "7",
]
_CALL = '<|open|>tools<|sep|><|open|>call tool="f"<|sep|>'
_END = "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"


def ids_of(marked: str) -> list[int]:
    return toy_tokenizer().encode_text(marked, allow_special=True)


def read(marked: str, start: str = "response") -> ParsedOutput:
    """Read text whose every marker is one."""
    output = toy_tokenizer().parse_output(ids_of(marked), start)
    assert toy_tokenizer().parse_output(marked, start) == output
    return output


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(_TAGS), max_size=20).map("".join), st.sampled_from(["think", "response", "message"]))
def test_anything_is_read_and_streaming_changes_nothing(marked: str, start: str) -> None:
    tokenizer, ids = toy_tokenizer(), ids_of(marked)
    whole = tokenizer.parse_output(ids, start)
    reader = tokenizer.output_reader(start)
    events = [event for index in ids for event in reader.feed([index])]
    assert reader.finish() == whole
    assert "".join(event.text for event in events if event.kind == "content") == whole.content
    assert "".join(event.text for event in events if event.kind == "reasoning") == whole.reasoning
    assert [event.call for event in events if event.call] == whole.tool_calls
    assert not (whole.complete and whole.open) and (whole.complete or not whole.well_formed)
    for length in range(len(ids)):
        assert not tokenizer.parse_output(ids[:length], start).well_formed or whole.well_formed


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(_TAGS), max_size=12).map("".join), st.integers(1, 9))
def test_text_may_be_cut_anywhere(marked: str, step: int) -> None:
    reader = OutputReader("think")
    for at in range(0, len(marked), step):
        reader.feed(marked[at : at + step])
    whole = OutputReader("think")
    whole.feed(marked)
    assert reader.finish() == whole.finish()


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        # A channel inside a channel closes it, and drops a call that is open.
        (f"a<|close|>response<|sep|>{_CALL}<|open|>response<|sep|>b", {"content": "ab", "tool_calls": []}),
        # A call inside a call drops the open one.
        (f'{_CALL}<|open|>call tool="g"<|sep|><|close|>call<|sep|>', {"tool_calls": [ParsedCall("g", "{}")]}),
        # A call at message level opens tools.
        (
            '<|close|>response<|sep|><|open|>call tool="f"<|sep|><|close|>call<|sep|>',
            {"tool_calls": [ParsedCall("f", "{}")]},
        ),
        # A call inside an answer is text.
        ('<|open|>call tool="f"<|sep|>', {"content": '<|open|>call tool="f"<|sep|>', "tool_calls": []}),
        # Text inside tools and calls is skipped.
        (f"{_CALL}x<|close|>call<|sep|>y{_END}", {"content": "", "tool_calls": [ParsedCall("f", "{}")]}),
        # Tags that fit nowhere are text in an argument, and skipped in a call.
        (
            f'{_CALL}<|open|>b<|sep|><|open|>argument key="a"<|sep|>x<|open|>b<|sep|>y<|sep|><|close|>argument<|sep|>'
            "<|close|>call<|sep|>",
            {"tool_calls": [ParsedCall("f", '{"a":"x<|open|>b<|sep|>y<|sep|>"}')]},
        ),
        # A tag interrupted by a marker.
        ("a<|open|>thi<|close|>response<|sep|>", {"content": "a<|open|>thi", "open": "message"}),
        # Arguments or one raw block, whichever came first.
        (
            f'{_CALL}<|open|>json<|sep|>raw<|close|>json<|sep|><|open|>argument key="a"<|sep|>1<|close|>argument<|sep|>'
            "<|close|>call<|sep|>",
            {"tool_calls": [ParsedCall("f", "raw")]},
        ),
        # An argument that its call closes counts; an argument without a key has an empty one.
        (f"{_CALL}<|open|>argument<|sep|>x<|close|>call<|sep|>", {"tool_calls": [ParsedCall("f", '{"":"x"}')]}),
        # Whitespace before visible text at message level belongs to it.
        ("a<|close|>response<|sep|>\n b <|end_of_msg|>", {"content": "a\n b ", "complete": True}),
        # The end inside a tag.
        ("a<|open|>x<|end_of_msg|>b", {"content": "a", "complete": True, "open": None}),
    ],
)
def test_repairs(marked: str, expected: dict[str, Any]) -> None:
    output = read(marked)
    assert {key: getattr(output, key) for key in expected} == expected
    assert not output.well_formed


def test_whole_messages_are_read_with_and_without_their_tag() -> None:
    body = "<|open|>response<|sep|>x<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    with_tag = read(f'<|open|>message role="assistant"<|sep|>{body}', "message")
    assert with_tag == read(body, "message") == ParsedOutput(content="x", complete=True, well_formed=True)


def test_a_second_message_stops_the_reading() -> None:
    output = read('a<|close|>response<|sep|><|close|>message<|sep|><|open|>message role="user"<|sep|>b<|end_of_msg|>')
    assert (output.content, output.complete, output.open) == ("a", False, None)


def test_ids_of_other_control_tokens_are_their_names() -> None:
    assert read("a[BOS]<|reserved_token_608|>").content == "a[BOS]<|reserved_token_608|>"


def test_look_alikes_in_text_stay_text() -> None:
    text = "".join(control_names()) + "<|close|>response<|sep|>"
    assert toy_tokenizer().parse_output(toy_tokenizer().encode(text), "response").content == text


@pytest.mark.parametrize("text", ["😀👩‍👧", "你好,世界", "aé中😀"])
def test_no_half_characters_are_shown(text: str) -> None:
    reader = toy_tokenizer().output_reader("response")
    single_bytes = [toy_tokenizer().convert_tokens_to_ids(to_token(bytes([byte]))) for byte in text.encode()]
    shown = [event.text for index in single_bytes for event in reader.feed([index])]
    assert "".join(shown) == text and all(piece in text for piece in shown)


def test_message_of_an_output() -> None:
    output = ParsedOutput("r", "c", [ParsedCall("f", "{}")])
    assert output.message() == {
        "role": "assistant",
        "content": "c",
        "reasoning_content": "r",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    assert ParsedOutput().message() == {"role": "assistant", "content": ""}


def test_start_and_input_are_checked() -> None:
    with pytest.raises(ValueError, match=r"start 'tools'.*think, response, message"):
        MarkupReader("tools")
    with pytest.raises(ValueError, match="reads text, not ids"):
        OutputReader("think").feed([1])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        toy_tokenizer().output_reader().feed([856])


def test_where_an_output_could_be_closed() -> None:
    reader = toy_tokenizer().output_reader("think")
    assert reader.open_channel == "think"
    assert reader.feed(ids_of("a")) == [Event("reasoning", "a")]
    reader.feed(ids_of("<|close|>"))
    assert reader.open_channel is None
    reader.feed(ids_of("think<|sep|><|open|>response<|sep|>"))
    assert reader.open_channel == "response"
    reader.feed(ids_of("<|sep|>"))
    assert reader.open_channel is None and not reader.is_done
