"""The chat loop run on lines that are given instead of typed."""

from collections.abc import Iterator

from rich.console import Console

from modeling_k3.terminal.loop import ChatLoop
from modeling_k3.terminal.screen import Screen
from modeling_k3.terminal.session import ChatSession
from modeling_k3.terminal.tools import Toolbox


def talk(session: ChatSession, lines: list[str], toolbox: Toolbox | None = None, *, with_styles: bool = False) -> str:
    """Run the loop on given lines; returns what was shown."""
    color = "standard" if with_styles else None
    console = Console(width=100, force_terminal=with_styles or None, color_system=color, highlight=False)
    toolbox = toolbox or Toolbox()
    session.configure(tools=toolbox.declarations)
    waiting: Iterator[str] = iter(lines)

    def read(prompt: str) -> str:
        for line in waiting:
            return line
        raise EOFError

    with console.capture() as captured:
        ChatLoop(session, Screen(console), toolbox, read).run()
    return captured.get()
