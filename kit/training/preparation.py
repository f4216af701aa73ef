"""From a configuration to the parts of a run, each checked before anything expensive starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig
from kit.errors import ConfigError, EnvironmentUnsupported, ObjectiveError

if TYPE_CHECKING:
    from kit.data import DataSplit
    from kit.objective import Objective
    from kit.training.embedded import Progress
    from kit.training.models import ModelFiles
    from rewards import Preset

HOOK_KINDS = ("advantage", "clip", "weights", "regularizers", "reduction")


@dataclass(frozen=True)
class Parts:
    """Everything a run is made of but the weights."""

    config: RunConfig
    objective: Objective
    preset: Preset
    files: ModelFiles
    data: DataSplit


def prepare(config: RunConfig, progress: Progress | None = None) -> Parts:
    """Builds and checks every part of a run but the weights. Raises `KitError` for what would fail later."""
    check_engine(config)
    objective = build_objective(config)
    preset = build_reward(config)
    from kit.data import load_data

    data = load_data(config.data)
    check_heldout(config, len(data.heldout))
    files = find_model(config, progress)
    check_context(config, files)
    return Parts(explicit(config, objective), objective, preset, files, fit_prompts(config, data, files.tokenizer))


def find_model(config: RunConfig, progress: Progress | None = None) -> ModelFiles:
    """The model's files, found and checked; imported late, because it brings transformers."""
    from kit.training import models

    return models.find_model(config.model, chat=config.data.chat, progress=progress)


def build_objective(config: RunConfig) -> Objective:
    """The objective of the configuration. Raises `ConfigError` or `ObjectiveError`."""
    from kit.objective import Objective

    section = config.objective
    spec = {"recipe": section.recipe} | {
        kind: getattr(section, kind) for kind in HOOK_KINDS if getattr(section, kind) is not None
    }
    objective = Objective.from_spec(spec)
    if "ref_logps" in objective.needs and config.model.reference == "none":
        raise ObjectiveError(
            "A regularizer needs ref_logps, but the run has no reference policy (model.reference: none). "
            "Set model.reference: base, or remove the regularizer."
        )
    if "sampler_logps" in objective.needs:
        raise ObjectiveError(
            "A hook needs sampler_logps, which only an engine apart from the trainer reports; completions come from "
            "transformers' generate here, whose probabilities are the policy's own. Remove the hook."
        )
    return objective


def explicit(config: RunConfig, objective: Objective) -> RunConfig:
    """The configuration with the objective's parts written out, every default of every hook included."""
    spec = objective.to_spec()
    section = {"recipe": config.objective.recipe} | {kind: spec[kind] for kind in HOOK_KINDS}
    return config.model_copy(update={"objective": type(config.objective).model_validate(section)})


def build_reward(config: RunConfig) -> Preset:
    """The preset, the user's functions, or both in one. Raises the reward library's errors.

    Functions of the user's own may outweigh the preset's correctness: their range is unknown, and the weights are theirs.
    """
    import rewards

    functions = [(function.path, function.weight) for function in config.reward.functions]
    preset = rewards.load(config.reward.preset, **config.reward.params) if config.reward.preset else None
    if preset is not None and not functions:
        return preset
    own = rewards.from_functions(functions, base=preset, allow_shaping_above_correctness=True)
    # A function of the user's own says how good a completion is, not whether it is right.
    return own if preset is not None else rewards.Preset(own.components, name=own.name, checker=None)


def check_engine(config: RunConfig) -> None:
    """Refuses an engine that this version does not drive. Raises `EnvironmentUnsupported`."""
    if config.generation.engine == "vllm":
        raise EnvironmentUnsupported(
            "generation.engine: vllm is not available in this version. Set generation.engine: hf (or auto): the same "
            "completions, sampled by transformers' generate."
        )


def check_heldout(config: RunConfig, heldout: int) -> None:
    """Refuses an evaluation without problems. Raises `ConfigError`."""
    wanted = config.evaluation.before or config.evaluation.after or config.evaluation.every
    if wanted and not heldout:
        raise ConfigError(
            "There are no held-out rows to evaluate on. Set data.heldout above 0, or turn evaluation.before, "
            "evaluation.after and evaluation.every off."
        )


def check_context(config: RunConfig, files: ModelFiles) -> None:
    """Refuses prompts and completions that together exceed the model's context. Raises `ConfigError`."""
    context = getattr(files.config.get_text_config(), "max_position_embeddings", None)
    asked = (config.data.max_prompt_tokens or 0) + config.generation.max_completion_tokens
    if context is not None and asked > context:
        raise ConfigError(
            f"data.max_prompt_tokens {config.data.max_prompt_tokens} + generation.max_completion_tokens "
            f"{config.generation.max_completion_tokens} = {asked} tokens, but {config.model.name} has a context of "
            f"{context}. Lower one of them by {asked - context}."
        )


def fit_prompts(config: RunConfig, data: DataSplit, tokenizer: Any) -> DataSplit:
    """Leaves out prompts longer than `data.max_prompt_tokens`. Raises `DataError` when none is left."""
    if config.data.max_prompt_tokens is None:
        return data
    from kit.data import filter_by_length
    from kit.evaluation.heldout import render

    def count_tokens(prompts: list[Any]) -> list[int]:
        texts = [render(tokenizer, prompt) for prompt in prompts]
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    return filter_by_length(data, count_tokens, config.data.max_prompt_tokens)
