"""One schema for YAML, the command line, Python and the web form.

    RunConfig
    ├── model         what is trained: weights, precision, LoRA
    ├── data          where prompts and references come from, how they are split
    ├── reward        a preset by name, or your own functions
    ├── objective     recipe and hooks (resolved in kit.objective)
    ├── teacher       whom the policy learns from beside its rewards
    ├── generation    how completions are sampled
    ├── selection     which of them are trained on
    ├── optimisation  steps, batch, learning rate
    ├── evaluation    held-out score before, during and after
    └── run           id, seed, folders, checkpoints, trackers

Unknown keys are refused with the nearest valid one. This module imports pydantic and yaml only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from kit.config.loading import apply_override, explain, leaves, read_yaml
from kit.config.sections import EMBEDDED as EMBEDDED
from kit.config.sections import EMBEDDED_MODELS as EMBEDDED_MODELS
from kit.config.sections import INSTALL_SMOLLM2 as INSTALL_SMOLLM2
from kit.config.sections import SMOLLM2 as SMOLLM2
from kit.config.sections import SMOLLM2_PACKAGE as SMOLLM2_PACKAGE
from kit.config.sections import DataConfig as DataConfig
from kit.config.sections import EvaluationConfig as EvaluationConfig
from kit.config.sections import GenerationConfig as GenerationConfig
from kit.config.sections import LoraConfig as LoraConfig
from kit.config.sections import ModelConfig as ModelConfig
from kit.config.sections import ObjectiveConfig as ObjectiveConfig
from kit.config.sections import OptimisationConfig as OptimisationConfig
from kit.config.sections import RewardConfig as RewardConfig
from kit.config.sections import RewardFunction as RewardFunction
from kit.config.sections import RunSection as RunSection
from kit.config.sections import Section as Section
from kit.config.sections import SelectionConfig as SelectionConfig
from kit.config.sections import TeacherConfig as TeacherConfig
from kit.errors import ConfigError
from kit.registry import did_you_mean

PRESET_FOLDER = Path(__file__).parent / "presets"


class RunConfig(Section):
    """The configuration of a run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    selection: SelectionConfig = Field(default_factory=SelectionConfig)
    optimisation: OptimisationConfig = Field(default_factory=OptimisationConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    run: RunSection = Field(default_factory=RunSection)

    @model_validator(mode="after")
    def _batch_is_whole(self) -> RunConfig:
        batch, group = self.optimisation.batch_size, self.generation.num_generations
        if batch % group:
            below, above = batch - batch % group, batch + group - batch % group
            nearest = " or ".join(str(size) for size in (below, above) if size)
            raise ValueError(
                f"optimisation.batch_size: {batch} completions a step cannot be made of groups of "
                f"{group} (generation.num_generations); use {nearest}"
            )
        micro = self.optimisation.micro_batch_size
        if micro is not None and batch % micro:
            divisors = [size for size in range(1, batch + 1) if batch % size == 0]
            near = min(divisors, key=lambda size: (abs(size - micro), size))
            raise ValueError(
                f"optimisation.micro_batch_size: {micro} does not divide batch_size {batch}; use {near}, for example"
            )
        return self

    def to_yaml(self) -> str:
        """The configuration as YAML, every default written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def preset_names() -> list[str]:
    """Names of the configurations that come with the kit."""
    return sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml"))


def load_config(source: str | Path | Mapping[str, Any] | RunConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """A validated configuration from a preset's name, a YAML file, a mapping or a configuration, overrides applied.

    `overrides` are `section.key=value` strings whose values are read as YAML (`objective.clip.eps_high=0.28`).
    Raises `ConfigError` with one line a fault.
    """
    if isinstance(source, RunConfig):
        tree, origin = source.model_dump(mode="json"), "the configuration"
    elif isinstance(source, Mapping):
        tree, origin = copy.deepcopy(dict(source)), "the configuration"
    else:
        path = find_config(source)
        tree, origin = read_yaml(path), path.name
    before = copy.deepcopy(tree)
    for override in overrides:
        apply_override(tree, override)
    _check_recipe_change(before, tree, overrides)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, origin, RunConfig)) from None


def non_defaults(tree: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, value, default) of what a configuration sets otherwise, the run's id and folder aside.

    The default of a key that the schema does not have is the text `not set`.
    """
    defaults = dict(leaves(RunConfig().model_dump(mode="json")))
    rows = ((key, value, defaults.get(key, "not set")) for key, value in leaves(tree))
    return [row for row in rows if row[0] not in ("run.id", "run.root") and row[1] != row[2]]


def _check_recipe_change(before: dict[str, Any], after: dict[str, Any], overrides: Sequence[str]) -> None:
    """Refuses a new recipe over a section that spells out every hook, as a saved run does: the hooks would win."""
    old, new = before.get("objective"), after.get("objective")
    if not isinstance(old, Mapping) or not isinstance(new, Mapping) or old.get("recipe") == new.get("recipe"):
        return
    hooks = [name for name in ObjectiveConfig.model_fields if name != "recipe"]
    changed = {f"{override.partition('=')[0].strip()}." for override in overrides}
    winning = [name for name in hooks if not any(key.startswith(f"objective.{name}.") for key in changed)]
    if all(old.get(name) is not None for name in hooks) and winning and "objective." not in changed:
        recipe = new.get("recipe")
        raise ConfigError(
            f"objective.recipe={recipe} would change nothing of {', '.join(winning)}: the configuration spells them out, as "
            "every saved run does, and what is spelt out wins over the recipe. Replace the whole section with "
            f"-o 'objective={{recipe: {recipe}}}', or set these hooks by overrides, too."
        )


def find_config(source: str | Path) -> Path:
    """The file meant by a preset's name or a path. Raises `ConfigError` if there is none."""
    path = Path(source)
    if path.is_file():
        return path
    preset = PRESET_FOLDER / f"{source}.yaml"
    if path.name == str(source) and preset.is_file():
        return preset
    raise ConfigError(
        f"There is no file '{source}' and no preset of that name.{did_you_mean(str(source), preset_names())} "
        f"Presets: {', '.join(preset_names())}. `grpo-kit init` writes a commented file to start from."
    )
