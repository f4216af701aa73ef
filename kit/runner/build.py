"""Builds the trainer of a run (model, reward functions, TRL's arguments) and writes env.json.

This module imports TRL, and Unsloth must be imported before TRL. Import it after the backend has been activated.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import set_seed
from transformers.trainer_callback import PrinterCallback

from kit.data.images import IMAGES
from kit.generation.engine import record
from kit.generation.tools import NOTHING, ToolSetup
from kit.models.backend import UNSLOTH
from kit.models.failures import BackoffEvent, BatchSizeBackoff, report_backoff
from kit.models.gguf import origin_note
from kit.models.libraries import return_freed_memory
from kit.models.loading import LoadedModel, keep_trainable_in_float32, load_model
from kit.models.memory import GIB, budget_of, card_of, generation_batch_of, prompt_tokens, room_of, workload
from kit.models.start import begin
from kit.models.unsloth import OFFLOAD, Loading, loading
from kit.runner.distributed import announce, is_first, world_size
from kit.runner.prepare import Parts, teacher_model
from kit.runner.recording import FailureMonitor, write_completions
from kit.runner.resume import git_state, inputs, packages, with_history
from kit.trainer.arguments import changes, check_precision, engine_settings, grpo_config
from kit.trainer.teacher import Teacher
from kit.trainer.trainer import HookedGRPOTrainer

if TYPE_CHECKING:
    from kit.config import RunConfig
    from kit.runner.console import Reporter
    from kit.runner.lifecycle import StopSignal
    from kit.runner.resume import PreviousRun, Resumption
    from kit.runs.store import RunDir

SECRET = ("token", "key", "secret", "password")
"""Arguments of the trainer whose names contain such a word are not recorded."""


@dataclass(frozen=True)
class Job:
    """A run with a run directory: the state that the steps of the main loop share."""

    parts: Parts
    folder: RunDir
    reporter: Reporter
    stop: StopSignal
    resumption: Resumption | None

    @property
    def config(self) -> RunConfig:
        return self.parts.config


@dataclass(frozen=True)
class Loaded:
    """The loaded parts of a trainer."""

    model: LoadedModel
    rewards: Any
    args: Any
    teacher: Teacher | None
    token_budget: int | None
    backoff: BatchSizeBackoff
    """Its generation batch is the one that was chosen for the free memory."""
    notes: dict[str, str]
    """Messages about the token budget and the generation batch; empty if the kit did not choose them."""


def load(
    parts: Parts, folder: Path, tell: Callable[[BackoffEvent], None], previous: PreviousRun | None = None
) -> Loaded:
    """Chooses the sizes that depend on free memory, then loads the model. `folder`: the output folder of the trainer."""
    config = parts.config
    set_seed(config.run.seed)  # Python, numpy and torch: for adapters, data order and sampling
    return_freed_memory(parts.files.parameters)
    teacher = None
    if config.teacher.model is not None:  # before the sizes are chosen, since its weights take memory
        own = parts.teacher and load_model(parts.teacher, teacher_model(config), Loading()).model
        teacher = Teacher(config.teacher, own)
    budget, at_once, notes = chosen_sizes(parts, previous)
    loaded = load_model(parts.files, config.model, loading(config, parts.files.backend, parts.files.context))
    rewards = parts.preset.trl(seed=config.run.seed, strict=False)
    args = grpo_config(config, loaded.backend, folder, rewards.reward_weights, world_size())
    backoff = BatchSizeBackoff(tell, args.per_device_train_batch_size)
    if at_once is not None:
        backoff.sizes["generation"] = at_once
    backoff.chosen = frozenset() if is_same_machine(previous, config) else frozenset({"generation"})
    return Loaded(loaded, rewards, args, teacher, budget, backoff, notes)


def make_trainer(
    config: RunConfig,
    model: LoadedModel,
    rewards: Any,
    args: Any,
    rows: Any,
    objective: Any,
    say: Callable[[str], None],
    interaction: ToolSetup = NOTHING,
    **keywords: Any,
) -> HookedGRPOTrainer:
    """Builds the trainer of a run, a probe or a model check, with the weights of step 0.

    It does not print metrics and writes no model card: `Reporter` and the export do.

    Args: args: its `GRPOConfig`. rows: training rows. keywords: other arguments of `HookedGRPOTrainer`.
    """
    trainer = HookedGRPOTrainer(
        model.model,
        rewards,
        args,
        train_dataset=rows,
        processing_class=model.processing_class(pictures=IMAGES in rows.column_names),
        peft_config=model.peft_config,
        objective=objective,
        engine=engine_settings(config, args, say),
        packing=config.optimisation.packing,
        share_prompts=config.optimisation.share_prompts,
        fast_decoding=True,
        offload=config.optimisation.gradient_checkpointing == OFFLOAD and model.backend.name != UNSLOTH,
        **{"skip_flat_groups": config.optimisation.skip_flat_groups} | interaction.trainer_arguments() | keywords,
    )
    keep_trainable_in_float32(trainer.model)
    begin(trainer.model, model.start, reference=trainer.beta != 0.0)
    trainer.remove_callback(PrinterCallback)
    trainer.create_model_card = lambda *args, **keywords: None
    return trainer


def build(job: Job, threads: int) -> tuple[HookedGRPOTrainer, BatchSizeBackoff]:
    """Builds the trainer and its `BatchSizeBackoff`. Writes env.json."""
    config, parts, folder, say = job.config, job.parts, job.folder, job.reporter.say
    announce(config, job.resumption, threads, folder)
    previous = job.resumption.previous if job.resumption is not None else None
    ready = load(parts, folder.path, partial(report_backoff, folder, say), previous)
    args, backend, memory, notes = ready.args, ready.model.backend, ready.backoff, ready.notes
    engine = record(config, parts.engine)
    env = environment(backend, threads, args, config.run.seed, engine) | {"inputs": inputs(parts)}
    if (start := origin_note(parts.files.source)) is not None:
        env["model_origin"] = start
        say(start)
    env = with_history(env, job.resumption) if job.resumption else env
    folder.write_json("env.json", env)

    batches = config.optimisation.steps // config.optimisation.iterations
    saves = config.run.save_completions and is_first()
    writers = [partial(write_completions, folder.completions)] * saves
    watch = FailureMonitor(ready.rewards, config.reward.max_failure_share, say, batches)
    if notes["generation_batch"]:
        say(notes["generation_batch"])
    if parts.engine.note:
        say(parts.engine.note)
    trainer = make_trainer(
        config,
        ready.model,
        ready.rewards,
        args,
        parts.data.train,
        parts.objective,
        say,
        parts.interaction,
        rollout_sinks=[*writers, watch],
        stateful={"failure_watch": watch, "memory": memory},
        memory=memory,
        selection=config.selection,
        teacher=ready.teacher,
        token_budget=ready.token_budget,
        was_stopped=lambda: job.stop.reason is not None,
        check_anew=job.resumption is not None and job.resumption.forced,
    )
    moved = changes(args, trainer.args)
    check_precision(moved)
    savings = trainer.savings_report | ({"token_budget": notes["token_budget"]} if notes["token_budget"] else {})
    at_once = memory.sizes.get("generation")
    env |= {"savings": savings, "token_budget": ready.token_budget, "generation_batch": at_once}
    env |= {"changed_by_backend": moved} if moved else {}
    folder.write_json("env.json", env)
    trainable = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    own = [hook.name for _, hook in parts.objective.hooks if hook.factory.custom]
    say(
        f"{config.model.name}: {parts.files.parameters / 1e6:.2f}M weights, {trainable / 1e6:.2f}M trained, on "
        f"{backend.device} ({backend.name}); objective {' with '.join([config.objective.recipe, *own])}, "
        f"seed {config.run.seed}"
    )
    if config.optimisation.iterations == 1 and parts.objective.clip.factory.custom:
        say("With optimisation.iterations: 1 every ratio is 1, so the bounds of your clip have no effect.")
    if backend.computes_in_float32:
        say(f"Backend: {backend.reason}.")
    elif args.fp16 and config.model.dtype == "auto":
        say("Computed in float16: this GPU has no bfloat16.")
    return trainer, memory


def chosen_sizes(parts: Parts, previous: PreviousRun | None) -> tuple[int | None, int | None, dict[str, str]]:
    """Returns the token budget, the number of completions generated at once (None: no limit), and messages about both.

    Call it before the model is loaded. A resumed run keeps its sizes: other part sizes would change rounding, and other
    generation batches would draw other random numbers. With another GPU or engine, the number of completions is chosen again.
    """
    config, files, backend = parts.config, parts.files, parts.files.backend
    device, float32 = backend.device, backend.computes_in_float32
    work = workload(config, device, parts.objective, prompt_tokens(config), card_of(device), float32=float32)
    room = room_of(device)
    budget = budget_of(config, files.shape, work, room)
    needed = (
        "not needed: whole micro-batches are computed at once" if budget is None else f"at most {budget} tokens at once"
    )
    budget_note = f"{needed}, chosen for {room / GIB:.1f} GiB of free memory"
    at_once = None if world_size() > 1 else generation_batch_of(config, files.shape, work, room)
    batch_note = (
        ""
        if at_once is None
        else (
            f"{at_once} of {work.batch} completions are generated at a time, so that their key-value cache fits into "
            f"{room / GIB:.1f} GiB of free memory."
        )
    )
    if previous is not None and previous.checkpoint is not None:
        if is_same_machine(previous, config):
            at_once, batch_note = previous.env.get("generation_batch"), ""
        if "token_budget" in previous.env:
            budget = previous.env["token_budget"]
            parts_note = f"at most {budget} tokens at once" if budget else "whole micro-batches are computed at once"
            budget_note = f"{parts_note}, as at the start of the run"
    if config.optimisation.token_budget is not None:
        budget, budget_note = config.optimisation.token_budget or None, ""
    return budget, at_once, {"token_budget": budget_note, "generation_batch": batch_note}


def is_same_machine(previous: PreviousRun | None, config: RunConfig) -> bool:
    """Whether a run continues on the GPU and with the engine of its start."""
    env = {} if previous is None else previous.env
    return (env.get("gpu"), env.get("engine", {}).get("name")) == (gpu_name(), config.generation.engine)


def gpu_name() -> str | None:
    """The name of the GPU; None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def environment(backend: Any, threads: int, args: Any, seed: int, engine: dict[str, Any]) -> dict[str, Any]:
    """The content of env.json: versions, hardware, seeds and TRL's arguments. `engine`: see `kit.generation.engine.record`."""
    gpu = gpu_name()
    return {
        "packages": packages(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "gpu": gpu,
        "cuda": torch.version.cuda if gpu else None,
        "threads": threads,
        "backend": {"name": backend.name, "device": backend.device, "reason": backend.reason},
        "git": git_state(),
        "seeds": {"run": seed, "trainer": args.seed, "data_order": args.data_seed, "engine": engine["seed"]},
        "engine": engine,
        "trainer_arguments": {
            key: value for key, value in args.to_dict().items() if not any(word in key for word in SECRET)
        },
    }
