"""The main loop: read this first. Configuration -> data, model, reward, objective -> trainer -> scores.

`python -m kit.train REQUEST` is how every face starts it: training has a process of its own, and all that it patched or
allocated ends with it. `kit.train(...)` in Python does the same and waits.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kit.api import CallableModule
from kit.config import RunConfig, load_config

if TYPE_CHECKING:
    from kit.runs.store import RunDir
    from kit.training.console import Reporter
    from kit.training.quiet import LogBook

sys.modules[__name__].__class__ = CallableModule  # importing this file binds it to kit.train, which is also a function


def run(config: RunConfig, *, quiet: bool = False) -> RunDir:
    """Trains as configured and returns the run directory. Raises `KitError` for what the user can mend.

    Until the data, model files, reward and objective were checked nothing is written; from then on whatever happens
    stands in the run directory: `finished`, `stopped` (by Ctrl-C, with a checkpoint) or `failed` (with the reason).
    """
    from kit.training.console import Reporter
    from kit.training.quiet import LogBook

    reporter, logs = Reporter(quiet), LogBook()
    with logs.collecting():
        reporter.say(f"grpo-kit: run '{config.run.id}'")
        return _run(config, reporter, logs)


def _run(config: RunConfig, reporter: Reporter, logs: LogBook) -> RunDir:
    # Everything that can be wrong is looked at before anything is written.
    from kit.training.backend import use_threads
    from kit.training.lifecycle import check_run_id, create_run_directory, lifecycle
    from kit.training.preparation import prepare

    check_run_id(config)
    threads = use_threads(config.run.threads)
    with reporter.bar("Building the embedded model (once)") as advance:
        parts = prepare(config, lambda done, total, loss: advance(done, total, f"loss {loss:.3f}"))
    config, data = parts.config, parts.data
    folder = create_run_directory(config)

    with lifecycle(folder, logs, reporter) as stop:
        folder.write_text("config.yaml", config.to_yaml())
        folder.write_json("data.json", data.info)
        reporter.data(data.info)

        # Model, reward functions, and TRL's arguments with every default pinned.
        from kit.training.arguments import grpo_config
        from kit.training.environment import environment
        from kit.training.models import keep_trainable_in_float32, load_model

        seed_everything(config.run.seed)
        loaded = load_model(parts.files, config.model)
        rewards = parts.preset.trl(seed=config.run.seed)
        args = grpo_config(config, loaded.backend, folder.path, rewards.reward_weights)
        folder.write_json("env.json", environment(loaded.backend, threads, args, config.run.seed))

        # The trainer: TRL's, with our objective as its loss.
        from kit.training.callbacks import Evaluator, Recorder
        from kit.training.quiet import silence_steps
        from kit.training.recording import CompletionWriter, FailureWatch
        from kit.training.trainer import make_trainer_class

        batches = config.optimisation.steps // config.optimisation.iterations
        writer = CompletionWriter(folder.completions, config.run.save_completions)
        watch = FailureWatch(rewards, config.reward.max_failure_share, reporter.say, batches)
        trainer = make_trainer_class()(
            loaded.model,
            rewards,
            args,
            train_dataset=data.train,
            processing_class=loaded.tokenizer,
            peft_config=loaded.peft_config,
            objective=parts.objective,
            rollout_sinks=[writer, watch],
        )
        keep_trainable_in_float32(trainer.model)
        silence_steps(trainer)
        trainable = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
        reporter.say(
            f"{config.model.name}: {parts.files.parameters / 1e6:.2f}M weights, {trainable / 1e6:.2f}M trained, on "
            f"{loaded.backend.device} ({loaded.backend.name}); objective {config.objective.recipe}, seed {config.run.seed}"
        )

        # Held-out score before, GRPO, held-out score after.
        from kit.evaluation.heldout import HeldOut

        heldout = HeldOut(data.heldout.to_list(), parts.preset, loaded.tokenizer, config.evaluation, config.generation)
        scores: dict[str, dict[str, Any]] = {}

        def score(model: Any, name: str) -> dict[str, Any]:
            with reporter.bar(f"Held-out score, {name}") as advance:

                def progress(done: int, total: int) -> None:
                    stop.check()
                    advance(done, total)

                scores[name] = heldout.score(model, progress)
            folder.write_json(f"eval/{name}.json", scores[name])
            return scores[name]

        if config.evaluation.before:
            score(trainer.model, "before")
        with reporter.bar("Training") as advance:
            trainer.add_callback(Recorder(folder, stop, advance))
            trainer.add_callback(Evaluator(folder, config.evaluation.every, score))
            trainer.train()
        trainer.save_model(str(folder.adapter))
        if config.evaluation.after and not stop.asked():
            score(trainer.model, "after")
        reporter.result(folder, scores, stop.reason)
    return folder


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy and torch, so that adapters, data order and sampling repeat."""
    from transformers import set_seed

    set_seed(seed)


def main(request: dict[str, Any], quiet: bool) -> None:
    """The job of the training process: ends in `KeyboardInterrupt` when the run was stopped."""
    folder = run(load_config(request["config"]), quiet=quiet)
    if folder.status()["state"] == "stopped":
        raise KeyboardInterrupt


if __name__ == "__main__":
    from kit.runs.child import serve

    sys.exit(serve(main))
