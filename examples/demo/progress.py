"""Progress of a run: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any, Self

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Shows tokens per second, the loss and the time left; `rich` draws it where it is installed."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.first, self.tokens = total, done, 0
        self.started = self.shown = time.perf_counter()
        self.bar: Any = _bar() if sys.stdout.isatty() else None
        # no total yet: the bar swings to and fro while the first step compiles
        self.task = self.bar.add_task("train", total=None, facts="compiling") if self.bar else None

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()

    def update(self, step: int, loss: float, tokens: int) -> None:
        """After `step` steps, the last of which took `tokens` tokens."""
        now = time.perf_counter()
        if step == self.first + 1:
            # the first step compiles, which says nothing about the others
            self.started = self.shown = now
        else:
            self.tokens += tokens
        taken = now - self.started
        left = taken / max(step - self.first - 1, 1) * (self.total - step)
        facts = f"{self.tokens / max(taken, 1e-9):8,.0f} tokens/s   loss {loss:.3f} bits/byte"
        if self.bar:
            self.bar.update(self.task, total=self.total, completed=step, facts=facts)
        elif step == self.total or now - self.shown > SECONDS_BETWEEN_LINES:
            self.shown = now
            print(f"step {step:5d}/{self.total}   {facts}   {left:4.0f} s left", flush=True)


def _bar() -> Any:
    try:
        from rich import progress
    except ImportError:
        return None
    columns = ("[progress.percentage]{task.percentage:>3.0f}%", "{task.fields[facts]}")
    return progress.Progress(progress.BarColumn(), *columns, progress.TimeRemainingColumn())
