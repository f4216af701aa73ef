"""Builds the parts of a run from its configuration and checks them before the model is loaded (`grpo-kit validate`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig, load_config
from kit.errors import ConfigError, EnvironmentUnsupported, ModelError, ObjectiveError, RewardError, RunError, refuse
from kit.generation.engine import HF, Engine, choose_engine, reports_logps, resolve, with_engine
from kit.generation.tools import NOTHING, ToolSetup, open_row
from kit.models.backend import TRANSFORMERS, choose_backend, torch_dtype
from kit.runs.store import RunStore

if TYPE_CHECKING:
    from kit.data import DataSplit
    from kit.models.loading import ModelFiles
    from kit.objective import Objective
    from rewards import Preset, Sample


def resolve_config(
    config: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    steps: int | None = None,
    seed: int | None = None,
    objective: str | Mapping[str, Any] | None = None,
    run_id: str | None = None,
) -> RunConfig:
    """Returns the configuration with shortcuts and overrides applied, and with a run id. Raises `ConfigError`.

    The shortcuts set optimisation.steps, run.seed, objective (a recipe's name or a mapping for the section) and run.id.
    """
    section = {"recipe": objective} if isinstance(objective, str) else objective
    shortcuts = {"optimisation.steps": steps, "run.seed": seed, "objective": section, "run.id": run_id}
    try:
        first = [f"{key}={json.dumps(value)}" for key, value in shortcuts.items() if value is not None]
    except TypeError:
        raise ConfigError(
            "A shortcut of train() must be a plain value. objective= takes a recipe's name or a mapping such as "
            "{'recipe': 'dapo', 'clip': {'eps_high': 0.28}}; name your own hooks as 'file.py:function'."
        ) from None
    resolved = load_config(config, [*first, *overrides])
    if resolved.run.id is None:
        stem = Path(config).stem if isinstance(config, (str, Path)) else "run"
        resolved.run.id = RunStore(resolved.run.root).new_id(stem)
    return resolved


@dataclass(frozen=True)
class Parts:
    """All parts of a run except the weights."""

    config: RunConfig
    objective: Objective
    preset: Preset
    files: ModelFiles
    data: DataSplit
    checker: Preset
    engine: Engine = HF
    interaction: ToolSetup = NOTHING
    teacher: ModelFiles | None = None  # a teacher that is another model; None: no teacher, or the policy itself


HOOK_KINDS = ("advantage", "clip", "weights", "regularizers", "reduction")
TRACKER_PACKAGES = {
    "trackio": ("trackio",),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "mlflow": ("mlflow",),
}
COMPARES_SAMPLER = ("off_policy_mask",)
"""Weights that use the engine's log-probabilities if the batch has them, but do not need them."""
PROBE_ROWS = 4
PROBE_TEXT = "<think>.</think><answer>0</answer>"


def prepare(config: RunConfig, *, fresh: bool = True, waits: bool = False) -> Parts:
    """Builds and checks all parts of a run except the weights. Raises `KitError` for anything that would fail later.

    Args: fresh: whether the run is new, so that its id must be free. waits: whether the run will wait for its GPU.
    """
    from kit.data import load_data
    from kit.data.images import IMAGES
    from kit.evaluation.checker import build_checker
    from kit.generation.prompts import fit_pictures, note_opened_thinking
    from kit.generation.tools import check_rows, check_turns, load_tools
    from kit.models.loading import find_model
    from kit.models.memory import check_memory
    from kit.models.start import described
    from kit.runner.distributed import check_division, world_size
    from kit.trainer.dynamic_sampling import check_dynamic_sampling
    from kit.trainer.teacher import check_teacher

    # Checks of the configuration and the machine.
    check_environment(config)
    config = config.model_copy(update={"model": described(config.model)})
    if config.run.id is not None and fresh:
        RunStore(config.run.root).check_free(config.run.id)
    check_division(config, world_size())
    objective = build_objective(config)
    config, engine = resolve(explicit(config, objective), choose_engine(config), objective=objective)
    check_truncated(config, objective)
    interaction = load_tools(config.generation)
    preset = build_reward(config)
    checker = build_checker(config, preset)

    # The data, and the reward on its first rows.
    data = load_data(config.data)
    columns, pictures = data.train.column_names, IMAGES in data.train.features
    config, engine = resolve(config, engine, columns, objective)
    if config.selection.dynamic_sampling is not None:
        check_dynamic_sampling(objective, turns=bool(interaction), processes=world_size(), images=pictures)
    check_teacher(config.teacher, objective.needs, columns)
    check_rows(interaction, data)
    check_heldout(config, len(data.heldout))
    samples, names = trial_samples(config, data, interaction)
    check_reward(config, preset, checker, samples, names)

    # The model's files. They may need another backend or engine than the configuration alone; `config` is updated.
    files = find_model(config.model, chat=config.data.chat, template=config.data.chat_template_kwargs)
    in_float32 = files.backend.computes_in_float32 and files.backend.name == TRANSFORMERS
    if engine.name == "vllm" and (config.model.load_in_4bit or in_float32):  # known from the files
        dtype = "float32" if in_float32 else config.model.dtype
        computed = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        requested = Engine("auto" if engine.note else "vllm", "")
        config, engine = resolve(config, choose_engine(with_engine(computed, requested)), columns, objective)
        build_objective(config)
    if files.backend.name != choose_backend(config.model).name:
        model = config.model.model_copy(update={"backend": files.backend.name})
        config, engine = resolve(config.model_copy(update={"model": model}), engine, columns, objective)
    config = with_learning_rate(config, files.config)
    check_memory(config, files.shape, files.backend.device, objective, waits=waits)
    limited = with_prompt_limit(config, data, files.tokenizer, interaction)
    check_prompts(limited, data, files)
    check_turns(interaction, files.tokenizer, chat=config.data.chat, source=config.model.name)
    data, config = fit_pictures(config, fit_prompts(config, data, files.tokenizer, interaction), files), limited
    prompts, rows = config.optimisation.batch_size // config.generation.num_generations, len(data.train)
    refuse(
        ConfigError,
        (
            prompts > rows,
            f"A step needs {prompts} prompts (optimisation.batch_size / generation.num_generations), but there are {rows} "
            "training rows, so the run would have no steps.",
            f"Lower optimisation.batch_size to {rows * config.generation.num_generations} or less, or raise data.limit.",
        ),
    )
    check_heldout(config, len(data.heldout))
    teacher = find_teacher(config, files.tokenizer, pictures=pictures)
    note_opened_thinking(preset, files.tokenizer, data.train.select(range(min(1, len(data.train))))["prompt"])
    return Parts(config, objective, preset, files, data, checker, engine, interaction, teacher)


# --- the configuration and the machine --------------------------------------------------------------------------------


def check_environment(config: RunConfig, *, trains: bool = False) -> None:
    """Raises `KitError` if the configuration needs packages or hardware that this machine does not have.

    trains: whether this is the training process. It must see one GPU, unless a launcher assigns several.
    """
    import torch

    choose_engine(config)
    torch_dtype(config.model.dtype, "cuda" if torch.cuda.is_available() else "cpu")
    eight_bit = config.optimisation.optimizer == "adamw_8bit"
    absent = [name for name in config.run.report_to if not any(map(find_spec, TRACKER_PACKAGES[name]))]
    listed = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    refuse(
        EnvironmentUnsupported,
        (
            trains and torch.cuda.device_count() > 1 and "LOCAL_RANK" not in os.environ,
            f"This process sees {torch.cuda.device_count()} GPUs, but a run trains on one.",
            f"Set CUDA_VISIBLE_DEVICES={listed[0] if listed else 0}; grpo-kit train and kit.train(...) do so where the variable "
            "is unset.",
        ),
        (
            eight_bit and find_spec("bitsandbytes") is None,
            "optimisation.optimizer: adamw_8bit needs bitsandbytes.",
            "Install it with: uv sync --inexact --extra bnb  (or: pip install 'grpo-kit[bnb]'), or set "
            "optimisation.optimizer: adamw.",
        ),
        (
            bool(absent),
            f"run.report_to: {', '.join(absent)} is not installed.",
            f"Install it with: pip install {' '.join(absent)}, or remove it from run.report_to.",
        ),
    )


def build_objective(config: RunConfig) -> Objective:
    """The objective of the configuration. Raises `ConfigError` or `ObjectiveError`.

    The user's own hooks are tried on random batches.
    """
    from kit.objective import Objective
    from kit.objective.check import require_sound

    section, iterations = config.objective, config.optimisation.iterations
    parts = {kind: value for kind in HOOK_KINDS if (value := getattr(section, kind)) is not None}
    objective = Objective.from_spec({"recipe": section.recipe} | parts)
    needs = objective.needs
    reference = sorted(needs & {"ref_logps", "full_kl"})
    refuse(
        ObjectiveError,
        (
            bool(reference) and config.model.reference == "none",
            f"A regularizer needs {', '.join(reference[:1])}, but the run has no reference policy (model.reference: none).",
            "Set model.reference: base, or remove the regularizer.",
        ),
        (
            "sampler_logps" in needs and not reports_logps(config),
            "A hook needs sampler_logps, which only vLLM reports. Here transformers' generate samples, with the same "
            "probabilities as the policy.",
            "Remove the hook, or set generation.engine: vllm.",
        ),
        (
            iterations > 1 and objective.clip.on_policy,
            f"{objective.clip.title} has no ratio, so with optimisation.iterations: {iterations} the gradient of the second and "
            "later steps on the same completions would be biased.",
            "Set optimisation.iterations: 1, or choose a clip with a ratio, e.g. ppo_clip.",
        ),
    )
    require_sound(objective)
    return objective


def check_truncated(config: RunConfig, objective: Objective) -> None:
    """Raises `ConfigError` if a hook would compare log-probabilities of a truncated and of a full distribution."""
    generation, needs = config.generation, "sampler_logps" in objective.needs
    hooks = [hook.name for hook in objective.weights if hook.name in COMPARES_SAMPLER or "sampler_logps" in hook.needs]
    if generation.truncates and generation.engine == "vllm" and (needs or hooks):
        raise ConfigError(
            f"generation.top_p, top_k or min_p with {', '.join(hooks) or objective.clip.name}: vLLM's log-probabilities "
            "are then over the remaining tokens, the trainer's over the whole vocabulary. Their ratio is biased (0.9 on average "
            "at top_p 0.8). Set top_p: 1.0, top_k: 0 and min_p: null, or generation.engine: hf."
        )


def explicit(config: RunConfig, objective: Objective) -> RunConfig:
    """The configuration with all parts of the objective and all defaults of their hooks."""
    spec = objective.to_spec()
    section = {"recipe": config.objective.recipe} | {kind: spec[kind] for kind in HOOK_KINDS}
    return config.model_copy(update={"objective": type(config.objective).model_validate(section)})


def build_reward(config: RunConfig) -> Preset:
    """One preset of the configured presets and functions. Raises the reward library's errors.

    The user's functions may outweigh the preset's correctness component, since their range is unknown.
    """
    import rewards

    presets = [(rewards.load(config.reward.preset, **config.reward.params), 1.0)] if config.reward.preset else []
    functions = []
    for function in config.reward.functions:
        if function.preset is not None:
            presets.append((rewards.load(function.preset, **function.params), function.weight))
        else:
            functions.append((function.path, function.weight))
    alone = len(presets) == 1 and presets[0][1] == 1.0
    preset = (presets[0][0] if alone else rewards.combine(presets)) if presets else None
    if preset is not None and not functions:
        return preset
    own = rewards.from_functions(functions, base=preset, allow_shaping_above_correctness=True)
    # A user's own function rates a completion but does not decide whether it is correct.
    return own if preset is not None else rewards.Preset(own.components, name=own.name, checker=None)


# --- the data ---------------------------------------------------------------------------------------------------------


def check_heldout(config: RunConfig, heldout: int) -> None:
    """Raises `ConfigError` if an evaluation is configured without held-out rows."""
    scores = config.evaluation.before or config.evaluation.after or config.evaluation.every
    remedy = "Set data.heldout above 0, or turn off evaluation.before, evaluation.after and evaluation.every."
    refuse(ConfigError, (bool(scores) and not heldout, "There are no held-out rows to evaluate on.", remedy))


def check_reward(
    config: RunConfig, preset: Preset, checker: Preset, samples: Sequence[Sample], columns: Sequence[str]
) -> None:
    """Scores `trial_samples`.

    Raises `RewardError` if a component cannot score any of them, `ConfigError` if evaluation.checker cannot judge any.
    """
    from kit.evaluation.heldout import scoring_context
    from rewards.functions import FunctionComponent

    if not samples:
        return
    ctx = scoring_context(config.run.seed, config.optimisation.steps)
    verdict = preset.score(samples, ctx)
    for component, _ in preset.components:
        name = component.name
        if set(verdict.statuses[name]) != {"error"}:
            continue
        reason = verdict.infos[name][0].get("reason", "no reason given")
        if isinstance(component, FunctionComponent):
            raise RewardError(
                f"The reward function '{name}' failed on trial completions of the first rows: {reason}. Correct the "
                f"function. It receives prompts, completions, {', '.join(columns)}; `reference` is the correct answer."
            )
        raise RewardError(
            f"The reward '{name}' of preset '{preset.name}' cannot score the rows of {config.data.source}: {reason}. Choose "
            "a reward.preset that fits the data (`grpo-kit reward list`), set data.reference_column, or set reward.preset: "
            f"null with reward.functions of your own. Columns: {', '.join(columns)}."
        )
    if config.evaluation.checker is None:
        return
    scores = checker.verdicts(samples, ctx)
    if {score.status for score in scores} == {"error"}:
        raise ConfigError(
            f"evaluation.checker: '{checker.name}' cannot judge the rows of {config.data.source}: "
            f"{scores[0].info.get('reason', 'no reason given')}. Choose a preset that fits the data (grpo-kit reward list). "
            f"Columns: {', '.join(columns)}."
        )


def trial_samples(
    config: RunConfig, data: DataSplit, interaction: ToolSetup = NOTHING
) -> tuple[list[Sample], list[str]]:
    """A group of artificial completions for each of up to 4 training rows, and the names of the columns."""
    import rewards
    from kit.generation.prompts import without_pictures

    first = data.train.select(range(min(64, len(data.train)))).to_list()
    chosen = sorted(first, key=lambda row: row.get("reference") is None)[:PROBE_ROWS]
    rows = [row for row in without_pictures(chosen) for _ in range(config.generation.num_generations)]
    if not rows:
        return [], []
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    columns["prompt_ids"] = [[0] for _ in rows]
    if interaction.environments is not None:
        columns["environments"] = [open_row(interaction, row)[1] for row in rows]
    prompts = [row["prompt"] for row in rows]
    completions = [
        PROBE_TEXT if isinstance(prompt, str) else [{"role": "assistant", "content": PROBE_TEXT}] for prompt in prompts
    ]
    return rewards.build_samples(prompts, completions, [[0] for _ in prompts], **columns), list(columns)


# --- the model --------------------------------------------------------------------------------------------------------


def check_prompts(config: RunConfig, data: DataSplit, files: ModelFiles) -> None:
    """Raises `ConfigError` if prompts do not fit into the context, or the template ignores the system message."""
    context, prompt, completion = files.context, config.data.max_prompt_tokens, config.generation.max_completion_tokens
    beyond = 0 if context is None else (prompt or 0) + completion - context
    template = files.family.template if files.family is not None else None
    dropped = template is not None and not template.system and config.data.chat and len(data.train) > 0
    refuse(
        ConfigError,
        (
            beyond > 0,
            f"data.max_prompt_tokens {prompt} + generation.max_completion_tokens {completion} = {(prompt or 0) + completion} "
            f"tokens, but {config.model.name} has a context of {context}.",
            f"Lower one of them by {beyond}.",
        ),
        (
            dropped and data.train[:1]["prompt"][0][0]["role"] == "system",
            f"The prompts begin with a system message (data.system_prompt), which the chat template of {config.model.name} "
            "ignores.",
            "Put its text into the user's message, or set model.chat_template to a template with a system message.",
        ),
    )


def fit_prompts(config: RunConfig, data: DataSplit, tokenizer: Any, interaction: ToolSetup = NOTHING) -> DataSplit:
    """Drops prompts longer than `data.max_prompt_tokens`, as `lengths_of` counts. Raises `DataError` if no row remains."""
    from kit.data import filter_by_length

    limit = config.data.max_prompt_tokens
    return data if limit is None else filter_by_length(data, _counter(data, tokenizer, interaction), limit)


def with_prompt_limit(config: RunConfig, data: DataSplit, tokenizer: Any, interaction: ToolSetup) -> RunConfig:
    """The configuration with the longest prompt as `data.max_prompt_tokens` if that is null and vLLM generates.

    vLLM starts only if its cache holds a sequence of the largest length, which without a limit is the model's whole context.
    """
    if config.data.max_prompt_tokens is not None or config.generation.engine != "vllm":
        return config
    count, sides = _counter(data, tokenizer, interaction), [rows for rows in (data.train, data.heldout) if len(rows)]
    limit = {"max_prompt_tokens": max((max(count(list(rows["prompt"]))) for rows in sides), default=1)}
    return config.model_copy(update={"data": config.data.model_copy(update=limit)})


def _counter(data: DataSplit, tokenizer: Any, interaction: ToolSetup) -> Callable[[list[Any]], list[int]]:
    """A function from prompts to their numbers of tokens, with tools and the longest text of an environment."""
    from kit.generation.prompts import count_tokens, observation_tokens

    added = max(observation_tokens(tokenizer, rows, interaction) for rows in (data.train, data.heldout))
    return partial(count_tokens, tokenizer, tools=interaction.all_tools(), added=added)


def longest_prompts(config: RunConfig, tokenizer: Any, rows: Any, interaction: ToolSetup) -> dict[str, int | None]:
    """Number of tokens of the longest prompt of `policy`, and of `teacher` if it has its own template.

    rows: a dataset. Parts of a teacher's prompt that come from the rollout count as one token.
    """
    from kit.generation.prompts import count_tokens, lengths_of
    from kit.trainer.teacher import trial_prompts

    limit, lengths = config.data.max_prompt_tokens, lengths_of(tokenizer, rows, interaction)
    fitting = [number for number, length in enumerate(lengths) if limit is None or length <= limit]
    longest: dict[str, int | None] = {"policy": max((lengths[number] for number in fitting), default=limit)}
    if shown := trial_prompts(config.teacher.prompt, rows.select(fitting)):
        longest["teacher"] = max(count_tokens(tokenizer, shown, interaction.all_tools()))
    return longest


def find_teacher(config: RunConfig, tokenizer: Any, *, pictures: bool) -> ModelFiles | None:
    """The files of the teacher; None without a teacher, or if it is the policy itself.

    Raises `ModelError` if the model is missing or has another tokenizer, and `ConfigError` if prompts contain pictures.
    """
    from kit.models.loading import find_model
    from kit.trainer.teacher import SELF, check_vocabulary

    teacher = config.teacher
    if teacher.model is not None and pictures:
        raise ConfigError(
            "teacher.model reads text only, but the prompts contain pictures. Set data.image_column: none."
        )
    if teacher.model in (None, SELF):
        return None
    try:
        files = find_model(teacher_model(config), chat=config.data.chat)
    except ModelError as error:
        raise ModelError(f"teacher.model: {str(error).removeprefix('model.name: ')}") from error
    check_vocabulary(tokenizer, files.tokenizer, str(teacher.model))
    return files


def teacher_model(config: RunConfig) -> Any:
    """The section `model` of a teacher: a frozen model of transformers.

    `lora` only sets the precision, that of frozen weights. The teacher has no adapter.
    """
    own = {name: getattr(config.teacher, name) for name in ("revision", "dtype", "load_in_4bit")}
    fixed: dict[str, Any] = {"name": config.teacher.model, "backend": "transformers", "lora": {}, "reference": "none"}
    shared = {name: getattr(config.model, name) for name in ("attention", "chat_template", "trust_remote_code")}
    return type(config.model).model_validate(shared | own | fixed)


WHOLE_COMPLETIONS = {"gspo": ("sequence_mean", "sequence_sum"), "gmpo": ("sequence_mean",)}
"""Clips of whole completions, with the reductions that papers use with them."""


def validate(config: RunConfig) -> list[str]:
    """Makes all checks of a run before its first step, and returns notes.

    Raises `KitError` for anything that would prevent the run from starting.
    """
    from kit.generation.prompts import thinking_note
    from kit.models.gguf import origin_note
    from kit.models.memory import card_of, note, plan_memory, planned_workload, room_of

    parts, original = prepare(config, waits=True, fresh=False), config
    config, data, preset, files = parts.config, parts.data, parts.preset, parts.files
    notes = [f"model: {config.model.name}, {files.parameters / 1e6:.2f}M weights, {files.backend.reason}"]
    try:
        if config.run.id is not None:
            RunStore(config.run.root).check_free(config.run.id)
    except RunError as taken:
        notes.append(f"run: {taken}")
    if (start := origin_note(files.source)) is not None:
        notes.append(f"model: {start}")
    if files.shape is not None:
        device = files.backend.device
        room = room_of(device, waits=True)
        work = planned_workload(
            config,
            files.shape,
            device,
            parts.objective,
            longest_prompts(config, files.tokenizer, data.train, parts.interaction),
            room=room,
            card=card_of(device),
            teacher=parts.teacher.shape if parts.teacher is not None else None,
            float32=files.backend.computes_in_float32,
        )
        notes.append(note(plan_memory(files.shape, work), room))
    rows = data.info["rows"]
    too_long = f"rows with prompts of more than {config.data.max_prompt_tokens} tokens"
    kinds = {"skipped": "bad rows", "too_long": too_long}
    omitted = "".join(f", {rows[key]} {kind} left out" for key, kind in kinds.items() if rows.get(key))
    notes += learning_rate_notes(original, config, files.config)
    if config.data.chat and (thinking := thinking_note(files)):
        notes.append(f"thinking: {thinking}")
    notes.append(f"data: {len(data.train)} training and {len(data.heldout)} held-out rows{omitted}")
    notes += [f"data: {note}" for note in data.info.get("notes", [])]
    notes.append(f"reward: {preset.name}, {preset.parts}")
    if parts.checker.checker is None:
        notes.append("reward: no component decides correctness, so held-out evaluation reports reward, not accuracy")
    needs = f", needs {', '.join(sorted(parts.objective.needs))}" if parts.objective.needs else ""
    own = [hook.name for _, hook in parts.objective.hooks if hook.factory.custom]
    notes.append(f"objective: {' with '.join([config.objective.recipe, *own])}{needs}")
    clip, reduction = parts.objective.clip.name, parts.objective.reduction.name
    if config.optimisation.iterations == 1 and clip != "reinforce":
        notes.append(
            "objective: on-policy, because each completion is used for one step (optimisation.iterations: 1). Every ratio is "
            "1, so the bounds of the clip have no effect. They have one with optimisation.iterations: 2"
        )
    meant = WHOLE_COMPLETIONS.get(clip, (reduction,))
    if reduction not in meant:
        notes.append(
            f"objective: {clip} clips whole completions and is made for reduction {' or '.join(meant)}; "
            f"with {reduction} longer completions weigh more"
        )
    if (sampling := config.selection.dynamic_sampling) is not None:
        notes.append(f"selection: dynamic sampling, at most {sampling.max_rounds} rounds of generation a step")
    if parts.engine.name == "vllm" or parts.engine.note:
        notes.append(f"engine: {parts.engine.name}, {parts.engine.reason}")
    prompts = config.optimisation.batch_size // config.generation.num_generations
    passes = config.optimisation.steps / config.optimisation.iterations * prompts / max(1, len(data.train))
    notes.append(
        f"steps: {config.optimisation.steps} x {prompts} prompts x {config.generation.num_generations} completions, "
        f"{passes:.2f} passes over the training rows"
    )
    return notes


# --- optimisation.learning_rate: auto ---------------------------------------------------------------------------------

BASE, FOR_ADAPTERS, WIDTH = 5e-5, 10.0, 2000
EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
"""Exponents P of the width by prefix of `model_type`. Other families have no published exponent, so P is 0."""
ALPHA = 32.0


def exponent(model_config: Any) -> float:
    """The exponent P of the model's width; 0 if none is published for the family."""
    kind = str(getattr(model_config, "model_type", ""))
    return next((value for name, value in EXPONENTS.items() if kind.startswith(name)), 0.0)


def learning_rate(model_config: Any, *, lora: bool) -> float:
    """Compute the learning rate for a transformers configuration by a published rule, to two digits.

        5e-5 * 10 * (2000 / H)^P        H: hidden size; the 10 for adapters only; P: 0.781 for Llama, 0.0775 for Qwen

    Sources: "LoRA Without Regret" (Schulman et al., Thinking Machines, 2025, thinkingmachines.ai/blog/lora) for the factor of
    about ten over full fine-tuning, at any rank and for large batches; `tinker_cookbook.hyperparam_utils.get_lr` for the
    constants, which were fitted with alpha 32, scaled by alpha / rank.
    """
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    rate = BASE * (FOR_ADAPTERS if lora else 1.0) * (WIDTH / text.hidden_size) ** exponent(model_config)
    return float(f"{rate:.2g}")


def with_learning_rate(config: RunConfig, model_config: Any) -> RunConfig:
    """The configuration with a number instead of `auto`."""
    if config.optimisation.learning_rate != "auto":
        return config
    rate = learning_rate(model_config, lora=config.model.lora is not None)
    return config.model_copy(update={"optimisation": config.optimisation.model_copy(update={"learning_rate": rate})})


def learning_rate_notes(unresolved: RunConfig, config: RunConfig, model_config: Any) -> list[str]:
    """Notes of `validate` on the learning rate. `unresolved`: the configuration with `auto`."""
    lines, lora = [], config.model.lora
    rate, rule = float(config.optimisation.learning_rate), learning_rate(model_config, lora=lora is not None)
    if unresolved.optimisation.learning_rate == "auto":
        why = "ten times that of all weights" if lora is not None else "all weights"
        width = (
            f"by the width of {model_config.model_type}"
            if exponent(model_config)
            else (f"independent of the width: no exponent is published for {model_config.model_type}")
        )
        lines.append(f"learning rate: {rate:g} (auto: {why}, {width})")
        if lora is not None and (lora.alpha != ALPHA or lora.rslora):
            lines.append(
                f"learning rate: the rule was fitted with model.lora.alpha: 32 without rslora, but this run has alpha "
                f"{lora.alpha:g}{' and rslora' * lora.rslora}, which scales the update. Try half and twice the number too"
            )
    elif rate * 10 <= rule:
        lines.append(
            f"learning rate: {rate:g} is {rule / rate:.0f} times lower than that of optimisation.learning_rate: auto ({rule:g}). "
            "Try auto if the reward stays flat"
        )
    return lines
