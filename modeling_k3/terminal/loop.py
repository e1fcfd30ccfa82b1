"""The loop of `k3 chat`: read a line, obey a command or let the model answer."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from modeling_k3.chat import EFFORTS
from modeling_k3.chat_reader import ParsedCall
from modeling_k3.demo import UserError

from .screen import Screen
from .session import ChatSession
from .tools import Toolbox, load_tools

HELP = """\
/effort low|high|max|none  how much to think; none says nothing about it
/think on|off              with or without the think channel
/tools FILE|stub|none      declare tools from a JSON file: you are asked for
                           their results; the stub makes them up
/system TEXT               add a system message
/reset                     a new conversation
/status                    settings, messages, tokens in the cache
/help                      this list
/exit                      leave, like Ctrl-D
Ctrl-C stops an answer and keeps what was written. A line that ends with a
backslash goes on in the next one. A message that begins with a slash: type two."""
#: Rounds of tool calls before the user is asked again.
MAX_TOOL_ROUNDS = 8

Read = Callable[[str], str]


class ChatLoop:
    """Talks to the user.

    Args:
        session: the conversation.
        screen: shows it.
        toolbox: declared tools; must be those of the session.
        read: prompt to line; raises EOFError at the end of input.
    """

    def __init__(self, session: ChatSession, screen: Screen, toolbox: Toolbox, read: Read) -> None:
        self.session, self.screen, self.toolbox, self.read = session, screen, toolbox, read

    def run(self) -> None:
        """Until the user leaves."""
        while True:
            try:
                line = self._read_message("> ")
            except EOFError:
                return
            except KeyboardInterrupt:
                self.screen.note("(/exit or Ctrl-D leaves)")
                continue
            if not line.strip():
                continue
            if line.startswith("/") and not line.startswith("//"):
                if line.strip() in ("/exit", "/quit"):
                    return
                self._obey(line)
                continue
            before = len(self.session.messages)
            self.session.user(line.removeprefix("/") if line.startswith("//") else line)
            try:
                self._answer()
            except RuntimeError as error:
                # Out of memory, for one: the conversation is again what it was before the message.
                self.session.drop_from(before)
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                self.screen.error(f"no answer, your message was dropped: {reason}")

    def _read_message(self, prompt: str) -> str:
        lines = [self.read(prompt)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self.read(". "))
        return "\n".join(lines)

    def _answer(self) -> None:
        """Let the model answer, and go on while it calls tools."""
        for _ in range(MAX_TOOL_ROUNDS):
            with _interruptible() as was_interrupted:
                turn = self.session.reply(self.screen.show, was_interrupted)
            self.screen.end_turn(turn, was_interrupted=was_interrupted())
            calls = self.session.messages[-1].get("tool_calls", ())
            if not calls or was_interrupted():
                return
            for given, call in zip(calls, turn.output.tool_calls, strict=True):
                result = self.toolbox.answer(call, self._ask)
                self.screen.note(f"← {call.name}: {result}")
                self.session.result(given["id"], result)
        self.screen.note(f"({MAX_TOOL_ROUNDS} rounds of tool calls; your turn)")

    def _ask(self, call: ParsedCall) -> str:
        try:
            return self._read_message(f"result of {call.name}> ")
        except (EOFError, KeyboardInterrupt):
            return "error: no result was given"

    def _obey(self, line: str) -> None:
        name, _, argument = line.strip().partition(" ")
        command = getattr(self, f"_do_{name[1:]}", None)
        if command is None:
            self.screen.error(f"there is no command {name}; /help lists them")
            return
        try:
            command(argument.strip())
        except UserError as error:
            self.screen.error(str(error))

    def _do_help(self, argument: str) -> None:
        self.screen.note(HELP)

    def _do_effort(self, argument: str) -> None:
        if argument not in (*EFFORTS, "none"):
            raise UserError(f"effort {argument!r} is not allowed; allowed: {', '.join(EFFORTS)}, none")
        effort = None if argument == "none" else argument
        self.session.configure(replace(self.session.settings, effort=effort))
        self.screen.note(f"effort: {argument}" + ("" if self.session.settings.thinking else " (thinking is off)"))

    def _do_think(self, argument: str) -> None:
        if argument not in ("on", "off"):
            raise UserError(f"think {argument!r} is not allowed; allowed: on, off")
        self.session.configure(replace(self.session.settings, thinking=argument == "on"))
        self.screen.note(f"thinking: {argument}")

    def _do_tools(self, argument: str) -> None:
        self.toolbox = load_tools(None if argument in ("", "none") else argument)
        self.session.configure(tools=self.toolbox.declarations)
        self.screen.note(f"tools: {len(self.toolbox.declarations)}")

    def _do_system(self, argument: str) -> None:
        if not argument:
            raise UserError("/system needs a text")
        self.session.system(argument)
        self.screen.note("added")

    def _do_reset(self, argument: str) -> None:
        self.session.reset()
        self.screen.note("a new conversation")

    def _do_status(self, argument: str) -> None:
        settings = self.session.settings
        self.screen.note(
            f"thinking {'on' if settings.thinking else 'off'}, effort {settings.effort or 'none'}, "
            f"at most {settings.max_new_tokens} tokens a turn, {len(self.session.tools)} tools, "
            f"{len(self.session.messages)} messages, {self.session.cached_tokens} tokens in the cache"
        )


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C ends an answer between two tokens, so that the cache stays whole; a second one is not waited for."""
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
