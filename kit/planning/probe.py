"""The worst case for real, with the real trainer: its largest update first, then two steps of the longest prompts and
completions of full length.

`python -m kit.planning.probe REQUEST` does it in a process of its own; `probe` is the face.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig, load_config
from kit.errors import RunError
from kit.runs.worker import call

if TYPE_CHECKING:
    from kit.runner.prepare import Parts

MODULE = "kit.planning.probe"
STEPS = 2


def probe(config: RunConfig, *, progress: bool = True) -> dict[str, Any]:
    """Runs the largest update and two steps; returns `peak_bytes` and `seconds` (of each step), measured.

    `worst_step` says of the update alone how many `tokens` (in `rows`) it held at once, and its `peak_bytes` and `seconds`.
    Nothing of it is kept.

    Raises `KitError` for a mistake of the user's, out of memory included.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-kit-probe-") as folder:
        result = Path(folder, "probe.json")
        request = {"config": config.model_dump(mode="json"), "folder": folder, "result": str(result)}
        outcome = call(MODULE, request, quiet=not progress)
        if outcome.error is not None:
            raise outcome.error
        if not result.is_file():
            raise RunError("The probe was stopped before it had a result.")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def worst_rows(parts: Parts) -> Any:
    """The training rows with the longest prompts, as many as two steps need."""
    from kit.evaluation.heldout import lengths_of

    config = parts.config
    train = parts.data.train
    lengths = lengths_of(parts.files.tokenizer, train, parts.interaction.all_tools())
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    wanted = STEPS * max(1, config.optimisation.batch_size // config.generation.num_generations)
    return train.select([order[place % len(order)] for place in range(wanted)])


def two_steps(parts: Parts, folder: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Trains two steps and measures. The trainer is made as `kit.runner.build.build` makes it; keep the two alike."""
    from kit.models.backend import activate_backend

    standby = parts.config.generation.vllm.standby
    with activate_backend(parts.files.backend, standby=standby):  # Unsloth comes before TRL
        return _measured(parts, folder, say)


def full_length(args: Any, tokens: int) -> dict[str, int]:
    """What makes the engine of `args` (a `GRPOConfig`) go on for `tokens`, in the engine's own word."""
    return {"min_tokens" if args.use_vllm else "min_new_tokens": tokens}


def _measured(parts: Parts, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    from transformers import TrainerCallback, set_seed

    from kit.data.images import IMAGES
    from kit.evaluation.heldout import lengths_of
    from kit.models.libraries import return_freed_memory
    from kit.models.loading import keep_trainable_in_float32, load_model
    from kit.models.unsloth import loading
    from kit.planning.worst_step import WorstStep, peak
    from kit.runner.console import silence_steps
    from kit.trainer.arguments import grpo_config
    from kit.trainer.engine import engine_settings
    from kit.trainer.savings import switches
    from kit.trainer.trainer import HookedGRPOTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter())

    config, clock = parts.config, Clock()
    set_seed(config.run.seed)
    return_freed_memory(parts.files.parameters)
    loaded = load_model(parts.files, config.model, loading(config, parts.files.backend, parts.files.context))
    rewards = parts.preset.trl(seed=config.run.seed, strict=False)
    args = grpo_config(config, loaded.backend, folder, rewards.reward_weights)
    args.max_steps, args.save_strategy, args.report_to = STEPS, "no", []
    args.generation_kwargs = full_length(args, config.generation.max_completion_tokens)
    rows = worst_rows(parts)
    longest = max(lengths_of(parts.files.tokenizer, rows, parts.interaction.all_tools()))
    trainer = HookedGRPOTrainer(
        loaded.model,
        rewards,
        args,
        train_dataset=rows,
        processing_class=loaded.processing_class(pictures=IMAGES in rows.column_names),
        peft_config=loaded.peft_config,
        objective=parts.objective,
        callbacks=[clock],
        engine=engine_settings(config, args, say),
        packing=config.optimisation.packing,
        share_prompts=config.optimisation.share_prompts,
        **switches(config) | {"skip_flat_groups": False},  # with this data every group may be flat
        **parts.interaction.trainer_arguments(),
    )
    keep_trainable_in_float32(trainer.model)
    silence_steps(trainer)
    worst = WorstStep(trainer, longest, config.generation.max_completion_tokens)
    trainer.callback_handler.callbacks.insert(0, worst)  # before the clock begins
    trainer.train()
    seconds = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return {
        "peak_bytes": int(peak(loaded.backend.device)),
        "seconds": seconds,
        "steps": STEPS,
        "worst_step": worst.found,
    }


def job(request: dict[str, Any], quiet: bool) -> None:
    """The process."""
    from kit.models.backend import use_threads
    from kit.models.failures import explained
    from kit.models.libraries import load_libraries
    from kit.runner.console import LogCapture, Reporter
    from kit.runner.prepare import prepare

    reporter, logs = Reporter(quiet), LogCapture()
    with logs.collecting(), explained():
        config = load_config(request["config"])
        config.optimisation.steps = STEPS
        use_threads(config.run.threads, config.model.name)
        load_libraries(config.model)
        parts = prepare(config, fresh=False)
        reporter.say(
            "The largest update, then two steps of the worst case: longest prompts, completions of full length"
        )
        found = two_steps(parts, Path(request["folder"]), reporter.say)
    Path(request["result"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    from kit.runs.worker import serve

    sys.exit(serve(job))
