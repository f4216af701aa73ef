"""The library that loads the model, its precision and device. The only module that may import Unsloth.

Unsloth rewrites TRL's classes when it is imported, and reads environment variables while it is. So the choice is made
here from what is installed, and carried out before anything imports `trl`. What a backend refuses of a model is said
before a run starts, with what to set instead; where `model.backend: auto` has chosen Unsloth, a refusal is the reason to
take transformers.
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
"""CUDA compute capability, (7, 5) for a T4; None stands for the CPU."""

BFLOAT16 = (8, 0)
"""Ampere; earlier GPUs emulate bfloat16, at a fraction of the speed."""
VLLM = (7, 0)
"""Volta, the oldest that vLLM generates on."""


def precision(dtype: str, capability: Capability | None, device_name: str = "this GPU") -> str:
    """Returns float32, bfloat16 or float16: the requested one, else the best that the device computes in.

    Raises `ModelError` for bfloat16 on a GPU without it, `EnvironmentUnsupported` for float16 on the CPU.
    """
    if capability is None:
        if dtype == "float16":
            raise EnvironmentUnsupported(
                "model.dtype: float16 trains on a GPU only, and this machine has none that torch can use. "
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
    """A device in a message."""
    return "the CPU" if capability is None else f"{device_name} (compute capability {capability[0]}.{capability[1]})"


log = logging.getLogger("kit")
TRANSFORMERS, UNSLOTH, UNSLOTH_CPU = "transformers", "unsloth", "unsloth-cpu"
TESTED_UNSLOTH = "2026.10.9"
NO_FLOAT32 = "model.dtype: float32, of which Unsloth's trainer makes bfloat16 or float16"
TRANSFORMERS_INSTEAD = "Set model.backend: transformers."
TRAINS_THE_SAME = "Set model.backend: transformers (or auto), which trains the same configuration."
# Switches that would change what a run computes without standing in its configuration.
_NEUTRAL = {
    "UNSLOTH_ALLOW_CPU": "0",
    "UNSLOTH_CPU_FROZEN_BF16": "0",
    "UNSLOTH_GRPO_ROLLOUT_LOGPROBS_AS_OLD": "0",
    "UNSLOTH_GRPO_ROUTING_REPLAY": "0",
    "UNSLOTH_VLLM_ALLOW_STALE_ROLLOUTS": "0",
    "UNSLOTH_VLLM_FP32_LM_HEAD": "1",  # the kit's scorer has float32 logits
    "UNSLOTH_VLLM_MERGED_ROLLOUT": "0",  # the adapter itself: in 16-bit weights, small updates round away
    "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE": "1",  # with standby, too, the engine's share is gpu_memory_utilization
    "UNSLOTH_VLLM_SUFFIX_DECODING": "0",
}


@dataclass(frozen=True)
class Backend:
    """The chosen loader and why."""

    name: str
    device: str
    reason: str
    computes_in_float32: bool = False
    """Although float16 was chosen: the model is of a family that overflows in it."""


@dataclass(frozen=True)
class Machine:
    """The machine's properties that decide the backend."""

    capability: Capability | None
    """Of the GPU that torch uses; None: there is none."""
    gpu: str = ""
    unsloth: str | None = None
    """The installed version; None: not installed."""
    processes: int = 1

    @property
    def old_unsloth(self) -> bool:
        """Whether the installed version is older than the tested one, and may not be tried."""
        if self.unsloth is None or os.environ.get("KIT_ALLOW_UNTESTED") == "1":
            return False
        return Version(self.unsloth) < Version(TESTED_UNSLOTH)

    @property
    def device(self) -> str:
        return "cpu" if self.capability is None else "cuda"


def this_machine() -> Machine:
    """Asks torch and the list of installed packages; imports nothing else."""
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
    """The loader for this machine. Raises `EnvironmentUnsupported` when the configuration asks for one it cannot have."""
    return decide(config, this_machine())


def decide(config: ModelConfig, machine: Machine) -> Backend:
    """The loader of `config` on `machine`."""
    name = config.backend
    if name == TRANSFORMERS:
        return Backend(TRANSFORMERS, machine.device, "model.backend: transformers")
    if name == "auto":
        return _best(config, machine)
    if machine.old_unsloth:
        raise EnvironmentUnsupported(
            f"model.backend: {name} with Unsloth {machine.unsloth}; the kit was tested with {TESTED_UNSLOTH}. Install that one: "
            f"pip install 'unsloth=={TESTED_UNSLOTH}' 'unsloth_zoo=={TESTED_UNSLOTH}', or try anyway with KIT_ALLOW_UNTESTED=1. "
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
            "model.backend: unsloth needs a CUDA GPU, and torch finds none here. Set model.backend: unsloth-cpu for Unsloth's "
            "CPU backend. " + TRAINS_THE_SAME
        )
    return Backend(UNSLOTH, "cuda", "model.backend: unsloth")


def _best(config: ModelConfig, machine: Machine) -> Backend:
    """Resolves `auto`: Unsloth on a CUDA GPU where it is installed and can train this configuration, else transformers."""
    reasons = (
        (machine.capability is None, "no GPU that torch can use"),
        (machine.unsloth is None, "Unsloth is not installed"),
        (machine.old_unsloth, f"Unsloth {machine.unsloth} is older than {TESTED_UNSLOTH}"),
        (machine.capability is not None and machine.capability < VLLM, f"Unsloth does not support {machine.gpu}"),
        (machine.processes > 1, "several processes share the batch"),
        (config.dtype == "float32", NO_FLOAT32),
        (config.attention is not None, "model.attention is set, and Unsloth brings its own"),
    )
    if reason := next((reason for when, reason in reasons if when), None):
        return Backend(TRANSFORMERS, machine.device, f"transformers + PEFT: {reason}")
    return Backend(UNSLOTH, "cuda", f"Unsloth {machine.unsloth} on {machine.gpu}: a GPU, and it is installed")


# --- carrying the choice out ------------------------------------------------------------------------------------------


_active: Backend | None = None


def active_backend() -> Backend | None:
    """The backend that this process runs on; None: no backend is active, and any trainer class will do."""
    return _active


@contextmanager
def activate_backend(backend: Backend, *, standby: bool = False) -> Iterator[Backend]:
    """Runs the block on `backend`: sets its environment variables and imports its packages in order.

    Enter it before anything imports `trl`. The environment is as before afterwards, but for what Unsloth sets itself.
    Raises `EnvironmentUnsupported` when it is too late for that.
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
    """The environment variables that a backend reads, as they must be before it is imported."""
    if backend.name == TRANSFORMERS:
        return {}
    if backend.name == UNSLOTH_CPU:
        return _NEUTRAL | {"UNSLOTH_FORCE_CPU": "1"}
    from kit.runs.lock import cache_folder

    folder = os.environ.get("UNSLOTH_COMPILE_LOCATION") or str(cache_folder() / "unsloth_compiled_cache")
    return _NEUTRAL | {"UNSLOTH_COMPILE_LOCATION": folder, "UNSLOTH_VLLM_STANDBY": "1" if standby else "0"}


def expand_segments(*, standby: bool = False) -> None:
    """Lets torch's allocator on the GPU grow its segments, so that packs of ever other lengths do not fragment its memory.

    Call it before CUDA starts. What the user has set stands; vLLM's sleep (`standby`) needs segments that stay, and WSL and
    Tegra have no virtual memory on the GPU.
    """
    chosen = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    without = "microsoft" in platform.release().lower() or os.path.exists("/etc/nv_tegra_release")
    if not (chosen or standby or without):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


@contextmanager
def switched(variables: Mapping[str, str], *others: str) -> Iterator[None]:
    """Sets environment variables, and puts back what they were; `others` too, which something inside sets."""
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
    """The package, imported if it was not. What it prints goes to the log.

    Raises `EnvironmentUnsupported` where this process cannot have it.
    """
    if "unsloth" not in sys.modules and "trl" in sys.modules:
        raise EnvironmentUnsupported(
            f"model.backend: {backend.name}, but TRL was imported in this process already, and Unsloth can only rewrite it "
            "while it is imported. Start a new process (grpo-kit train, kit.train(...)), or import unsloth first."
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
    """Redirects what is printed inside to the kit's log, line by line."""
    heard = io.StringIO()
    heard.fileno = lambda: 1  # type: ignore[method-assign]  # vLLM mutes the descriptor while it makes process groups
    try:
        with contextlib.redirect_stdout(heard):
            yield
    finally:
        for line in filter(None, map(str.strip, heard.getvalue().splitlines())):
            log.info("unsloth: %s", line)


@contextmanager
def without_collections() -> Iterator[None]:
    """Pauses garbage collection in a process of the kit: modules leave no garbage, and looking takes a third of their time.

    What is there afterwards is left out of later collections; elsewhere, where it may be garbage by then, nothing is changed.
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

    Cores are those that this process may use; processes that a launcher has started on one machine share them. The embedded
    models gain little from a second thread, and on crowded cores two wait for each other: they get one.
    """
    import torch

    openmp_threads, processes = os.environ.get("OMP_NUM_THREADS", ""), os.environ.get("LOCAL_WORLD_SIZE")
    if threads is None and processes is None and openmp_threads.isdecimal():  # launchers set it by themselves
        threads = int(openmp_threads) or None
    if threads is None:
        threads = 1 if model in EMBEDDED_MODELS else max(1, physical_cores() // int(processes or "1"))
    torch.set_num_threads(threads)
    return threads


def physical_cores() -> int:
    """Cores that this process may run on, hyper-threads not counted."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def torch_dtype(name: str, device: str) -> torch.dtype:
    """The precision of the weights; `auto` is the best that the device computes in. Raises as `precision` does."""
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


# --- what a backend refuses -------------------------------------------------------------------------------------------


def suited(backend: Backend, config: ModelConfig, model_config: Any) -> Backend:
    """The backend, or transformers where `auto` has chosen one that stops at this architecture. Raises `ModelError`."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    experts = [getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    if backend.name == UNSLOTH and any(isinstance(count, int) and count > 1 for count in experts):
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


FLOAT32_FAMILIES = ("gemma3,", "gemma3text", "gemma3n", "gemma4", "qwen3_5")
"""Of Unsloth's `FORCE_FLOAT32` those whose experts do not keep them from it anyway; with a comma: the whole of a type."""


def overflows_in_float16(model_config: Any) -> bool:
    """Whether activations of this family exceed what float16 holds, so that it is computed in float32 instead."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    types = {str(getattr(each, "model_type", "")) for each in (model_config, text)}
    return any(family == name.replace("_", "") or family in f"{name}," for family in FLOAT32_FAMILIES for name in types)
