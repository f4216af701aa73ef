"""The main loop: read this first. Configuration -> data, model, reward, objective -> trainer -> scores.

`python -m kit.train REQUEST` is how every face starts it: training has a process of its own, and all that it patched or
allocated ends with it. `kit.train(...)` in Python does the same and waits. Several processes that share the batch are
started by a launcher: `torchrun --nproc-per-node 2 -m kit.train run.yaml -o run.id=NAME` (or `accelerate launch`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kit import CallableModule
from kit.config import RunConfig, load_config
from kit.errors import EngineError

if TYPE_CHECKING:
    from kit.models.failures import BatchSizeBackoff
    from kit.runner.console import LogCapture, Reporter
    from kit.runner.distributed import DistributedContext
    from kit.runner.lifecycle import StopSignal
    from kit.runner.prepare import Parts
    from kit.runner.resume import PreviousRun, Resumption
    from kit.runner.trackers import Trackers
    from kit.runs.store import RunDir

sys.modules[__name__].__class__ = CallableModule  # importing this file binds it to kit.train, which is also a function


def run(
    config: RunConfig, *, quiet: bool = False, resume: bool = False, force: bool = False, adopt: bool = False
) -> RunDir:
    """Trains as configured and returns the run directory. Raises `KitError` for what the user can mend.

    Until the data, model files, reward and objective were checked nothing is written; from then on whatever happens
    stands in the run directory: `finished`, `stopped` (by Ctrl-C, with a checkpoint) or `failed` (with the reason).
    `resume` continues the run directory of that id; `force` also where something that matters has changed; `adopt` says
    that a face has made (or claimed) the directory for this process already.
    """
    from kit.models.libraries import load_libraries
    from kit.runner.console import LogCapture, Reporter
    from kit.runner.distributed import join

    processes = join()
    config = processes.broadcast(config)
    reporter, logs = Reporter(quiet or not processes.is_first), LogCapture()
    with logs.collecting():
        reporter.say(f"grpo-kit: run '{config.run.id}'{processes.note()}")
        load_libraries(config.model)
        folder = _run(config, reporter, logs, processes, resume=resume, force=force, adopt=adopt)
    processes.leave()
    return folder


@dataclass(frozen=True)
class Checked:
    """What was found before anything was written."""

    parts: Parts
    threads: int
    previous: PreviousRun | None
    resumption: Resumption | None


@dataclass(frozen=True)
class Job:
    """A run that has a directory: what its steps share."""

    parts: Parts
    folder: RunDir
    reporter: Reporter
    processes: DistributedContext
    stop: StopSignal
    resumption: Resumption | None

    @property
    def config(self) -> RunConfig:
        return self.parts.config


def _run(
    config: RunConfig,
    reporter: Reporter,
    logs: LogCapture,
    processes: DistributedContext,
    *,
    resume: bool,
    force: bool,
    adopt: bool,
) -> RunDir:
    from kit.models.backend import activate_backend
    from kit.runner.distributed import ReadOnlyRunDir
    from kit.runner.lifecycle import create_run_directory, following, lifecycle
    from kit.runner.resume import truncate_to_checkpoint
    from kit.runner.trackers import Trackers

    first = processes.is_first
    look = partial(check, config, reporter, processes, resume=resume, force=force, adopt=adopt)
    found = processes.main_process_first(look)
    parts, config = found.parts, found.parts.config
    folder = processes.main_process_first(
        lambda: create_run_directory(config, resume=resume, adopt=adopt) if first else ReadOnlyRunDir.of(config)
    )
    life = lifecycle(folder, logs, reporter) if first else following(folder, processes)

    backend = activate_backend(parts.files.backend, standby=config.generation.vllm.standby)  # Unsloth comes before TRL

    with life as stop, backend, Trackers(folder, reporter.say) as trackers:
        if first and found.resumption is not None:
            truncate_to_checkpoint(found.resumption, reporter.say)
        resumption = processes.broadcast(found.resumption)
        resumption = resumption and resumption.seen_from(folder)
        folder.write_text("config.yaml", config.to_yaml())
        folder.write_json("data.json", parts.data.info)
        reporter.data(parts.data.info)
        job = Job(parts, folder, reporter, processes, stop, resumption)
        job, trainer, memory = build_with_fallback(job, found.threads, trackers)
        learn(job, trainer, memory, found.previous.step if found.previous else 0)
    return folder


def check(
    config: RunConfig, reporter: Reporter, processes: DistributedContext, *, resume: bool, force: bool, adopt: bool
) -> Checked:
    """Looks at everything that can be wrong, before anything is written. Raises `KitError`."""
    from kit.models.backend import use_threads
    from kit.runner.distributed import check_division
    from kit.runner.lifecycle import check_run_id
    from kit.runner.prepare import prepare
    from kit.runner.resume import check_resumable, load_previous_run

    first, fresh = processes.is_first, not (resume or adopt)
    check_division(config, processes.size)
    if fresh and first:
        check_run_id(config)
    previous = load_previous_run(config, adopt=adopt) if resume and first else None
    threads = use_threads(config.run.threads or (previous.threads if previous else None), config.model.name)
    parts = prepare(config, fresh=fresh)
    return Checked(parts, threads, previous, check_resumable(previous, parts, force=force) if previous else None)


def build(job: Job, threads: int, trackers: Trackers) -> tuple[Any, BatchSizeBackoff | None]:
    """Model, reward functions, TRL's arguments with every default pinned, and the trainer made of them."""
    from kit.data.images import IMAGES
    from kit.generation.engine import record
    from kit.models.failures import BatchSizeBackoff, report_backoff
    from kit.models.libraries import return_freed_memory
    from kit.models.loading import keep_trainable_in_float32, load_model
    from kit.models.unsloth import loading
    from kit.runner.console import silence_steps
    from kit.runner.distributed import GatheringSink
    from kit.runner.environment import environment
    from kit.runner.recording import CompletionWriter, FailureMonitor
    from kit.runner.resume import inputs, with_history
    from kit.trainer.arguments import changes, grpo_config
    from kit.trainer.engine import engine_settings
    from kit.trainer.savings import switches
    from kit.trainer.trainer import make_trainer_class

    config, parts, folder, say = job.config, job.parts, job.folder, job.reporter.say
    seed_everything(config.run.seed)
    return_freed_memory(parts.files.parameters)
    loaded = load_model(parts.files, config.model, loading(config, parts.files.backend, parts.files.context))
    rewards = parts.preset.trl(seed=config.run.seed, strict=False)
    args = grpo_config(config, loaded.backend, folder.path, rewards.reward_weights, job.processes.size)
    engine = record(config, parts.engine, loaded.backend.name)
    stands_on = environment(loaded.backend, threads, args, config.run.seed, engine)
    stands_on |= {"inputs": inputs(parts)}
    stands_on = with_history(stands_on, job.resumption) if job.resumption else stands_on
    folder.write_json("env.json", stands_on)
    trackers.start(config)

    batches = config.optimisation.steps // config.optimisation.iterations
    writer = GatheringSink(CompletionWriter(folder.completions, config.run.save_completions), job.processes)
    watch = FailureMonitor(rewards, config.reward.max_failure_share, say, batches)
    told = partial(report_backoff, folder, say)
    memory = (
        BatchSizeBackoff(told, args.per_device_train_batch_size) if config.run.on_out_of_memory == "halve" else None
    )
    if parts.engine.note:
        say(parts.engine.note)
    trainer = make_trainer_class()(
        loaded.model,
        rewards,
        args,
        train_dataset=parts.data.train,
        processing_class=loaded.processing_class(pictures=IMAGES in parts.data.train.column_names),
        peft_config=loaded.peft_config,
        objective=parts.objective,
        rollout_sinks=[writer, watch],
        stateful={"failure_watch": watch} | ({"memory": memory} if memory else {}),
        memory=memory,
        engine=engine_settings(config, args, say),
        selection=config.selection,
        **switches(config),
        packing=config.optimisation.packing,
        share_prompts=config.optimisation.share_prompts,
        **parts.interaction.trainer_arguments(),
    )
    moved = changes(args, trainer.args)
    stands_on |= {"savings": trainer.savings_report} | ({"changed_by_backend": moved} if moved else {})
    folder.write_json("env.json", stands_on)
    trainer.chunks, trainer.fast_decoding = config.generation.chunks, True
    trainer.was_stopped = lambda: job.stop.reason is not None
    trainer.check_anew = job.resumption is not None and job.resumption.forced
    keep_trainable_in_float32(trainer.model)
    silence_steps(trainer)
    trainable = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    say(
        f"{config.model.name}: {parts.files.parameters / 1e6:.2f}M weights, {trainable / 1e6:.2f}M trained, on "
        f"{loaded.backend.device} ({loaded.backend.name}); objective {config.objective.recipe}, seed {config.run.seed}"
    )
    return trainer, memory


def build_with_fallback(job: Job, threads: int, trackers: Trackers) -> tuple[Job, Any, BatchSizeBackoff | None]:
    """`build`; with transformers' generate where `engine: auto` chose a vLLM that does not start. Raises `EngineError`."""
    from kit.models.failures import release

    parts = job.parts
    try:
        return job, *build(job, threads, trackers)
    except EngineError as error:
        if parts.engine.note is None or "sampler_logps" in parts.objective.needs or job.processes.size > 1:
            raise
        reason = str(error)
    release()  # the first model, which the error's traceback has kept until here
    job = fall_back_to_hf(job, reason)
    return job, *build(job, threads, trackers)


def fall_back_to_hf(job: Job, reason: str) -> Job:
    """The same run with transformers' generate. `reason`: what kept vLLM from starting."""
    from kit.generation.engine import Engine, with_engine

    parts = job.parts
    engine = Engine("hf", f"vLLM did not start: {reason}")
    job.reporter.say(f"{reason}\nCompletions come from transformers' generate instead (generation.engine: auto).")
    config = with_engine(parts.config, engine)
    job.folder.write_text("config.yaml", config.to_yaml())
    return replace(job, parts=replace(parts, engine=engine, config=config))


def learn(job: Job, trainer: Any, memory: BatchSizeBackoff | None, start: int) -> None:
    """Held-out score before, GRPO from step `start` on, held-out score after."""
    from kit.evaluation.heldout import HeldOut
    from kit.runner.environment import peak_memory
    from kit.runner.evaluation import AlertCallback, EvaluationCallback, conclude, make_policy
    from kit.runner.recording import Recorder, SyncCallback
    from kit.runner.resume import earlier_scores, train_on

    config, parts, folder, stop, first = job.config, job.parts, job.folder, job.stop, job.processes.is_first
    rows, settings = parts.data.heldout.to_list(), (config.evaluation, config.generation)
    shown = parts.files.processor
    heldout = HeldOut(
        rows, parts.preset, parts.files.tokenizer, *settings, parts.checker, memory, parts.interaction, processor=shown
    )
    policy = make_policy(folder, config.evaluation, parts.checker, job.reporter.say)
    scores = earlier_scores(job.resumption) if job.resumption else {}

    def score(model: Any, name: str, step: int) -> dict[str, Any]:
        with folder.phase("held-out score"), job.reporter.bar(f"Held-out score, {name}") as advance:

            def progress(done: int, total: int) -> None:
                stop.check()
                advance(done, total)

            scores[name] = heldout.score(model, progress, step=step)
        folder.write_json(f"eval/{name}.json", scores[name])
        return scores[name]

    if first and config.evaluation.before and "before" not in scores:
        score(trainer.model, "before", 0)
    with job.reporter.bar("Training", start) as advance:
        if first:
            trainer.add_callback(Recorder(folder, stop, advance))
            trainer.add_callback(AlertCallback(policy))
            trainer.add_callback(EvaluationCallback(policy, score, stop))
        trainer.add_callback(SyncCallback(job.processes, stop, folder))
        job.processes.wait()
        try:
            train_on(trainer, job.resumption)
        finally:
            trainer.flush_sinks()  # also where it fails: what came of every completion is then looked for
    if first:
        folder.append_event("memory", step=trainer.state.global_step, **peak_memory())
        folder.append_event("packing", step=trainer.state.global_step, **trainer.packing_report)
        conclude(policy, stop, trainer, score)
        job.reporter.result(folder, config, stop.reason)


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy and torch, so that adapters, data order and sampling repeat."""
    from transformers import set_seed

    set_seed(seed)


def main(request: dict[str, Any], quiet: bool) -> None:
    """The job of the training process: ends in `KeyboardInterrupt` when the run was stopped."""
    ways = {name: bool(request.get(name)) for name in ("resume", "force", "adopt")}
    folder = run(load_config(request["config"]), quiet=quiet, **ways)
    if folder.status()["state"] == "stopped":
        raise KeyboardInterrupt


def read_request(source: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The request that a face has written (JSON), or one for a YAML file or a preset's name. Raises `ConfigError`."""
    from kit.runner.request import resolve_config
    from kit.runs.worker import read_json

    if source.endswith(".json"):
        return read_json(source)
    return {"config": resolve_config(source, overrides).model_dump(mode="json")}


if __name__ == "__main__":
    from kit.runs.worker import serve

    sys.exit(serve(main, read=read_request))
