"""The main loop: read this first. Configuration -> data, model, reward, objective -> trainer -> scores.

The command line, the web page and `kit.train(...)` in Python start every run as a process, `python -m kit.train REQUEST`, so that
patches and allocated memory end with the run. `torchrun --nproc-per-node 2 -m kit.train run.yaml -o run.id=NAME` starts several
processes that share each batch; the first one writes the run directory.

`run` calls the steps, which are modules of `kit.runner`. Each module is imported when its step begins, because the order of
imports matters: if Unsloth is the backend, it has to be active before TRL is imported (kit/runner/__init__.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit import CallableModule, runner
from kit.config import RunConfig, load_config
from kit.evaluation.results import metric_key
from kit.models.backend import activate_backend, expand_segments, use_threads
from kit.models.libraries import load_libraries
from kit.report.run_report import write_report
from kit.runs.worker import leave, serve

if TYPE_CHECKING:
    from kit.models.failures import BatchSizeBackoff
    from kit.runs.store import RunDir
    from kit.trainer.trainer import HookedGRPOTrainer

sys.modules[__name__].__class__ = CallableModule  # kit.train is this module and a function


def run(
    config: RunConfig, *, quiet: bool = False, resume: bool = False, force: bool = False, adopt: bool = False
) -> RunDir:
    """Trains as configured and returns the run directory. Raises `KitError` for errors that the user can correct.

    Checks data, model files, reward and objective before it writes anything. After that the run directory records how the run
    ended: `finished`, `stopped` (by Ctrl-C, with a checkpoint) or `failed` (with the reason).

    quiet: print nothing to the terminal; log.txt has everything.
    resume: continue the run whose id is `config.run.id`.
    force: resume although data, configuration or packages have changed.
    adopt: use the run directory that the caller has created (or claimed) for this process.
    """
    expand_segments(standby=config.generation.vllm.standby)
    reporter, logs = runner.console.Reporter(quiet), runner.console.LogCapture()
    with logs.collecting():
        reporter.say(f"grpo-kit: run '{config.run.id}'")
        load_libraries(config.model)
        previous = runner.resume.load_previous_run(config, adopt=adopt) if resume else None
        runner.prepare.check_environment(config, trains=True)
        threads = use_threads(config.run.threads or (previous.threads if previous else None), config.model.name)
        parts = runner.prepare.prepare(config, fresh=not (resume or adopt))
        resumption = runner.resume.check_resumable(previous, parts, force=force) if previous else None
        folder = runner.lifecycle.create_run_directory(parts.config, resume=resume, adopt=adopt)
        # If Unsloth is the backend, it has to be active before runner.build imports TRL below.
        backend = activate_backend(parts.files.backend, standby=parts.config.generation.vllm.standby)
        with runner.lifecycle.lifecycle(folder, logs, reporter, write_report) as stop, backend:
            if resumption is not None:
                runner.resume.truncate_to_checkpoint(resumption, reporter.say)
            folder.write_text("config.yaml", parts.config.to_yaml())
            folder.write_json("data.json", parts.data.info)
            runner.recording.save_heldout(folder, parts.data.heldout)
            reporter.data(parts.data.info)
            job = runner.build.Job(parts, folder, reporter, stop, resumption)
            trainer, memory = runner.build.build(job, threads)
            learn(job, trainer, memory, previous.step if previous else 0)
    return folder


def learn(job: runner.build.Job, trainer: HookedGRPOTrainer, memory: BatchSizeBackoff, start: int) -> None:
    """Scores the held-out problems, trains with GRPO from step `start` on, and scores them again."""
    config, folder, stop = job.config, job.folder, job.stop
    score = runner.evaluation.HeldOutScores(job, memory)
    key = metric_key(config.evaluation.metric, config.evaluation.k, checked=job.parts.checker.checker is not None)
    evaluator = runner.evaluation.Evaluator(folder, config.evaluation, key, score, stop, job.reporter.say)
    with runner.trackers.Trackers(folder, config, job.reporter.say) as trackers:
        if config.evaluation.before and "before" not in score.known:
            score(trainer.model, "before", 0)
        with job.reporter.bar("Training", start) as advance:
            trainer.add_callback(runner.recording.Recorder(folder, stop, advance, scores_after=config.evaluation.after))
            trainer.add_callback(evaluator)
            trainer.add_callback(trackers)
            trainer.add_callback(runner.recording.SharedStop(stop, folder))
            runner.resume.train_on(trainer, job.resumption)
        folder.append_event("memory", step=trainer.state.global_step, **runner.recording.peak_memory())
        folder.append_event("packing", step=trainer.state.global_step, **trainer.packing_report)
        evaluator.conclude(trainer)
        job.reporter.result(folder, config, stop.reason)


def main(request: dict[str, Any], quiet: bool) -> None:
    """Runs the request of a training process. Raises `KeyboardInterrupt` if the run was stopped."""
    runner.distributed.join()
    if not runner.distributed.is_first():
        runner.follower.follow()
        return
    options = {name: bool(request.get(name)) for name in ("resume", "force", "adopt")}
    folder = run(load_config(request["config"]), quiet=quiet, **options)
    if folder.status()["state"] == "stopped":
        raise KeyboardInterrupt


def read_request(source: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Reads a request from a JSON file of the kit, or builds one from a YAML file or a preset's name. Raises `ConfigError`."""
    if source.endswith(".json"):
        request: dict[str, Any] = json.loads(Path(source).read_text(encoding="utf-8"))
        return request
    return {"config": runner.prepare.resolve_config(source, overrides).model_dump(mode="json")}


if __name__ == "__main__":
    leave(serve(main, read=read_request))
