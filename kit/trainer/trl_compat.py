"""Refusals before the first step: whatever could make a hook be ignored without notice."""

from __future__ import annotations

import inspect
import json
import logging
from typing import TYPE_CHECKING, Any

from kit.errors import EnvironmentUnsupported, ObjectiveError, refuse
from kit.models.backend import UNSLOTH, is_unsloths
from kit.trainer.arguments import true_defaults

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from kit.models.backend import Backend
    from kit.objective import Objective

log = logging.getLogger("kit")

# Arguments of TRL's own loss and advantage. An objective takes their place, so setting one beside it would be ignored.
TRL_LOSS_ARGUMENTS = (
    "beta", "epsilon", "epsilon_high", "delta", "loss_type", "importance_sampling_level", "scale_rewards",
    "multi_objective_aggregation", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy",
    "off_policy_mask_threshold", "use_bias_correction_kl", "sapo_temperature_neg", "sapo_temperature_pos",
    "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
)  # fmt: skip


def check_backend(base: type, backend: Backend | None) -> None:
    """Refuses a trainer class of another backend than this process was begun with. Raises `EnvironmentUnsupported`.

    Unsloth only warns when it could not generate its class, and leaves TRL's. `None`: nothing was said, any class will do.
    """
    is_theirs = is_unsloths(base)
    refuse(
        EnvironmentUnsupported,
        (
            backend is not None and backend.name == UNSLOTH and not is_theirs,
            f"model.backend: unsloth, but trl.GRPOTrainer is {base.__module__}.{base.__name__}: Unsloth did not put its own "
            "class in its place (it says why in the log of the run), so its kernels would be missing.",
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
    """Refuses what an objective cannot do with this trainer, whose class may derive from `ours`.

    Raises `ObjectiveError`; `EnvironmentUnsupported` for a model that is divided over processes.
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
            "An objective makes passes of its own over a model that every process holds whole; DeepSpeed and FSDP divide it.",
            "Start with torchrun or accelerate launch --multi_gpu, or go on in another trainer: grpo-kit scale --to verl.",
        ),
    )
    refuse(
        ObjectiveError,
        (
            getattr(kind, scoring) is not getattr(hooked, scoring),
            f"{kind.__name__} overrides {scoring}: TRL asks it at the rollout only, and updates are scored by trainer.scorer, so "
            "that the two would differ.",
            "Change trainer.scorer.score instead, which both take.",
        ),
        (
            objective.clip.on_policy and bool(later),
            f"{objective.clip.title} has no ratio, so with {' and '.join(later)} the steps after the first on the same "
            "completions would follow a biased gradient.",
            "Make one step on each generation, or choose a clip with a ratio, e.g. ppo_clip.",
        ),
    )
    for part, state in objective.state_dict().items():
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise ObjectiveError(
                f"The state of {part} cannot be saved in a checkpoint: {error}. Let its state_dict() hold plain numbers, "
                "strings, lists and dicts, e.g. tensor.tolist()."
            ) from None


def check_arguments(args: Any) -> None:
    """Refuses arguments of TRL's own loss beside an objective. Raises `ObjectiveError`.

    TRL's default counts as unset, and so does the one that a backend has moved it to.
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
            "Say it in the objective (e.g. regularizers=[{'name': 'kl', 'coef': 0.04}]), or pass objective=None for TRL's loss.",
        ),
    )


def balances_experts(model: Any, *, configured: bool) -> bool:
    """Whether the loss balances the load of experts. configured: as TRL took it from the model's configuration.

    TRL adds that for every configuration with `output_router_logits`. Granite 4's has it, with experts or without, and the
    architecture gives no router logits: a step would fail.
    """
    if not configured:
        return False
    recorded = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    if any(recorded) and not any("router_logits" in outputs for outputs in recorded):
        log.info("the load of experts is not balanced: the architecture gives no router logits")
        return False
    return True
