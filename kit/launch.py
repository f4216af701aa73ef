"""Start runs as processes and report how they ended, for `kit.api`, the command line and studies. Imports no torch."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import RunError
from kit.runs.store import RunDir, RunStore
from kit.runs.supervisor import cut_short, detach, settle, supervise
from kit.runs.worker import DONE, Outcome

if TYPE_CHECKING:
    from kit.config import RunConfig

TRAINER = "kit.train"


def launch(config: RunConfig, *, quiet: bool = False) -> Outcome:
    """Trains with a resolved configuration, waits, and returns how the run ended.

    Removes the directory if the run ended before the training process adopted it, usually because of an error of the user.
    """
    folder = create_run(config)
    outcome = _supervise(folder, {"config": config.model_dump(mode="json")}, quiet)
    record = folder.record()
    if record and not record.get("adopted") and not folder.metrics_file.exists():
        shutil.rmtree(folder.path, ignore_errors=True)
    return outcome


def launch_detached(config: RunConfig) -> RunDir:
    """Starts a run with a resolved configuration and returns at once. The run continues if this process ends."""
    folder = create_run(config)
    detach(folder, {"config": config.model_dump(mode="json")}, module=TRAINER)
    return folder


def create_run(config: RunConfig) -> RunDir:
    """Creates the directory of a new run, for a training process to adopt. Raises `RunError` if the id is taken."""
    assert config.run.id is not None, "resolve_config() gives every run an id"
    return RunStore(config.run.root).create(
        config.run.id, config=config.to_yaml(), step=0, total_steps=config.optimisation.steps, face=True
    )


def relaunch(
    run_id: str,
    root: str | Path = "runs",
    *,
    force: bool = False,
    detached: bool = False,
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> Outcome:
    """Resumes a run and returns how it ended. Raises `RunError` if the run has no config.yaml or no step left."""
    from kit.config import load_config

    folder = RunStore(root).open(run_id)
    if not folder.config.is_file():
        raise RunError(
            f"{folder.path} has no config.yaml, so the run's configuration is unknown. Restore the file, or remove the folder "
            f"and start the run again with: grpo-kit train CONFIG -o run.id={run_id}"
        )
    config = load_config(folder.config, overrides)
    longer = config.optimisation.steps > load_config(folder.config).optimisation.steps
    # The training process refuses this as well, but a caller that does not wait for it would not see the error.
    if (status := folder.status())["state"] == "finished" and not longer and (detached or not (overrides or force)):
        raise RunError(
            f"The run '{run_id}' has finished with step {status.get('step')}; there is nothing to resume. "
            f"Start another run from its configuration with: grpo-kit train {folder.config} -o run.id=NAME"
        )
    config.run.id, config.run.root = run_id, str(root)
    request = {"config": config.model_dump(mode="json"), "resume": True, "force": force}
    folder.claim("starting", face=True)
    if not detached:
        return _supervise(folder, request, quiet)
    detach(folder, request, module=TRAINER)
    return Outcome(DONE)


def _supervise(run: RunDir, request: dict[str, Any], quiet: bool) -> Outcome:
    """Supervises a run that this process has created or claimed. In a notebook, shows the run's card below the cell."""
    from kit.report.live import in_notebook, shown

    try:
        with shown(run) if in_notebook() and not quiet else nullcontext() as on_line:
            on_message = on_line or functools.partial(print, file=sys.stderr, flush=True)
            return supervise(run, request, module=TRAINER, quiet=quiet, on_message=on_message, on_line=on_line)
    except BaseException as error:
        settle(run, None, cut_short(error))
        raise
