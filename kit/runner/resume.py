"""Going on with a run that ended before its time, as if it had not: what it left, what may have changed since.

A run goes on from its last whole checkpoint. It is refused where the steps to come could not be those of the run: other
data, another configuration, other packages. (`kit.runner.rewind` then makes the directory what it was at that step.)
A run that has saved no checkpoint starts again from the beginning; nothing is refused then, as no step is gone on from.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig, load_config
from kit.errors import ConfigError, RunError
from kit.runner.compatibility import differences
from kit.runner.previous_run import Past, Resumption
from kit.runs.checkpoints import step_of
from kit.runs.store import ALIVE, RunDir, RunStore
from kit.trainer.progress import is_over

if TYPE_CHECKING:
    from kit.runner.parts import Parts


def look_back(config: RunConfig, *, adopt: bool = False) -> Past:
    """The past of the run that the configuration names. Raises `RunError` when it is live or has nothing left to do."""
    run = RunStore(config.run.root).open(str(config.run.id))
    status = run.status()
    if adopt:  # a face has claimed it for this process, and noted how it had ended
        status = status.get("before") or {"state": "interrupted"}
    elif status["state"] in ALIVE:
        raise RunError(
            f"The run '{run.id}' is {status['state']} (process {status.get('pid')} on {status.get('host')}). Stop it first "
            f"(grpo-kit stop {run.id}{run.root_option}), or follow it with: grpo-kit logs -f {run.id}{run.root_option}"
        )
    last = run.last_checkpoint
    past = Past(
        run=run,
        state=str(status["state"]),
        reason=status.get("reason"),
        asked=config,
        config=_old_config(run),
        data=_read(run.data),
        env=_read(run.env),
        checkpoint=last,
        step=step_of(last) if last else 0,
        over=False,
        longer=False,
    )
    return _with_aim(past, config)


def _old_config(run: RunDir) -> RunConfig | None:
    if run.config.is_file() and not run.config.read_text(encoding="utf-8", errors="replace").strip():
        raise RunError(
            f"{run.config} is empty, so how run '{run.id}' was configured is not known. Bring it back, or start a new run."
        )
    try:
        return load_config(run.config) if run.config.is_file() else None
    except ConfigError as error:
        raise RunError(
            f"The configuration of run '{run.id}' is not one of this version of the kit ({error}). Resume with the version "
            "that it was started with (env.json names it), or start a new run."
        ) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # interrupted before it was written, and then before any step
        return {}
    return content if isinstance(content, dict) else {}


def _with_aim(past: Past, config: RunConfig) -> Past:
    """Whether steps are left to make. Raises `RunError` when nothing is."""
    wanted = config.optimisation.steps
    steps = past.config.optimisation.steps if past.config else wanted
    longer = wanted > steps and past.step == steps
    over = not longer and past.checkpoint is not None and (past.step >= wanted or is_over(past.checkpoint))
    if past.state == "finished" and not longer:
        why = f" ({past.reason})" if past.reason else ""
        raise RunError(
            f"The run '{past.run.id}' is finished after {past.step} of {steps} steps{why}; there is nothing to resume. To "
            f"train it for longer: grpo-kit resume {past.run.id} -o optimisation.steps=N with N above {steps}. For anything "
            f"else start a new run: grpo-kit train {past.run.config} -o run.id=NAME"
        )
    if wanted < past.step:
        raise RunError(
            f"The run '{past.run.id}' has made {past.step} steps, and optimisation.steps is {wanted} now. Set it to "
            f"{past.step} or more."
        )
    return replace(past, over=over, longer=longer)


def check_resumable(past: Past, parts: Parts, *, force: bool) -> Resumption:
    """Compares the run that was with what there is now. Raises `RunError` that lists what matters, unless `force`.

    Of a run that starts again from the beginning only its weights matter: without `force` none are thrown away.
    """
    if past.checkpoint is None:
        weights = [path.name for path in (*past.run.checkpoints, past.run.adapter) if path.exists()]
        if weights and not force:
            raise RunError(
                f"The run '{past.run.id}' has no whole checkpoint to go on from, but weights in {', '.join(weights)}. Bring a "
                "whole checkpoint back, or start the run again from the beginning with --force, which removes those weights."
            )
        changes = list(differences(past.config, past.data, past.env, parts, asked=past.asked))
        return Resumption(past, changes, forced=bool(weights))
    changes = list(differences(past.config, past.data, past.env, parts, past.checkpoint))
    if changes and not force:
        listed = "\n".join(f"  {change}" for change in changes)
        raise RunError(
            f"The run '{past.run.id}' cannot go on as it was:\n{listed}\nBring that back, or go on regardless with --force: "
            "the steps to come are then those of another run, which is noted in events.jsonl."
        )
    return Resumption(past, changes, forced=bool(changes))


def with_past(env: dict[str, Any], resumption: Resumption) -> dict[str, Any]:
    """The record of the environment: as it was, or where something that matters has changed, the new after the old."""
    if resumption.past.checkpoint is None:  # none of the steps that were made in it is left
        return env
    old = dict(resumption.past.env)
    earlier = old.pop("earlier", [])
    if old and not resumption.forced:
        return dict(resumption.past.env)
    if old:
        earlier = [*earlier, old | {"until_step": resumption.past.step}]
    return env | {"earlier": earlier} if earlier else env


def train_on(trainer: Any, resumption: Resumption | None) -> None:
    """Makes the steps that are left: all of them in a new run, none where only the closing work was interrupted."""
    past = resumption.past if resumption is not None else None
    if past is None or past.checkpoint is None:
        trainer.train()
    elif past.over:
        trainer.load_weights(past.checkpoint)
        past.run.write_status("running", step=past.step, total_steps=trainer.args.max_steps)
    else:
        trainer.train(resume_from_checkpoint=str(past.checkpoint))
