"""Formats, requests and results of exports. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit.errors import ConfigError, RunError
from kit.export.target import check_free
from kit.registry import did_you_mean
from kit.runs.files import read_json
from kit.runs.store import RunDir
from kit.runs.worker import call_for_result

# --- formats ----------------------------------------------------------------------------------------------------------


FORMATS = {
    "adapter": "the LoRA weights alone, in PEFT's format; the base model is needed to use them",
    "merged-16bit": "base and adapter in one model, float16 or bfloat16",
    "gguf": "one file for llama.cpp and programs that use it",
    "ollama": "the GGUF file with a Modelfile",
}
CONVERTED = ("f32", "f16", "bf16", "q8_0")
"""GGUF types that llama.cpp's converter writes itself. All others need llama-quantize."""


@dataclass(frozen=True)
class Limits:
    """Largest differences between an export and its source on the source's greedy completions.

    `agreement` is the least share of tokens at which both choose the same token. `mean` and `largest` are differences of
    log-probabilities in nats.
    """

    agreement: float
    mean: float
    largest: float

    def loosest(self, other: Limits) -> Limits:
        """The looser of two limits, value by value."""
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
"""Limits by the dtype or quantisation of the stored weights, which also apply to the dtype in which the source computes. Each
step to a lower precision at least doubles the rounding error."""
ALIASES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "q5_k_s": "q5_k_m", "q5_0": "q5_k_m", "q5_1": "q5_k_m",
    "q4_k_s": "q4_k_m", "q4_0": "q4_k_m", "q4_1": "q4_k_m", "q3_k_s": "q3_k_m", "q3_k_l": "q3_k_m",
}  # fmt: skip
QUANTIZATIONS = sorted(name for name in {*LIMITS, *ALIASES} if name[0] == "q" or name in CONVERTED)


def _known(kind: str, name: str, plain: str, known: Collection[str]) -> str:
    """Return `plain`, the normalised `name`. Raises `ConfigError` if it is not known."""
    if plain not in known:
        raise ConfigError(f"There is no {kind} '{name}'.{did_you_mean(plain, list(known))} Known: {', '.join(known)}.")
    return plain


def limits_of(stored: str, computed: str, *, base_in_4bit: bool) -> Limits:
    """Limits of an export with weights stored as `stored`, compared with a source that computes in `computed`.

    With `base_in_4bit`, the source was trained on 4-bit weights and the export has full-precision ones, so that the limits
    include the rounding of the base.
    """
    limits = LIMITS[ALIASES.get(stored, stored)].loosest(LIMITS[computed])
    return limits.loosest(LIMITS["nf4"]) if base_in_4bit else limits


# --- the request and its result ---------------------------------------------------------------------------------------


JOB = "kit.export.job"
DTYPES = ("auto", "float16", "bfloat16", "float32")
NOT_VERIFIED = ".not-verified"
"""Suffix of the folder of an export that failed its verification."""


class NotVerified(RunError):
    """Raised for an export that failed its verification. `result` has the figures; the command line exits with 1."""

    exit_code = 1

    def __init__(self, message: str, result: dict[str, Any]) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class ExportRequest:
    """The options of an export. `Run.export` documents them."""

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
        """Check the options and return them for the process that exports. Raises `KitError` for what would fail there."""
        name = _known("format", self.format, self.format.strip().lower().replace("_", "-"), FORMATS)
        quantization = self.quantization.strip().lower().replace("-", "_")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: '{self.dtype}' is none of {', '.join(DTYPES)}.")
        if self.prompts < 1:
            raise ConfigError(f"prompts: {self.prompts}, expected 1 or more; --no-verify skips the verification.")
        out = Path(self.out).expanduser().absolute() if self.out is not None else None
        if out is not None and ".." in out.parts:
            out = out.resolve()
        check_place(out or run.path / "export" / name, run, force=self.force)
        return asdict(self) | {
            "run_dir": str(run.path.resolve()),
            "format": name,
            "out": str(out) if out else None,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "quantization": _known("quantisation", self.quantization, quantization, QUANTIZATIONS),
            "llama_cpp": str(self.llama_cpp) if self.llama_cpp else None,
        }


def export(run: RunDir, request: ExportRequest, *, progress: bool = False) -> dict[str, Any]:
    """Export in a child process and return the result. Raises `NotVerified` or another `KitError`."""
    from kit.evaluation.results import checkpoint_now, weights_of

    if not run.config.is_file():
        raise RunError(f"Run '{run.id}' has no config.yaml yet, so there is nothing to export.")
    weights_of(run, checkpoint_now(run, request.checkpoint))  # raises at once if there are no weights
    stopped = f"The export of {run.id} was stopped before it was finished. Its files were removed."
    result = call_for_result(JOB, request.for_run(run), stopped, quiet=not progress)
    verdict = result["verification"]
    if verdict is not None and not verdict["verified"]:
        raise NotVerified(
            f"not verified: {result['path']} differs from the trained model: {'; '.join(verdict['faults'])}.", result
        )
    return result


def exports(run: RunDir) -> dict[str, dict[str, Any]]:
    """Results of the run's exports by format. Unreadable files are left out."""
    paths = sorted((run.path / "export").glob("*.json"))
    return {path.stem: result for path in paths if (result := read_json(path))}


def check_place(target: Path, run: RunDir, *, force: bool) -> None:
    """Raise `KitError` for a target that an export of `run`, verified or not, may not replace."""
    resolved, exported = target.resolve(), (run.path / "export").resolve()
    if (
        resolved.is_relative_to(run.path.resolve())
        and exported not in resolved.parents
        and resolved != run.path.resolve()
    ):
        raise ConfigError(f"{target} is inside the run directory. Choose a folder elsewhere, or omit --out.")
    check_free(target, force=force, keep=run.path)
    check_free(target.with_name(target.name + NOT_VERIFIED), force=True)
