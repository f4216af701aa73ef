"""The main loop: read this first. Configuration -> data, model, reward, objective -> trainer -> scores.

`python -m kit.train REQUEST` is how every face starts it: training has a process of its own, and all that it patched or
allocated ends with it. `kit.train(...)` in Python does the same and waits.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kit.api import CallableModule
from kit.config import RunConfig, load_config

if TYPE_CHECKING:
    from kit.runs.store import RunDir
    from kit.training.callbacks import Stop
    from kit.training.console import Reporter

sys.modules[__name__].__class__ = CallableModule  # importing this file binds it to kit.train, which is also a function


def run(config: RunConfig, *, quiet: bool = False) -> RunDir:
    """Trains as configured and returns the run directory. Raises `KitError` for what the user can mend.

    Until the data, model files, reward and objective were checked nothing is written; from then on whatever happens
    stands in the run directory: `finished`, `stopped` (by Ctrl-C, with a checkpoint) or `failed` (with the reason).
    """
    from kit.training.console import Reporter

    reporter = Reporter(quiet)
    reporter.say(f"grpo-kit: run '{config.run.id}'")

    # Everything that can be wrong is looked at before anything is written.
    from kit.training.backend import use_threads
    from kit.training.preparation import prepare

    threads = use_threads(config.run.threads)
    with reporter.bar("Building the embedded model (once)") as advance:
        parts = prepare(config, lambda done, total, loss: advance(done, total, f"loss {loss:.3f}"))
    config, data = parts.config, parts.data
    folder = create_run_directory(config)
    folder.write_json("data.json", data.info)
    reporter.say(f"{len(data.train)} training and {len(data.heldout)} held-out problems from {config.data.source}")

    with lifecycle(folder, reporter) as stop:
        # Model, reward functions, and TRL's arguments with every default pinned.
        from kit.training.arguments import grpo_config
        from kit.training.environment import environment
        from kit.training.models import load_model

        seed_everything(config.run.seed)
        loaded = load_model(parts.files, config.model)
        rewards = parts.preset.trl(seed=config.run.seed)
        args = grpo_config(config, loaded.backend, folder.path, rewards.reward_weights)
        folder.write_json("env.json", environment(loaded.backend, threads, args, config.run.seed))

        # The trainer: TRL's, with our objective as its loss.
        from kit.training.callbacks import Evaluator, Recorder
        from kit.training.recording import CompletionWriter, FailureWatch
        from kit.training.trainer import make_trainer_class

        writer = CompletionWriter(folder.completions, config.run.save_completions)
        watch = FailureWatch(rewards, config.reward.max_failure_share)
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
        quieten(trainer)
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

    draw_curves(folder, scores)
    if scores:
        reporter.scores({name: scores[name] for name in ("before", "after") if name in scores})
        for name in ("before", "after"):
            if name in scores:
                reporter.samples(f"Held-out completions, {name} (greedy)", scores[name]["samples"])
    reporter.closing(folder.path, hints(config, folder))
    return folder


def create_run_directory(config: RunConfig) -> RunDir:
    """A new run directory with the configuration in it. Raises `RunError` if the id is taken or the disk refuses."""
    from kit.runs.store import RunStore

    assert config.run.id is not None, "every face gives a run its id"
    folder = RunStore(config.run.root).create(config.run.id)
    folder.write_status("starting", total_steps=config.optimisation.steps, step=0)
    folder.check_free_space(200 * 1024 * 1024)
    folder.write_text("config.yaml", config.to_yaml())
    return folder


@contextmanager
def lifecycle(folder: RunDir, reporter: Reporter) -> Iterator[Stop]:
    """Writes how the run ends, whatever ends it, and lets Ctrl-C end it in order."""
    from kit.training.callbacks import Stop
    from kit.training.failures import explained

    handler = logging.FileHandler(folder.log, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("kit").setLevel(logging.INFO)
    stop = Stop(folder)
    try:
        with stop.listening(reporter.say), explained():
            yield stop
    except KeyboardInterrupt:
        folder.write_status("stopped", reason=stop.reason or "interrupted at once, without a checkpoint", exit=130)
        raise
    except BaseException as error:
        logging.getLogger("kit").exception("the run failed")
        folder.write_status("failed", reason=f"{type(error).__name__}: {error}", exit=getattr(error, "exit_code", 1))
        raise
    else:
        folder.write_status(
            "stopped" if stop.reason else "finished", reason=stop.reason, exit=130 if stop.reason else 0
        )
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def quieten(trainer: Any) -> None:
    """Leaves the terminal to our own reporter: no dictionary a step, no bars of libraries below."""
    from transformers.trainer_callback import PrinterCallback
    from transformers.utils.logging import disable_progress_bar

    trainer.remove_callback(PrinterCallback)
    disable_progress_bar()


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy and torch, so that adapters, data order and sampling repeat."""
    from transformers import set_seed

    set_seed(seed)


def draw_curves(folder: RunDir, scores: dict[str, dict[str, Any]]) -> None:
    """Draws `curves.png` into the run directory, if a step was made."""
    if metrics := folder.metrics():
        from kit.figures import draw

        draw(folder.id, metrics, scores, folder.path / "curves.png")


def hints(config: RunConfig, folder: RunDir) -> list[str]:
    """What to look at and try next."""
    return [
        f"curves         {folder.path / 'curves.png'}",
        f"completions    {folder.completions}/  (Parquet: every completion with its rewards)",
        f"adapter        {folder.adapter}/",
        "try next       grpo-kit quickstart --objective dr_grpo --seed 1",
        "your own data  grpo-kit init run.yaml, then grpo-kit train run.yaml",
    ]


def main(request: dict[str, Any], quiet: bool) -> None:
    """The job of the training process: ends in `KeyboardInterrupt` when the run was stopped."""
    folder = run(load_config(request["config"]), quiet=quiet)
    if folder.status()["state"] == "stopped":
        raise KeyboardInterrupt


if __name__ == "__main__":
    from kit.runs.child import serve

    sys.exit(serve(main))
