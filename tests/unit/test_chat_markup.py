"""Reading tags: what counts as an attribute, and that nothing a model writes takes long to read."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_k3.markup import read_tag, unescape

_SIZE = 200_000


@pytest.mark.parametrize(
    "text",
    [
        "x " + "a" * _SIZE,
        "x " + "a=" * (_SIZE // 2),
        'x a="' + "b" * _SIZE,
        'x a="' + "b " * (_SIZE // 2),
        "x " + '="' * (_SIZE // 2),
        "x " + 'a="' * (_SIZE // 3),
        'x k="v" a="' + "b=" * (_SIZE // 2),
        " " * _SIZE,
        "a" * _SIZE,
    ],
    ids=lambda text: text[:8],
)
def test_long_tags_take_no_time(text: str) -> None:
    began = time.process_time()
    read_tag(text)
    assert time.process_time() - began < 1


@settings(max_examples=500, deadline=None)
@given(st.text(st.sampled_from('ab="" \n&é'), max_size=24))
def test_attributes_are_those_of_the_plain_pattern(text: str) -> None:
    name, attributes = read_tag(f"name {text}")
    wanted: dict[str, str] = {}
    for key, value in re.findall(r'([^\s="]+)="([^"]*)"', text):
        wanted.setdefault(key, unescape(value))
    assert (name, attributes) == ("name", wanted)


@pytest.mark.parametrize(
    ("text", "attributes"),
    [
        ('x a="1" b="2"', {"a": "1", "b": "2"}),
        ('x a="1"b="2"', {"a": "1", "b": "2"}),
        ('x a="1" a="2"', {"a": "1"}),
        ('x =a="1" b c="&quot;&amp;"', {"a": "1", "c": '"&'}),
        ('x "a="1" b="2', {"a": "1"}),
        ('x a ="1"', {}),
    ],
)
def test_attributes(text: str, attributes: dict[str, str]) -> None:
    assert read_tag(text) == ("x", attributes)
