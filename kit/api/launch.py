"""The Python face: `kit.train(...)` starts a run in a process of its own and returns a `kit.api.run.Run`. No torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.api.run import Run
from kit.errors import RunError
from kit.runner.prepare import resolve_config
from kit.runs.store import RunDir, RunStore
from kit.runs.supervisor import cut_short, detach, settle, supervise
from kit.runs.worker import DONE, Outcome

if TYPE_CHECKING:
    from kit.config import RunConfig

TRAINER = "kit.train"


def train(
    config: str | Path | Mapping[str, Any] | RunConfig = "quickstart",
    *,
    overrides: Sequence[str] = (),
    progress: bool = True,
    **shortcuts: Any,
) -> Run:
    """Trains in a process of its own, waits for it, and returns the run, finished or stopped by Ctrl-C.

    Args:
        config: a preset's name, a YAML file, a mapping, or a `RunConfig`.
        overrides: `section.key=value` strings, as on the command line.
        progress: let the process print its progress; in a notebook, show a card that follows the run.
        shortcuts: `steps` (optimiser steps), `seed`, `objective` (a recipe's name, or a mapping like the objective
            section; either way it takes the place of the whole section), `run_id`.

    Raises:
        KitError: the kind of error that the user made, before or during the run.
        RunError: the training process crashed.
    """
    run, outcome = launch(resolve_config(config, overrides, **shortcuts), quiet=not progress)
    if outcome.error is not None:
        raise outcome.error
    if run is None:
        raise RunError("The run was stopped before it had begun; nothing was written.")
    return run


def launch(config: RunConfig, *, quiet: bool = False) -> tuple[Run | None, Outcome]:
    """Runs a prepared configuration, and says how it ended; the run is None when it never got a directory."""
    assert config.run.id is not None, "resolve_config() gives every run an id"
    folder = RunDir(Path(config.run.root) / config.run.id)
    request = {"config": config.model_dump(mode="json")}
    make = functools.partial(_make, config)
    try:
        with _shown(folder, quiet or folder.path.exists()) as on_line:  # a taken id is refused, and its run is another
            outcome = supervise(
                folder, request, module=TRAINER, quiet=quiet, on_message=on_line or _tell, make=make, on_line=on_line
            )
    except BaseException as error:
        if request.get("adopt"):  # the directory was made here
            settle(folder, None, cut_short(error))
        raise
    try:
        return Run(config.run.id, config.run.root), outcome
    except RunError:
        return None, outcome


def start(
    config: str | Path | Mapping[str, Any] | RunConfig = "quickstart",
    *,
    overrides: Sequence[str] = (),
    **shortcuts: Any,
) -> Run:
    """Like `train`, but returns at once: the run goes on by itself, also when this process or its terminal ends.

    Follow it by the returned `Run`: `.status`, `.metrics()`, `.wait()`, `.stop()`. Mistakes that show only when data and
    model are read end the run as `failed`, with the reason; those of the configuration itself raise `ConfigError`.
    """
    resolved = resolve_config(config, overrides, **shortcuts)
    folder = _make(resolved)
    detach(folder, {"config": resolved.model_dump(mode="json")}, module=TRAINER)
    return Run(folder.id, resolved.run.root)


def _make(config: RunConfig) -> RunDir:
    """The directory of a new run, for a training process to adopt."""
    assert config.run.id is not None, "resolve_config() gives every run an id"
    return RunStore(config.run.root).create(
        config.run.id, config=config.to_yaml(), step=0, total_steps=config.optimisation.steps, face=True
    )


def resume(
    run_id: str, root: str | Path = "runs", *, force: bool = False, detach: bool = False, overrides: Sequence[str] = ()
) -> Run:
    """Goes on with a run that was stopped, interrupted or failed, in its directory, from its last whole checkpoint.

    Where no checkpoint had been saved yet it starts again from the beginning, with its id, configuration and seed.

    Args:
        run_id: the run.
        root: folder that holds all runs.
        force: also where data, configuration or packages have changed in a way that matters; the run records it.
        detach: return at once, as `start` does.
        overrides: `section.key=value` strings; most of them change the run, and are refused without `force`.

    Raises:
        RunError: there is no such run, it is live, or it has finished.
        KitError: it may not go on, with the reason.
    """
    run, outcome = relaunch(run_id, root, force=force, detached=detach, overrides=overrides)
    if outcome.error is not None:
        raise outcome.error
    return run


def relaunch(
    run_id: str,
    root: str | Path = "runs",
    *,
    force: bool = False,
    detached: bool = False,
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> tuple[Run, Outcome]:
    """Resumes a run and returns it with its outcome. Raises `RunError` where there is nothing to go on with."""
    from kit.config import load_config

    run = Run(run_id, root)
    folder = RunDir(run.path)
    if not folder.config.is_file():
        raise RunError(
            f"{folder.path} has no config.yaml, so how the run was configured is not known. Bring it back, or remove the folder "
            f"and start it again with: grpo-kit train CONFIG --run-id {run_id}"
        )
    config = load_config(folder.config, overrides)
    longer = config.optimisation.steps > load_config(folder.config).optimisation.steps
    # The training process refuses that, too, but whoever does not wait for it would not hear of it.
    if run.status["state"] == "finished" and not longer and (detached or not (overrides or force)):
        raise RunError(
            f"The run '{run_id}' has finished, with step {run.status.get('step')}; there is nothing to resume. "
            f"Start another from its configuration with: grpo-kit train {folder.config} -o run.id=NAME"
        )
    config.run.id, config.run.root = run_id, str(root)
    request = {"config": config.model_dump(mode="json"), "resume": True, "force": force, "adopt": True}
    folder.claim("starting", face=True)
    try:
        if detached:
            detach(folder, request, module=TRAINER)
            return run, Outcome(DONE)
        with _shown(folder, quiet) as on_line:
            return run, supervise(
                folder, request, module=TRAINER, quiet=quiet, on_message=on_line or _tell, on_line=on_line
            )
    except BaseException as error:
        settle(folder, None, cut_short(error))
        raise


def _shown(run: RunDir, quiet: bool) -> AbstractContextManager[Callable[[str], None] | None]:
    """Shows a card of the run below a notebook's cell, and yields a function for what the run prints; else nothing."""
    from kit.api.notebook import in_notebook, shown

    return shown(run) if in_notebook() and not quiet else nullcontext()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
