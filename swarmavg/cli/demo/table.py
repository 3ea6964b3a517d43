"""What a person sees of a running demo: a live table, or plain lines for logs. The same reports feed both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.live import Live
from rich.table import Table

from swarmavg.cli.demo.messages import FromChild, Progress, Ready, TrainedAlone, TrainedTogether
from swarmavg.cli.demo.session import Listener, Plan

COLUMNS = ("", "digits", "stage", "step", "epoch", "loss", "group", "MB/s", "accuracy", "alone")
_DIGITS = 10
_SELF_EXPLAINING = {"", "stage"}


@dataclass(slots=True)
class Row:
    """The latest word of one child."""

    name: str
    stage: str = "starting"
    digits: Sequence[int] = ()
    last: Progress | None = None
    alone: float | None = None
    accuracy: float | None = None
    joins: bool = True
    """Whether it goes on with the swarm after training alone."""

    def take(self, message: FromChild) -> None:
        match message:
            case Ready():
                self.digits, self.stage = message.digits, "alone"
            case Progress():
                self.last, self.accuracy = message, message.accuracy
                self.stage = "alone" if message.group is None else "together"
            case TrainedAlone():
                self.alone = message.accuracy
                self.stage = "joining" if self.joins else "done"
            case TrainedTogether():
                self.stage, self.accuracy = "done", message.accuracy

    def landmark(self, steps: int) -> tuple[str, int]:
        """Stage, and tenths of it that are done."""
        return self.stage, self.last.step * 10 // steps if self.last else 0

    def cells(self, steps: int) -> tuple[str, ...]:
        """One text per column; empty where nothing is known yet."""
        last = self.last
        return (
            self.name,
            "".join(str(digit) for digit in self.digits) if len(self.digits) < _DIGITS else "all",
            self.stage,
            f"{last.step}/{steps}" if last else "",
            f"{last.epoch}" if last else "",
            f"{last.loss:.3f}" if last else "",
            f"{last.group}" if last and last.group else "",
            f"{last.megabytes_per_second:.1f}" if last and last.megabytes_per_second else "",
            f"{self.accuracy:.1%}" if self.accuracy is not None else "",
            f"{self.alone:.1%}" if self.alone is not None else "",
        )


@contextmanager
def display(plan: Plan, *, live: bool) -> Iterator[Listener]:
    """Show a run, for as long as the context lasts."""
    rows = [Row(f"peer {number}") for number in range(plan.peers)] + [Row("all data", joins=False)]
    if live:
        with Live(_table(rows, plan.steps), auto_refresh=False) as screen:
            yield lambda number, message: _redraw(screen, rows, plan.steps, number, message)
    else:
        yield lambda number, message: _print_line(rows[number], plan.steps, message)


def _redraw(screen: Live, rows: Sequence[Row], steps: int, number: int, message: FromChild) -> None:
    rows[number].take(message)
    screen.update(_table(rows, steps), refresh=True)


def _print_line(row: Row, steps: int, message: FromChild) -> None:
    """One line at each change of stage, and each time that another tenth of the steps is done."""
    before = row.landmark(steps)
    row.take(message)
    if row.landmark(steps) == before:
        return
    print(_line(row.cells(steps)), flush=True)


def _line(cells: Sequence[str]) -> str:
    named = zip(COLUMNS, cells, strict=True)
    return "  ".join(cell if column in _SELF_EXPLAINING else f"{column} {cell}" for column, cell in named if cell)


def _table(rows: Sequence[Row], steps: int) -> Table:
    table = Table(
        title="peers that each see only some digits learn all of them", box=None, padding=(0, 1, 0, 0), pad_edge=False
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in {"", "digits", "stage"} else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.cells(steps))
    return table
