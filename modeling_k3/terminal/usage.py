"""What is wrong with a command line is one line, like every other error of `k3`; and help has room for its words."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup, TyperOption
from typer.exceptions import TyperException

_SHORT = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH", list[Path]: "PATH"}
# Of the library that checks values.
_CLUMSY = {"such option: ": "such option ", "Value error, ": "", "Input should be": "it should be"}


class Commands(TyperGroup):
    """A group whose usage errors say, in one line, which command, what is wrong, and where to read on."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Parse and run, then leave with the exit code; see the base class."""
        shorten(self)
        try:
            code = super().main(args, *rest, standalone_mode=False, **extra)
        except TyperException as error:
            if not standalone_mode:
                raise
            words = " ".join(error.format_message().split())
            # Without words it is the help, which has been printed.
            if words:
                typer.echo(f"error: {as_line(words, self.named(args))}", err=True)
            code = error.exit_code
        if standalone_mode:
            sys.exit(code or 0)
        return code

    def named(self, args: Sequence[str] | None) -> str:
        """The command that a command line begins with, such as `k3 convert flat`."""
        group, path = self, [self.name or ""]
        for word in sys.argv[1:] if args is None else args:
            if not isinstance(group, TyperGroup) or word not in group.commands:
                break
            group = group.commands[word]
            path.append(word)
        return " ".join(path)


def as_line(words: str, command: str) -> str:
    """`k3 plan: no such option --bugdet (Possible options: --budget); see k3 plan --help`."""
    for clumsy, plain in _CLUMSY.items():
        words = words.replace(clumsy, plain)
    words = words.rstrip(".")
    return f"{command}: {words[0].lower()}{words[1:]}{' See' if words.endswith('?') else '; see'} {command} --help"


def shorten(group: TyperGroup) -> None:
    """Name the values of all options by a letter or a word, so that what is said of them has room at 80 columns."""
    for command in (group, *group.commands.values()):
        if isinstance(command, TyperGroup) and command is not group:
            shorten(command)
        for option in (*command.params, command.get_help_option(typer.Context(command))):
            if isinstance(option, TyperOption) and option.metavar is None:
                option.metavar = _SHORT.get(option.type_descriptor.annotation)
