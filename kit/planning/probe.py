"""Measures the worst case with the real trainer: the largest update, then two steps of full length.

`python -m kit.planning.probe REQUEST` does it in a process of its own; `probe` is the face.
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
    import torch

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
        request = {"config": config.model_dump(mode="json"), "folder": folder}
        stopped = "The probe was stopped before it had a result."
        return call_for_result(MODULE, request, stopped, quiet=not progress)


def worst_rows(parts: Parts) -> Any:
    """The training rows with the longest prompts, as many as two steps need."""
    from kit.generation.prompts import lengths_of

    config = parts.config
    train = parts.data.train
    lengths = lengths_of(parts.files.tokenizer, train, parts.interaction.all_tools())
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    count = STEPS * max(1, config.optimisation.batch_size // config.generation.num_generations)
    return train.select([order[place % len(order)] for place in range(count)])


def two_steps(parts: Parts, folder: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Trains two steps of the trainer that a run would have, and measures."""
    from kit.models.backend import activate_backend

    standby = parts.config.generation.vllm.standby
    with activate_backend(parts.files.backend, standby=standby):  # Unsloth comes before TRL
        from transformers import TrainerCallback

        from kit.generation.prompts import lengths_of
        from kit.models.failures import backoff_message
        from kit.runner.build import load, make_trainer

        config, times, largest = parts.config, list[float](), dict[str, Any]()

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                largest.update(largest_update(trainer, longest, config.generation.max_completion_tokens))
                times.append(time.perf_counter())

            def on_step_end(self, *_: Any, **__: Any) -> None:
                times.append(time.perf_counter())

        ready = load(parts, folder, lambda event: say(backoff_message(event)))
        args = ready.args
        args.max_steps, args.save_strategy, args.report_to = STEPS, "no", []
        args.generation_kwargs = full_length(args, config.generation.max_completion_tokens)
        rows = worst_rows(parts)
        longest = max(lengths_of(parts.files.tokenizer, rows, parts.interaction.all_tools()))
        trainer = make_trainer(
            config,
            ready.model,
            ready.rewards,
            args,
            rows,
            parts.objective,
            say,
            parts.interaction,
            memory=ready.backoff,
            teacher=ready.teacher,
            token_budget=ready.token_budget,
            skip_flat_groups=False,  # with this data every group may be flat
        )
        trainer.callback_handler.callbacks.insert(0, Clock())  # the largest update comes before anything else
        trainer.train()
        seconds = [after - before for before, after in itertools.pairwise(times)]
        return {
            "peak_bytes": peak(parts.files.backend.device),
            "seconds": seconds,
            "steps": STEPS,
            "worst_step": largest,
        }


def full_length(args: Any, tokens: int) -> dict[str, int]:
    """What makes the engine of `args` (a `GRPOConfig`) go on for `tokens`, in the engine's own word."""
    return {"min_tokens" if args.use_vllm else "min_new_tokens": tokens}


def largest_update(trainer: Any, prompt: int, completion: int) -> dict[str, Any]:
    """One update of the worst case: the longest prompt beside a completion of full length in every row.

    Its gradient is dropped. Returns what it took: `rows`, `tokens`, `peak_bytes`, `seconds`.

    No rollout is so bad: the tokens are random, no two prompts are the same, and no completion is without an advantage. What
    it takes is what the largest pass of any step can take. The micro-batch has `per_device_train_batch_size` rows, and goes
    through as the trainer's token budget lets it.
    """
    started = time.perf_counter()
    checks, trainer.checks = trainer.checks, None  # they are for steps on real completions
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer._stepping = True
    try:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, worst_micro_batch(trainer, prompt, completion))
        trainer.accelerator.backward(loss)
    finally:
        trainer._stepping, trainer.checks = False, checks
    trainer.model.zero_grad()
    if trainer.critic is not None:
        trainer.critic.head.zero_grad()
    rows = trainer.policy_loss.at_once
    return {
        "rows": rows,
        "tokens": rows * (prompt + completion),
        "peak_bytes": peak(trainer.accelerator.device.type),
        "seconds": time.perf_counter() - started,
    }


def peak(device: str) -> int:
    """The most memory of this process so far, in bytes: what the allocator reserved on a GPU, else resident."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_reserved())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worst_micro_batch(trainer: Any, prompt: int, completion: int) -> dict[str, Any]:
    """A micro-batch of random tokens without any padding, with whatever the trainer's objective needs."""
    import torch

    from kit.objective.batch import fields_where
    from kit.trainer.micro_batch import MicroBatch
    from kit.trainer.teacher import TEACHER_NEEDS

    rows, device = trainer.args.per_device_train_batch_size, trainer.accelerator.device
    generator = torch.Generator().manual_seed(0)
    vocabulary = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().weight.shape[0]

    def ids(width: int) -> torch.Tensor:
        return torch.randint(0, vocabulary, (rows, width), generator=generator).to(device)

    ones = torch.ones(rows, completion, device=device)
    inputs: dict[str, Any] = {
        "prompt_ids": ids(prompt),
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.long, device=device),
        "completion_ids": ids(completion),
        "completion_mask": ones.long(),
        "advantages": 1.0 - 2.0 * (torch.arange(rows, device=device) % 2),
        "num_items_in_batch": torch.tensor(rows * completion * trainer.args.steps_per_generation, device=device),
    }
    needs = trainer.needs
    if "rewards" in needs:
        inputs["rewards"] = ones[:, 0]
    if "truncated" in needs:
        inputs["truncated"] = ones[:, 0] == 0
    if needs & fields_where(model="reference"):
        inputs["ref_per_token_logps"] = -ones
    if "sampler_logps" in needs:
        inputs["sampling_per_token_logps"] = -ones
    if "values" in needs:
        inputs |= {"old_values": 0.0 * ones, "value_targets": 0.0 * ones}
    if "full_kl" in needs:
        trainer.checkpoints.restore_reference_head(inputs)
        head = trainer.rollout_memory.reference_head
        inputs["ref_hidden"] = head.hidden.new_zeros(rows, completion, head.hidden.shape[-1])
    if needs & TEACHER_NEEDS:
        inputs |= {"teacher_logps": -ones, "teacher_known": ones[:, 0] > 0}
    if "teacher_kl" in needs:
        trainer.teacher.see_head(MicroBatch(inputs))
        head = trainer.rollout_memory.teacher_head = trainer.teacher.head
        inputs["teacher_hidden"] = head.hidden.new_zeros(rows, completion, head.hidden.shape[-1])
    return inputs


def job(request: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """The process."""
    from kit.models.backend import expand_segments, use_threads
    from kit.models.failures import explained
    from kit.models.libraries import load_libraries
    from kit.runner.console import LogCapture, Reporter
    from kit.runner.prepare import prepare

    reporter, logs = Reporter(quiet), LogCapture()
    with held_gpu("a probe"), logs.collecting(), explained():
        config = load_config(request["config"])
        config.optimisation.steps = STEPS
        expand_segments(standby=config.generation.vllm.standby)  # as a run does: what is reserved depends on it
        use_threads(config.run.threads, config.model.name)
        load_libraries(config.model)
        parts = prepare(config, fresh=False)
        reporter.say(
            "The largest update, then two steps of the worst case: longest prompts, completions of full length"
        )
        return two_steps(parts, Path(request["folder"]), reporter.say)


if __name__ == "__main__":
    from kit.runs.worker import serve

    sys.exit(serve(job))
