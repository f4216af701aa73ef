"""`grpo-kit scale CONFIG --to verl` (or `easyr1`): a run as one of a Ray-based trainer; and the names that `import` shares.

Written are the trainer's YAML, the rows of both sides as parquet, a reward function made of `rewards`, and for verl a module
that registers the objective (`kit.objective.verl`). EasyR1 takes no loss from outside: an objective goes into its keys, or is
refused. Every setting that is not as by default and has no place there is listed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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

# --- names, for both ways -----------------------------------------------------------------------------------------------

BOTH = {
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "generation.max_completion_tokens",
    "data.seed": "run.seed",
    "trainer.save_freq": "run.save_every",
    "trainer.val_before_train": "evaluation.before",
    "trainer.experiment_name": "run.id",
}
VERL = BOTH | {
    "actor_rollout_ref.model.path": "model.name",
    "actor_rollout_ref.model.trust_remote_code": "model.trust_remote_code",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.target_modules": "model.lora.targets",
    "actor_rollout_ref.actor.optim.lr": "optimisation.learning_rate",
    "actor_rollout_ref.actor.optim.weight_decay": "optimisation.weight_decay",
    "actor_rollout_ref.actor.optim.betas": "optimisation.betas",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "optimisation.warmup_steps",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "optimisation.schedule",
    "actor_rollout_ref.actor.grad_clip": "optimisation.max_grad_norm",
    "actor_rollout_ref.actor.ppo_epochs": "optimisation.iterations",
    "actor_rollout_ref.rollout.n": "generation.num_generations",
    "actor_rollout_ref.rollout.temperature": "generation.temperature",
    "actor_rollout_ref.rollout.top_p": "generation.top_p",
    "actor_rollout_ref.rollout.top_k": "generation.top_k",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "generation.vllm.gpu_memory_utilization",
    "actor_rollout_ref.rollout.enable_prefix_caching": "generation.vllm.prefix_caching",
    "actor_rollout_ref.rollout.enforce_eager": "generation.vllm.eager",
    "actor_rollout_ref.rollout.max_model_len": "generation.vllm.max_model_length",
    "actor_rollout_ref.rollout.max_num_seqs": "generation.vllm.max_num_seqs",
    "actor_rollout_ref.rollout.quantization": "generation.vllm.quantization",
    "trainer.total_training_steps": "optimisation.steps",
    "trainer.test_freq": "evaluation.every",
    "trainer.max_actor_ckpt_to_keep": "run.keep_checkpoints",
}
EASYR1 = BOTH | {
    "worker.actor.model.model_path": "model.name",
    "worker.actor.model.trust_remote_code": "model.trust_remote_code",
    "worker.actor.model.lora.rank": "model.lora.rank",
    "worker.actor.model.lora.alpha": "model.lora.alpha",
    "worker.actor.model.lora.target_modules": "model.lora.targets",
    "worker.actor.optim.lr": "optimisation.learning_rate",
    "worker.actor.optim.weight_decay": "optimisation.weight_decay",
    "worker.actor.optim.betas": "optimisation.betas",
    "worker.actor.optim.lr_warmup_steps": "optimisation.warmup_steps",
    "worker.actor.optim.lr_scheduler_type": "optimisation.schedule",
    "worker.actor.max_grad_norm": "optimisation.max_grad_norm",
    "worker.actor.ppo_epochs": "optimisation.iterations",
    "worker.rollout.n": "generation.num_generations",
    "worker.rollout.temperature": "generation.temperature",
    "worker.rollout.top_p": "generation.top_p",
    "worker.rollout.top_k": "generation.top_k",
    "worker.rollout.gpu_memory_utilization": "generation.vllm.gpu_memory_utilization",
    "worker.rollout.enforce_eager": "generation.vllm.eager",
    "worker.rollout.max_model_len": "generation.vllm.max_model_length",
    "trainer.max_steps": "optimisation.steps",
    "trainer.val_freq": "evaluation.every",
    "trainer.save_limit": "run.keep_checkpoints",
}
MODES = {"vanilla": "grpo", "default": "grpo", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo"}
"""Losses of verl and EasyR1 by recipe."""
COLUMNS = {"data.train_files": "source", "data.prompt_key": "prompt_column", "data.answer_key": "reference_column"}
SAID = (
    "clip_ratio", "batch_size", "kl", "reward_function", "custom_reward", "adv_estimator", "loss_mode", "loss_type",
    "loss_agg_mode", "loss_avg_mode", "tau_",
)  # fmt: skip
"""Parts of names of verl and EasyR1 that are read together, or told of in other words."""
AVERAGES = {
    "token-mean": "global_token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "fixed_length", "token": "token_mean", "seq": "sequence_mean",
}  # fmt: skip
OFF = ("run.save_every", "evaluation.every", "generation.top_k")
"""0 here is -1 there."""
IN_BATCHES = ("optimisation.steps", "optimisation.warmup_steps", "run.save_every", "evaluation.every")
"""Counted in optimiser steps here; there in batches, on each of which `optimisation.iterations` steps are made."""
SCHEDULES = ("constant", "cosine")
CARRIED = (
    "reward.preset", "reward.params", "reward.functions", "optimisation.batch_size", "optimisation.micro_batch_size",
    "optimisation.gradient_checkpointing", "generation.engine", "run.report_to", "run.root", "run.threads",
)  # fmt: skip
"""What is said there in another way, and what is of this machine."""
DATA = ("source", "subset", "split", "revision", "task_params", "prompt_column", "reference_column", "rename", "system_prompt",
        "limit", "heldout", "skip_bad_rows", "seed")  # fmt: skip
"""What the written rows have taken in."""
REWARDS = '''"""The reward of {config}, as {trainer} calls it. It needs the package grpo-rewards, or the kit."""

import rewards

compute_score = {expression}.{trainer}()
'''
OBJECTIVE = '''"""Registers the objective of verl.yaml beside this file; verl imports it in every process. It needs the kit."""

from pathlib import Path

from kit.objective.verl import register

register(Path(__file__).with_name("verl.yaml"))
'''
MODULE = "grpo_kit_objective"


@dataclass
class Scaled:
    """The other trainer's YAML as a tree, what goes beside it, how it is started, and what has no place there."""

    trainer: str
    tree: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Dataset] = field(default_factory=dict)
    carried: set[str] = field(default_factory=set)  # keys of the kit
    left: list[str] = field(default_factory=list)
    command: str = ""

    def set(self, key: str, value: Any) -> None:
        """One value, by its dotted key."""
        place = self.tree
        *folders, name = key.split(".")
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = value

    def write(self, folder: Path, *, force: bool) -> list[Path]:
        """All files. Raises `ConfigError` for those that are there, unless `force`."""
        comment = f"# {self.command}\n"
        texts = {f"{self.trainer}.yaml": comment + yaml.safe_dump(self.tree, sort_keys=False, width=120), **self.texts}
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


def scale(config: RunConfig, trainer: str, folder: Path, *, gpus: int = 8, nodes: int = 1) -> Scaled:
    """`config` as a run of `trainer` whose files lie in `folder`. Reads the data. Raises `ConfigError` for what cannot be one."""
    trainers: dict[str, Callable[[Scaled, RunConfig, Path], None]] = {"verl": _to_verl, "easyr1": _to_easyr1}
    if trainer not in trainers:
        raise ConfigError(f"--to {trainer}: known are {', '.join(trainers)}.")
    _refuse(config)
    folder = folder.resolve()
    out = Scaled(trainer)
    names = VERL if trainer == "verl" else EASYR1
    out.carried = {*names.values(), *CARRIED, *(f"data.{name}" for name in DATA)}
    values = {key: value for key, value in _flat(config).items() if value is not None}
    iterations = config.optimisation.iterations
    for name, key in names.items():
        if key not in values:
            continue
        value = values[key]
        if key in IN_BATCHES:
            value = -(-value // iterations)
            if value * iterations != values[key]:
                out.left.append(
                    f"{key}: {values[key]}: {trainer} counts batches of {iterations} steps, and gets {value} of them"
                )
        out.set(name, _there(key, value))
    if values["optimisation.schedule"] not in SCHEDULES:
        out.carried.discard("optimisation.schedule")
        out.set(next(name for name, key in names.items() if key == "optimisation.schedule"), "constant")
    for key, value in {"nnodes": nodes, "n_gpus_per_node": gpus}.items():
        out.set(f"trainer.{key}", value)
    out.set("trainer.logger", ["console", *config.run.report_to])
    out.set("data.shuffle", True)
    out.set("data.filter_overlong_prompts", config.data.max_prompt_tokens is not None)
    for side in ("train", "val"):
        out.set(f"data.{side}_files", str(folder / f"{side}.parquet"))
    trainers[trainer](out, config, folder)
    _add_rows(out, config)
    out.texts["grpo_kit_rewards.py"] = _reward_file(config, trainer)
    default = _flat(RunConfig())
    for key, value in values.items():
        if value != default.get(key) and not key.startswith("objective.") and key not in out.carried:
            out.left.append(f"{key}: {json.dumps(value, default=str)}: {trainer} has no such setting")
    return out


def _there(key: str, value: Any) -> Any:
    if key in OFF and not value:
        return -1
    if key == "model.lora.alpha" and value == int(value):
        return int(value)  # declared as a whole number there
    return list(value) if isinstance(value, tuple) else value


def _flat(config: RunConfig) -> dict[str, Any]:
    kept = ("data.chat_template_kwargs", "data.task_params", "data.rename", "reward.params")
    found: dict[str, Any] = {}
    for key, value in leaves(config.model_dump()):
        whole = next((one for one in kept if key.startswith(f"{one}.")), None)
        if whole is None:
            found[key] = value
        else:
            found.setdefault(whole, {})[key[len(whole) + 1 :]] = value
    return found


def _refuse(config: RunConfig) -> None:
    if config.model.name in EMBEDDED_MODELS:
        raise ConfigError(
            f"model.name: {config.model.name} comes with the kit, and with nothing else. Set it to a model folder or a hub id."
        )
    if config.optimisation.learning_rate == "auto":
        raise ConfigError("optimisation.learning_rate: auto is found when a run of the kit starts. Set the number.")
    if not config.data.chat:
        raise ConfigError("data.chat: false: prompts are conversations there. Take it out.")
    for key in ("tools", "environment", "rollout"):
        if getattr(config.generation, key):
            raise ConfigError(
                f"generation.{key}: tools and environments are written anew there (its agent loops). Take it out."
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
        keys[f"{rollout}.load_format"] = "safetensors"  # the engine loads the base weights, and gets adapters
    for key, value in keys.items():
        out.set(key, value)
    kept = config.data.model_dump(exclude_defaults=True)
    data = {"source": config.data.source} | {name: kept[name] for name in DATA if name in kept}
    reward = {
        name: value for name, value in config.reward.model_dump().items() if name in ("preset", "params", "functions")
    }
    out.tree = {
        "defaults": ["ppo_trainer", "_self_"],
        **out.tree,
        NAME: {"loss": spec, "objective": section, "reward": reward, "data": data},
    }
    out.texts[f"{MODULE}.py"] = OBJECTIVE
    out.command = (
        f"PYTHONPATH={folder} VERL_USE_EXTERNAL_MODULES={MODULE} python -m verl.trainer.main_ppo --config-path={folder} "
        "--config-name=verl"
    )


# --- EasyR1 -------------------------------------------------------------------------------------------------------------

ADVANTAGES = {"group_zscore": "grpo", "leave_one_out": "rloo"}
NO_LIMIT = 1e6


def _to_easyr1(out: Scaled, config: RunConfig, folder: Path) -> None:
    from kit.objective.objective import Objective
    from kit.objective.verl import KL_ESTIMATORS

    objective = Objective.from_spec(config.objective.model_dump(exclude_none=True))
    clip, optimisation = objective.clip, config.optimisation
    advantage = ADVANTAGES.get(objective.advantage.name)
    ways = {
        "ppo_clip": lambda v: {"loss_type": "default", "clip_ratio_dual": NO_LIMIT, **_bounds(v)},
        "dual_clip": lambda v: {"loss_type": "default", "clip_ratio_dual": v["c"], **_bounds(v)},
        "gspo": lambda v: {"loss_type": "gspo", "clip_ratio_dual": NO_LIMIT, **_bounds(v)},
        "gspo_token": lambda v: {"loss_type": "gspo_token", "clip_ratio_dual": NO_LIMIT, **_bounds(v)},
        "cispo": lambda v: {"loss_type": "cispo", "clip_ratio_low": 1 - 1e-6, "clip_ratio_high": v["eps_high"] - 1.0},
        "sapo": lambda v: {"loss_type": "sapo", "tau_positive": v["tau_pos"], "tau_negative": v["tau_neg"]},
    }
    by_sequence = clip.values.get("level", "token") != "token"
    plain = all(isinstance(value, (int, float, str)) for value in clip.values.values())
    if advantage is None or clip.name not in ways or by_sequence or not plain:
        raise ConfigError(
            f"EasyR1 takes no loss from outside, and has none of advantage {objective.advantage.name} with clip "
            f"{clip.describe()}. It has advantages {', '.join(ADVANTAGES)} and clips {', '.join(ways)} by token. verl takes any."
        )
    for name, value in ways[clip.name](clip.values).items():
        out.set(f"worker.actor.{name}", value)
    out.set("algorithm.adv_estimator", advantage)
    by_row = objective.reduction.name == "sequence_mean"
    out.set("worker.actor.loss_avg_mode", "seq" if by_row else "token")
    if not by_row and objective.reduction.name != "token_mean":
        out.left.append(
            f"objective.reduction {objective.reduction.name}: EasyR1 averages over the tokens of a micro-batch"
        )
    out.set("algorithm.disable_kl", True)
    for hook in (*objective.weights, *objective.regularizers):
        values = hook.values
        if hook.name == "kl" and values["estimator"] in KL_ESTIMATORS and not values["bias_corrected"]:
            kl = {"disable_kl": False, "use_kl_loss": True, "kl_coef": hook.coef_at(0)}
            for name, value in {**kl, "kl_penalty": KL_ESTIMATORS[values["estimator"]]}.items():
                out.set(f"algorithm.{name}", value)
            if not isinstance(values["coef"], (int, float)):
                out.left.append(f"objective.regularizers kl: coef stays at {hook.coef_at(0):g}")
        else:
            out.left.append(f"objective.{hook.kind}s {hook.name}: EasyR1 has none; the loss goes without it")
    prompts = optimisation.batch_size // config.generation.num_generations
    out.set("data.rollout_batch_size", prompts)
    out.set("worker.actor.global_batch_size", prompts)
    out.set("worker.actor.micro_batch_size_per_device_for_update", optimisation.micro_batch_size or 4)
    if optimisation.gradient_checkpointing is not None:
        out.set("worker.actor.model.enable_gradient_checkpointing", bool(optimisation.gradient_checkpointing))
    if config.model.lora is None:
        out.set("worker.actor.model.lora.rank", 0)
    elif isinstance(config.model.lora.targets, list):
        out.set("worker.actor.model.lora.target_modules", ",".join(config.model.lora.targets))
    for key in ("prompt_key", "answer_key"):
        out.set(f"data.{key}", key.partition("_")[0])
    out.set("worker.rollout.tensor_parallel_size", 1)
    out.set("worker.reward.reward_function", f"{folder / 'grpo_kit_rewards.py'}:compute_score")
    out.command = f"python -m verl.trainer.main config={folder / 'easyr1.yaml'}"


def _bounds(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"clip_ratio_low": values["eps_low"], "clip_ratio_high": values["eps_high"]}


# --- rows and rewards -----------------------------------------------------------------------------------------------------


def _add_rows(out: Scaled, config: RunConfig) -> None:
    """The rows of both sides in the other trainer's columns. Raises `ConfigError` for fewer rows than a step takes."""
    import datasets

    from kit.data import load_data

    datasets.disable_progress_bars()
    split = load_data(config.data)
    prompts = config.optimisation.batch_size // config.generation.num_generations
    if len(split.train) < prompts:
        raise ConfigError(
            f"{config.data.source} has {len(split.train)} rows to train on, and a step takes {prompts}: {out.trainer} leaves "
            "incomplete steps out. Bring more rows, or a smaller optimisation.batch_size."
        )
    epochs = -(-config.optimisation.steps // (len(split.train) // prompts))
    out.set("trainer.total_epochs", epochs)
    if not len(split.heldout):
        out.left.append("data.heldout: 0: validation is on rows of training, as there must be some")
    extras = [name for name in split.train.column_names if name not in ("prompt", "reference")]
    if out.trainer == "easyr1":
        if extras:
            out.left.append(f"columns {', '.join(extras)}: EasyR1's rewards are given the answer alone")
        if any(len(messages) > 1 for messages in split.train["prompt"]):
            out.left.append(
                "prompts of several messages (data.system_prompt): EasyR1's are one; their texts stand in it"
            )

    def for_verl(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {
            "data_source": config.data.source,
            "prompt": row["prompt"],
            "reward_model": {"style": "rule", "ground_truth": row["reference"]},
            "extra_info": {"index": index, **{name: row[name] for name in extras}},
        }

    def for_easyr1(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {"prompt": "\n\n".join(one["content"] for one in row["prompt"]), "answer": row["reference"]}

    for name, side in {"train.parquet": split.train, "val.parquet": split.heldout or split.train}.items():
        change = for_verl if out.trainer == "verl" else for_easyr1
        out.rows[name] = side.map(change, with_indices=True, remove_columns=side.column_names)


def _reward_file(config: RunConfig, trainer: str) -> str:
    reward = config.reward
    presets = [(_loaded(reward.preset, reward.params), 1.0)] if reward.preset else []
    presets += [(_loaded(one.preset, one.params), one.weight) for one in reward.functions if one.preset is not None]
    functions = [(_absolute(one.path), one.weight) for one in reward.functions if one.preset is None]
    preset = "None"
    if len(presets) == 1 and presets[0][1] == 1.0:
        preset = presets[0][0]
    elif presets:
        preset = f"rewards.combine([{', '.join(f'({loaded}, {weight!r})' for loaded, weight in presets)}])"
    if functions:
        preset = f"rewards.from_functions({functions!r}, base={preset}, allow_shaping_above_correctness=True)"
    return REWARDS.format(config=config.run.id or "a run", trainer=trainer, expression=preset)


def _loaded(name: str, params: Mapping[str, Any]) -> str:
    return f"rewards.load({', '.join([repr(name), *(f'{key}={value!r}' for key, value in params.items())])})"


def _absolute(path: str) -> str:
    """`file.py:function` with the file's whole path: the other trainer has another working directory."""
    file, _, name = path.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else path
