"""From the kit's configuration to TRL's `GRPOConfig`, every field that a run depends on pinned.

Nothing is left to defaults that another package may move: what is not said here does not change a run. The fields that
belong to TRL's own loss stay at TRL's values, because the objective takes its place.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.config import RunConfig
from kit.errors import ConfigError, ModelError
from kit.generation.engine import hands_adapter, vllm_arguments
from kit.models.backend import UNSLOTH, Backend, choose_backend, torch_dtype
from kit.models.failures import EngineSettings
from kit.models.memory import micro_batch_size
from kit.models.unsloth import checkpointing

log = logging.getLogger("kit")

SCHEDULERS = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
OPTIMIZERS = {"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit"}
# Fields that the class derives or writes in another way: what it has made of them is not a change.
NORMALISED = (
    "output_dir", "disable_tqdm", "report_to", "accelerator_config", "debug", "generation_batch_size",
    "steps_per_generation", "dataloader_pin_memory", "fsdp", "fsdp_config", "deepspeed",
    "parallelism_config", "ddp_find_unused_parameters", "local_rank", "lr_scheduler_kwargs",
)  # fmt: skip


def grpo_config(
    config: RunConfig, backend: Backend, folder: Path, reward_weights: list[float], processes: int = 1
) -> Any:
    """`trl.GRPOConfig` of this run. `batch_size` completions of all processes make one optimiser step, in equal micro-batches.

    Raises `ConfigError` while the learning rate is `auto`.
    """
    import torch
    from trl import GRPOConfig

    if isinstance(config.optimisation.learning_rate, str):
        raise ConfigError("optimisation.learning_rate: auto is known once a run is prepared (kit.runner.prepare).")
    # How TRL loads the reference policy when all weights train: the same weights as the policy's at the start.
    reference = {"revision": config.model.revision, "attn_implementation": config.model.attention}
    reference = {name: value for name, value in reference.items() if value is not None}
    optimisation, generation, run = config.optimisation, config.generation, config.run
    micro = micro_batch_size(config, backend, processes)
    accumulation = optimisation.batch_size // (micro * processes)
    dtype = torch_dtype(config.model.dtype, backend.device)
    checkpointed = bool(checkpointing(optimisation.gradient_checkpointing, backend))
    fields: dict[str, Any] = dict(
        output_dir=str(folder),
        seed=run.seed,
        data_seed=run.seed,
        full_determinism=False,
        use_cpu=backend.device == "cpu",
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16 and not backend.computes_in_float32,
        max_steps=optimisation.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_iterations=optimisation.iterations,
        learning_rate=optimisation.learning_rate,
        lr_scheduler_type=SCHEDULERS[optimisation.schedule],
        warmup_steps=optimisation.warmup_steps,
        optim=OPTIMIZERS[optimisation.optimizer],
        adam_beta1=0.9,
        adam_beta2=0.99,
        adam_epsilon=1e-8,
        weight_decay=optimisation.weight_decay,
        max_grad_norm=optimisation.max_grad_norm,
        gradient_checkpointing=checkpointed,
        # Unsloth moves activations to main memory in the reentrant way only; the gradients are the same.
        gradient_checkpointing_kwargs={"use_reentrant": backend.name == UNSLOTH and checkpointed},
        num_generations=generation.num_generations,
        max_completion_length=generation.max_completion_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
        repetition_penalty=1.0,
        max_tool_calling_iterations=generation.max_tool_calling_iterations,
        **vllm_arguments(config),
        # Unsloth's class refuses the balancing loss of experts, which its forward functions do not give.
        router_aux_loss_coef=0.0 if backend.name == UNSLOTH else None,
        reward_weights=reward_weights,
        shuffle_dataset=True,
        remove_unused_columns=False,
        disable_dropout=False,
        logging_strategy="steps",
        logging_steps=1,
        logging_first_step=True,
        log_completions=False,
        save_strategy="steps",
        save_steps=run.save_every or optimisation.steps,
        save_total_limit=run.keep_checkpoints + (config.evaluation.every > 0),
        save_only_model=False,
        eval_strategy="no",
        report_to="none",  # kit.runner.trackers is a callback of the kit's own
        run_name=run.id,
        disable_tqdm=True,
        push_to_hub=False,
        trust_remote_code=config.model.trust_remote_code,
        model_init_kwargs={"dtype": "float32", "use_safetensors": True, "device_map": None, **reference}
        if config.model.lora is None
        else None,
        dataloader_num_workers=0,
        dataloader_pin_memory=backend.device == "cuda",
    )
    return pinned(GRPOConfig, fields)


def engine_settings(config: RunConfig, args: Any, tell: Callable[[str], None]) -> EngineSettings | None:
    """Settings of the engine for a run whose completions come from vLLM; None for another. `args`: its `GRPOConfig`."""
    if not args.use_vllm:
        return None
    generation, vllm = config.generation, config.generation.vllm
    import torch

    # Truncated or constrained sampling renormalises: the engine's log-probabilities are then of another distribution.
    comparable = not generation.truncates and vllm.regex is None
    device = "cpu" if args.use_cpu else "cuda"
    adapter_alone = hands_adapter(config, device) and choose_backend(config.model).name != UNSLOTH
    return EngineSettings(
        seed=config.run.seed,
        timeout=vllm.timeout,
        dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
        eager=vllm.eager,
        adapter_alone=adapter_alone,
        revision=config.model.revision,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        compared=comparable,
        tell=tell,
    )


def pinned(config_class: type, given: dict[str, Any]) -> Any:
    """A `GRPOConfig` with `given`, and TRL's own default in every other field, whatever another package has made of it.

    A field that the class still changes on the way is put back.
    """
    stated = true_defaults(config_class) | given
    args = config_class(**stated)
    for name, value in stated.items():
        if name not in NORMALISED and _plain(getattr(args, name)) != _plain(value):
            log.info("%s: %r, although this backend would set %r", name, value, getattr(args, name))
            setattr(args, name, value)
    return args


def true_defaults(config_class: type) -> dict[str, Any]:
    """TRL's default of every field: of the oldest `GRPOConfig` among the bases, which a backend may have replaced."""
    oldest = [cls for cls in config_class.__mro__ if cls.__name__ == "GRPOConfig"][-1]
    fields = [field for field in dataclasses.fields(oldest) if field.init]
    made = {field.name: field.default_factory() for field in fields if callable(field.default_factory)}
    return made | {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def changes(asked: Any, in_force: Any) -> dict[str, list[Any]]:
    """Fields that building the trainer changed, by name: what was asked, and what is in force. `beta` is the kit's own."""
    before, after = asked.to_dict(), in_force.to_dict()
    names = [name for name in before if name != "beta" and before[name] != after.get(name)]
    return {name: [before[name], after.get(name)] for name in names}


PRECISION = ("bf16", "fp16", "mixed_precision")


def check_precision(changed: dict[str, list[Any]]) -> None:
    """Refuses a trainer whose backend computes in another precision than asked. Raises `ModelError`. changed: `changes`."""
    moved = [f"{name} {before} became {now}" for name, (before, now) in changed.items() if name in PRECISION]
    if moved:
        raise ModelError(
            f"The backend computes in another precision than model.dtype asks for ({', '.join(moved)}), so this would be another "
            "run than the one described. Set model.backend: transformers, or model.dtype: auto."
        )


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
