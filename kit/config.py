"""One schema for YAML, the command line, Python and the web form.

    RunConfig
    ├── model         what is trained: weights, precision, LoRA
    ├── data          where prompts and references come from, how they are split
    ├── reward        a preset by name, or your own functions
    ├── objective     recipe and hooks (resolved in kit.objective)
    ├── generation    how completions are sampled
    ├── optimisation  steps, batch, learning rate
    ├── evaluation    held-out score before, during and after
    └── run           id, seed, folders, checkpoints, trackers

Unknown keys are refused with the nearest valid one. This module imports pydantic and yaml only.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kit.errors import ConfigError
from kit.loading import apply_override, explain, read_yaml
from kit.registry import did_you_mean

PRESET_FOLDER = Path(__file__).parent / "presets"
EMBEDDED = "embedded"
HookSpec = str | dict[str, Any]


class Section(BaseModel):
    """Base of all sections: no unknown keys, assignments validated, documentation from the strings below fields."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True)


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685)."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank r of the update B·A."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scaling numerator: the update is multiplied by alpha / rank (alpha / sqrt(rank) with `rslora`)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability on the adapter's input. Above 0, old and new log-probabilities differ even on-policy."""
    targets: str | list[str] = "all-linear"
    """`all-linear`, or the names of the modules that get an adapter."""
    rslora: bool = False
    """Rank-stabilised scaling (arXiv 2312.03732)."""


class ModelConfig(Section):
    """The policy: weights, precision, adapters."""

    name: str = EMBEDDED
    """`embedded` (the tiny model that the kit builds itself), a model folder, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; null is its default branch."""
    backend: Literal["auto", "transformers", "unsloth"] = "auto"
    """Who loads the model. `auto`: in this version always transformers + PEFT; `unsloth` is refused."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights. `auto`: bfloat16 on a GPU that has it, float16 on an older one, float32 on the CPU."""
    load_in_4bit: bool = False
    """Quantise the frozen weights to 4-bit NF4 with bitsandbytes (QLoRA, arXiv 2305.14314)."""
    lora: LoraConfig | None = Field(default_factory=LoraConfig)
    """Adapters; null trains every weight."""
    reference: Literal["auto", "base", "none"] = "auto"
    """Reference policy for KL terms. `base`: the weights before training (with LoRA: the same model, adapters off, no
    extra memory). `auto`: base if a term needs it. `none`: never; such a term is then refused."""
    attention: str | None = None
    """Attention implementation of transformers (`sdpa`, `eager`, `flash_attention_2`); null lets it choose."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: read the repository first, it runs with your rights."""


class DataConfig(Section):
    """Prompts and references."""

    source: str = "reasoning-gym:chain_sum"
    """`reasoning-gym:TASK`, a .jsonl/.json/.csv/.parquet file, a folder of them, a saved `datasets` folder, or a
    hub id."""
    subset: str | None = None
    """Configuration of a hub dataset, e.g. `main` for openai/gsm8k."""
    split: str = "train"
    """Split of a hub dataset that rows are taken from."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""
    task_params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of a reasoning-gym task, e.g. {min_terms: 2, max_terms: 3}."""
    prompt_column: str | None = None
    """Column with the prompt: a text, or a list of chat messages. Null: prompt, question, problem,
    messages, instruction or input."""
    reference_column: str | None = None
    """Column with the reference answer. Null: reference, answer, solution, target, label or gold;
    a dataset may have none."""
    rename: dict[str, str] = Field(default_factory=dict)
    """Further columns to hand to the reward under another name: {theirs: ours}."""
    system_prompt: str | None = None
    """Put before every conversation. Null: none is added."""
    chat: bool = True
    """Wrap text prompts as a user message, so that the chat template applies. False sends the text as it is."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Rows to use at most, train and held-out together, after reading."""
    heldout: Annotated[int, Field(ge=0)] = 200
    """Rows set apart for evaluation, chosen by a hash of their content: the same row never stands on both sides."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = 512
    """Prompts longer than this many tokens are left out, and counted. Null: no filter."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be used instead of refusing to start; how many is reported."""
    seed: int = 0
    """Seed of generated tasks and of the order of rows, apart from the run's seed: arms of a comparison share rows."""


class RewardFunction(Section):
    """A reward function of yours."""

    path: str
    """`file.py:function` or `package.module:function`, with TRL's calling convention."""
    weight: float = 1.0
    """Factor on its value in the weighted sum."""


class RewardConfig(Section):
    """What is rewarded: a preset, your functions, or both."""

    preset: str | None = "reasoning-gym"
    """Name of a preset of `rewards` (`grpo-kit reward list`), or null when `functions` says everything. Left out beside
    `functions` it is null."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the preset."""
    functions: list[RewardFunction] = Field(default_factory=list)
    """Reward functions added to the preset, or used alone."""
    max_failure_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The run stops when, over 5 steps in a row, more than this share of scores are errors or timeouts."""

    @model_validator(mode="before")
    @classmethod
    def _functions_alone(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and tree.get("functions") and "preset" not in tree:
            return {**tree, "preset": None}
        return tree

    @model_validator(mode="after")
    def _something_is_rewarded(self) -> RewardConfig:
        if self.preset is None and not self.functions:
            raise ValueError("nothing is rewarded: set reward.preset to a name, or list reward.functions")
        return self


class ObjectiveConfig(Section):
    """The loss, as a recipe and changes to it. Hooks: names, `file.py:function`, or {name: ..., hyper-parameters}."""

    recipe: str = "dapo"
    """Starting point: grpo, dr_grpo, dapo, gspo, ppo, ... (all of them: `grpo-kit objective list`)."""
    advantage: HookSpec | None = None
    """Advantage estimator. Null: the recipe's. A mapping without `name` changes only the given hyper-parameters."""
    clip: HookSpec | None = None
    """Per-token surrogate and its clipping. Null: the recipe's."""
    weights: list[HookSpec] | None = None
    """Detached per-token multipliers. Null: the recipe's."""
    regularizers: list[HookSpec] | None = None
    """Penalties, each with a `coef` (a number, a schedule, or a controller such as adaptive_kl). Null: the recipe's."""
    reduction: HookSpec | None = None
    """From per-token losses to one number. Null: the recipe's."""


class GenerationConfig(Section):
    """How completions are sampled."""

    engine: Literal["auto", "hf", "vllm"] = "auto"
    """`hf`: transformers' generate. `auto`: in this version always hf; `vllm` is refused."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions a prompt (the group size G)."""
    max_completion_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens after which a completion is cut."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature of sampling; the loss divides logits by it, too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: the smallest set of tokens with this probability mass."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among the k most likely tokens; 0 is no limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Penalty on repeated tokens (arXiv 1909.05858); 1 is none. Other values make sampling differ from the policy."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of GPU memory for vLLM's weights and cache; read with engine vllm only, hence not in this version."""


class OptimisationConfig(Section):
    """Steps, batch, learning rate."""

    steps: Annotated[int, Field(ge=1)] = 200
    """Optimiser steps."""
    batch_size: Annotated[int, Field(ge=2)] = 64
    """Completions per optimiser step (prompts × num_generations)."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Completions per forward and backward pass; null: the whole batch at once, at most 16 on a GPU."""
    iterations: Annotated[int, Field(ge=1)] = 1
    """Optimiser steps on the same completions (μ); above 1 the later ones are off-policy."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps over which the learning rate rises from 0."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW in the weights' precision, or with 8-bit states (bitsandbytes)."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay rates of AdamW's first and second moments."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this norm; 0 turns it off."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass to save memory. Null: on with a GPU, off on the CPU."""


class EvaluationConfig(Section):
    """Held-out score: greedy accuracy, and pass@1, pass@k and maj@k from sampled completions."""

    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate every so many optimiser steps; 0: not in between."""
    prompts: Annotated[int, Field(ge=1)] = 200
    """Held-out problems used, at most."""
    k: Annotated[int, Field(ge=1, le=256)] = 4
    """Sampled completions a problem for pass@1 and pass@k (unbiased estimator, arXiv 2107.03374)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of those samples."""
    seed: int = 0
    """Seed of those samples."""
    batch_size: Annotated[int, Field(ge=1)] = 128
    """Completions generated at once."""
    checker: str | None = None
    """Preset of `rewards` that says what is right, apart from what is trained on. Null: the checker that the training
    preset names, if it names one."""
    metric: Literal["auto", "greedy_accuracy", "pass@1", "pass@k", "maj@k", "greedy_reward"] = "auto"
    """The score by which the best checkpoint is chosen, training stopped early and the alarm raised. `auto`: greedy
    accuracy where something says what is right, else the greedy reward."""
    keep_best: bool = True
    """Keep the checkpoint with the best score, besides the last ones. Needs `every`."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Stop early after so many evaluations in a row without a better score. Null: never."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """How much better a score must be to count as better, in its own unit."""
    alarm: Literal["off", "warn", "stop", "rollback"] = "warn"
    """What to do when the training reward rises while the held-out score falls (reward hacking): only say so, stop the
    run, or stop it with the weights of its best checkpoint."""

    @field_validator("alarm", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false


class RunSection(Section):
    """Names, seeds, folders."""

    id: str | None = None
    """Name of the run: lower-case letters, digits and dashes. Null: made from the preset and the time."""
    root: str = "runs"
    """Folder that holds all runs."""
    seed: int = 0
    """Seed of adapters, sampling and data order."""
    save_every: Annotated[int, Field(ge=0)] = 50
    """Optimiser steps between checkpoints; 0: only at the end."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Checkpoints kept; older ones are removed."""
    save_completions: bool = True
    """Write every completion with its rewards to completions/*.parquet."""
    on_out_of_memory: Literal["halve", "fail"] = "halve"
    """Out of memory in a micro-batch: go on with halved micro-batches and the same effective batch (three times in a row
    at most), or end the run."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of torch; null: the number of physical cores that this process may use."""
    report_to: list[Literal["trackio", "wandb", "tensorboard", "mlflow"]] = Field(default_factory=list)
    """Trackers that mirror the metrics. The run directory stays the truth."""

    @field_validator("id")
    @classmethod
    def _is_a_plain_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?", value):
            raise ValueError("a run id has 1 to 64 lower-case letters, digits and dashes, and no dash at either end")
        return value


class RunConfig(Section):
    """Everything that decides a run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
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


def _check_recipe_change(before: dict[str, Any], after: dict[str, Any], overrides: Sequence[str]) -> None:
    """Refuses a new recipe over a section that spells out every hook, as a saved run does: the hooks would win."""
    old, new = before.get("objective"), after.get("objective")
    if not isinstance(old, Mapping) or not isinstance(new, Mapping) or old.get("recipe") == new.get("recipe"):
        return
    hooks = [name for name in ObjectiveConfig.model_fields if name != "recipe"]
    if any(old.get(name) is None for name in hooks):
        return
    changed = {override.partition("=")[0].strip() for override in overrides}
    winning = [
        name
        for name in hooks
        if new.get(name) is not None and not any(f"{key}.".startswith(f"objective.{name}.") for key in changed)
    ]
    if winning and "objective" not in changed:
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
