"""Conversation to segments, and the fixed point render -> encode -> decode -> read."""

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from modeling_k3.call_arguments import Argument, argument_elements, object_text, read_object, value_text
from modeling_k3.chat import ChatOptions, render_chat
from modeling_k3.markup import MARKERS, Segment, escape, open_tag, read_tag, unescape
from modeling_k3.tool_results import CallTable, read_calls, sort_results
from tests.chat_data import FIRST_CONTROL, assistant_messages, control_names, conversations, texts, toy_tokenizer

_PLAIN = ChatOptions(add_generation_prompt=False)
_DRAWS = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def call(name: str = "f", arguments: Any = "{}", call_id: str | None = None) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def assistant(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **fields}


def result(call_id: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **fields}


@_DRAWS
@given(conversations(), st.booleans())
def test_only_the_template_makes_control_tokens(messages: list[dict[str, Any]], thinking: bool) -> None:
    check_controls(messages, thinking)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(conversations(), st.booleans())
def test_thousands_of_conversations(messages: list[dict[str, Any]], thinking: bool) -> None:
    check_controls(messages, thinking)


@pytest.mark.parametrize("name", control_names())
def test_every_control_name_in_every_field(name: str) -> None:
    tools = [{"type": "function", "function": {"name": name, "description": name, "parameters": {name: [name]}}}]
    messages = [
        {"role": "system", "content": name, "name": name, name: name},
        {"role": "system", "tools": tools},
        {"role": "user", "content": [{"type": "text", "text": name}, {"type": name, "text": name}], "name": name},
        {
            "role": "assistant",
            "name": name,
            "content": name,
            "reasoning_content": name,
            "tool_calls": [
                call(name, {name: name, "x": {name: [name]}}, name),
                call(name, json.dumps({name: name, "x": [name]})),
                call(name, name),
            ],
        },
        result(name, name),
        {"role": "tool", "tool": name, "name": name, "content": [{"type": "text", "text": name}]},
    ]
    options = {"response_format": "json_schema", "response_schema": {name: name}, "tool_choice": name}
    for thinking in (True, False):
        check_controls(messages, thinking, tools, **options)


def check_controls(messages: list[dict[str, Any]], thinking: bool, tools: Any = None, **options: Any) -> None:
    """As many control ids as control segments, which are the four of the format; and nothing is modified."""
    before = copy.deepcopy(messages)
    tokenizer = toy_tokenizer()
    options = {"thinking": thinking, "thinking_effort": "low", **options}
    chat = tokenizer.render_chat(messages, tools, **options)
    ids = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **options)
    assert sum(index >= FIRST_CONTROL for index in ids) == sum(segment.allow_special for segment in chat.segments)
    assert {segment.text for segment in chat.segments if segment.allow_special} <= {*MARKERS, "<|end_of_msg|>"}
    assert all(segment.text for segment in chat.segments)
    assert tokenizer.decode(ids) == chat.text
    assert messages == before


def rendered_assistant(message: dict[str, Any]) -> tuple[str, list[int]]:
    """Text and ids of an assistant message after its opening tag."""
    chat = render_chat([message], None, _PLAIN)
    begin, end = chat.assistant[0]
    ids = [i for text, allow in chat.segments[begin:end] for i in toy_tokenizer().encode_text(text, allow)]
    return "".join(text for text, _ in chat.segments[begin:end]), ids


@_DRAWS
@given(assistant_messages())
@example(assistant(call(arguments='{"a":1e2,"a":[1,  2]}'), call(arguments="{"), content="<|close|>response<|sep|>"))
def test_reading_a_rendered_message_is_a_fixed_point(message: dict[str, Any]) -> None:
    text, ids = rendered_assistant(message)
    output = toy_tokenizer().parse_output(ids, "message")
    again, _ = rendered_assistant(output.message())
    assert output.well_formed
    assert again == text
    decoded = toy_tokenizer().decode(ids)
    if decoded.count("<|") + decoded.count("[EOS]") == sum(index >= FIRST_CONTROL for index in ids):
        assert toy_tokenizer().parse_output(decoded, "message") == output, "without look-alikes text is as good"
    assert output.content == (message.get("content") or "")
    assert output.reasoning == message.get("reasoning_content", "")
    assert [each.name for each in output.tool_calls] == [
        each["function"]["name"] for each in message.get("tool_calls", ())
    ]


@settings(max_examples=25, deadline=None)
@given(assistant_messages())
def test_cut_at_any_token_is_read_as_far_as_it_goes(message: dict[str, Any]) -> None:
    _, ids = rendered_assistant(message)
    whole = toy_tokenizer().parse_output(ids, "message")
    for length in range(len(ids)):
        output = toy_tokenizer().parse_output(ids[:length], "message")
        assert not output.complete and not output.well_formed
        assert whole.reasoning.startswith(output.reasoning)
        assert whole.content.startswith(output.content)
        assert whole.tool_calls[: len(output.tool_calls)] == output.tool_calls


@given(texts())
def test_attribute_values_survive(value: str) -> None:
    assert unescape(escape(value)) == value
    body = "".join(text for text, _ in open_tag("call", {"tool": value, "index": 1})[1:-1])
    assert read_tag(body) == ("call", {"tool": value, "index": "1"})


def test_tags_of_any_shape_are_read() -> None:
    assert read_tag("") == read_tag(" \n") == ("", {})
    assert read_tag('  think\n a="1" a="2" b=3 ="4" c') == ("think", {"a": "1"})


def test_empty_values_leave_three_segments() -> None:
    assert [text for text, _ in open_tag("x", {"key": ""})] == ["<|open|>", "x", " key", '="', '"', "<|sep|>"]


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("{}", []),
        (' {\n"a" :\t1e2 , "b":-0}tail', [("a", "number", "1e2"), ("b", "number", "-0")]),
        (
            '{"s":"a\\n\\u00e9\nb","n":null,"t":true}',
            [("s", "string", "a\né\nb"), ("n", "null", "null"), ("t", "boolean", "true")],
        ),
        ('{"x":[1,  {"a":"\\u00e9"}]}', [("x", "array", '[1,  {"a":"\\u00e9"}]')]),
        ('{"n":NaN,"i":-Infinity}', [("n", "number", "NaN"), ("i", "number", "-Infinity")]),
        ('{"big":' + "7" * 5000 + "}", [("big", "number", "7" * 5000)]),
    ],
)
def test_argument_text_keeps_its_characters(text: str, entries: list[tuple[str, str, str]]) -> None:
    assert read_object(text) == [Argument(*entry) for entry in entries]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "{",
        "[1]",
        '"a"',
        "{'a':1}",
        '{"a":1,}',
        '{"a"}',
        '{"a":01}',
        '{"a":}',
        "{a:1}",
        "[" * 9999,
        '{"a":' + "[" * 99999,
    ],
)
def test_other_argument_text_goes_into_a_raw_block(text: str) -> None:
    assert read_object(text) is None
    body = "".join(piece for piece, allow in argument_elements(text) if not allow)
    assert body == (f'json type="object"{text}json' if text else "")


@pytest.mark.parametrize("value", [3, 1.5, True, ["a"], {"a": {1, 2}}, {"a": object()}])
def test_arguments_of_another_kind_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="arguments"):
        render_chat([assistant(call(arguments=value))])


def test_values_are_read_back_as_they_were_written() -> None:
    assert value_text("number", " 1e2\n") == "1e2"
    assert value_text("number", "twelve") == '"twelve"'
    assert value_text("string", "7") == value_text(None, "7") == '"7"'
    assert value_text("object", '{"a":"line\nbreak"}') == '{"a":"line\nbreak"}'
    assert object_text([("é", "1"), ("é", '"x"')]) == '{"é":1,"é":"x"}'


def test_results_are_sorted_and_named_only_if_all_match() -> None:
    messages = [
        assistant(call("f", call_id="1"), call("g", call_id="2")),
        result("2", "two", name="old"),
        result("1", "one"),
    ]
    ordered = sort_results(messages)
    assert [(each["content"], each["tool"]) for each in ordered[1:]] == [("one", "f"), ("two", "g")]
    assert ordered[2]["name"] == "g" and messages[1]["name"] == "old"
    messages[1]["tool_call_id"] = None
    assert sort_results(messages) == messages


def test_an_assistant_without_calls_clears_the_table() -> None:
    messages = [assistant(call("f", call_id="1")), assistant(), result("1", "late")]
    with pytest.raises(ValueError, match=r"message 2.*no name"):
        render_chat(messages)


def test_call_table_counts_results_not_calls() -> None:
    table = CallTable()
    table.restart(read_calls([call("f"), call("g")], "message 0"))
    assert [table.label({"role": "tool"}, "m") for _ in range(2)] == [("f", 1), ("g", 2)]
    with pytest.raises(ValueError, match="result 3"):
        table.label({"role": "tool"}, "m")


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "image_url", "image_url": {"url": "x"}, "text": "y"}])
def test_images_are_refused_in_one_sentence(part: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="this is the text model: images"):
        render_chat([{"role": "user", "content": [part]}])
    with pytest.raises(ValueError, match="this is the text model: images"):
        ChatOptions(image_prompts=["x"])


@pytest.mark.parametrize(
    ("messages", "error", "pattern"),
    [
        (["hi"], ValueError, "message 0"),
        ([{"role": "user"}, {"role": "developer"}], ValueError, "message 1.*developer.*allowed: system"),
        ([{"role": ["user"]}], ValueError, "message 0"),
        ([{"role": "user", "content": 3}], TypeError, "content"),
        ([{"role": "user", "content": {"text": "x"}}], TypeError, "content"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], ValueError, "part 0"),
        ([{"role": "user", "content": [{"text": "x"}]}], ValueError, "part 0"),
        ([{"role": "user", "content": ["x"]}], ValueError, "part 0"),
        ([{"role": "assistant", "reasoning_content": 3}], TypeError, "reasoning"),
        ([{"role": "assistant", "tool_calls": "f"}], ValueError, "tool_calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], ValueError, "tool call 1"),
    ],
)
def test_errors_name_the_place(messages: list[Any], error: type[Exception], pattern: str) -> None:
    before = copy.deepcopy(messages)
    with pytest.raises(error, match=pattern):
        render_chat(messages)
    assert messages == before


@pytest.mark.parametrize("effort", ["medium", "", "LOW", 1])
def test_unknown_effort_is_refused_unless_thinking_is_off(effort: Any) -> None:
    with pytest.raises(ValueError, match=r"thinking_effort.*low, high, max"):
        ChatOptions(thinking_effort=effort)
    assert ChatOptions(thinking=False, thinking_effort=effort).thinking_effort == effort


def test_schema_is_found_where_it_may_stand() -> None:
    schema = {"type": "object"}
    for given_format in ({"schema": schema}, {"json_schema": schema}, schema):
        options = ChatOptions(response_format={"type": "json_schema", "json_schema": given_format})
        assert json.dumps(schema, separators=(",", ":")) in "".join(text for text, _ in options.tail_messages())
    options = ChatOptions(
        response_format={"type": "json_schema", "json_schema": {"schema": schema}}, response_schema=None
    )
    assert "```json\nnull\n```" in "".join(text for text, _ in options.tail_messages())


def test_a_continued_message_stays_open() -> None:
    messages = [{"role": "assistant", "content": "one, ", "reasoning_content": "count"}]
    for continued, ending in (("response", "one, "), ("think", "count")):
        chat = render_chat(messages, None, ChatOptions(add_generation_prompt=False, continued=continued))
        assert chat.segments[-1] == Segment(ending, False)
    for wrong in ([{"role": "user"}], [], [assistant(call())]):
        with pytest.raises(ValueError, match="continued"):
            render_chat(wrong, None, ChatOptions(add_generation_prompt=False, continued="response"))
    with pytest.raises(ValueError, match="come last"):
        ChatOptions(continued="response")
