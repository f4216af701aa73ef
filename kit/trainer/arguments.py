"""Makes TRL's `GRPOConfig` from the kit's configuration, and refuses settings that could make a hook ineffective.

Every field is set explicitly, so that a backend that changes TRL's defaults does not change a run. Fields of TRL's own loss
keep TRL's values, because the objective replaces that loss. The checks run before the first step, so that no hook is ignored
silently.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig
from kit.errors import ConfigError, EnvironmentUnsupported, ModelError, ObjectiveError, refuse
from kit.generation.engine import hands_adapter, vllm_arguments
from kit.models.backend import UNSLOTH, Backend, choose_backend, is_unsloths, torch_dtype
from kit.models.failures import EngineSettings
from kit.models.memory import micro_batch_size
from kit.models.unsloth import checkpointing

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from kit.objective import Objective

log = logging.getLogger("kit")

SCHEDULERS = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
OPTIMIZERS = {"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit"}
# Fields that the class derives or normalises. A different value is no change.
NORMALISED = (
    "output_dir", "disable_tqdm", "report_to", "accelerator_config", "debug", "generation_batch_size",
    "steps_per_generation", "dataloader_pin_memory", "fsdp", "fsdp_config", "deepspeed",
    "parallelism_config", "ddp_find_unused_parameters", "local_rank", "lr_scheduler_kwargs",
)  # fmt: skip


def grpo_config(
    config: RunConfig, backend: Backend, folder: Path, reward_weights: list[float], processes: int = 1
) -> Any:
    """The `trl.GRPOConfig` of a run. An optimiser step has `batch_size` completions over all processes, in equal micro-batches.

    Raises `ConfigError` if the learning rate is still `auto`.
    """
    import torch
    from trl import GRPOConfig

    if isinstance(config.optimisation.learning_rate, str):
        raise ConfigError("optimisation.learning_rate is auto. Resolve it with kit.runner.prepare.prepare first.")
    # If all weights train, TRL loads the reference policy with these arguments: the initial weights of the policy.
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
        # Unsloth offloads activations only with reentrant checkpointing. The gradients are the same.
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
        # Unsloth's class refuses the load balancing loss of experts: its forward functions do not return router logits.
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
        report_to="none",  # the kit's callback kit.runner.trackers reports instead
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
    """Settings of the vLLM engine of a run; None if it does not use vLLM. `args`: its `GRPOConfig`."""
    if not args.use_vllm:
        return None
    generation, vllm = config.generation, config.generation.vllm
    import torch

    # Truncated or constrained sampling renormalises, so the engine's log-probabilities are of another distribution.
    # So does a least length, which a probe sets (`generation_kwargs`): it excludes the end tokens.
    comparable = not generation.truncates and vllm.regex is None and not args.generation_kwargs
    device = "cpu" if args.use_cpu else "cuda"
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    adapter_alone = hands_adapter(config, device) and choose_backend(config.model).name != UNSLOTH
    adapter_alone &= device == "cpu" or dtype is not None  # a family that overflows in float16 computes in float32
    return EngineSettings(
        seed=config.run.seed,
        timeout=vllm.timeout,
        dtype=dtype,
        eager=vllm.eager,
        adapter_alone=adapter_alone,
        four_bit=config.model.load_in_4bit,
        revision=config.model.revision,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        at_once=min(256, config.optimisation.batch_size),
        compared=comparable,
        tell=tell,
    )


def pinned(config_class: type, values: dict[str, Any]) -> Any:
    """A `GRPOConfig` with `values` and TRL's defaults in all other fields, even if a backend has replaced the class.

    A field that the class changes in its constructor is reset.
    """
    stated = true_defaults(config_class) | values
    args = config_class(**stated)
    for name, value in stated.items():
        if name not in NORMALISED and _plain(getattr(args, name)) != _plain(value):
            log.info("%s: %r, instead of the backend's %r", name, value, getattr(args, name))
            setattr(args, name, value)
    return args


def true_defaults(config_class: type) -> dict[str, Any]:
    """TRL's default for every field, from the first `GRPOConfig` among the bases. A backend may have replaced the class."""
    oldest = [cls for cls in config_class.__mro__ if cls.__name__ == "GRPOConfig"][-1]
    fields = [field for field in dataclasses.fields(oldest) if field.init]
    made = {field.name: field.default_factory() for field in fields if callable(field.default_factory)}
    return made | {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def changes(requested: Any, actual: Any) -> dict[str, list[Any]]:
    """Fields that the trainer's constructor changed, by name: [requested, actual] value. `beta` is the kit's own."""
    before, after = requested.to_dict(), actual.to_dict()
    names = [name for name in before if name != "beta" and before[name] != after.get(name)]
    return {name: [before[name], after.get(name)] for name in names}


PRECISION = ("bf16", "fp16", "mixed_precision")


def check_precision(changed: dict[str, list[Any]]) -> None:
    """Raises `ModelError` if the backend computes in another precision than requested. changed: the result of `changes`."""
    moved = [f"{name} {before} became {now}" for name, (before, now) in changed.items() if name in PRECISION]
    if moved:
        raise ModelError(
            f"The backend computes in another precision than model.dtype ({', '.join(moved)}). Set model.backend: transformers, "
            "or model.dtype: auto."
        )


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


# --- checks before the first step: settings with which a hook would be ignored ----------------------------------------


# Arguments of TRL's own loss and advantage. An objective replaces both, so these arguments would be ignored.
TRL_LOSS_ARGUMENTS = (
    "beta", "epsilon", "epsilon_high", "delta", "loss_type", "importance_sampling_level", "scale_rewards",
    "multi_objective_aggregation", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy",
    "off_policy_mask_threshold", "use_bias_correction_kl", "sapo_temperature_neg", "sapo_temperature_pos",
    "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
)  # fmt: skip


def check_backend(base: type, backend: Backend | None) -> None:
    """Raises `EnvironmentUnsupported` if the trainer class is not the one of this process's backend (None: any class).

    If Unsloth cannot generate its class, it only warns and keeps TRL's.
    """
    is_theirs = is_unsloths(base)
    refuse(
        EnvironmentUnsupported,
        (
            backend is not None and backend.name == UNSLOTH and not is_theirs,
            f"model.backend: unsloth, but trl.GRPOTrainer is {base.__module__}.{base.__name__}: Unsloth did not replace "
            "it with its own class (see the log of the run), so its kernels would be missing.",
            "Update unsloth and unsloth_zoo together, or set model.backend: transformers.",
        ),
        (
            backend is not None and backend.name != UNSLOTH and is_theirs,
            f"model.backend: {backend and backend.name}, but trl.GRPOTrainer is Unsloth's ({base.__name__}): Unsloth was "
            "imported in this process.",
            "Start a new process, or set model.backend: unsloth.",
        ),
    )


def check_combination(trainer: GRPOTrainer, objective: Objective, hooked: type) -> None:
    """Raises `ObjectiveError` if an objective cannot work with this trainer, a subclass of `hooked`.

    Raises `EnvironmentUnsupported` for a model that is sharded over processes.
    """
    args, kind = trainer.args, type(trainer)
    scoring = "_get_per_token_logps_and_entropies"
    later = [
        name
        for name, present in (
            (f"num_iterations={args.num_iterations} (optimisation.iterations)", args.num_iterations > 1),
            (
                f"steps_per_generation={args.steps_per_generation} above gradient_accumulation_steps="
                f"{args.gradient_accumulation_steps}",
                args.steps_per_generation > args.gradient_accumulation_steps,
            ),
        )
        if present
    ]
    refuse(
        EnvironmentUnsupported,
        (
            trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
            "An objective needs the complete model in every process, but DeepSpeed and FSDP shard it.",
            "Start with torchrun or accelerate launch --multi_gpu, or use another trainer: grpo-kit scale --to verl.",
        ),
    )
    refuse(
        ObjectiveError,
        (
            getattr(kind, scoring) is not getattr(hooked, scoring),
            f"{kind.__name__} overrides {scoring}: TRL calls it at the rollout only, but trainer.scorer scores the updates, so "
            "the two would differ.",
            "Change trainer.scorer.score instead, which both use.",
        ),
        (
            objective.clip.on_policy and bool(later),
            f"{objective.clip.title} has no ratio, so with {' and '.join(later)} the gradient of the second and later steps "
            "on the same completions would be biased.",
            "Make one step per generation batch, or choose a clip with a ratio, e.g. ppo_clip.",
        ),
    )
    for part, state in objective.state_dict().items():
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise ObjectiveError(
                f"The state of {part} cannot be saved in a checkpoint: {error}. Its state_dict() must contain plain numbers, "
                "strings, lists and dicts, e.g. tensor.tolist()."
            ) from None


def check_arguments(args: Any) -> None:
    """Raises `ObjectiveError` if arguments of TRL's own loss are set together with an objective.

    TRL's default counts as unset, and so does a backend's default.
    """
    defaults = true_defaults(type(args))
    moved = {name: parameter.default for name, parameter in inspect.signature(type(args)).parameters.items()}
    ignored = [
        f"{name}={getattr(args, name)!r}"
        for name in TRL_LOSS_ARGUMENTS
        if name in defaults and getattr(args, name) not in (defaults[name], moved.get(name, defaults[name]))
    ]
    if getattr(args, "use_vllm", False) and args.vllm_importance_sampling_correction:
        ignored.append("vllm_importance_sampling_correction=True")
    refuse(
        ObjectiveError,
        (
            bool(ignored),
            f"{', '.join(ignored)} would be ignored: with an objective, TRL's own loss is not used.",
            "Set it in the objective (e.g. regularizers=[{'name': 'kl', 'coef': 0.04}]), or pass objective=None for TRL's loss.",
        ),
    )


def balances_experts(model: Any, *, configured: bool) -> bool:
    """Whether the loss balances the load of experts. configured: TRL's value from the model's configuration.

    TRL adds that loss for every configuration with `output_router_logits`. Granite 4's has the key, but the architecture returns
    no router logits, so that a step would fail.
    """
    if not configured:
        return False
    recorded = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    if any(recorded) and not any("router_logits" in outputs for outputs in recorded):
        log.info("the load of experts is not balanced: the architecture returns no router logits")
        return False
    return True
