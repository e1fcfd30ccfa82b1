"""The state machine behind `chat_reader`: markers and text in, events out. Never an error, whatever comes.

    message level    think · response · tools · visible text counts as an answer
    tools            call ...
    call             argument ... or one json

What does not follow the format is repaired, and the repair is remembered.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from .call_arguments import object_text, value_text
from .markup import END_OF_TEXT, ENDS, OPEN, SEP, read_tag

#: Element in which an output begins: after a generation prompt with thinking on, with thinking off, a whole message.
STARTS = ("think", "response", "message")
CHANNELS = ("think", "response", "tools")
_TEXT_ELEMENTS = ("think", "response", "argument", "json")


class ParsedCall(NamedTuple):
    """A finished tool call.

    Args:
        name: of the tool.
        arguments: text; a JSON object unless the model wrote a raw block. Callers that need an id make one up.
    """

    name: str
    arguments: str


class Event(NamedTuple):
    """What streaming output added.

    Args:
        kind: "reasoning", "content" or "tool_call".
        text: what is added to reasoning or content.
        call: the finished call.
    """

    kind: str
    text: str = ""
    call: ParsedCall | None = None


@dataclass
class _OpenCall:
    name: str | None
    entries: list[tuple[str, str]] = field(default_factory=list)
    raw: str | None = None

    def finished(self) -> ParsedCall:
        return ParsedCall(self.name or "", object_text(self.entries) if self.raw is None else self.raw)


class MarkupReader:
    """The state machine: markers and text in, events out. `OutputReader` feeds it.

    Args:
        start: element in which the output begins, one of `STARTS`.

    Raises:
        ValueError: there is no such start.
    """

    def __init__(self, start: str = "think") -> None:
        if start not in STARTS:
            raise ValueError(f"start {start!r} is not allowed; allowed: {', '.join(STARTS)}")
        self.stack = ["message"] if start == "message" else ["message", start]
        self.is_done = self.is_complete = self.is_repaired = False
        self.events: list[Event] = []
        self._may_open_message = start == "message"
        self._tag: tuple[str, list[str]] | None = None
        self._call: _OpenCall | None = None
        self._body: list[str] = []
        self._attributes: dict[str, str] = {}
        # A run of text at message level counts once something in it is visible, with the whitespace before it.
        self._blank = ""
        self._is_visible_run = False

    @property
    def is_in_tag(self) -> bool:
        """Between a marker and its `<|sep|>`."""
        return self._tag is not None

    @property
    def innermost(self) -> str | None:
        """The innermost open element."""
        return self.stack[-1] if self.stack else None

    def marker(self, name: str) -> None:
        """Take one of the three markers or of the two end tokens."""
        if self.is_done:
            return
        if name in ENDS:
            self.is_repaired |= name == END_OF_TEXT or self._tag is not None or bool(self.stack)
            self.is_done = self.is_complete = True
            return
        tag, self._tag = self._tag, None
        if name == SEP and tag is None:
            self._literal(SEP)
        elif name == SEP:
            self._end_tag(tag[0], "".join(tag[1]))
        else:
            if tag is not None:
                self._literal(tag[0] + "".join(tag[1]))
            self._tag = (name, [])

    def text(self, text: str) -> None:
        """Take a piece of text."""
        if self.is_done or not text:
            return
        if self._tag is not None:
            self._tag[1].append(text)
        elif self.innermost in ("argument", "json"):
            self._body.append(text)
        elif self.innermost in ("think", "response"):
            self.events.append(Event("reasoning" if self.innermost == "think" else "content", text))
        elif self.innermost in ("tools", "call"):
            self.is_repaired |= not text.isspace()
        elif self._is_visible_run or not text.isspace():
            self.events.append(Event("content", self._blank + text))
            self._blank, self._is_visible_run, self._may_open_message = "", True, False
            self.is_repaired = True
        else:
            self._blank += text

    def _literal(self, text: str) -> None:
        """A marker or tag that fits nowhere is text where text is, and skipped elsewhere."""
        self.is_repaired = True
        if self.innermost in _TEXT_ELEMENTS:
            self.text(text)

    def _end_tag(self, marker: str, text: str) -> None:
        self._blank, self._is_visible_run = "", False
        name, attributes = read_tag(text)
        fits = self._open(name, attributes) if marker == OPEN else self._close(name)
        if not fits:
            self._literal(marker + text + SEP)

    def _open(self, name: str, attributes: dict[str, str]) -> bool:
        """Open an element. Returns False if it fits nowhere."""
        if name == "message":
            self.is_done = not self._may_open_message
        elif name in CHANNELS:
            if self.stack != ["message"]:
                self.is_repaired = True
                self._close_down_to("message")
            self.stack.append(name)
        elif name == "call" and (self.innermost in ("message", None) or "tools" in self.stack):
            if self.innermost != "tools":
                self.is_repaired = True
                self._close_down_to("tools" if "tools" in self.stack else "message")
                self.stack += [] if "tools" in self.stack else ["tools"]
            self.stack.append("call")
            self._call = _OpenCall(attributes.get("tool"))
        elif name in ("argument", "json") and self._call is not None and self.innermost == "call":
            # A call holds arguments or one raw block.
            if self._call.raw is not None or (name == "json" and self._call.entries):
                return False
            self.stack.append(name)
            self._body, self._attributes = [], attributes
        else:
            return False
        self._may_open_message = False
        return True

    def _close(self, name: str) -> bool:
        """Close an element and what is open inside. Returns False if it is not open."""
        if name not in self.stack:
            return False
        self.is_repaired |= self.innermost != name
        self._close_down_to(name)
        self._leave(is_closed=True)
        return True

    def _close_down_to(self, name: str) -> None:
        while self.stack and self.innermost != name:
            self._leave(is_closed=False)

    def _leave(self, is_closed: bool) -> None:
        """Leave the innermost element; a call counts only if its own closing tag was read."""
        element, call = self.stack.pop(), self._call
        if call is None:
            return
        if element == "argument":
            self.is_repaired |= "key" not in self._attributes
            value = value_text(self._attributes.get("type"), "".join(self._body))
            call.entries.append((self._attributes.get("key", ""), value))
        elif element == "json":
            call.raw = "".join(self._body)
        elif element == "call":
            self._call = None
            if is_closed and call.name:
                self.events.append(Event("tool_call", call=call.finished()))
            else:
                self.is_repaired = True
