"""Which engine and which backend a run gets: decided together, and refused with what to set instead."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from kit.config import RunConfig
from kit.data.images import IMAGES
from kit.errors import ConfigError, EnvironmentUnsupported, KitError
from kit.generation.engine import HF_INSTEAD, Engine, instead_of_vllm, resolved
from kit.models.backend import (
    TRANSFORMERS,
    TRANSFORMERS_INSTEAD,
    UNSLOTH,
    UNSLOTH_CPU,
    Backend,
    Machine,
    decide,
    fast_inference,
    precision,
    standby,
    this_machine,
)

if TYPE_CHECKING:
    from kit.objective import Objective


IMAGE_COLUMNS = {"image", "images"}


def settle_backend(config: RunConfig, columns: Collection[str] = (), machine: Machine | None = None) -> RunConfig:
    """The configuration, with `auto` written out as transformers where Unsloth would refuse this run.

    `columns`: of the data. Raises `KitError` for what the backend that was asked for refuses.
    """
    machine = machine or this_machine()
    backend = decide(config.model, machine)
    obstacle = next(obstacles(config, backend, machine, columns), None)
    if obstacle is None:
        return config
    if config.model.backend != "auto" or backend.name == TRANSFORMERS:
        raise obstacle
    plain = config.model.model_copy(update={"backend": TRANSFORMERS})
    return settle_backend(config.model_copy(update={"model": plain}), columns, machine)


def settle(
    config: RunConfig,
    engine: Engine,
    columns: Collection[str] = (),
    objective: Objective | None = None,
    machine: Machine | None = None,
) -> tuple[RunConfig, Engine]:
    """The configuration with engine and backend written out, and the engine: hf where `auto` chose a vLLM that the backend
    or the data refuses.

    Raises `KitError` as `settle_backend` does, also where a hook of the objective needs vLLM.
    """
    try:
        return settle_backend(resolved(config, engine), columns, machine), engine
    except KitError as obstacle:
        needed = objective is not None and "sampler_logps" in objective.needs
        if engine.name != "vllm" or engine.note is None or needed:  # a note: nobody asked for it
            raise
        engine = instead_of_vllm(obstacle)
    return settle_backend(resolved(config, engine), columns, machine), engine


def obstacles(config: RunConfig, backend: Backend, machine: Machine, columns: Collection[str]) -> Iterator[KitError]:
    """Everything that keeps `backend` from this run, as the errors that say so."""
    checkpointing = config.optimisation.gradient_checkpointing
    if checkpointing == "unsloth" and backend.name == TRANSFORMERS:
        yield ConfigError(
            f"optimisation.gradient_checkpointing: unsloth is Unsloth's way, and the model is loaded by {backend.reason}. "
            "Set optimisation.gradient_checkpointing: true, or model.backend: unsloth on a GPU."
        )
    yield from _precision(config, backend, machine)
    if config.generation.engine == "vllm":
        yield from _with_engine(config, backend, machine, columns)
    if backend.name != TRANSFORMERS:
        yield from _of_unsloth(config, backend, columns)


def _precision(config: RunConfig, backend: Backend, machine: Machine) -> Iterator[KitError]:
    capability = machine.capability if backend.device == "cuda" else None
    try:
        precision(config.model.dtype, capability, machine.gpu)
        if config.generation.engine == "vllm":
            standby(config.generation.vllm.standby, capability, machine.gpu)
    except KitError as error:
        yield error


def _with_engine(config: RunConfig, backend: Backend, machine: Machine, columns: Collection[str]) -> Iterator[KitError]:
    lora, vllm = config.model.lora, config.generation.vllm
    if IMAGES in columns:
        yield EnvironmentUnsupported(
            f"generation.engine: vllm with pictures (column {IMAGES}) is not tried in this version. {HF_INSTEAD}"
        )
    if backend.name == UNSLOTH_CPU:
        yield EnvironmentUnsupported(
            "generation.engine: vllm with model.backend: unsloth-cpu: Unsloth's fast inference needs a GPU. Set "
            "generation.engine: hf, or model.backend: transformers, which drives vLLM's CPU build."
        )
    if backend.name != UNSLOTH:
        return
    try:
        fast_inference(True, machine.capability, machine.gpu)
    except KitError as error:
        yield error
    if vllm.mode == "server":
        yield ConfigError(
            "generation.vllm.mode: server under Unsloth, which makes its own engine in the training process and would leave "
            f"the server unused. Set generation.vllm.mode: colocate, or generation.engine: hf. {TRANSFORMERS_INSTEAD}"
        )
    if vllm.seed is not None:
        yield ConfigError(
            f"generation.vllm.seed: {vllm.seed} under Unsloth, whose engine takes no seed. Set generation.vllm.seed: null. "
            f"{TRANSFORMERS_INSTEAD}"
        )
    if lora is not None and vllm.max_lora_rank is not None and lora.rank > vllm.max_lora_rank:
        yield ConfigError(
            f"model.lora.rank: {lora.rank} is above generation.vllm.max_lora_rank: {vllm.max_lora_rank}, so the engine could "
            f"not load the adapter. Set generation.vllm.max_lora_rank: {lora.rank} (or null), or a smaller rank."
        )
    if lora is None:
        yield ConfigError(
            "generation.engine: vllm with model.lora: null under Unsloth: its engine shares frozen weights and takes adapters "
            f"only. Keep model.lora, or set generation.engine: hf. {TRANSFORMERS_INSTEAD}"
        )
    for key, asked in (("revision", config.model.revision), ("trust_remote_code", config.model.trust_remote_code)):
        if asked:
            yield ConfigError(
                f"model.{key}: {asked} with generation.engine: vllm under Unsloth: its engine ignores or refuses it. Download "
                f"the model and give its folder, or set generation.engine: hf. {TRANSFORMERS_INSTEAD}"
            )


def _of_unsloth(config: RunConfig, backend: Backend, columns: Collection[str]) -> Iterator[KitError]:
    pictures = IMAGE_COLUMNS & set(columns)
    if pictures:
        yield ConfigError(
            f"The data has pictures (column {', '.join(sorted(pictures))}), and GRPO with pictures is not proven under "
            f"model.backend: {backend.name}. {TRANSFORMERS_INSTEAD}"
        )
    if backend.name == UNSLOTH and config.model.attention is not None:
        yield ConfigError(
            f"model.attention: {config.model.attention}, but Unsloth brings an attention of its own. Set model.attention: "
            f"null. {TRANSFORMERS_INSTEAD}"
        )
    if backend.name == UNSLOTH and config.generation.temperature >= 10:
        yield ConfigError(
            f"generation.temperature: {config.generation.temperature:g}: Unsloth's trainer refuses 10 and above. Set a lower "
            f"one. {TRANSFORMERS_INSTEAD}"
        )
