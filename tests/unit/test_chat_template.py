"""The Jinja template renders the same text as the segments."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

import modeling_k3
from modeling_k3.chat import ChatOptions, render_chat
from modeling_k3.tokenization_k3 import TEMPLATE_MARK
from tests.chat_data import arguments, conversations, read_golden, texts

SOURCE = (Path(modeling_k3.__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
TEMPLATE = _compile_jinja_template(SOURCE)
_CASES = [case for case in read_golden("cases.json") if case.get("feature") != "images"]


def rendered(messages: Any, tools: Any = None, **options: Any) -> str:
    return TEMPLATE.render(messages=messages, tools=tools, **options)


@pytest.mark.parametrize("case", _CASES, ids=[case["name"] for case in _CASES])
def test_golden_cases(case: dict[str, Any]) -> None:
    messages, tools = case["input"]["messages"], case["input"]["tools"]
    options = {"thinking_effort": None, **case["input"]["options"]}
    options = case["input"]["options"] if case["entry"] == "template" else options
    if "error" in case:
        with pytest.raises((TemplateError, TypeError)):
            rendered(messages, tools, **options)
    elif messages and isinstance(messages[0], list):
        assert [rendered(each, tools, **options) for each in messages] == case["rendered"]
    else:
        assert rendered(messages, tools, **options) == case["rendered"]


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_random_conversations(messages: list[dict[str, Any]]) -> None:
    wanted = render_chat(messages, None, ChatOptions(thinking_effort="high")).text
    assert rendered(messages, thinking_effort="high") == wanted


_PIECES = [
    *'{}[]:,"\\ \n\t',
    "1e2",
    "-0",
    "01",
    "1.",
    "true",
    "nul",
    "NaN",
    "-Infinity",
    '"a"',
    '"\\u00e9"',
    '"\\ud83d\\ude00"',
    '{"a":',
]


@settings(max_examples=150, deadline=None)
@given(arguments().filter(lambda each: isinstance(each, str)))
def test_argument_text(text: str) -> None:
    check_arguments(text)


@pytest.mark.parametrize("left", _PIECES)
def test_argument_text_that_is_nearly_json(left: str) -> None:
    for right in _PIECES:
        for text in (
            f'{{"a":{left}{right}}}',
            f'{{"a":1,{left}{right}',
            f"{left}{right}",
            f'{{"a":[{left},{{"b":{right}}}],"c":2}}x',
        ):
            check_arguments(text)


@pytest.mark.parametrize("digit", ["\u0661", "\u00b2", "\uff11"])
def test_digits_of_other_scripts_are_no_number(digit: str) -> None:
    for number in (f"1{digit}", digit, f"-{digit}", f"1e{digit}", f"1e+{digit}", f"1.{digit}", f"1.5{digit}2"):
        check_arguments(f'{{"a":{number}}}')
        assert f'<|open|>json type="object"<|sep|>{{"a":{number}}}<|close|>json' in arguments_rendered(number)


def arguments_rendered(value: str) -> str:
    messages = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": f'{{"a":{value}}}'}]}]
    return rendered(messages, thinking_effort=None)


def check_arguments(text: str) -> None:
    messages = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": text}]}]
    assert rendered(messages, thinking_effort=None) == render_chat(messages).text, json.dumps(text)


@settings(max_examples=20, deadline=None)
@given(texts(), texts())
def test_schema_and_tools(key: str, value: str) -> None:
    schema = {"z": {key: value}, "a": [key, {"b": 1, "a": 2.5}]}
    options = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}, "tool_choice": "none"}
    messages = [{"role": "system", "tools": [schema]}, {"role": "user", "content": value}]
    wanted = render_chat(messages, [schema], ChatOptions(thinking_effort="max", **options)).text
    assert rendered(messages, [schema], **options) == wanted


def test_it_says_that_it_is_unsafe() -> None:
    assert SOURCE.startswith(TEMPLATE_MARK)
    assert "UNSAFE FOR UNTRUSTED TEXT" in SOURCE[:200]
