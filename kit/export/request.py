"""Requests and results of exports, without torch: the formats, the checked request, the result that is filed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit.errors import ConfigError, RunError
from kit.export import target as places
from kit.registry import did_you_mean
from kit.runs.store import RunDir
from kit.runs.worker import call_for_result

# --- formats ----------------------------------------------------------------------------------------------------------


FORMATS = {
    "adapter": "the LoRA weights alone, as PEFT reads them; needs the base model beside it",
    "merged-16bit": "base and adapter in one model, float16 or bfloat16",
    "gguf": "one file for llama.cpp and what is built on it",
    "ollama": "the GGUF file with a Modelfile",
}
CONVERTED = ("f32", "f16", "bf16", "q8_0")
"""GGUF types that the converter writes by itself; the others take llama-quantize."""


@dataclass(frozen=True)
class Limits:
    """How far an export may be from its source on the source's greedy tokens before it counts as broken.

    `agreement`: least share of tokens at which both choose the same. `mean`, `largest`: log-probability, nats.
    """

    agreement: float
    mean: float
    largest: float

    def loosest(self, other: Limits) -> Limits:
        """What both together may lose at least."""
        return Limits(
            min(self.agreement, other.agreement), max(self.mean, other.mean), max(self.largest, other.largest)
        )


LIMITS = {
    "float32": Limits(0.995, 1e-3, 0.05),
    "float16": Limits(0.98, 0.005, 0.25),
    "bfloat16": Limits(0.95, 0.03, 1.0),
    "q8_0": Limits(0.95, 0.03, 1.0),
    "q6_k": Limits(0.93, 0.06, 1.5),
    "q5_k_m": Limits(0.90, 0.10, 2.5),
    "q4_k_m": Limits(0.85, 0.20, 4.0),
    "q3_k_m": Limits(0.75, 0.40, 6.0),
    "q2_k": Limits(0.60, 0.80, 10.0),
    "nf4": Limits(0.85, 0.20, 4.0),
}
"""Limits by the precision of the stored numbers; each step down at least doubles the rounding error. The same table applies to
the precision in which the source computes."""
ALIASES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "q5_k_s": "q5_k_m", "q5_0": "q5_k_m", "q5_1": "q5_k_m",
    "q4_k_s": "q4_k_m", "q4_0": "q4_k_m", "q4_1": "q4_k_m", "q3_k_s": "q3_k_m", "q3_k_l": "q3_k_m",
}  # fmt: skip
QUANTIZATIONS = sorted(name for name in {*LIMITS, *ALIASES} if name[0] == "q" or name in CONVERTED)


def format_name(name: str) -> str:
    """A format by either spelling: `merged_16bit`, `merged-16bit`. Raises `ConfigError` for another word."""
    plain = name.strip().lower().replace("_", "-")
    if plain not in FORMATS:
        raise ConfigError(
            f"There is no format '{name}'.{did_you_mean(plain, list(FORMATS))} Known: {', '.join(FORMATS)}."
        )
    return plain


def quantization_name(name: str) -> str:
    """A GGUF type in lower case. Raises `ConfigError` for one that nothing is known of."""
    plain = name.strip().lower().replace("-", "_")
    if plain not in QUANTIZATIONS:
        raise ConfigError(
            f"There is no quantisation '{name}'.{did_you_mean(plain, QUANTIZATIONS)} Known: {', '.join(QUANTIZATIONS)}."
        )
    return plain


def limits_of(stored: str, computed: str, *, base_in_4bit: bool) -> Limits:
    """What an export stored as `stored` may differ by from a source that computes in `computed`.

    `base_in_4bit`: the source was trained on 4-bit weights and the export holds the full ones, so that the rounding of the
    base stands between them.
    """
    limits = LIMITS[ALIASES.get(stored, stored)].loosest(LIMITS[computed])
    return limits.loosest(LIMITS["nf4"]) if base_in_4bit else limits


# --- the request and its result ---------------------------------------------------------------------------------------


JOB = "kit.export.job"
DTYPES = ("auto", "float16", "bfloat16", "float32")
NOT_VERIFIED = ".not-verified"
"""After the name of a folder that is not what was trained."""


class NotVerified(RunError):
    """An export that was written and is not what was trained. `result` holds the figures; the command line exits with 1."""

    exit_code = 1

    def __init__(self, message: str, result: dict[str, Any]) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class ExportRequest:
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

    def for_run(self, run: RunDir) -> dict[str, Any]:
        """The same, checked, for the process that exports. Raises `KitError` for what would fail there."""
        name = format_name(self.format)
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
        return asdict(self) | {
            "run_dir": str(run.path.resolve()),
            "format": name,
            "out": str(out) if out else None,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "quantization": quantization_name(self.quantization),
            "llama_cpp": str(self.llama_cpp) if self.llama_cpp else None,
        }


def export(run: RunDir, request: ExportRequest, *, progress: bool = False) -> dict[str, Any]:
    """Exports in a process of its own and returns the result. Raises `NotVerified`, and `KitError` for all else."""
    from kit.evaluation.results import checkpoint_now, weights_of

    if not run.config.is_file():
        raise RunError(f"Run '{run.id}' has no config.yaml yet, so there is nothing to export.")
    weights_of(run, checkpoint_now(run, request.checkpoint))  # an answer at once where there is nothing to export
    stopped = f"The export of {run.id} was stopped before it was done; nothing of it is left."
    result = call_for_result(JOB, request.for_run(run), stopped, quiet=not progress)
    verdict = result["verification"]
    if verdict is not None and not verdict["verified"]:
        raise NotVerified(
            f"not verified: {result['path']} is not what was trained: {'; '.join(verdict['faults'])}.", result
        )
    return result


def exports(run: RunDir) -> dict[str, dict[str, Any]]:
    """Results by format, for those who list them; what cannot be read is left out."""
    results = {}
    for path in sorted((run.path / "export").glob("*.json")):
        try:
            results[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return results


def check_place(target: Path, run: RunDir, *, force: bool) -> None:
    """Refuses a folder that an export of `run` may not take the place of, verified or not. Raises `KitError`."""
    place, exported = target.resolve(), (run.path / "export").resolve()
    if place.is_relative_to(run.path.resolve()) and exported not in place.parents and place != run.path.resolve():
        raise ConfigError(f"{target} lies within the run's own files. Give a folder elsewhere, or leave --out away.")
    places.check_free(target, force=force, keep=run.path)
    places.check_free(target.with_name(target.name + NOT_VERIFIED), force=True)
