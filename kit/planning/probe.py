"""Measure the worst case with the real trainer: two steps with the longest prompts and completions of full length.

`probe` starts `python -m kit.planning.probe REQUEST`, a separate process that measures.
"""

from __future__ import annotations

import itertools
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig, load_config
from kit.runs.lock import held_gpu
from kit.runs.worker import call_for_result

if TYPE_CHECKING:
    from kit.runner.prepare import Parts

MODULE = "kit.planning.probe"
STEPS = 2


def probe(config: RunConfig, *, progress: bool = True) -> dict[str, Any]:
    """Run two steps and return the measured `peak_bytes` and `seconds` (per step). Leaves no files.

    Raises `KitError` for user errors, including out of memory.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-kit-probe-") as folder:
        request = {"config": config.model_dump(mode="json"), "folder": folder}
        return call_for_result(MODULE, request, "The probe was stopped before it had a result.", quiet=not progress)


def worst_rows(parts: Parts) -> Any:
    """Return the training rows with the longest prompts, as many as two steps need."""
    from kit.generation.prompts import lengths_of

    config = parts.config
    train = parts.data.train
    lengths = lengths_of(parts.files.tokenizer, train, parts.interaction)
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    count = STEPS * max(1, config.optimisation.batch_size // config.generation.num_generations)
    return train.select([order[index % len(order)] for index in range(count)])


def two_steps(parts: Parts, folder: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Train two steps with the trainer that a run would have, and measure memory and time."""
    from kit.models.backend import activate_backend

    standby = parts.config.generation.vllm.standby
    with activate_backend(parts.files.backend, standby=standby):  # Unsloth must be imported before TRL
        from transformers import TrainerCallback

        from kit.models.failures import backoff_message
        from kit.runner.build import load, make_trainer

        config, times = parts.config, list[float]()

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                times.append(time.perf_counter())

            def on_step_end(self, *_: Any, **__: Any) -> None:
                times.append(time.perf_counter())

        ready = load(parts, folder, lambda event: say(backoff_message(event)))
        args = ready.args
        args.max_steps, args.save_strategy, args.report_to = STEPS, "no", []
        minimum = "min_tokens" if args.use_vllm else "min_new_tokens"
        args.generation_kwargs = {minimum: config.generation.max_completion_tokens}
        trainer = make_trainer(
            config,
            ready.model,
            ready.rewards,
            args,
            worst_rows(parts),
            parts.objective,
            say,
            parts.interaction,
            memory=ready.backoff,
            teacher=ready.teacher,
            token_budget=ready.token_budget,
            skip_flat_groups=False,  # all groups of these rows may be flat
        )
        trainer.add_callback(Clock())
        trainer.train()
        seconds = [end - start for start, end in itertools.pairwise(times)]
        return {"peak_bytes": peak(parts.files.backend.device), "seconds": seconds, "steps": STEPS}


def peak(device: str) -> int:
    """Return the peak memory of this process in bytes: reserved by the allocator on a GPU, with the context, else resident.

    What other programs hold on the card, e.g. a display, counts as context.
    """
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        context = max(0, total - free - torch.cuda.memory_reserved())
        return int(torch.cuda.max_memory_reserved()) + context
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def job(request: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Prepare as a run does and measure, in the separate process."""
    from kit.models.backend import expand_segments, use_threads
    from kit.models.failures import explained
    from kit.models.libraries import load_libraries
    from kit.runner.console import LogCapture, Reporter
    from kit.runner.prepare import prepare

    reporter, logs = Reporter(quiet), LogCapture()
    with held_gpu("a probe"), logs.collecting(), explained():
        config = load_config(request["config"])
        config.optimisation.steps = STEPS
        expand_segments(standby=config.generation.vllm.standby)  # reserved memory depends on it
        use_threads(config.run.threads, config.model.name)
        load_libraries(config.model)
        parts = prepare(config, fresh=False)
        reporter.say("Two steps of the worst case: longest prompts, completions of full length")
        return two_steps(parts, Path(request["folder"]), reporter.say)


if __name__ == "__main__":
    from kit.runs.worker import serve

    sys.exit(serve(job))
