"""`grpo-kit scale CONFIG --to verl` converts a run for verl, which trains on many GPUs with Ray.

It writes verl's YAML, the rows of both sides as parquet, a reward function of `rewards`, and a module that registers the
objective (`kit.objective.verl`). It lists all settings that differ from their defaults and that verl does not have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kit.config import EMBEDDED_MODELS, RunConfig
from kit.config.loading import leaves
from kit.errors import ConfigError
from kit.runs.files import write_atomic

if TYPE_CHECKING:
    from datasets import Dataset

VERL = {
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "generation.max_completion_tokens",
    "data.seed": "run.seed",
    "trainer.save_freq": "run.save_every",
    "trainer.val_before_train": "evaluation.before",
    "trainer.experiment_name": "run.id",
    "actor_rollout_ref.model.path": "model.name",
    "actor_rollout_ref.model.trust_remote_code": "model.trust_remote_code",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.target_modules": "model.lora.targets",
    "actor_rollout_ref.actor.optim.lr": "optimisation.learning_rate",
    "actor_rollout_ref.actor.optim.weight_decay": "optimisation.weight_decay",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "optimisation.warmup_steps",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "optimisation.schedule",
    "actor_rollout_ref.actor.grad_clip": "optimisation.max_grad_norm",
    "actor_rollout_ref.actor.ppo_epochs": "optimisation.iterations",
    "actor_rollout_ref.rollout.n": "generation.num_generations",
    "actor_rollout_ref.rollout.temperature": "generation.temperature",
    "actor_rollout_ref.rollout.top_p": "generation.top_p",
    "actor_rollout_ref.rollout.top_k": "generation.top_k",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "generation.vllm.gpu_memory_utilization",
    "actor_rollout_ref.rollout.enforce_eager": "generation.vllm.eager",
    "trainer.total_training_steps": "optimisation.steps",
    "trainer.test_freq": "evaluation.every",
    "trainer.max_actor_ckpt_to_keep": "run.keep_checkpoints",
}
"""verl's keys and the kit's."""
OFF = ("run.save_every", "evaluation.every", "generation.top_k")
"""Keys where the kit's 0 is verl's -1."""
IN_BATCHES = ("optimisation.steps", "optimisation.warmup_steps", "run.save_every", "evaluation.every")
"""Keys in optimiser steps. verl counts batches of `optimisation.iterations` steps."""
SCHEDULES = ("constant", "cosine")
CARRIED = (
    "reward.preset", "reward.params", "reward.functions", "optimisation.batch_size", "optimisation.micro_batch_size",
    "optimisation.gradient_checkpointing", "generation.engine", "run.report_to", "run.root", "run.threads",
)  # fmt: skip
"""Keys that are converted in another way, and keys of this machine."""
DATA = ("source", "subset", "split", "revision", "task_params", "prompt_column", "reference_column", "rename", "system_prompt",
        "limit", "heldout", "skip_bad_rows", "seed")  # fmt: skip
"""Keys that the written rows include."""
REWARDS = '''"""The reward of {config} for verl. It needs the package grpo-rewards or the kit."""

import rewards

compute_score = {expression}.verl()
'''
OBJECTIVE = '''"""Registers the objective of the verl.yaml in this folder. verl imports it in every process. It needs the kit."""

from pathlib import Path

from kit.objective.verl import register

register(Path(__file__).with_name("verl.yaml"))
'''
MODULE = "grpo_kit_objective"


@dataclass
class Scaled:
    """verl's YAML as a tree, other files, the command to start it, and settings that verl does not have."""

    tree: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Dataset] = field(default_factory=dict)
    carried: set[str] = field(default_factory=set)  # keys of the kit
    left: list[str] = field(default_factory=list)
    command: str = ""

    def set(self, key: str, value: Any) -> None:
        """Set a value by its dotted key."""
        place = self.tree
        *folders, name = key.split(".")
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = value

    def write(self, folder: Path, *, force: bool) -> list[Path]:
        """Write all files. Raises `ConfigError` if one exists, unless `force`."""
        comment = f"# {self.command}\n"
        texts = {"verl.yaml": comment + yaml.safe_dump(self.tree, sort_keys=False, width=120), **self.texts}
        files = [folder / name for name in (*texts, *self.rows)]
        there = [str(path) for path in files if path.exists()]
        if there and not force:
            raise ConfigError(f"{there[0]} exists. Name another folder with --out, or replace it with --force.")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomic(folder / name, text)
        for name, rows in self.rows.items():
            rows.to_parquet(folder / name)
        return files


def scale(config: RunConfig, folder: Path, *, gpus: int = 8, nodes: int = 1) -> Scaled:
    """Convert `config` to a run of verl with its files in `folder`. Reads the data. Raises `ConfigError` if it is impossible."""
    _refuse(config)
    folder = folder.resolve()
    out = Scaled()
    out.carried = {*VERL.values(), *CARRIED, *(f"data.{name}" for name in DATA)}
    values = {key: value for key, value in _flat(config).items() if value is not None}
    iterations = config.optimisation.iterations
    for name, key in VERL.items():
        if key not in values:
            continue
        value = values[key]
        if key in IN_BATCHES:
            value = -(-value // iterations)
            if value * iterations != values[key]:
                out.left.append(f"{key}: {values[key]}: verl counts batches of {iterations} steps: {value} batches")
        if key in OFF and not value:
            value = -1
        elif key == "model.lora.alpha" and value == int(value):
            value = int(value)  # an integer in verl
        out.set(name, list(value) if isinstance(value, tuple) else value)
    if values["optimisation.schedule"] not in SCHEDULES:
        out.carried.discard("optimisation.schedule")
        out.set(next(name for name, key in VERL.items() if key == "optimisation.schedule"), "constant")
    for key, value in {"nnodes": nodes, "n_gpus_per_node": gpus}.items():
        out.set(f"trainer.{key}", value)
    out.set("trainer.logger", ["console", *config.run.report_to])
    out.set("data.shuffle", True)
    out.set("data.filter_overlong_prompts", config.data.max_prompt_tokens is not None)
    for side in ("train", "val"):
        out.set(f"data.{side}_files", str(folder / f"{side}.parquet"))
    _to_verl(out, config, folder)
    _add_rows(out, config)
    out.texts["grpo_kit_rewards.py"] = _reward_file(config)
    default = _flat(RunConfig())
    for key, value in values.items():
        if value != default.get(key) and not key.startswith("objective.") and key not in out.carried:
            out.left.append(f"{key}: {json.dumps(value, default=str)}: verl has no such setting")
    return out


def _flat(config: RunConfig) -> dict[str, Any]:
    mappings = ("data.chat_template_kwargs", "data.task_params", "data.rename", "reward.params")
    values: dict[str, Any] = {}
    for key, value in leaves(config.model_dump()):
        mapping = next((name for name in mappings if key.startswith(f"{name}.")), None)
        if mapping is None:
            values[key] = value
        else:
            values.setdefault(mapping, {})[key[len(mapping) + 1 :]] = value
    return values


def _refuse(config: RunConfig) -> None:
    if config.model.name in EMBEDDED_MODELS:
        raise ConfigError(
            f"model.name: {config.model.name} is only available in the kit. Set it to a model folder or a hub id."
        )
    if config.optimisation.learning_rate == "auto":
        raise ConfigError("optimisation.learning_rate: auto is resolved at the start of a run. Set a number.")
    if not config.data.chat:
        raise ConfigError("data.chat: false: verl only supports conversations. Set data.chat: true.")
    for key in ("tools", "environment"):
        if getattr(config.generation, key):
            raise ConfigError(
                f"generation.{key}: verl uses agent loops instead of tools and environments. Remove the key."
            )


def _to_verl(out: Scaled, config: RunConfig, folder: Path) -> None:
    from kit.objective.objective import Objective
    from kit.objective.verl import NAME, carried_by_verl

    section = config.objective.model_dump(exclude_none=True)
    objective = Objective.from_spec(section)
    spec, keys, left = carried_by_verl(objective)
    out.left += left
    if spec["reduction"]["name"] == "fixed_length":
        spec["reduction"]["length"] = spec["reduction"]["length"] or config.generation.max_completion_tokens
        keys["actor_rollout_ref.actor.loss_scale_factor"] = spec["reduction"]["length"]
    group, optimisation = config.generation.num_generations, config.optimisation
    longest = (config.data.max_prompt_tokens or 1024) + config.generation.max_completion_tokens
    micro = optimisation.micro_batch_size
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    budget = max(optimisation.token_budget or 16384, longest)
    keys |= {
        "hydra.searchpath": ["pkg://verl.trainer.config"],
        "data.train_batch_size": optimisation.batch_size // group,
        f"{actor}.ppo_mini_batch_size": optimisation.batch_size // group,
        f"{actor}.use_dynamic_bsz": micro is None,
        f"{rollout}.name": "vllm",
        f"{rollout}.tensor_model_parallel_size": 1,
        "reward.custom_reward_function.path": str(folder / "grpo_kit_rewards.py"),
        "reward.custom_reward_function.name": "compute_score",
        "ray_kwargs.ray_init.runtime_env.env_vars": {
            "PYTHONPATH": str(folder), "VERL_USE_EXTERNAL_MODULES": MODULE,
        },
    }  # fmt: skip
    if micro is None:
        keys[f"{actor}.ppo_max_token_len_per_gpu"] = budget
    else:
        keys[f"{actor}.ppo_micro_batch_size_per_gpu"] = micro
        for place in (rollout, "actor_rollout_ref.ref"):
            keys[f"{place}.log_prob_micro_batch_size_per_gpu"] = micro
    if (checkpointing := optimisation.gradient_checkpointing) is not None:
        keys["actor_rollout_ref.model.enable_gradient_checkpointing"] = bool(checkpointing)
        keys["actor_rollout_ref.model.enable_activation_offload"] = checkpointing == "offload"
    if config.data.chat_template_kwargs:
        keys["data.apply_chat_template_kwargs"] = config.data.chat_template_kwargs
    out.carried |= {"optimisation.optimizer", "optimisation.token_budget", "data.chat_template_kwargs"}
    if optimisation.optimizer == "adamw_8bit":
        keys |= {f"{actor}.optim.optimizer": "AdamW8bit", f"{actor}.optim.optimizer_impl": "bitsandbytes.optim"}
    if config.model.lora is None:
        keys["actor_rollout_ref.model.lora_rank"] = 0
    else:
        keys[f"{rollout}.load_format"] = "safetensors"  # the engine loads the base weights and receives adapters
    for key, value in keys.items():
        out.set(key, value)
    out.tree = {"defaults": ["ppo_trainer", "_self_"], **out.tree, NAME: {"loss": spec}}
    out.texts[f"{MODULE}.py"] = OBJECTIVE
    out.command = (
        f"PYTHONPATH={folder} VERL_USE_EXTERNAL_MODULES={MODULE} python -m verl.trainer.main_ppo --config-path={folder} "
        "--config-name=verl"
    )


# --- rows and rewards -----------------------------------------------------------------------------------------------------


def _add_rows(out: Scaled, config: RunConfig) -> None:
    """Write the rows of both sides with verl's columns. Raises `ConfigError` for fewer rows than a step needs."""
    import datasets

    from kit.data import load_data

    datasets.disable_progress_bars()
    split = load_data(config.data)
    prompts = config.optimisation.batch_size // config.generation.num_generations
    if len(split.train) < prompts:
        raise ConfigError(
            f"{config.data.source} has {len(split.train)} training rows, but a step needs {prompts}, and verl drops "
            "incomplete steps. Use more rows, or a smaller optimisation.batch_size."
        )
    epochs = -(-config.optimisation.steps // (len(split.train) // prompts))
    out.set("trainer.total_epochs", epochs)
    if not len(split.heldout):
        out.left.append("data.heldout: 0: verl needs validation rows, so training rows are used")
    extras = [name for name in split.train.column_names if name not in ("prompt", "reference")]

    def for_verl(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {
            "data_source": config.data.source,
            "prompt": row["prompt"],
            "reward_model": {"style": "rule", "ground_truth": row["reference"]},
            "extra_info": {"index": index, **{name: row[name] for name in extras}},
        }

    for name, side in {"train.parquet": split.train, "val.parquet": split.heldout or split.train}.items():
        out.rows[name] = side.map(for_verl, with_indices=True, remove_columns=side.column_names)


def _reward_file(config: RunConfig) -> str:
    reward = config.reward
    presets = [(_loaded(reward.preset, reward.params), 1.0)] if reward.preset else []
    presets += [
        (_loaded(part.preset, part.params), part.weight) for part in reward.functions if part.preset is not None
    ]
    functions = []
    for own in reward.functions:
        if own.preset is None:  # with the file's whole path: verl has another working directory
            file, _, name = own.path.rpartition(":")
            functions.append((f"{Path(file).resolve()}:{name}" if file.endswith(".py") else own.path, own.weight))
    preset = "None"
    if len(presets) == 1 and presets[0][1] == 1.0:
        preset = presets[0][0]
    elif presets:
        preset = f"rewards.combine([{', '.join(f'({loaded}, {weight!r})' for loaded, weight in presets)}])"
    if functions:
        preset = f"rewards.from_functions({functions!r}, base={preset}, allow_shaping_above_correctness=True)"
    return REWARDS.format(config=config.run.id or "a run", expression=preset)


def _loaded(name: str, params: Mapping[str, Any]) -> str:
    return f"rewards.load({', '.join([repr(name), *(f'{key}={value!r}' for key, value in params.items())])})"
