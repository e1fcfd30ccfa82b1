"""Tool calls and their results: which result answers which call, and under which name and number it is rendered."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A tool call of an assistant message.

    Args:
        name: of the tool.
        arguments: JSON text, an object, or None.
        call_id: as text, or None.
    """

    name: object
    arguments: object
    call_id: str | None


def read_calls(calls: object, where: str) -> list[Call]:
    """Read `tool_calls`: each from its `function` object or, without one, from itself.

    Args:
        calls: list of objects; None or empty for none.
        where: for messages.

    Raises:
        ValueError: not a list, an entry that is no object, or a call without a name.
    """
    if not calls:
        return []
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ValueError(f"{where}: tool_calls is a list, not {type(calls).__name__}")
    read = []
    for index, call in enumerate(calls, start=1):
        function = call.get("function") if isinstance(call, Mapping) else None
        function = call if function is None else function
        if not isinstance(function, Mapping) or function.get("name") is None:
            raise ValueError(f"{where}, tool call {index}: an object with a function name is needed, not {call!r:.80}")
        read.append(Call(function["name"], function.get("arguments"), _as_text(call.get("id"))))
    return read


class CallTable:
    """The calls of the latest assistant message, and how many results were rendered since."""

    def __init__(self) -> None:
        self.calls: Sequence[Call] = ()
        self.results = 0

    def restart(self, calls: Sequence[Call]) -> None:
        """An assistant message begins a new count, also one without calls."""
        self.calls, self.results = calls, 0

    def label(self, message: Mapping[str, Any], where: str) -> tuple[object, int]:
        """Name and number of the next result. The number is its rendered position, not the call's.

        Raises:
            ValueError: neither the message nor a call at its position has a name.
        """
        self.results += 1
        name = message["tool"] if "tool" in message else message.get("name")
        if name is None and self.results <= len(self.calls):
            name = self.calls[self.results - 1].name
        if name is None:
            raise ValueError(f"{where}: the tool result has no name, and result {self.results} answers no call")
        return name, self.results


def sort_results(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Put each uninterrupted run of tool results into the order of the calls that they answer.

    A run is sorted, and its results take the names of their calls, if every one of its ids belongs to a call of the
    latest assistant message; otherwise it stays as it is.

    Args:
        messages: checked messages. They are not modified.
    """
    ordered: list[Mapping[str, Any]] = []
    run: list[Mapping[str, Any]] = []
    positions: dict[str, int] = {}
    calls: list[Call] = []
    for position, message in enumerate(messages):
        if message["role"] == "tool":
            run.append(message)
            continue
        ordered += _sorted_run(run, positions, calls)
        run = []
        ordered.append(message)
        if message["role"] == "assistant":
            calls = read_calls(message.get("tool_calls"), f"message {position}")
            positions = {}
            for index, call in enumerate(calls):
                if call.call_id is not None:
                    # An id used twice means its first call.
                    positions.setdefault(call.call_id, index)
    return ordered + _sorted_run(run, positions, calls)


def _sorted_run(
    run: Sequence[Mapping[str, Any]], positions: Mapping[str, int], calls: Sequence[Call]
) -> list[Mapping[str, Any]]:
    ids = [_result_id(message) for message in run]
    if any(each is None or each not in positions for each in ids):
        return list(run)
    answered = [positions[each] for each in ids if each is not None]
    pairs = sorted(zip(answered, run, strict=True), key=lambda pair: pair[0])
    return [_named(message, calls[position].name) for position, message in pairs]


def _named(message: Mapping[str, Any], name: object) -> Mapping[str, Any]:
    renamed = {**message, "tool": name}
    return {**renamed, "name": name} if "name" in message else renamed


def _result_id(message: Mapping[str, Any]) -> str | None:
    return _as_text(message["tool_call_id"] if "tool_call_id" in message else message.get("id"))


def _as_text(value: object) -> str | None:
    return None if value is None else str(value)
