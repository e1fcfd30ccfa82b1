"""Arguments of a tool call: JSON text or an object <-> `argument` elements, one level deep.

Arguments given as text keep their original characters (`1e2` stays `1e2`, a long integer keeps every digit): values are
cut out of the text, never converted. Arguments given as an object are printed by the JSON writer.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from .markup import Segment, element, text_segments

_WHITESPACE = " \t\n\r"


def _literal(text: str) -> int:
    """Stands for a number whose characters are kept: converting it could fail or lose digits."""
    return 0


# Lenient on raw control characters inside strings, like the readers that produced the training text.
_READER = json.JSONDecoder(strict=False, parse_int=_literal, parse_float=_literal, parse_constant=_literal)


class Argument(NamedTuple):
    """One entry of a call's arguments.

    Args:
        key: its name.
        kind: "string", "number", "boolean", "null", "object" or "array".
        text: the decoded text of a string, the JSON of anything else.
    """

    key: str
    kind: str
    text: str


def kind_of(value: object) -> str:
    """The `type` attribute of a value.

    Raises:
        TypeError: the value is none that JSON knows.
    """
    if isinstance(value, str):
        return "string"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, dict):
        return "object"
    if isinstance(value, list | tuple):
        return "array"
    raise TypeError(f"arguments: a value of type {type(value).__name__} has no JSON form")


def read_object(text: str) -> list[Argument] | None:
    """Read the JSON object at the beginning of a text, one level deep.

    Args:
        text: whitespace, an object, then anything.

    Returns:
        Its entries in order, repeated keys included; None if the text does not begin with a complete object.
    """
    try:
        return _read_entries(text)
    except (ValueError, StopIteration, IndexError, RecursionError):
        return None


def _read_entries(text: str) -> list[Argument] | None:
    at = _skip(text, 0)
    if text[at] != "{":
        return None
    entries: list[Argument] = []
    at = _skip(text, at + 1)
    if text[at] == "}":
        return entries
    while True:
        if text[at] != '"':
            return None
        key, at = _READER.scan_once(text, at)
        at = _skip(text, at)
        if text[at] != ":":
            return None
        begin = _skip(text, at + 1)
        value, end = _READER.scan_once(text, begin)
        kind = kind_of(value)
        entries.append(Argument(key, kind, value if kind == "string" else text[begin:end]))
        at = _skip(text, end)
        if text[at] == "}":
            return entries
        if text[at] != ",":
            return None
        at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _WHITESPACE:
        at += 1
    return at


def argument_elements(arguments: object) -> list[Segment]:
    """The body of a `call` element.

    Args:
        arguments: None, an object, or text; text that begins with a JSON object is read one level deep, any other text
            goes into a `json` element unchanged.

    Returns:
        Segments; none for None, `""`, `{}`.

    Raises:
        TypeError: arguments are of another kind, or hold a value without a JSON form.
    """
    if arguments is None or arguments == "":
        return []
    if isinstance(arguments, str):
        entries = read_object(arguments)
        if entries is None:
            return element("json", {"type": "object"}, *text_segments(arguments))
    elif isinstance(arguments, Mapping):
        entries = [_from_value(key, value) for key, value in arguments.items()]
    else:
        raise TypeError(
            f"arguments: {type(arguments).__name__} is not allowed; allowed are an object, JSON text, and null"
        )
    return [
        segment
        for entry in entries
        for segment in element("argument", {"key": entry.key, "type": entry.kind}, *text_segments(entry.text))
    ]


def _from_value(key: object, value: object) -> Argument:
    kind = kind_of(value)
    return Argument(str(key), kind, str(value) if kind == "string" else json.dumps(value, ensure_ascii=False))


def value_text(kind: str | None, body: str) -> str:
    """The JSON text of an `argument` element's body.

    Args:
        kind: its `type`; None if it has none, which means a string.
        body: what stands in it.

    Returns:
        JSON: a string as such; anything else character for character without whitespace around it, if it is valid
        JSON, and as a string otherwise.
    """
    if kind is not None and kind != "string":
        stripped = body.strip()
        try:
            _READER.decode(stripped)
            return stripped
        except (ValueError, RecursionError):
            pass
    return json.dumps(body, ensure_ascii=False)


def object_text(entries: list[tuple[str, str]]) -> str:
    """Join keys and the JSON texts of their values to one JSON object, without spaces."""
    return "{" + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{text}" for key, text in entries) + "}"
