"""Checks of this machine for `grpo-kit doctor`, each with a result and a remedy. Of heavy packages it imports only torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kit.config import ModelConfig

GIB = 1024**3
DISK_WARN, DISK_FAIL = 10 * GIB, 1 * GIB
RAM_WARN, RAM_FAIL = 8 * GIB, 2 * GIB
BF16_CAPABILITY = (8, 0)
DRIVERS = {"12": "525", "13": "580"}
"""The oldest Linux driver of each CUDA major version (NVIDIA, CUDA compatibility guide)."""


@dataclass(frozen=True)
class Check:
    """The result of one check. `level` is ok, warn or fail; `fix` is the remedy if it is not ok."""

    name: str
    level: str
    result: str
    fix: str = ""


def check_machine(root: str | Path = "runs", model: ModelConfig | None = None) -> list[Check]:
    """Run all checks, the most basic ones first. A check that raises becomes a warning.

    `root` and `model` are `run.root` and the section `model` of a run.
    """
    checks: list[Check] = []
    parts = (versions, torch_build, gpu, partial(backend, model), partial(run_folder, root), memory, sandbox, caches)
    for check in parts:
        try:
            checks += check()
        except Exception as error:  # a driver or a broken package may raise any type
            name = getattr(check, "__name__", None) or check.func.__name__  # type: ignore[attr-defined]
            result = f"the check failed: {type(error).__name__}: {error}"
            checks.append(Check(name, "warn", result, "See the message."))
    return checks


def failed(checks: list[Check]) -> bool:
    """Whether a check failed without which no run can start."""
    return any(check.level == "fail" for check in checks)


def versions() -> Iterator[Check]:
    """Compare Python and packages with the ranges that the installed kit declares."""
    from packaging.specifiers import SpecifierSet

    if installed("grpo-kit") is None:
        result = f"the kit in {Path(__file__).parents[2]} is not installed, so its supported versions are unknown"
        yield Check("packages", "warn", result, "Install it: uv sync, or pip install -e . in that folder")
        return
    version = platform.python_version()
    supported = importlib.metadata.metadata("grpo-kit")["Requires-Python"] or ""
    if SpecifierSet(supported).contains(version, prereleases=True):
        yield Check("Python", "ok", f"{version} (supported: {supported or 'any'})")
    else:
        fix = f"Create an environment with a supported Python ({supported})."
        yield Check("Python", "fail", f"{version}, expected {supported}", fix)
    yield from packages()


def packages() -> Iterator[Check]:
    """Compare installed versions with the ranges that the kit declares; extras only if they are installed."""
    from packaging.requirements import Requirement

    wrong: dict[str, Check] = {}  # several extras may have the same package with other ranges
    fine = 0
    for requirement in map(Requirement, importlib.metadata.requires("grpo-kit") or []):
        marker = str(requirement.marker or "")
        optional = "extra" in marker
        if '"tested"' in marker:
            continue  # single versions within the other ranges
        if requirement.marker is not None and not optional and not requirement.marker.evaluate():
            continue
        version = installed(requirement.name)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            fine += 1
        elif version is not None or not optional:
            result = "not installed" if version is None else f"{version}, expected {requirement.specifier}"
            fix = f"pip install '{requirement.name}{requirement.specifier}'"
            wrong[requirement.name] = Check(requirement.name, "warn" if optional else "fail", result, fix)
    yield from wrong.values()
    yield Check("packages", "ok", f"{fine} have supported versions")


def installed(name: str) -> str | None:
    """The version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_build() -> Iterator[Check]:
    """The CUDA version of torch's build, and whether torch finds the GPU of the system."""
    import torch

    build = torch.version.cuda
    result = f"{torch.__version__}, built for {'CUDA ' + build if build else 'the CPU'}"
    if _nvidia_device() and not torch.cuda.is_available():
        fix = "Install torch for CUDA (https://pytorch.org/get-started/locally)"
        if build is not None:
            needed = DRIVERS.get(build.partition(".")[0], "of its release date")
            fix = (
                f"CUDA {build} needs the NVIDIA driver {needed} or newer, and this machine has {_driver() or 'an unknown one'}: "
                "update it, choose a newer runtime, or install torch for an older CUDA (https://pytorch.org/get-started/locally)"
            )
        yield Check("torch", "fail", f"{result}; the machine has an NVIDIA GPU that torch cannot use", f"{fix}.")
        return
    yield Check("torch", "ok", result)


def gpu() -> Iterator[Check]:
    """The GPU: name, memory, compute capability, bfloat16, driver."""
    import torch

    from kit.runs.lock import gpu_holder

    if not torch.cuda.is_available():
        result = "none; runs use the CPU, which suffices for quickstart and tiny models"
        yield Check("GPU", "warn", result, "Use a GPU machine.")
        return
    properties = torch.cuda.get_device_properties(0)
    total = properties.total_memory
    yield Check("GPU", "ok", f"{properties.name}, {total / GIB:.1f} GiB, driver {_driver() or 'unknown'}")
    if holder := gpu_holder():  # a look at the free memory would take some of it from the run
        yield Check("GPU memory", "ok", holder)
    elif (free := torch.cuda.mem_get_info(0)[0]) < 0.9 * total:
        used = f"{(total - free) / GIB:.1f} GiB are used by other programs"
        yield Check("GPU memory", "warn", used, "Close the programs that nvidia-smi lists, or plan with the free part.")
    capability = (properties.major, properties.minor)
    oldest = divmod(int(architectures[0][3:]), 10) if (architectures := torch.cuda.get_arch_list()) else (7, 0)
    result = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= BF16_CAPABILITY:
        yield Check("bfloat16", "ok", f"{result}: has bfloat16")
    elif capability >= oldest:
        yield Check("bfloat16", "warn", f"{result}: no bfloat16", "Nothing to do: model.dtype auto trains in float16.")
    else:
        fix = "Use a newer GPU (T4, RTX 20 or newer), or install torch for an older CUDA (https://pytorch.org/get-started/locally)."
        yield Check("bfloat16", "fail", f"{result}; torch {torch.__version__} needs {oldest[0]}.{oldest[1]}", fix)


def backend(model: ModelConfig | None = None) -> Iterator[Check]:
    """The backend that would load the model of a run, with the reason."""
    from kit.config import ModelConfig
    from kit.errors import EnvironmentUnsupported
    from kit.models.backend import choose_backend

    section = model or ModelConfig()
    try:
        chosen = choose_backend(section)
    except EnvironmentUnsupported as error:
        result, _, fix = str(error).partition(". ")
        yield Check("backend", "fail", result, fix)
        return
    reason = f"(model.backend: {section.backend}): {chosen.reason}"
    yield Check("backend", "ok", f"{chosen.name} on {chosen.device} {reason}")


def _nvidia_device() -> bool:
    return Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia/version").exists()


def _driver() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def run_folder(root: str | Path) -> Iterator[Check]:
    """Whether the folder of runs is writable, and the free space on its disk."""
    folder = _existing(Path(root))
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".grpo-kit-"):
            yield Check("run folder", "ok", f"{Path(root).absolute()} is writable")
    except OSError as error:
        fix = "Set run.root to a writable folder, or change the permissions of this one."
        yield Check("run folder", "fail", f"{folder} is not writable: {error.strerror or error}", fix)
    free = shutil.disk_usage(folder).free
    fix = "Free some space, lower run.keep_checkpoints, or set run.root to another disk."
    yield _graded("disk", free, DISK_WARN, DISK_FAIL, f"{free / GIB:.1f} GiB free on the disk of the runs", fix)


def _existing(folder: Path) -> Path:
    return next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())


def memory() -> Iterator[Check]:
    """RAM that is available."""
    from kit.models.memory import free_memory

    free = free_memory("cpu")
    fix = "Close other programs; a model is loaded through RAM even if it trains on a GPU."
    yield _graded("memory", free, RAM_WARN, RAM_FAIL, f"{free / GIB:.1f} GiB of RAM available", fix)


def _graded(name: str, value: float, warn: float, fail: float, result: str, fix: str) -> Check:
    level = "fail" if value < fail else "warn" if value < warn else "ok"
    return Check(name, level, result, fix if level != "ok" else "")


def sandbox() -> Iterator[Check]:
    """Whether generated programs can run in isolation."""
    from rewards.sandbox import problem

    if not (reason := problem()):
        yield Check("sandbox", "ok", "Landlock and a system call filter")
        return
    result = f"isolation does not work here ({reason}); rewards that run generated code refuse to start"
    fix = "Run on Linux 5.13 or later with Landlock, and allow it in the container."
    yield Check("sandbox", "warn", result, fix)


def caches() -> Iterator[Check]:
    """Whether the hub's cache and the kit's cache (locks of GPUs, compiled code of Unsloth) are writable."""
    from kit.runs.lock import cache_folder

    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folders = ("kit cache", cache_folder(), "GRPO_KIT_CACHE", "warn"), ("hub cache", hub, "HF_HOME", "fail")
    for name, folder, variable, level in folders:
        existing = _existing(folder)
        if os.access(existing, os.W_OK):
            free = shutil.disk_usage(existing).free
            result = f"{folder}, {free / GIB:.1f} GiB free"
            yield _graded(name, free, DISK_WARN, 0, result, f"Set {variable} to another disk.")
        else:
            yield Check(name, level, f"{folder} is not writable", f"Set {variable} to a writable folder.")


def main(previous: str = "{}") -> int:
    """Print which packages an installation downgraded and whether torch sees the GPU; return 1 if a check failed.

    `previous` has the packages before the installation, as a JSON object from name to version.
    """
    from packaging.version import InvalidVersion, Version

    older = []
    for name, version in sorted(json.loads(previous).items()):
        now = installed(name)
        with suppress(InvalidVersion):
            if now is not None and Version(now) < Version(version):
                older.append(f"{name} {version} -> {now}")
    if older:
        print("downgraded to the versions with which the kit was tested:", ", ".join(older))
    checks = [*torch_build(), *gpu()]
    for check in checks:
        print(f"{check.name}: {check.result}. {check.fix if check.level != 'ok' else ''}".rstrip())
    return int(failed(checks))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
