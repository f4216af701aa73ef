"""The Python interface: `train`, `start` and `resume`, which return a `Run`, the handle on a run. Imports no torch.

A `Run` holds only the path of the run's directory, which has all data, so it can be created again at any time:
`kit.Run("quickstart-20260101-120000").plot()`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit import launch as launching
from kit.errors import ConfigError, RunError, refuse
from kit.runner.prepare import resolve_config
from kit.runs.store import ALIVE, RunDir, RunStore
from kit.runs.worker import call_for_result

if TYPE_CHECKING:
    from kit.config import RunConfig
    from kit.report.charts import Figure

POLL_SECONDS = 0.2
EVALUATOR = "kit.runner.evaluate"


def train(
    config: str | Path | Mapping[str, Any] | RunConfig = "quickstart",
    *,
    overrides: Sequence[str] = (),
    progress: bool = True,
    **shortcuts: Any,
) -> Run:
    """Trains in a separate process, waits for it, and returns the run, finished or stopped by Ctrl-C.

    Args:
        config: a preset's name, a YAML file, a mapping, or a `RunConfig`.
        overrides: `section.key=value` strings, as on the command line.
        progress: let the process print its progress; in a notebook, show a card that follows the run.
        shortcuts: `steps` (optimiser steps), `seed`, `objective` (a recipe's name, or a mapping like the objective
            section; either replaces the whole section), `run_id`.

    Raises:
        KitError: an error that the user can correct, before or during the run.
        RunError: the training process crashed.
    """
    resolved = resolve_config(config, overrides, **shortcuts)
    outcome = launching.launch(resolved, quiet=not progress)
    if outcome.error is not None:
        raise outcome.error
    try:
        return Run(str(resolved.run.id), resolved.run.root)
    except RunError:
        raise RunError("The run was stopped before it began; nothing was written.") from None


def start(
    config: str | Path | Mapping[str, Any] | RunConfig = "quickstart",
    *,
    overrides: Sequence[str] = (),
    **shortcuts: Any,
) -> Run:
    """Starts a run like `train`, but returns at once. The run continues if this process or its terminal ends.

    Follow the run with the returned `Run`: `.status`, `.metrics()`, `.wait()`, `.stop()`. Errors in the configuration raise
    `ConfigError`; errors in the data or the model end the run as `failed`, with the reason.
    """
    resolved = resolve_config(config, overrides, **shortcuts)
    return Run(launching.launch_detached(resolved).id, resolved.run.root)


def resume(
    run_id: str, root: str | Path = "runs", *, force: bool = False, detach: bool = False, overrides: Sequence[str] = ()
) -> Run:
    """Continues a run that was stopped, was interrupted or failed, in its directory, from its last complete checkpoint.

    A run without a checkpoint starts again from the beginning, with its id, configuration and seed.

    Args:
        run_id: id of the run.
        root: folder that holds all runs.
        force: resume although data, configuration or packages have changed in a way that matters; the run records it.
        detach: return at once, as `start` does.
        overrides: `section.key=value` strings; those that change results are refused without `force`.

    Raises:
        RunError: no run has this id, or the run is live or finished.
        KitError: the run cannot be resumed; the message has the reason.
    """
    outcome = launching.relaunch(run_id, root, force=force, detached=detach, overrides=overrides)
    if outcome.error is not None:
        raise outcome.error
    return Run(run_id, root)


class Run:
    """The handle on a run, live or ended. Raises `RunError` if no run has this id."""

    def __init__(self, id: str, root: str | Path = "runs") -> None:
        self._dir: RunDir = RunStore(root).open(id)
        self.id = id

    def __repr__(self) -> str:
        status = self.status
        step, total = status.get("step"), status.get("total_steps")
        parts = [self.id, str(status["state"])]
        if step is not None:
            parts.append(f"step {step}/{total}" if total else f"step {step}")
        rewards = [line["reward"] for line in self.metrics() if line.get("reward") is not None]
        if rewards:
            parts.append(f"reward {rewards[-1]:.3f}")
        return f"<Run {', '.join(parts)}, in {self.path}>"

    def _repr_html_(self) -> str:
        """The run's card in a notebook: state, main figures, curves and held-out scores."""
        from kit.report.run_report import card

        return card(self._dir)

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self._dir.path

    @property
    def status(self) -> dict[str, Any]:
        """State, step, heartbeat and so on. The state of a run whose process died is `interrupted`."""
        return self._dir.status()

    def metrics(self) -> list[dict[str, Any]]:
        """One mapping per logged step, oldest first."""
        return self._dir.metrics()

    def events(self) -> list[dict[str, Any]]:
        """Phases, checkpoints and alerts, oldest first."""
        return self._dir.events()

    def evaluations(self) -> dict[str, dict[str, Any]]:
        """Held-out scores by name: `before`, `step-00050` and so on, `after`, then any others."""
        return self._dir.evaluations()

    def completions(self, step: int | None = None) -> list[dict[str, Any]]:
        """Saved completions with their rewards, of one step or of all steps; empty if none were saved."""
        import pyarrow.parquet as pq

        rows: list[dict[str, Any]] = []
        for path in sorted(self._dir.completions.glob("*.parquet")):
            try:
                rows += pq.read_table(path).to_pylist()
            except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
                raise RunError(f"{path} cannot be read: {error}.") from error
        return rows if step is None else [row for row in rows if row.get("step") == step]

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draws reward, held-out accuracy, completion length, KL and entropy over steps, as far as the run has logged them.

        A notebook shows the SVG picture; `path` (.svg) saves it. Raises `RunError` if there is nothing to draw yet.
        """
        from kit.report.charts import draw

        return draw(self.id, self.metrics(), self.evaluations(), path)

    def wait(self, timeout: float | None = None) -> Run:
        """Waits until the run has ended, in whatever state.

        Raises `RunError` if the run has not ended after `timeout` seconds, or if a `resume` of it was refused.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (state := self._dir.settled()["state"]) in ALIVE:
            if end is not None and time.monotonic() >= end:
                raise RunError(f"The run '{self.id}' is still {state} after {timeout:g} s; it continues.")
            time.sleep(POLL_SECONDS)
        if (refused := self.status.get("refused")) is not None:
            raise RunError(f"The run '{self.id}' was not resumed and is still {state}: {refused}")
        return self

    def watch(self) -> None:
        """Shows the run live in a notebook until it has ended. Interrupting the cell does not stop the run."""
        from kit.report.live import watch

        watch(self._dir)

    def stop(self, timeout: float | None = None, *, now: bool = False) -> dict[str, Any]:
        """Stops the run after its current step, with a checkpoint; waits, and returns the last status.

        Args:
            timeout: seconds after which the process is terminated; None: wait as long as it takes.
            now: stop without finishing the step; the steps since the last checkpoint are lost.

        Raises:
            RunError: the run's process is on another machine or belongs to another user.
        """
        from kit.runs.stopping import stop

        return stop(self._dir, timeout=timeout, now=now)

    def report(self, path: str | Path | None = None, *, completions: bool = True) -> Path:
        """Writes the run's report, one self-contained HTML file, and returns its path (default: `report.html` in the run).

        Works in any state; the report names missing or damaged files. `completions=False` leaves out the samples, which
        contain rows of the data. Raises `RunError` if the file cannot be written.
        """
        from kit.report.run_report import write_report

        return write_report(self._dir, path, completions=completions)

    def evaluate(
        self,
        *,
        checkpoint: str | int | None = None,
        name: str = "again",
        changes: Sequence[str] = (),
        progress: bool = False,
        **overrides: Any,
    ) -> dict[str, Any]:
        """Scores the trained model on held-out rows again, in a separate process, and returns the scores.

        Args:
            checkpoint: `best`, `last` or a step; None is the run's result in adapter/.
            name: the scores are written to eval/NAME.json.
            changes: `section.key=value` strings of the sections evaluation and generation.
            progress: let the process print its progress and the table of scores.
            overrides: keys of the configuration's evaluation section: `run.evaluate(prompts=50, k=8)`.

        Raises:
            KitError: an error that the user can correct.
            RunError: the process crashed or was stopped.
        """
        from kit.config import load_config

        all_changes = [*changes, *(f"evaluation.{key}={json.dumps(value)}" for key, value in overrides.items())]
        other = [c for c in all_changes if c.partition(".")[0].strip() not in ("evaluation", "generation")]
        refuse(
            ConfigError,
            (
                bool(other),
                f"{', '.join(other)}: an evaluation of existing weights can only change keys of the sections evaluation and "
                "generation.",
                "Write evaluation.k=8, for example; for other keys train a new run.",
            ),
            (
                not re.fullmatch(r"(?!before$|after$|step-)[a-z0-9][a-z0-9-]{0,63}", name),
                f"An evaluation cannot be called '{name}'.",
                "Use 1 to 64 lower-case letters, digits and dashes; before, after and step-... are reserved for the run.",
            ),
        )
        if not self._dir.config.is_file():
            raise RunError(f"Run '{self.id}' has no config.yaml yet, so there is nothing to evaluate.")
        load_config(self._dir.config, all_changes)
        request = {
            "run_dir": str(self.path.resolve()),
            "overrides": all_changes,
            "checkpoint": checkpoint,
            "name": name,
        }
        stopped = f"The evaluation of {self.id} was stopped before it had a result."
        return call_for_result(EVALUATOR, request, stopped, quiet=not progress)

    def export(
        self,
        to: str,
        *,
        out: str | Path | None = None,
        checkpoint: str | int | None = None,
        progress: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Writes the trained model in another format and compares it with the trained weights.

        Runs in a separate process. The result is also written to export/FORMAT.json.

        Args:
            to: `adapter`, `merged_16bit`, `gguf` or `ollama`.
            out: the folder; None is export/FORMAT in the run's directory.
            checkpoint: `best`, `last` or a step; None is the run's result, or the last checkpoint of a live run.
            progress: let the process print what it does.
            options: force, dtype, quantization, prompts, seed, verify, base, llama_cpp, as in `grpo-kit export --help`.

        Raises:
            NotVerified: the export differs from the trained weights; a `RunError` with the figures in `result`.
            KitError: an error that the user can correct, a full disk, or a process that died.
        """
        from kit.export.request import ExportRequest, export

        return export(self._dir, ExportRequest(to, out=out, checkpoint=checkpoint, **options), progress=progress)

    def chat(self, prompt: str | None = None, *, checkpoint: str | int | None = None, **options: Any) -> dict[str, Any]:
        """Asks base model and tuned model one question with one seed; returns `{prompt, reference, base, tuned}`.

        Each answer is a mapping of text, tokens, finish (`stop`, `length`), seconds and reward. For several questions use
        `kit.chat.client.open_chat`, a session that keeps the models loaded.

        Args:
            prompt: the question; or pass `heldout=N` for the N-th held-out prompt.
            checkpoint: `best`, `last` or a step; None is the run's result.
            options: heldout, reference (the correct answer, for the reward), sides, seed, temperature (0: greedy), top_p,
                top_k, min_p, max_tokens. The run's own settings are the defaults.

        Raises:
            KitError: an error that the user can correct, or a process that died.
        """
        from kit.chat.client import open_chat

        with open_chat(self._dir, checkpoint) as session:
            return session.answer(prompt, **options)
