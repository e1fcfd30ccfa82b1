"""Model output -> reasoning, content, tool calls; whole or streaming, from ids or from text.

Read ids where you can: only ids tell a marker from the same characters written as text. Reading text is a fallback: an
answer that quotes `<|close|>response<|sep|>` ends there.

Whatever a model writes is accepted. What does not follow the format is repaired (`well_formed` is then False), and
output that stops anywhere is returned as far as it goes: never an error, never half a tool call.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from transformers.utils import to_py_obj

from .markup import ENDS, MARKERS
from .markup_reader import Event, MarkupReader, ParsedCall

_NAMES = (*MARKERS, *ENDS)
_NAME = re.compile("|".join(re.escape(name) for name in _NAMES))


@dataclass
class ParsedOutput:
    """What was read.

    Args:
        reasoning, content: text of the channels, nothing stripped.
        tool_calls: finished calls in the order they appeared.
        complete: an end id was read.
        open: innermost element still open when an output that is not complete stopped.
        well_formed: complete, and nothing had to be repaired.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ParsedCall] = field(default_factory=list)
    complete: bool = False
    open: str | None = None
    well_formed: bool = False

    def message(self) -> dict[str, Any]:
        """The assistant message to append to the conversation: keep its reasoning, the model expects it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class OutputReader:
    """Reads model output as it comes.

        for ids in stream:
            for event in reader.feed(ids): show(event)
        message = reader.finish().message()

    Args:
        start: element in which the output begins: "think" or "response" after a generation prompt, "message" for a
            whole message.
        markers: id to name of the three markers and the two end tokens. Needed for ids, not for text.
        token_bytes: id to bytes of any other token. Needed for ids, not for text.
    """

    def __init__(
        self,
        start: str = "think",
        markers: Mapping[int, str] | None = None,
        token_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        self._machine = MarkupReader(start)
        self._markers = markers or {}
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending_text = ""
        self._parts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._calls: list[ParsedCall] = []

    def feed(self, output: Iterable[int] | str) -> list[Event]:
        """Take more output.

        Args:
            output: ids, or text. One reader takes one of them.

        Returns:
            What became certain. Text is emitted as soon as its bytes are whole characters; a tag and a call when they
            are finished.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        if isinstance(output, str):
            self._feed_text(output)
        else:
            self._feed_ids(output)
        return self._collect()

    @property
    def is_done(self) -> bool:
        """An end was read: whatever comes is ignored."""
        return self._machine.is_done

    @property
    def open_channel(self) -> str | None:
        """The channel ("think" or "response") that output could be closed in right here without repair, or None."""
        machine, (pending, _) = self._machine, self._decoder.getstate()
        is_clean = not (machine.is_repaired or machine.is_done or machine.is_in_tag or pending)
        return machine.innermost if is_clean and machine.innermost in ("think", "response") else None

    def finish(self) -> ParsedOutput:
        """What was read, when no more output comes. A half tag and a half character at the end are dropped."""
        # In text, the beginning of a marker that never came is text.
        rest, self._pending_text = self._pending_text, ""
        self._machine.text(rest)
        self._collect()
        machine = self._machine
        return ParsedOutput(
            reasoning="".join(self._parts["reasoning"]),
            content="".join(self._parts["content"]),
            tool_calls=list(self._calls),
            complete=machine.is_complete,
            open=None if machine.is_complete else machine.innermost,
            well_formed=machine.is_complete and not machine.is_repaired,
        )

    def _collect(self) -> list[Event]:
        events, self._machine.events = self._machine.events, []
        for event in events:
            if event.call is not None:
                self._calls.append(event.call)
            else:
                self._parts[event.kind].append(event.text)
        return events

    def _feed_ids(self, ids: Iterable[int]) -> None:
        for index in ids:
            if self.is_done:
                return
            name = self._markers.get(index)
            if name is not None:
                # Bytes of a character that a marker cut off.
                self._machine.text(self._decoder.decode(b"", final=True))
                self._machine.marker(name)
            elif self._token_bytes is None:
                raise ValueError("this reader was made without markers and token_bytes, so it reads text, not ids")
            else:
                self._machine.text(self._decoder.decode(self._token_bytes(index)))

    def _feed_text(self, text: str) -> None:
        text = self._pending_text + text
        at = 0
        for match in _NAME.finditer(text):
            self._machine.text(text[at : match.start()])
            self._machine.marker(match.group())
            at = match.end()
        held = _begun_name(text, at)
        self._machine.text(text[at:held])
        self._pending_text = text[held:]


def single_output(output: Any) -> list[int]:
    """The ids of one output.

    Args:
        output: list, array or tensor; a batch axis of one, as `generate` returns it, is dropped.

    Raises:
        TypeError: several outputs, or no ids.
    """
    ids = to_py_obj(output)
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    if isinstance(ids, list) and len(ids) > 1 and all(isinstance(row, list) for row in ids):
        raise TypeError(f"output is one row of ids, not a batch of {len(ids)}: read its rows one by one")
    if not isinstance(ids, list | tuple | range) or not all(isinstance(index, int | Integral) for index in ids):
        raise TypeError(f"output is text or one row of ids; this {type(output).__name__} holds something else")
    return list(ids)


def _begun_name(text: str, at: int) -> int:
    """Where the beginning of a marker stands at the end of a text; its length if there is none."""
    longest = max(len(name) for name in _NAMES) - 1
    for begin in range(max(at, len(text) - longest), len(text)):
        if any(name.startswith(text[begin:]) for name in _NAMES):
            return begin
    return len(text)
