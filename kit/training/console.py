"""What a person sees of a run: phases, bars with ETA on a terminal, plain lines elsewhere, and the closing table."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

log = logging.getLogger("kit")
LINES = 10
"""Progress lines that a piece of long work prints where there is no terminal."""


class Advance(Protocol):
    """Reports progress: so much done of so much, with a short note."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class Reporter:
    """Prints to the terminal and, in plain text, to the run's log. `quiet` leaves the log only."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """One line, for the person and for the log."""
        self.console.print(escape(text))
        log.info(text)

    @contextmanager
    def bar(self, title: str) -> Iterator[Advance]:
        """Progress of one piece of long work, with ETA: a live bar on a terminal, about ten lines elsewhere."""
        if self.console.is_terminal and not self.console.quiet:
            with self._live(title) as advance:
                yield advance
        else:
            yield self._lines(title)

    @contextmanager
    def _live(self, title: str) -> Iterator[Advance]:
        parts = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
        )
        with Progress(*parts, console=self.console) as progress:
            task = progress.add_task(escape(title), total=None, note="")

            def advance(done: int, total: int, note: str = "") -> None:
                progress.update(task, completed=done, total=total, note=escape(note))

            yield advance

    def _lines(self, title: str) -> Advance:
        started, shown = time.perf_counter(), 0

        def advance(done: int, total: int, note: str = "") -> None:
            nonlocal shown
            share = done * LINES // max(total, 1)
            if share <= shown and done != total:
                return
            shown = share
            elapsed = time.perf_counter() - started
            eta = elapsed / max(done, 1) * (total - done)
            self.console.print(escape(f"{title}  {done}/{total}  {clock(elapsed)}  eta {clock(eta)}  {note}".rstrip()))

        return advance

    def scores(self, scores: Mapping[str, Mapping[str, Any]]) -> None:
        """The before/after table of held-out scores, with 95 % intervals."""
        table = Table(title="Held-out score (95 % interval)", title_justify="left", header_style="bold")
        table.add_column("")
        for name in scores:
            table.add_column(name)
        for row in rows_of(scores):
            table.add_row(*row)
        self.console.print(table)
        for name, score in scores.items():
            log.info("%s: %s", name, {key: value for key, value in score.items() if key != "samples"})

    def samples(self, title: str, samples: list[dict[str, Any]], limit: int = 3) -> None:
        """A few completions as they came."""
        self.console.print(f"\n[bold]{escape(title)}[/bold]")
        for sample in samples[:limit]:
            self.console.print(f"  [dim]{escape(shorten(sample['prompt'], 100))}[/dim]")
            reward = "" if sample["reward"] is None else f"   reward {sample['reward']:.2f}"
            text = escape(shorten(sample["completion"], 160))
            self.console.print(f"  {text}{reward}   (reference {escape(str(sample['reference']))})")

    def closing(self, folder: Path, hints: list[str]) -> None:
        """Where everything lies and what to try next."""
        self.console.print(f"\nEverything of this run lies in [bold]{escape(str(folder))}[/bold]")
        for hint in hints:
            self.console.print(f"  {escape(hint)}")


def rows_of(scores: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Cells of the score table: a label and one text a column of `scores`."""
    keys = [key for key in next(iter(scores.values()), {}) if key.startswith(("greedy_", "pass@"))]
    rows = [[key.replace("_", " "), *(interval(score[key]) for score in scores.values())] for key in keys]
    rows.append(["completion tokens", *(f"{score['completion_tokens_mean']:.1f}" for score in scores.values())])
    rows.append(["cut at the limit", *(f"{score['truncated_share']:.1%}" for score in scores.values())])
    return rows


def interval(estimate: Mapping[str, float]) -> str:
    """`0.430 [0.363, 0.499]`."""
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def shorten(text: str, limit: int) -> str:
    """One line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def clock(seconds: float) -> str:
    """`1:05` or `2:03:10`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
