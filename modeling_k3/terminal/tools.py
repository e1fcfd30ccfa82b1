"""Tools in the terminal: declarations from a file or a stub, and where results come from."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modeling_k3.chat_reader import ParsedCall
from modeling_k3.demo import UserError

#: Name that stands for the tool below in place of a file.
STUB = "stub"
_STUB_DECLARATION = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city."}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class Toolbox:
    """Declared tools.

    Args:
        declarations: JSON schemas.
        is_stub: results are made up here; otherwise the user is asked for them.
    """

    declarations: tuple[Mapping[str, Any], ...] = ()
    is_stub: bool = False

    def answer(self, call: ParsedCall, ask: Callable[[ParsedCall], str]) -> str:
        """The result of a call: made up by the stub, or what `ask` returns."""
        if not self.is_stub:
            return ask(call)
        if call.name != _STUB_DECLARATION["function"]["name"]:
            return json.dumps({"error": f"there is no tool {call.name}"}, ensure_ascii=False)
        return json.dumps({"temperature_celsius": 21, "sky": "clear", "note": "made up by the stub"})


def load_tools(source: str | None) -> Toolbox:
    """Read declarations.

    Args:
        source: file with a JSON list of tool schemas, "stub", or None for no tools.

    Raises:
        UserError: the file cannot be read, or holds no list of objects.
    """
    if source is None:
        return Toolbox()
    if source == STUB:
        return Toolbox((_STUB_DECLARATION,), is_stub=True)
    try:
        declarations = json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"tools {source}: {error}. Expected is a JSON file, or {STUB!r}.") from error
    if not isinstance(declarations, Sequence) or not all(isinstance(each, dict) for each in declarations):
        raise UserError(f"tools {source}: expected is a list of tool schemas, each an object.")
    return Toolbox(tuple(declarations))
