"""`grpo-kit import FILE`: what another trainer's file says, as a configuration and reward functions of the kit.

An Unsloth notebook, a TRL script or YAML file, a verl or EasyR1 YAML file. Nothing of it is run: notebooks and scripts are
parsed, constants are folded, and the calls that make model, adapters, data and trainer are read. What was taken, what was
dropped, and what looks like a mistake is told.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kit.config import load_config
from kit.config.loading import leaves
from kit.errors import ConfigError
from kit.planning.scaling import AVERAGES, COLUMNS, EASYR1, IN_BATCHES, MODES, OFF, SAID, VERL
from kit.runs.files import write_atomic

UNKNOWN = object()
SAME: dict[str, str] = {
    "learning_rate": "optimisation.learning_rate",
    "max_steps": "optimisation.steps",
    "num_iterations": "optimisation.iterations",
    "weight_decay": "optimisation.weight_decay",
    "warmup_steps": "optimisation.warmup_steps",
    "max_grad_norm": "optimisation.max_grad_norm",
    "num_generations": "generation.num_generations",
    "max_completion_length": "generation.max_completion_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "temperature": "generation.temperature",
    "top_p": "generation.top_p",
    "min_p": "generation.min_p",
    "repetition_penalty": "generation.repetition_penalty",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "vllm_gpu_memory_utilization": "generation.vllm.gpu_memory_utilization",
    "save_steps": "run.save_every",
    "seed": "run.seed",
    "model_name_or_path": "model.name",
    "model_name": "model.name",
    "model": "model.name",
    "load_in_4bit": "model.load_in_4bit",
    "dataset_name": "data.source",
    "dataset_config": "data.subset",
    "dataset_train_split": "data.split",
    "r": "model.lora.rank",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "use_rslora": "model.lora.rslora",
    "gpu_memory_utilization": "generation.vllm.gpu_memory_utilization",
}
"""TRL's, PEFT's and Unsloth's names of what the kit has under another."""
LOSSES = ("grpo", "dapo", "bnpo", "cispo", "sapo", "dr_grpo", "gspo", "gmpo")
CALLS = ("GRPOConfig", "LoraConfig", "from_pretrained", "get_peft_model")
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip
RIGHT = re.compile(r"correct|accura|answer|match|solution|check|verif|numbers", re.IGNORECASE)
SHORT = 400
"""Tokens below which a completion that has to think is likely to be cut."""


@dataclass
class Imported:
    """The configuration as a tree, reward functions as source, and what there is to say."""

    tree: dict[str, Any] = field(default_factory=dict)
    functions: str = ""
    taken: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)  # by the other trainer's names

    def set(self, key: str, value: Any, said: str) -> None:
        """One value of the configuration, and where it is from."""
        place = self.tree
        *folders, name = key.split(".")
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = value
        self.taken.append(f"{key}: {json.dumps(value, default=str)} (from {said})")

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the configuration as it stands."""
        place: Any = self.tree
        for name in key.split("."):
            place = place.get(name) if isinstance(place, Mapping) else None
        return default if place is None else place

    def listed(self) -> list[str]:
        """What is said to people."""
        groups = (("taken", self.taken), ("dropped", self.dropped), ("looks like a mistake", self.mistakes))
        return [line for title, lines in groups if lines for line in (f"{title}:", *(f"  {one}" for one in lines))]


def import_file(path: Path) -> Imported:
    """Reads a notebook, a script or a YAML file. Raises `ConfigError` for one that holds no GRPO run."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}).") from None
    found = Imported()
    if path.suffix in (".yaml", ".yml"):
        _read_yaml(found, text, path)
    else:
        source = _cells(text, path) if path.suffix == ".ipynb" else text
        _Script(found, source, path).read()
    _finish(found)
    return found


def write(found: Imported, folder: Path, *, force: bool) -> list[Path]:
    """run.yaml and rewards.py in a folder. Raises `ConfigError` for files that are there, unless `force`."""
    for one in found.tree.get("reward", {}).get("functions", []) if folder != Path() else ():
        if one["path"].startswith("rewards.py:"):
            one["path"] = f"{folder}/{one['path']}"
    files = {folder / "run.yaml": yaml.safe_dump(found.tree, sort_keys=False, allow_unicode=True, width=120)}
    if found.functions:
        files[folder / "rewards.py"] = found.functions
    there = [str(path) for path in files if path.exists()]
    if there and not force:
        raise ConfigError(f"{there[0]} exists. Name another folder with --out, or replace it with --force.")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        write_atomic(path, text)
    return list(files)


# --- YAML -------------------------------------------------------------------------------------------------------------


def _read_yaml(found: Imported, text: str, path: Path) -> None:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML ({error}).") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deep; a configuration has a handful of levels.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no mapping of keys.")
    if "actor_rollout_ref" in tree or "worker" in tree:
        _read_verl(found, tree)
        return
    if not {"num_generations", "max_completion_length", "dataset_name", "reward_funcs"} & tree.keys():
        raise ConfigError(
            f"{path} is no GRPO configuration of TRL, verl or EasyR1: it holds {', '.join(list(tree)[:8])}."
        )
    _take(found, tree, path.name)
    for name in tree.get("reward_funcs") or []:
        _reward_of_trl(found, str(name))


def _read_verl(found: Imported, tree: Mapping[str, Any]) -> None:
    """A YAML file of verl or EasyR1. What `grpo-kit scale` wrote keeps what verl has no words for in a section of its own."""
    kept = tree.get("grpo_kit") or {}
    theirs = {name: value for name, value in tree.items() if name not in ("grpo_kit", "hydra", "defaults")}
    given = {name: value for name, value in leaves(theirs) if value is not None and "${" not in str(value)}
    found.dropped += [f"{name}: {value}: said by another key" for name, value in leaves(theirs) if "${" in str(value)]
    easy = "worker" in tree
    actor, names = ("worker.actor", EASYR1) if easy else ("actor_rollout_ref.actor", VERL)
    names = names | {name: f"data.{key}" for name, key in COLUMNS.items()}
    kept_keys = {f"{section}.{name}" for section, values in kept.items() for name in values}
    for name, value in given.items():
        key = names.get(name)
        if key is None or key in kept_keys or (name.endswith(("lora_rank", "lora.rank")) and not value):
            continue
        if value == -1:
            value = 0 if key in OFF else None
        elif key == "data.source":
            value, _, split = str(value[0] if isinstance(value, list) else value).partition("@")
            if split:
                found.set("data.split", split, name)
        elif key == "model.lora.targets" and "," in str(value) and isinstance(value, str):
            value = value.split(",")
        elif key in IN_BATCHES:
            value *= given.get(f"{actor}.ppo_epochs", 1)
        if value is not None:
            found.set(key, value, name)
    group = found.get("generation.num_generations", 8)
    prompts = given.get("data.rollout_batch_size" if easy else "data.train_batch_size")
    if prompts:
        found.set("optimisation.batch_size", prompts * group, f"{prompts} prompts a step, {group} completions each")
    if micro := given.get(f"{actor}.ppo_micro_batch_size_per_gpu"):
        found.set("optimisation.micro_batch_size", micro, "ppo_micro_batch_size_per_gpu")
    if given.get(f"{actor}.optim.optimizer") == "AdamW8bit":
        found.set("optimisation.optimizer", "adamw_8bit", "optimizer")
    if not given.get("actor_rollout_ref.model.lora_rank") and not given.get("worker.actor.model.lora.rank"):
        found.set("model.lora", None, "no lora_rank: every weight trains")
    if template := (tree.get("data") or {}).get("apply_chat_template_kwargs"):
        found.set("data.chat_template_kwargs", template, "apply_chat_template_kwargs")
    for section, values in kept.items():
        if section != "loss":
            for name, value in values.items():
                found.set(f"{section}.{name}", value, f"grpo_kit.{section}")
    if "objective" not in kept:
        _objective_of_verl(found, given, actor)
    for name in ("worker.reward.reward_function", "custom_reward_function.path"):
        if name in given:
            found.dropped.append(
                f"{name}: {given[name]}: its signature is another; make it `def reward(completions, reference, **_)` in a file"
            )
    known = (*names, *SAID, *(("rollout_correction", "entropy", "env_vars", "custom_reward") if kept else ()))
    rest = [name for name in given if not any(name == one or one in name for one in known)]
    found.dropped += [f"{name}: {given[name]}" for name in rest]


def _objective_of_verl(found: Imported, given: Mapping[str, Any], actor: str) -> None:
    mode = str(given.get(f"{actor}.policy_loss.loss_mode") or given.get(f"{actor}.loss_type") or "vanilla")
    low, high = given.get(f"{actor}.clip_ratio_low"), given.get(f"{actor}.clip_ratio_high")
    low, high = (each if each is not None else given.get(f"{actor}.clip_ratio") for each in (low, high))
    recipe = MODES.get(mode, "grpo")
    if mode not in MODES:
        found.dropped.append(f"loss {mode}; grpo stands in its place, see `grpo-kit objective list`")
    bounded = recipe in ("grpo", "gspo", "gmpo")
    _objective(found, recipe, low if bounded else None, high if bounded else None, _kl_of_verl(given, actor))
    if mode == "cispo" and high is not None:
        found.set("objective.clip", {"eps_high": 1.0 + high}, "clip_ratio_high, which bounds the ratio less 1")
    taus = {"tau_pos": given.get(f"{actor}.tau_positive"), "tau_neg": given.get(f"{actor}.tau_negative")}
    if mode == "sapo" and None not in taus.values():
        found.set("objective.clip", taus, "tau_positive and tau_negative")
    average = given.get(f"{actor}.loss_agg_mode") or given.get(f"{actor}.loss_avg_mode")
    if average in AVERAGES:
        found.set("objective.reduction", AVERAGES[average], f"the loss is averaged by {average}")
    estimator = given.get("algorithm.adv_estimator", "grpo")
    if estimator == "rloo":
        found.set("objective.advantage", "leave_one_out", "algorithm.adv_estimator")
    elif estimator != "grpo":
        found.dropped.append(f"algorithm.adv_estimator: {estimator}; see `grpo-kit objective list`")


def _kl_of_verl(leaves: Mapping[str, Any], actor: str) -> float:
    if leaves.get(f"{actor}.use_kl_loss"):
        return float(leaves.get(f"{actor}.kl_loss_coef", 0.001))
    if leaves.get("algorithm.disable_kl") or not leaves.get("algorithm.use_kl_loss"):
        return 0.0
    return float(leaves.get("algorithm.kl_coef", 0.0))


# --- TRL's arguments --------------------------------------------------------------------------------------------------


def _take(found: Imported, given: Mapping[str, Any], said: str) -> None:
    """What has a counterpart, of keyword arguments or a flat file."""
    found.given |= {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if value is UNKNOWN:
            found.dropped.append(f"{name}: computed in the file, and nothing of it is run")
        elif value is None:
            continue
        elif name in SAME and not (name in ("max_steps", "min_p") and value in (-1, 0)):
            found.set(SAME[name], value, f"{said}: {name}")
        elif not _special(found, name, value, said):
            found.dropped.append(f"{name}: {value}")


def _special(found: Imported, name: str, value: Any, said: str) -> bool:
    """What is said in another way here; True where something was made of it, or is made later."""
    if name == "top_k":
        found.set("generation.top_k", max(0, int(value)), f"{said}: {name}")
    elif name in ("target_modules", "lora_target_modules"):
        value = value[0] if isinstance(value, list) and value == ["all-linear"] else value
        found.set("model.lora.targets", value, f"{said}: {name}")
    elif name == "lr_scheduler_type":
        known = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
        found.set("optimisation.schedule", known.get(str(value), "constant"), f"{said}: {name}")
    elif name == "optim":
        found.set("optimisation.optimizer", "adamw_8bit" if "8bit" in str(value) else "adamw", f"{said}: {name}")
    elif name in ("use_vllm", "fast_inference"):
        found.set("generation.engine", "auto" if value else "hf", f"{said}: {name}")
    elif name == "report_to":
        asked = [value] if isinstance(value, str) else value
        kept = [one for one in asked if one in ("trackio", "wandb", "tensorboard", "mlflow")]
        found.set("run.report_to", kept, f"{said}: {name}")
    elif name == "mask_truncated_completions":
        if value:
            found.set("objective.weights", ["drop_truncated"], f"{said}: {name}")
    elif name == "use_peft":
        if not value:
            found.set("model.lora", None, f"{said}: {name}")
    else:
        return name in LATER
    return True


LATER = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "beta", "epsilon", "epsilon_high", "loss_type",
    "warmup_ratio", "num_train_epochs", "max_seq_length", "adam_beta1", "adam_beta2", "reward_funcs",
}  # fmt: skip
"""Arguments that are put together once all are known."""


def _objective(found: Imported, loss: str, low: Any, high: Any, kl: float) -> None:
    found.set("objective.recipe", loss if loss in LOSSES else "grpo", f"loss {loss}")
    if loss not in LOSSES:
        found.dropped.append(f"loss_type: {loss}; grpo stands in its place, see `grpo-kit objective list`")
    if low is not None or high is not None:
        low = 0.2 if low is None else low
        found.set(
            "objective.clip", {"eps_low": low, "eps_high": low if high is None else high}, "epsilon and epsilon_high"
        )
    found.set("objective.regularizers", [{"name": "kl", "coef": kl}] if kl else [], f"KL coefficient {kl:g}")


def _put_together(found: Imported) -> None:
    """What several of TRL's arguments say together."""
    given = {name: value for name, value in found.given.items() if value is not UNKNOWN}
    rows = given.get("per_device_train_batch_size", 8) * given.get("gradient_accumulation_steps", 1)
    group = found.get("generation.num_generations", 8)
    found.set("generation.num_generations", group, "num_generations")
    whole = -(-rows // group) * group
    found.set("optimisation.batch_size", whole, f"{rows} completions a step, in whole groups of {group}")
    beta, loss = given.get("beta", 0.0), str(given.get("loss_type", "dapo"))
    _objective(found, loss, given.get("epsilon"), given.get("epsilon_high"), float(beta))
    steps = found.get("optimisation.steps")
    if steps is None and "num_train_epochs" in given:
        found.dropped.append(f"num_train_epochs: {given['num_train_epochs']}; set optimisation.steps")
    if "warmup_ratio" in given and steps:
        found.set("optimisation.warmup_steps", int(given["warmup_ratio"] * steps), "warmup_ratio of the steps")
    if "adam_beta1" in given or "adam_beta2" in given:
        betas = [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]
        found.set("optimisation.betas", betas, "adam_beta1 and adam_beta2")
    room, prompt = given.get("max_seq_length"), found.get("data.max_prompt_tokens")
    longest = found.get("generation.max_completion_tokens")
    if isinstance(room, int) and prompt and longest and prompt + longest > room:
        found.mistakes.append(
            f"max_prompt_length {prompt} + max_completion_length {longest} is more than max_seq_length {room}: long completions "
            "would be cut"
        )


def _reward_of_trl(found: Imported, name: str) -> bool:
    """A function that TRL or open-r1 bring; True where `rewards.compat` has it."""
    import rewards.compat

    if not hasattr(rewards.compat, name):
        found.dropped.append(f"reward {name}: it is not in the file; write it into rewards.py")
        return False
    entries = found.tree.setdefault("reward", {}).setdefault("functions", [])
    entries.append({"path": f"rewards.compat:{name}"})
    found.taken.append(f"reward.functions: rewards.compat:{name} (the function of that name)")
    return True


# --- Python -----------------------------------------------------------------------------------------------------------


def _cells(text: str, path: Path) -> str:
    """The code of a notebook, without what only a notebook understands."""
    try:
        cells = json.loads(text)["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is no notebook.") from None
    kept = [cell for cell in code if not cell.lstrip().startswith("%%")]
    lines = [line for cell in kept for line in cell.splitlines()]
    return "\n".join(re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in lines) + "\n"


class _Script:
    """A script's constants, calls and functions."""

    def __init__(self, found: Imported, source: str, path: Path) -> None:
        self.found, self.source, self.path = found, source, path
        try:
            self.module = ast.parse(source)
        except SyntaxError as error:
            raise ConfigError(f"{path} is no Python that can be parsed (line {error.lineno}: {error.msg}).") from None
        self.names: dict[str, Any] = {}
        self.calls: list[tuple[str, ast.Call]] = []

    def read(self) -> None:
        for node in ast.walk(self.module):
            if isinstance(node, ast.Call):
                self.calls.append((ast.unparse(node.func).rpartition(".")[2], node))
        for statement in self._statements(self.module.body):
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target = statement.targets[0]
                if isinstance(target, ast.Name):
                    self.names[target.id] = self.value(statement.value)
        trainers = [call for name, call in self.calls if name.endswith("GRPOTrainer")]
        if not trainers and not any(name == "GRPOConfig" for name, _ in self.calls):
            raise ConfigError(
                f"{self.path} makes neither a GRPOConfig nor a GRPOTrainer, so there is no GRPO run to import."
            )
        for name, call in self.calls:
            if name in CALLS and not (
                name == "from_pretrained" and re.search("okenizer|rocessor", ast.unparse(call.func))
            ):
                self._call(name, call)
            elif name == "load_dataset":
                self._data(call)
        for call in trainers:
            self._trainer(call)
        system = next((value for name, value in self.names.items() if re.fullmatch(r"(?i)system_?prompt", name)), None)
        if isinstance(system, str):
            self.found.set("data.system_prompt", system, "the constant of that name")
        if any(name in ("map", "filter") for name, _ in self.calls):
            self.found.dropped.append(
                "dataset.map and .filter: what they make of the columns; data.prompt_column, .reference_column and .rename "
                "choose columns, and a prepared file does the rest"
            )

    def _statements(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        """Those outside of functions and classes, in order, those of `main` included."""
        for statement in body:
            yield statement
            if isinstance(statement, ast.If) or (isinstance(statement, ast.FunctionDef) and statement.name == "main"):
                yield from self._statements(statement.body)

    def value(self, node: ast.expr) -> Any:
        """A constant, or what arithmetic makes of constants; `UNKNOWN` for anything else."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.names.get(node.id, UNKNOWN)
        if isinstance(node, (ast.List, ast.Tuple)):
            found = [self.value(one) for one in node.elts]
            return UNKNOWN if UNKNOWN in found else found
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            values = [self.value(one) for one in node.values]
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            return UNKNOWN if UNKNOWN in values else dict(zip(keys, values, strict=True))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.value(node.operand)
            return -inner if isinstance(inner, (int, float)) else UNKNOWN
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            left, right = self.value(node.left), self.value(node.right)
            if all(isinstance(one, (int, float)) for one in (left, right)) and (
                right or not isinstance(node.op, ast.Div)
            ):
                return ARITHMETIC[type(node.op)](left, right)
        return UNKNOWN

    def _keywords(self, call: ast.Call) -> dict[str, Any]:
        return {word.arg: self.value(word.value) for word in call.keywords if word.arg is not None}

    def _call(self, name: str, call: ast.Call) -> None:
        given = self._keywords(call)
        if name == "from_pretrained":
            if call.args:
                given.setdefault("model_name", self.value(call.args[0]))
            wanted = {"model_name", "load_in_4bit", "max_seq_length", "fast_inference", "gpu_memory_utilization"}
            given = {key: value for key, value in given.items() if key in wanted}
        if name == "get_peft_model":
            given.pop("model", None)
            given.pop("random_state", None)
        _take(self.found, given, name)

    def _data(self, call: ast.Call) -> None:
        words = self._keywords(call)
        given = [self.value(one) for one in call.args]
        for key, value in (
            ("data.source", given[0] if given else words.get("path", UNKNOWN)),
            ("data.subset", given[1] if len(given) > 1 else words.get("name", UNKNOWN)),
            ("data.split", words.get("split", UNKNOWN)),
        ):
            if isinstance(value, str) and self.found.get(key) is None:
                self.found.set(key, value, "load_dataset")

    def _trainer(self, call: ast.Call) -> None:
        words = {word.arg: word.value for word in call.keywords}
        model = self.value(words["model"]) if "model" in words else UNKNOWN
        if isinstance(model, str):
            self.found.set("model.name", model, "GRPOTrainer")
        if self.found.get("model.lora") is None and "peft_config" not in words and not self._adapts():
            self.found.set("model.lora", None, "no peft_config: every weight trains")
        asked = words.get("reward_funcs")
        if isinstance(asked, ast.Name):
            asked = next(
                (one.value for one in self._statements(self.module.body) if isinstance(one, ast.Assign)
                 and ast.unparse(one.targets[0]) == asked.id), asked)  # fmt: skip
        names = [ast.unparse(one) for one in (asked.elts if isinstance(asked, ast.List) else [asked] if asked else [])]
        self._functions(names)

    def _adapts(self) -> bool:
        return any(name in ("LoraConfig", "get_peft_model") for name, _ in self.calls)

    def _functions(self, names: list[str]) -> None:
        """Reward functions, and all that they use, as a file of their own."""
        top = {one.name: one for one in self.module.body if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
        there = [name for name in names if name in top]
        for name in names:
            if name not in top:
                _reward_of_trl(self.found, name)
        if not there:
            return
        assigned = {
            ast.unparse(target): one
            for one in self.module.body
            if isinstance(one, ast.Assign)
            for target in one.targets
        }
        used, waiting = set[str](), list(there)
        while waiting:
            name = waiting.pop()
            if name in used or (name not in top and name not in assigned):
                continue
            used.add(name)
            waiting += [one.id for one in ast.walk(top.get(name) or assigned[name]) if isinstance(one, ast.Name)]
        seen = {
            one.id for name in used for one in ast.walk(top.get(name) or assigned[name]) if isinstance(one, ast.Name)
        }
        lines = [
            ast.unparse(one) for one in self.module.body if isinstance(one, (ast.Import, ast.ImportFrom))
            and any((alias.asname or alias.name.partition(".")[0]) in seen for alias in one.names)
        ]  # fmt: skip
        parts = [one for one in self.module.body if any(one is (top.get(name) or assigned[name]) for name in used)]
        texts = [ast.get_source_segment(self.source, one) or ast.unparse(one) for one in parts]
        head = f'"""Reward functions of {self.path.name}, as they stood there."""\n'
        self.found.functions = "\n\n".join([head + "\n".join(lines), *texts]).strip() + "\n"
        entries = self.found.tree.setdefault("reward", {}).setdefault("functions", [])
        for name in there:
            entries.append({"path": f"rewards.py:{name}"})
            self.found.taken.append(f"reward.functions: rewards.py:{name} (reward_funcs)")
        self._outweighed({name: _largest(top[name]) for name in there})

    def _outweighed(self, largest: Mapping[str, float]) -> None:
        right = {name: value for name, value in largest.items() if RIGHT.search(name)}
        if not right:
            self.found.mistakes.append(
                f"no reward function says whether an answer is right, by its name: {', '.join(largest)}"
            )
            return
        rest = sum(value for name, value in largest.items() if name not in right)
        if rest >= max(right.values()) > 0:
            self.found.mistakes.append(
                f"rewards for form give up to {rest:g} together, and the largest for correctness {max(right.values()):g}: a "
                "wrong answer in good form can outweigh a right one"
            )


def _largest(function: ast.AST) -> float:
    """The largest number that a function's returned values are written as; 0 where none is."""
    found = [0.0]
    for node in ast.walk(function):
        spoken = isinstance(node, ast.Return) or (
            isinstance(node, ast.Call) and ast.unparse(node.func).endswith("append")
        )
        if isinstance(node, (ast.Assign, ast.AugAssign)) or spoken:
            inner = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
            found += [float(one) for one in inner if isinstance(one, (int, float)) and not isinstance(one, bool)]
    return max(found)


# --- the whole --------------------------------------------------------------------------------------------------------


def _finish(found: Imported) -> None:
    """What is put together, what is missing, what looks wrong; and that the configuration is one. Raises `ConfigError`."""
    if found.given:
        _put_together(found)
    if found.get("generation.engine") == "auto" and found.get("model.load_in_4bit"):
        found.dropped.append(
            "vLLM with 4-bit weights is kept for Unsloth on a GPU; elsewhere completions come from transformers"
        )
    if not found.get("reward.functions") and not found.get("reward.preset"):
        found.set(
            "reward.preset", "gsm8k-reasoning", "no function that could be taken: choose one of `grpo-kit reward list`"
        )
    for key in ("model.name", "data.source"):
        if found.get(key) is None:
            found.dropped.append(f"{key} is not said in the file: the default is the kit's own; set it")
    group, batch = found.get("generation.num_generations", 8), found.get("optimisation.batch_size", 64)
    longest = found.get("generation.max_completion_tokens", 256)
    if group < 4:
        flat = 0.3**group + 0.7**group
        found.mistakes.append(
            f"groups of {group}: with a pass rate of 30 % {flat:.0%} of them have one reward and teach nothing; use 8 or more"
        )
    if batch <= 8:
        found.mistakes.append(
            f"{batch} completions a step ({batch // group} prompt{'s' * (batch > group)}): the gradient is mostly noise, and "
            "an engine idles; use 64 or more (optimisation.micro_batch_size bounds memory)"
        )
    if longest < SHORT:
        found.mistakes.append(
            f"completions of at most {longest} tokens: a model that reasons is cut before its answer "
            "(completions/clipped_ratio shows it)"
        )
    load_config(found.tree)
