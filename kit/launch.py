"""Start runs in processes of their own and say how they ended: below `kit.api`, the command line and studies. No torch."""

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
    """Trains as a prepared configuration says, waits, and returns how the run ended.

    Where that was before the training process took the directory over (a mistake of the user's, above all), nothing is left.
    """
    folder = create_run(config)
    outcome = _supervise(folder, {"config": config.model_dump(mode="json")}, quiet)
    record = folder.record()
    if record and not record.get("adopted") and not folder.metrics_file.exists():
        shutil.rmtree(folder.path, ignore_errors=True)
    return outcome


def launch_detached(config: RunConfig) -> RunDir:
    """Starts a prepared configuration and returns at once: the run goes on when this process ends."""
    folder = create_run(config)
    detach(folder, {"config": config.model_dump(mode="json")}, module=TRAINER)
    return folder


def create_run(config: RunConfig) -> RunDir:
    """Creates the directory of a new run, for a training process to adopt. Raises `RunError` where the id is taken."""
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
    """Resumes a run and returns how it ended. Raises `RunError` where there is nothing to go on with."""
    from kit.config import load_config

    folder = RunStore(root).open(run_id)
    if not folder.config.is_file():
        raise RunError(
            f"{folder.path} has no config.yaml, so how the run was configured is not known. Bring it back, or remove the folder "
            f"and start it again with: grpo-kit train CONFIG -o run.id={run_id}"
        )
    config = load_config(folder.config, overrides)
    longer = config.optimisation.steps > load_config(folder.config).optimisation.steps
    # The training process refuses that, too, but whoever does not wait for it would not hear of it.
    if (status := folder.status())["state"] == "finished" and not longer and (detached or not (overrides or force)):
        raise RunError(
            f"The run '{run_id}' has finished, with step {status.get('step')}; there is nothing to resume. "
            f"Start another from its configuration with: grpo-kit train {folder.config} -o run.id=NAME"
        )
    config.run.id, config.run.root = run_id, str(root)
    request = {"config": config.model_dump(mode="json"), "resume": True, "force": force}
    folder.claim("starting", face=True)
    if not detached:
        return _supervise(folder, request, quiet)
    detach(folder, request, module=TRAINER)
    return Outcome(DONE)


def _supervise(run: RunDir, request: dict[str, Any], quiet: bool) -> Outcome:
    """Supervises a run that this process has made or claimed. In a notebook a card of it is shown below the cell."""
    from kit.report.live import in_notebook, shown

    try:
        with shown(run) if in_notebook() and not quiet else nullcontext() as on_line:
            tell = on_line or functools.partial(print, file=sys.stderr, flush=True)
            return supervise(run, request, module=TRAINER, quiet=quiet, on_message=tell, on_line=on_line)
    except BaseException as error:
        settle(run, None, cut_short(error))
        raise
