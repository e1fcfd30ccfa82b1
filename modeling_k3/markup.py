"""The markup of the chat format: segments, tags, attributes.

    opening tag   <|open|> name key="value" ... <|sep|>
    closing tag   <|close|> name <|sep|>

Markers are control segments; names, keys, values and bodies are text segments and can never become control tokens.
Segments are encoded one by one: their borders are part of the format.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
#: Ends a message: the id that stops generation.
END_OF_MESSAGE = "<|end_of_msg|>"
#: Ends a document. No chat turn ends with it, but generation stops there as well.
END_OF_TEXT = "[EOS]"
MARKERS = (OPEN, CLOSE, SEP)
ENDS = (END_OF_MESSAGE, END_OF_TEXT)

# A key begins where a word does, and nothing is given back: the time is linear in the length, whatever was written.
_ATTRIBUTE = re.compile(r'(?<![^\s="])([^\s="]++)="([^"]*+)"')


class Segment(NamedTuple):
    """A piece of a rendered conversation.

    Args:
        text: what it says.
        allow_special: True for one of the four control names of the format, which becomes its id. False for text.
    """

    text: str
    allow_special: bool


def text_segments(*texts: str) -> list[Segment]:
    """Text segments; empty ones are left out."""
    return [Segment(text, False) for text in texts if text]


def control(name: str) -> Segment:
    """A control segment."""
    return Segment(name, True)


def open_tag(name: str, attributes: Mapping[str, object] | None = None) -> list[Segment]:
    """An opening tag.

    Args:
        name: of the element.
        attributes: in order; values that are not text are converted by `str`, then escaped.
    """
    segments = [control(OPEN), Segment(name, False)]
    for key, value in (attributes or {}).items():
        segments += text_segments(f" {key}", '="', escape(str(value)), '"')
    return [*segments, control(SEP)]


def close_tag(name: str) -> list[Segment]:
    """A closing tag."""
    return [control(CLOSE), Segment(name, False), control(SEP)]


def element(name: str, attributes: Mapping[str, object] | None, *body: Segment) -> list[Segment]:
    """Opening tag, body, closing tag."""
    return [*open_tag(name, attributes), *body, *close_tag(name)]


def escape(value: str) -> str:
    """Escape an attribute value: `&`, then `"`. Nothing else is special there; bodies are never escaped."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """The inverse of `escape`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def read_tag(text: str) -> tuple[str, dict[str, str]]:
    """Read what stands between a marker and its `<|sep|>`.

    Returns:
        Name (the first word, empty if there is none) and attributes; whatever has not the form `key="value"` is
        skipped, of a repeated key the first counts.
    """
    words = text.split(None, 1)
    name, rest = (words[0], words[1] if len(words) > 1 else "") if words else ("", "")
    attributes: dict[str, str] = {}
    for key, value in _ATTRIBUTE.findall(rest):
        attributes.setdefault(key, unescape(value))
    return name, attributes
