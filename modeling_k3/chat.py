"""Conversation -> segments: roles, channels, tools, tool results, options.

    tools declared · effort · messages · tool choice · response format · generation prompt

    message      <|open|>message role="..." ...<|sep|> body <|close|>message<|sep|><|end_of_msg|>
    assistant    think channel (with thinking on) · response channel · tools channel (with calls)

There is no beginning token and no default system prompt. Nothing is stripped, nothing the caller passes is modified.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .call_arguments import argument_elements
from .markup import END_OF_MESSAGE, Segment, close_tag, control, element, open_tag, text_segments
from .tool_results import Call, CallTable, read_calls, sort_results

EFFORTS = ("low", "high", "max")
ROLES = ("system", "user", "assistant", "tool")
#: Channels a generation prompt or an unfinished message can leave open.
THINK, RESPONSE = "think", "response"

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without markdown code "
    "blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"
_NO_IMAGES = "this is the text model: images cannot be given to it, in messages or as image_prompts"


class _Unset:
    """Tells an option that was not given from one that is None."""


UNSET = _Unset()


@dataclass(frozen=True)
class ChatOptions:
    """What shapes a conversation beside its messages and tools.

    Args:
        add_generation_prompt: end with the opening tags of the assistant's turn.
        thinking: False for no think channel anywhere, and no effort message.
        thinking_effort: "low", "high" or "max"; None for no effort message.
        tool_choice: "required" and "none" are stated; anything else says nothing.
        response_format: an object with `type`, or the bare type; "json_object" and "json_schema" are stated.
        response_schema: JSON schema; not given, it is taken from `response_format`.
        image_prompts: refused if not None.
        continued: "response" or "think": the last message is the assistant's and stays open in this channel, for the
            model to go on with. None closes every message.

    Raises:
        ValueError: an option has a value that is not allowed.
    """

    add_generation_prompt: bool = True
    thinking: bool = True
    thinking_effort: str | None = None
    tool_choice: Any = None
    response_format: Any = None
    response_schema: Any = UNSET
    image_prompts: Any = None
    continued: str | None = None

    def __post_init__(self) -> None:
        if self.image_prompts is not None:
            raise ValueError(_NO_IMAGES)
        if self.thinking and self.thinking_effort is not None and self.thinking_effort not in EFFORTS:
            raise ValueError(f"thinking_effort {self.thinking_effort!r} is not allowed; allowed: {', '.join(EFFORTS)}")
        if self.continued not in (None, THINK, RESPONSE):
            raise ValueError(f"continued {self.continued!r} is not allowed; allowed: {THINK}, {RESPONSE}")
        if self.continued and (self.add_generation_prompt or self.tail_messages()):
            raise ValueError("a message to be continued must come last: no generation prompt, tool_choice or format")
        if self.continued == THINK and not self.thinking:
            raise ValueError("continued 'think' is not allowed with thinking off")

    def tail_messages(self) -> list[Segment]:
        """What is stated after the conversation: tool choice, response format."""
        segments = []
        if isinstance(self.tool_choice, str) and self.tool_choice in _TOOL_CHOICE:
            segments += _fixed("tool-choice", _TOOL_CHOICE[self.tool_choice])
        wanted = self.response_format
        kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
        if kind == "json_object":
            segments += _fixed("response-format", _FORMAT.format(kind))
        elif kind == "json_schema":
            schema = self._given_schema() if isinstance(self.response_schema, _Unset) else self.response_schema
            segments += _fixed("response-format", _FORMAT.format(kind) + _SCHEMA + _fenced(schema))
        return segments

    def _given_schema(self) -> Any:
        given = self.response_format.get("json_schema") if isinstance(self.response_format, Mapping) else None
        if isinstance(given, Mapping):
            for key in ("schema", "json_schema"):
                if given.get(key) is not None:
                    return given[key]
        return given


@dataclass
class RenderedChat:
    """A conversation as segments.

    Args:
        segments: in order, none empty; encode each on its own.
        assistant: half-open ranges of segments that belong to assistant messages, for a loss mask: everything after
            the message's opening tag, up to and with its end.
    """

    segments: list[Segment] = field(default_factory=list)
    assistant: list[tuple[int, int]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The joined text. Do not encode it for a model: text typed by a user would turn into control tokens."""
        return "".join(segment.text for segment in self.segments)


def render_chat(
    messages: Sequence[Any], tools: Sequence[Any] | None = None, options: ChatOptions | None = None
) -> RenderedChat:
    """Render one conversation.

    Args:
        messages: objects with `role` and what belongs to it; may be empty.
        tools: JSON schemas to declare first; None or empty for none.
        options: None for the defaults.

    Raises:
        ValueError: a message, tool call, result or part that the format cannot express, with its position.
        TypeError: a content or argument of a wrong kind.
    """
    options = options or ChatOptions()
    for position, message in enumerate(messages):
        _check_message(message, position)
    if options.continued and not (messages and messages[-1]["role"] == "assistant" and not _calls(messages[-1])):
        raise ValueError("a message to be continued must be the assistant's, come last and hold no tool calls")
    out = RenderedChat()
    if tools:
        out.segments += _fixed("tool-declare", _TOOLS + _fenced(tools))
    if options.thinking and options.thinking_effort is not None:
        out.segments += _fixed("thinking-effort", _EFFORT.format(options.thinking_effort))
    _render_messages(sort_results(messages), options, out)
    out.segments += options.tail_messages()
    if options.add_generation_prompt:
        out.segments += open_tag("message", {"role": "assistant"}) + open_tag(THINK if options.thinking else RESPONSE)
    return out


def _render_messages(messages: Sequence[Mapping[str, Any]], options: ChatOptions, out: RenderedChat) -> None:
    table = CallTable()
    for position, message in enumerate(messages):
        where = f"message {position}"
        role = message["role"]
        attributes: dict[str, object] = {"role": role}
        if role == "tool":
            attributes["tool"], attributes["index"] = table.label(message, where)
        elif role == "system" and message.get("tools"):
            out.segments += _fixed("tool-declare", _MORE_TOOLS + _fenced(message["tools"]))
            continue
        elif message.get("name"):
            attributes["name"] = message["name"]
        if role != "assistant":
            body = _content(message.get("content"), where)
            out.segments += [*element("message", attributes, *body), control(END_OF_MESSAGE)]
            continue
        calls = _calls(message, where)
        table.restart(calls)
        out.segments += open_tag("message", attributes)
        begin = len(out.segments)
        continued = options.continued if position == len(messages) - 1 else None
        out.segments += _assistant_body(message, calls, options.thinking, continued, where)
        if not continued:
            out.segments += [*close_tag("message"), control(END_OF_MESSAGE)]
        out.assistant.append((begin, len(out.segments)))


def _assistant_body(
    message: Mapping[str, Any], calls: Sequence[Call], thinking: bool, continued: str | None, where: str
) -> list[Segment]:
    """The channels of an assistant message; with `continued`, up to the end of the text of that channel."""
    segments: list[Segment] = []
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if not isinstance(reasoning, str):
            raise TypeError(f"{where}: reasoning is text, not {type(reasoning).__name__}")
        segments += open_tag(THINK) + text_segments(reasoning)
        if continued == THINK:
            return segments
        segments += close_tag(THINK)
    segments += open_tag(RESPONSE) + _content(message.get("content"), where)
    if continued == RESPONSE:
        return segments
    segments += close_tag(RESPONSE)
    if calls:
        segments += open_tag("tools")
        for index, call in enumerate(calls, start=1):
            attributes = {"tool": call.name, "index": index}
            try:
                segments += element("call", attributes, *argument_elements(call.arguments))
            except TypeError as error:
                raise TypeError(f"{where}, tool call {index}: {error}") from None
        segments += close_tag("tools")
    return segments


def _check_message(message: object, position: int) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {position} is no object but {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"message {position}: role {role!r} is not allowed; allowed: {', '.join(ROLES)}")


def _calls(message: Mapping[str, Any], where: str = "message") -> list[Call]:
    return read_calls(message.get("tool_calls"), where)


def _content(content: object, where: str) -> list[Segment]:
    """The body of a message: text, or the texts of its parts as segments of their own."""
    if content is None:
        return []
    if isinstance(content, str):
        return text_segments(content)
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise TypeError(f"{where}: content is text, a list of parts or null, not {type(content).__name__}")
    return text_segments(*(_part_text(part, f"{where}, part {index}") for index, part in enumerate(content)))


def _part_text(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or "type" not in part:
        raise ValueError(f"{where}: a content part is an object with `type` and `text`")
    if part["type"] in ("image", "image_url"):
        raise ValueError(f"{where}: {_NO_IMAGES}")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where}: type {part['type']!r} has no `text`; allowed are parts with text")
    return part["text"]


def _fixed(kind: str, body: str) -> list[Segment]:
    """A system message of the format itself."""
    attributes = {"role": "system", "type": kind}
    return [*element("message", attributes, *text_segments(body)), control(END_OF_MESSAGE)]


def _fenced(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return f"```json\n{text}\n```"
