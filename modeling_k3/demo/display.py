"""What is seen while the demo works."""

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .train import Tick


class Display:
    """A progress bar with live figures; where there is no terminal, a line for each look at held-out text."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, figures="")
        self._held_out: float | None = None
        self._rate: float | None = None

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, what: str) -> Callable[[float], None]:
        """Announce a stage. Returns what to call with the share of it that is done."""
        if not self.console.is_terminal:
            self.console.print(what)
        self._bar.reset(self._task, total=1.0, description=what, figures="")
        return lambda share: self._bar.update(self._task, completed=share)

    def tick(self, tick: Tick) -> None:
        """Show a training step."""
        self._rate = tick.tokens_per_second if self._rate is None else 0.9 * self._rate + 0.1 * tick.tokens_per_second
        if tick.held_out_bits is not None:
            self._held_out = tick.held_out_bits
        held_out = "" if self._held_out is None else f", held out [bold]{self._held_out:.2f}[/bold]"
        figures = f"train {tick.train_bits:.2f}{held_out} bits/byte, {self._rate:,.0f} tokens/s"
        if self.console.is_terminal:
            self._bar.update(
                self._task, total=1.0, completed=tick.share, description=f"step {tick.step:,}", figures=figures
            )
        elif tick.held_out_bits is not None:
            self.console.print(
                f"{tick.share:4.0%}  {tick.elapsed:5.0f} s  step {tick.step:,}  {figures}", soft_wrap=True
            )
