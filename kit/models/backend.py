"""The library that loads the model, its precision and device. The only module that may import Unsloth.

Unsloth replaces TRL's classes when it is imported, and reads environment variables during the import. The backend is therefore
chosen from the installed packages, and activated before anything imports `trl`. If a backend does not support a model, an
error before the run names the setting to change; `model.backend: auto` uses transformers instead of Unsloth then.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import io
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from kit.config import EMBEDDED_MODELS, ModelConfig
from kit.errors import EnvironmentUnsupported, ModelError

if TYPE_CHECKING:
    import torch

Capability = tuple[int, int]
"""CUDA compute capability, (7, 5) for a T4; None: the CPU."""

BFLOAT16 = (8, 0)
"""Ampere. Earlier GPUs emulate bfloat16 slowly."""
VLLM = (7, 0)
"""Volta, the oldest GPUs that vLLM supports."""


def precision(dtype: str, capability: Capability | None, device_name: str = "this GPU") -> str:
    """Returns float32, bfloat16 or float16: the requested dtype, or for auto the best of the device.

    Raises `ModelError` for bfloat16 on a GPU without it, `EnvironmentUnsupported` for float16 on the CPU.
    """
    if capability is None:
        if dtype == "float16":
            raise EnvironmentUnsupported(
                "model.dtype: float16 needs a GPU for training, but torch finds none. "
                "Set model.dtype: float32 (or auto)."
            )
        return "float32" if dtype == "auto" else dtype
    if dtype == "bfloat16" and capability < BFLOAT16:
        raise ModelError(
            f"model.dtype: bfloat16, but {described(capability, device_name)} has no bfloat16. Use float16 or auto."
        )
    if dtype != "auto":
        return dtype
    return "bfloat16" if capability >= BFLOAT16 else "float16"


def described(capability: Capability | None, device_name: str) -> str:
    """The device for messages."""
    return "the CPU" if capability is None else f"{device_name} (compute capability {capability[0]}.{capability[1]})"


log = logging.getLogger("kit")
TRANSFORMERS, UNSLOTH, UNSLOTH_CPU = "transformers", "unsloth", "unsloth-cpu"
TESTED_UNSLOTH = "2026.10.9"
NO_FLOAT32 = "Unsloth's trainer replaces model.dtype: float32 by bfloat16 or float16"
TRANSFORMERS_INSTEAD = "Set model.backend: transformers."
TRAINS_THE_SAME = "Set model.backend: transformers (or auto), which supports the same configuration."
# Environment variables of Unsloth that would change a run without being part of its configuration.
_NEUTRAL = {
    "UNSLOTH_ALLOW_CPU": "0",
    "UNSLOTH_BLOCK_COMPILE": "0",  # for packs it compiles every decoder layer separately, which takes minutes
    "UNSLOTH_CPU_FROZEN_BF16": "0",
    "UNSLOTH_GRPO_ROLLOUT_LOGPROBS_AS_OLD": "0",
    "UNSLOTH_GRPO_ROUTING_REPLAY": "0",
    "UNSLOTH_VLLM_ALLOW_STALE_ROLLOUTS": "0",
    "UNSLOTH_VLLM_FP32_LM_HEAD": "1",  # the kit's scorer has float32 logits
    "UNSLOTH_VLLM_MERGED_ROLLOUT": "0",  # use the adapter: small updates would be lost in 16-bit merged weights
    "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE": "1",  # the engine's share is gpu_memory_utilization with standby too
    "UNSLOTH_VLLM_SUFFIX_DECODING": "0",
}


@dataclass(frozen=True)
class Backend:
    """The chosen backend and the reason."""

    name: str
    device: str
    reason: str
    computes_in_float32: bool = False
    """Whether the model computes in float32 although float16 was chosen, because its family overflows in float16."""


@dataclass(frozen=True)
class Machine:
    """Properties of the machine that determine the backend."""

    capability: Capability | None
    """Capability of torch's GPU; None: no GPU."""
    gpu: str = ""
    unsloth: str | None = None
    """Installed version; None: not installed."""
    processes: int = 1

    @property
    def old_unsloth(self) -> bool:
        """Whether the installed version is older than the tested one, and untested versions are not allowed."""
        if self.unsloth is None or os.environ.get("KIT_ALLOW_UNTESTED") == "1":
            return False
        return Version(self.unsloth) < Version(TESTED_UNSLOTH)

    @property
    def device(self) -> str:
        return "cpu" if self.capability is None else "cuda"


def this_machine() -> Machine:
    """Reads the properties from torch and from the installed packages, without importing other packages."""
    import torch

    try:
        version = importlib.metadata.version("unsloth")
    except importlib.metadata.PackageNotFoundError:
        version = None
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if not torch.cuda.is_available():
        return Machine(None, unsloth=version, processes=processes)
    capability = torch.cuda.get_device_capability()
    return Machine(capability, torch.cuda.get_device_name(), version, processes)


def choose_backend(config: ModelConfig) -> Backend:
    """The backend of `config` on this machine. Raises `EnvironmentUnsupported` if the configured one cannot be used."""
    return decide(config, this_machine())


def decide(config: ModelConfig, machine: Machine) -> Backend:
    """The backend of `config` on `machine`."""
    name = config.backend
    if name == TRANSFORMERS:
        return Backend(TRANSFORMERS, machine.device, "model.backend: transformers")
    if name == "auto":
        return _best(config, machine)
    if machine.old_unsloth:
        raise EnvironmentUnsupported(
            f"model.backend: {name} with Unsloth {machine.unsloth}; the kit was tested with {TESTED_UNSLOTH}. Install: "
            f"pip install 'unsloth=={TESTED_UNSLOTH}' 'unsloth_zoo=={TESTED_UNSLOTH}', or set KIT_ALLOW_UNTESTED=1. "
            f"{TRAINS_THE_SAME}"
        )
    if machine.unsloth is None:
        raise EnvironmentUnsupported(
            f"model.backend: {name}, but Unsloth is not installed. Install it with: uv sync --inexact --extra unsloth  (or: pip "
            f"install 'grpo-kit[unsloth]'). {TRAINS_THE_SAME}"
        )
    if name == UNSLOTH_CPU:
        return Backend(UNSLOTH_CPU, "cpu", "model.backend: unsloth-cpu")
    if machine.capability is None:
        raise EnvironmentUnsupported(
            "model.backend: unsloth needs a CUDA GPU, but torch finds none. Set model.backend: unsloth-cpu for Unsloth's "
            "CPU backend. " + TRAINS_THE_SAME
        )
    return Backend(UNSLOTH, "cuda", "model.backend: unsloth")


def _best(config: ModelConfig, machine: Machine) -> Backend:
    """Resolves `auto`: Unsloth if there is a CUDA GPU and it is installed and supports the configuration, else transformers."""
    reasons = (
        (machine.capability is None, "no GPU that torch can use"),
        (machine.unsloth is None, "Unsloth is not installed"),
        (machine.old_unsloth, f"Unsloth {machine.unsloth} is older than {TESTED_UNSLOTH}"),
        (machine.capability is not None and machine.capability < VLLM, f"Unsloth does not support {machine.gpu}"),
        (machine.processes > 1, "several processes train on one batch"),
        (config.dtype == "float32", NO_FLOAT32),
        (config.attention is not None, "model.attention is set, but Unsloth uses its own"),
    )
    if reason := next((reason for when, reason in reasons if when), None):
        return Backend(TRANSFORMERS, machine.device, f"transformers + PEFT: {reason}")
    return Backend(UNSLOTH, "cuda", f"Unsloth {machine.unsloth} on {machine.gpu}")


# --- activating the backend -------------------------------------------------------------------------------------------


_active: Backend | None = None


def active_backend() -> Backend | None:
    """The active backend of this process; None: none is active, and any trainer class is accepted."""
    return _active


@contextmanager
def activate_backend(backend: Backend, *, standby: bool = False) -> Iterator[Backend]:
    """Runs the block on `backend`: sets its environment variables and imports its packages in order.

    Enter it before anything imports `trl`; otherwise it raises `EnvironmentUnsupported`. Afterwards the environment is restored,
    except for variables that Unsloth sets itself.
    """
    global _active
    previous = _active
    with switched(switches(backend, standby=standby)):
        _active = backend
        try:
            if backend.name != TRANSFORMERS:
                _unsloth(backend)
            yield backend
        finally:
            _active = previous


def switches(backend: Backend, *, standby: bool = False) -> dict[str, str]:
    """The environment variables that must be set before a backend is imported."""
    if backend.name == TRANSFORMERS:
        return {}
    if backend.name == UNSLOTH_CPU:
        return _NEUTRAL | {"UNSLOTH_FORCE_CPU": "1"}
    from kit.runs.lock import cache_folder

    folder = os.environ.get("UNSLOTH_COMPILE_LOCATION") or str(cache_folder() / "unsloth_compiled_cache")
    return _NEUTRAL | {"UNSLOTH_COMPILE_LOCATION": folder, "UNSLOTH_VLLM_STANDBY": "1" if standby else "0"}


def expand_segments(*, standby: bool = False) -> None:
    """Enables expandable segments of torch's GPU allocator, so that packs of varying lengths do not fragment memory.

    Call it before CUDA starts. A user's own setting has priority. vLLM's sleep (`standby`) needs fixed segments, and WSL and
    Tegra have no virtual memory on the GPU.
    """
    chosen = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    without = "microsoft" in platform.release().lower() or os.path.exists("/etc/nv_tegra_release")
    if not (chosen or standby or without):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


@contextmanager
def switched(variables: Mapping[str, str], *others: str) -> Iterator[None]:
    """Sets environment variables inside the block and restores them, and also `others`, which code inside may set."""
    before = {name: os.environ.get(name) for name in (*variables, *others)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _unsloth(backend: Backend) -> Any:
    """Imports the package. Its output goes to the log.

    Raises `EnvironmentUnsupported` if this process cannot import it.
    """
    if "unsloth" not in sys.modules and "trl" in sys.modules:
        raise EnvironmentUnsupported(
            f"model.backend: {backend.name}, but this process has imported TRL already, and Unsloth can only patch it "
            "during its import. Start a new process (grpo-kit train, kit.train(...)), or import unsloth first."
        )
    with stdout_to_log(), without_collections():
        try:
            import unsloth
        except (ImportError, NotImplementedError, RuntimeError) as failure:
            raise EnvironmentUnsupported(
                f"Unsloth is installed but cannot be imported here ({type(failure).__name__}: {failure}). {TRAINS_THE_SAME}"
            ) from failure
    return unsloth


def fast_language_model(backend: Backend) -> Any:
    """`unsloth.FastLanguageModel` of this backend."""
    return _unsloth(backend).FastLanguageModel


@contextmanager
def stdout_to_log() -> Iterator[None]:
    """Redirects output inside the block to the kit's log, line by line."""
    heard = io.StringIO()
    heard.fileno = lambda: 1  # type: ignore[method-assign]  # vLLM mutes this descriptor while it creates process groups
    try:
        with contextlib.redirect_stdout(heard):
            yield
    finally:
        for line in filter(None, map(str.strip, heard.getvalue().splitlines())):
            log.info("unsloth: %s", line)


@contextmanager
def without_collections() -> Iterator[None]:
    """Pauses garbage collection during imports in a process of the kit. Collections take a third of the time and find nothing.

    Existing objects are then frozen for later collections. In other processes, whose objects may be garbage, it does nothing.
    """
    if not is_of_the_kit():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def is_of_the_kit() -> bool:
    """Whether this process was started as `python -m kit....`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and (spec.name or "").startswith("kit.")


def is_unsloths(base: type) -> bool:
    """Whether a trainer class is the one that Unsloth generates, by the names of its classes."""
    return any(cls.__name__.startswith(("Unsloth", "_Unsloth")) for cls in base.__mro__)


# --- device -----------------------------------------------------------------------------------------------------------


def use_threads(threads: int | None, model: str) -> int:
    """Sets torch's CPU threads and returns the number: `threads`, else OMP_NUM_THREADS, else one per physical core.

    Cores are those that this process may use, divided by the number of processes that a launcher has started. The embedded
    models use one thread: a second one saves little, and on busy cores two wait for each other.
    """
    import torch

    openmp_threads, processes = os.environ.get("OMP_NUM_THREADS", ""), os.environ.get("LOCAL_WORLD_SIZE")
    if threads is None and processes is None and openmp_threads.isdecimal():  # not if a launcher has set it
        threads = int(openmp_threads) or None
    if threads is None:
        threads = 1 if model in EMBEDDED_MODELS else max(1, physical_cores() // int(processes or "1"))
    torch.set_num_threads(threads)
    return threads


def physical_cores() -> int:
    """Number of physical cores that this process may use."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def torch_dtype(name: str, device: str) -> torch.dtype:
    """The dtype of the weights; `auto` is the best of the device. Raises the errors of `precision`."""
    import torch

    machine = this_machine() if device == "cuda" else Machine(None)
    return getattr(torch, precision(name, machine.capability, machine.gpu))  # type: ignore[no-any-return]


def quantization_config(dtype: torch.dtype | None = None) -> Any:
    """NF4 with double quantisation (QLoRA, arXiv 2305.14314). Raises `EnvironmentUnsupported` without bitsandbytes."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise EnvironmentUnsupported(
            "model.load_in_4bit needs bitsandbytes. Install it with: uv sync --inexact --extra bnb  "
            "(or: pip install 'grpo-kit[bnb]')"
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


# --- architectures that a backend does not support --------------------------------------------------------------------


def suited(backend: Backend, config: ModelConfig, model_config: Any) -> Backend:
    """The backend, or transformers if `auto` has chosen one without support for this architecture. Raises `ModelError`."""
    if backend.name == UNSLOTH and has_experts(model_config):
        why = f"{config.name} is a mixture of experts, whose balancing loss Unsloth's trainer does not compute"
        if config.backend != "auto":
            raise ModelError(f"{why}. {TRANSFORMERS_INSTEAD}")
        backend = Backend(TRANSFORMERS, backend.device, f"transformers + PEFT: {why}")
    if backend.device == "cuda" and overflows_in_float16(model_config):
        import torch

        if torch_dtype(config.dtype, backend.device) is torch.float16:
            why = f"{model_config.model_type} overflows in float16, so it is computed in float32, which is slow"
            return replace(backend, reason=f"{backend.reason}; {why}", computes_in_float32=True)
    return backend


def has_experts(model_config: Any) -> bool:
    """Whether the model is a mixture of experts."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    experts = [getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    return any(isinstance(count, int) and count > 1 for count in experts)


FLOAT32_FAMILIES = ("gemma3,", "gemma3text", "gemma3n", "gemma4", "qwen3_5")
"""Families of Unsloth's `FORCE_FLOAT32` without mixtures of experts. With a comma, the complete model_type must match."""


def overflows_in_float16(model_config: Any) -> bool:
    """Whether activations of this family exceed the range of float16, so that it must compute in float32."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    types = {str(getattr(each, "model_type", "")) for each in (model_config, text)}
    return any(family == name.replace("_", "") or family in f"{name}," for family in FLOAT32_FAMILIES for name in types)
