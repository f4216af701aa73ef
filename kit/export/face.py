"""What is asked of an export, checked before a process is started, and what came of it. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.errors import ConfigError, RunError
from kit.export import target as places
from kit.export.formats import PUSHED, format_name, quantization_name
from kit.runs.store import ALIVE, RunDir
from kit.runs.worker import STOPPED, call

JOB = "kit.export.job"
DTYPES = ("auto", "float16", "bfloat16")
NOT_VERIFIED = ".not-verified"
"""After the name of a folder that is not what was trained."""


class NotVerified(RunError):
    """An export that was written and is not what was trained. `result` holds the figures; the command line exits with 1."""

    exit_code = 1

    def __init__(self, message: str, result: dict[str, Any]) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class Wish:
    """What an export shall be. See `Run.export` for the meaning of each."""

    format: str
    out: str | Path | None = None
    checkpoint: str | int | None = None
    force: bool = False
    dtype: str = "auto"
    quantization: str = "q4_k_m"
    prompts: int = 16
    seed: int = 0
    verify: bool = True
    base: str | None = None
    llama_cpp: str | Path | None = None
    repo: str | None = None
    private: bool = False
    push: str = "adapter"

    def request(self, run: RunDir) -> dict[str, Any]:
        """The same, checked, for the process that exports. Raises `KitError` for what would fail there."""
        name, push = format_name(self.format), format_name(self.push)
        if push not in PUSHED:
            raise ConfigError(f"A hub repository cannot hold '{push}'. It can hold: {', '.join(PUSHED)}.")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: '{self.dtype}' is none of {', '.join(DTYPES)}.")
        if self.prompts < 1:
            raise ConfigError(
                f"prompts: {self.prompts}, expected 1 or more. To leave the verification out: --no-verify."
            )
        out = Path(self.out).expanduser().absolute() if self.out is not None else None
        if out is not None and ".." in out.parts:
            out = out.resolve()
        check_place(out or run.path / "export" / name, run, force=self.force)
        if name == "hub":
            from kit.export.hub import check_push

            check_push(self.repo)
        return {
            "run_dir": str(run.path.resolve()), "format": name, "out": str(out) if out else None,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint), "force": self.force,
            "dtype": self.dtype, "quantization": quantization_name(self.quantization), "prompts": self.prompts,
            "seed": self.seed, "verify": self.verify, "base": self.base,
            "llama_cpp": str(self.llama_cpp) if self.llama_cpp else None, "repo": self.repo, "private": self.private,
            "push": push,
        }  # fmt: skip


def export(run: RunDir, wish: Wish, *, progress: bool = False) -> dict[str, Any]:
    """Exports in a process of its own and returns the result. Raises `NotVerified`, and `KitError` for all else."""
    from kit.evaluation.results import weights_of

    if not run.config.is_file():
        raise RunError(f"Run '{run.id}' has no config.yaml yet, so there is nothing to export.")
    checkpoint = wish.checkpoint
    if checkpoint is None and run.status()["state"] in ALIVE:
        checkpoint = "last"
    weights_of(run, checkpoint)  # an answer at once where there is nothing to export
    request = wish.request(run)
    filed = run.path / "export" / f"{request['format']}.json"
    before = filed.stat().st_mtime_ns if filed.is_file() else None
    outcome = call(JOB, request, quiet=not progress)
    if outcome.error is not None:
        outcome.error.shown = outcome.shown
        raise outcome.error
    if outcome.code == STOPPED or not filed.is_file() or filed.stat().st_mtime_ns == before:
        raise RunError(f"The export of {run.id} was stopped before it was done; nothing of it is left.")
    result: dict[str, Any] = json.loads(filed.read_text(encoding="utf-8"))
    verdict = result["verification"]
    if verdict is not None and not verdict["verified"]:
        raise NotVerified(
            f"not verified: {result['path']} is not what was trained: {'; '.join(verdict['faults'])}.", result
        )
    return result


def exports(run: RunDir) -> dict[str, dict[str, Any]]:
    """Results by format, for those who list them; what cannot be read is left out."""
    found = {}
    for path in sorted((run.path / "export").glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return found


def check_place(target: Path, run: RunDir, *, force: bool) -> None:
    """Refuses a folder that an export of `run` may not take the place of, verified or not. Raises `KitError`."""
    place, exported = target.resolve(), (run.path / "export").resolve()
    if place.is_relative_to(run.path.resolve()) and exported not in place.parents and place != run.path.resolve():
        raise ConfigError(f"{target} lies within the run's own files. Give a folder elsewhere, or leave --out away.")
    places.check_free(target, force=force, keep=run.path)
    places.check_free(target.with_name(target.name + NOT_VERIFIED), force=True)
