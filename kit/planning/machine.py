"""Checks of this machine (`grpo-kit doctor`), each with what was seen and what to do. Nothing heavy but torch is imported."""

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
    """One finding. `level` is ok, warn or fail; `fix` says what to do where it is not ok."""

    name: str
    level: str
    seen: str
    fix: str = ""


def check_machine(root: str | Path = "runs", model: ModelConfig | None = None) -> list[Check]:
    """Every check, the most basic first. A check that raises becomes a warning.

    `root` and `model` are those of the run that is asked about.
    """
    checks: list[Check] = []
    every = (versions, torch_build, gpu, partial(backend, model), partial(run_folder, root), memory, sandbox, caches)
    for check in every:
        try:
            checks += check()
        except Exception as error:  # whatever a driver or a broken package raises
            name = getattr(check, "__name__", None) or check.func.__name__  # type: ignore[attr-defined]
            seen = f"could not be looked at: {type(error).__name__}: {error}"
            checks.append(Check(name, "warn", seen, "See the message."))
    return checks


def failed(checks: list[Check]) -> bool:
    """Whether a check failed that keeps a run from starting."""
    return any(check.level == "fail" for check in checks)


def versions() -> Iterator[Check]:
    """Python and packages against the ranges that the installed kit declares; one warning where it is not installed."""
    from packaging.specifiers import SpecifierSet

    if installed("grpo-kit") is None:
        seen = (
            f"the kit in {Path(__file__).parents[2]} is not installed here, so nothing says which versions it supports"
        )
        yield Check("packages", "warn", seen, "Install it: uv sync, or pip install -e . in that folder")
        return
    version = platform.python_version()
    supported = importlib.metadata.metadata("grpo-kit")["Requires-Python"] or ""
    if SpecifierSet(supported).contains(version, prereleases=True):
        yield Check("Python", "ok", f"{version} (supported: {supported or 'any'})")
    else:
        fix = f"Make an environment with a supported Python ({supported})."
        yield Check("Python", "fail", f"{version}, expected {supported}", fix)
    yield from packages()


def packages() -> Iterator[Check]:
    """Installed versions against the ranges that this kit declares; extras only where they are installed."""
    from packaging.requirements import Requirement

    wrong: dict[str, Check] = {}  # a package may stand in several extras with different ranges: one finding is enough
    fine = 0
    for requirement in map(Requirement, importlib.metadata.requires("grpo-kit") or []):
        marker = str(requirement.marker or "")
        optional = "extra" in marker
        if '"tested"' in marker:
            continue  # one version of each package, inside the ranges that the others declare
        if requirement.marker is not None and not optional and not requirement.marker.evaluate():
            continue
        version = installed(requirement.name)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            fine += 1
        elif version is not None or not optional:
            seen = "not installed" if version is None else f"{version}, expected {requirement.specifier}"
            fix = f"pip install '{requirement.name}{requirement.specifier}'"
            wrong[requirement.name] = Check(requirement.name, "warn" if optional else "fail", seen, fix)
    yield from wrong.values()
    yield Check("packages", "ok", f"{fine} in the supported ranges")


def installed(name: str) -> str | None:
    """The version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_build() -> Iterator[Check]:
    """Which CUDA torch was built for, and whether it finds a GPU that the system has."""
    import torch

    build = torch.version.cuda
    seen = f"{torch.__version__}, built for {'CUDA ' + build if build else 'the CPU'}"
    if _nvidia_device() and not torch.cuda.is_available():
        fix = "Install torch for CUDA (https://pytorch.org/get-started/locally)"
        if build is not None:
            needed = DRIVERS.get(build.partition(".")[0], "of its release")
            fix = (
                f"CUDA {build} needs the NVIDIA driver {needed} or newer, and this machine has {_driver() or 'an unknown one'}: "
                "update it, choose a newer runtime, or install torch for an older CUDA (https://pytorch.org/get-started/locally)"
            )
        yield Check("torch", "fail", f"{seen}; the machine has an NVIDIA GPU that torch cannot use", f"{fix}.")
        return
    yield Check("torch", "ok", seen)


def gpu() -> Iterator[Check]:
    """The GPU: name, memory, compute capability, bfloat16, driver."""
    import torch

    if not torch.cuda.is_available():
        yield Check(
            "GPU", "warn", "none; runs use the CPU, which is right for quickstart and tiny models", "Use a GPU machine."
        )
        return
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    yield Check("GPU", "ok", f"{properties.name}, {total / GIB:.1f} GiB, driver {_driver() or 'unknown'}")
    if free < 0.9 * total:
        taken = f"{(total - free) / GIB:.1f} GiB are in use by others"
        yield Check("GPU memory", "warn", taken, "Close what nvidia-smi lists, or plan with what is free.")
    capability = (properties.major, properties.minor)
    seen = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= BF16_CAPABILITY:
        yield Check("bfloat16", "ok", f"{seen}: has bfloat16")
    elif capability >= (7, 0):
        yield Check("bfloat16", "warn", f"{seen}: no bfloat16", "Nothing to do: model.dtype auto trains in float16.")
    else:
        yield Check("bfloat16", "fail", f"{seen}: below 7.0", "Use a GPU of 2018 or later (T4, RTX 20 and up).")


def backend(model: ModelConfig | None = None) -> Iterator[Check]:
    """The backend that would load the model of a run, and why."""
    from kit.config import ModelConfig
    from kit.errors import EnvironmentUnsupported
    from kit.models.backend import choose_backend

    section = model or ModelConfig()
    try:
        chosen = choose_backend(section)
    except EnvironmentUnsupported as error:
        seen, _, fix = str(error).partition(". ")
        yield Check("backend", "fail", seen, fix)
        return
    yield Check(
        "backend", "ok", f"{chosen.name} on {chosen.device} (model.backend: {section.backend}): {chosen.reason}"
    )


def _nvidia_device() -> bool:
    return Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia/version").exists()


def _driver() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def run_folder(root: str | Path) -> Iterator[Check]:
    """Whether the runs' folder can be written, and the free space where it lies."""
    folder = _existing(Path(root))
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".grpo-kit-"):
            yield Check("run folder", "ok", f"{Path(root).absolute()} can be written")
    except OSError as error:
        fix = "Set run.root to a folder that you may write to, or change the rights of this one."
        yield Check("run folder", "fail", f"{folder} cannot be written: {error.strerror or error}", fix)
    free = shutil.disk_usage(folder).free
    fix = "Free some space, lower run.keep_checkpoints, or set run.root to another disk."
    yield _graded("disk", free, DISK_WARN, DISK_FAIL, f"{free / GIB:.1f} GiB free where runs lie", fix)


def _existing(folder: Path) -> Path:
    return next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())


def memory() -> Iterator[Check]:
    """RAM that can still be allocated."""
    from kit.models.memory import free_memory

    free = free_memory("cpu")
    fix = "Close other programs; a model is read through RAM even when it trains on a GPU."
    yield _graded("memory", free, RAM_WARN, RAM_FAIL, f"{free / GIB:.1f} GiB of RAM available", fix)


def _graded(name: str, value: float, warn: float, fail: float, seen: str, fix: str) -> Check:
    level = "fail" if value < fail else "warn" if value < warn else "ok"
    return Check(name, level, seen, fix if level != "ok" else "")


def sandbox() -> Iterator[Check]:
    """The level at which generated programs can be run here."""
    from rewards.sandbox import problem

    if not (reason := problem()):
        yield Check("sandbox", "ok", "Landlock and a filter of system calls")
        return
    yield Check(
        "sandbox",
        "warn",
        f"no isolation works here ({reason}); rewards that run generated code will refuse to start",
        "Run on Linux 5.13 or later with Landlock, and let the container use it.",
    )


def caches() -> Iterator[Check]:
    """Where models of the hub are kept, GPUs' locks and what Unsloth compiles, and whether that can be written."""
    from kit.runs.lock import cache_folder

    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folders = ("kit cache", cache_folder(), "GRPO_KIT_CACHE", "warn"), ("hub cache", hub, "HF_HOME", "fail")
    for name, folder, variable, without in folders:
        place = _existing(folder)
        if os.access(place, os.W_OK):
            free = shutil.disk_usage(place).free
            yield _graded(
                name, free, DISK_WARN, 0, f"{folder}, {free / GIB:.1f} GiB free", f"Point {variable} elsewhere."
            )
        else:
            yield Check(name, without, f"{folder} cannot be written", f"Set {variable} to a folder that can be.")


def main(before: str = "{}") -> int:
    """Prints what an installation changed and whether torch sees the GPU; returns 1 where a check failed.

    before: the packages before the installation, a JSON object of name to version.
    """
    from packaging.version import InvalidVersion, Version

    older = []
    for name, version in sorted(json.loads(before).items()):
        now = installed(name)
        with suppress(InvalidVersion):
            if now is not None and Version(now) < Version(version):
                older.append(f"{name} {version} -> {now}")
    if older:
        print("older than before, as the kit was tested with these versions:", ", ".join(older))
    checks = [*torch_build(), *gpu()]
    for check in checks:
        print(f"{check.name}: {check.seen}. {check.fix if check.level != 'ok' else ''}".rstrip())
    return int(failed(checks))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
