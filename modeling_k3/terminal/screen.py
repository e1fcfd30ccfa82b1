"""What a conversation looks like in the terminal."""

from rich.console import Console
from rich.text import Text

from modeling_k3.chat_reader import Event, ParsedOutput

from .session import Turn

# What a model writes must not steer the terminal: control characters are shown as their pictures.
_VISIBLE: dict[int, int | str] = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
# Nor may it turn the order of what is read, or break lines where none ends: those characters are shown as escapes.
_VISIBLE |= {code: f"\\u{code:04x}" for code in (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_STYLES = {"reasoning": "dim", "content": "", "tool_call": "cyan"}


class Screen:
    """Shows a conversation.

    Args:
        console: where.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._kind: str | None = None
        self._is_line_open = False

    def show(self, event: Event) -> None:
        """Show what the model just wrote: reasoning dimmed, the answer plain, a call on a line of its own."""
        if event.kind != self._kind:
            self._end_line()
            self._kind = event.kind
        text = event.text
        if event.call is not None:
            self._end_line()
            text = f"→ {event.call.name}({event.call.arguments})\n"
        self._write(text, _STYLES[event.kind])

    def end_turn(self, turn: Turn, *, was_interrupted: bool) -> None:
        """Say how the turn went."""
        self._end_line()
        self._kind = None
        speed = turn.new_tokens / max(turn.seconds, 1e-9)
        notes = [
            f"{turn.new_tokens} tokens, {speed:.1f}/s",
            f"prompt {turn.prompt_tokens}, {turn.reused_tokens} from the cache",
            *_remarks(turn.output, was_interrupted),
        ]
        self.note(f"[{'; '.join(notes)}]")

    def note(self, text: str) -> None:
        """A remark of the program itself."""
        self._end_line()
        self._write(f"{text}\n", "dim italic")

    def error(self, text: str) -> None:
        """Something the user can put right."""
        self._end_line()
        self._write(f"{text}\n", "red")

    def _write(self, text: str, style: str) -> None:
        if text:
            self.console.print(Text(text.translate(_VISIBLE), style=style), end="", soft_wrap=True)
            self._is_line_open = not text.endswith("\n")

    def _end_line(self) -> None:
        if self._is_line_open:
            self._write("\n", "")


def _remarks(output: ParsedOutput, was_interrupted: bool) -> list[str]:
    if was_interrupted:
        return [f"stopped inside {output.open}" if output.open else "stopped"]
    if not output.complete:
        return [f"cut off inside {output.open}: more tokens may be needed" if output.open else "cut off"]
    return [] if output.well_formed else ["the output did not follow the format and was repaired"]
