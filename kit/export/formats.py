"""The formats of an export: how they are spelt, by how much they may differ from the source, the room they need."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kit.errors import ConfigError
from kit.registry import did_you_mean

FORMATS = {
    "adapter": "the LoRA weights alone, as PEFT reads them; needs the base model beside it",
    "merged-16bit": "base and adapter in one model, float16 or bfloat16",
    "merged-4bit": "the same, quantised to NF4 (bitsandbytes); a lossy form",
    "gguf": "one file for llama.cpp and what is built on it",
    "ollama": "the GGUF file with a Modelfile",
    "hub": "a repository on the Hugging Face hub",
}
PUSHED = ("adapter", "merged-16bit", "merged-4bit", "gguf")
"""What a hub repository may hold."""
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
"""By the precision of the numbers. Each step down doubles the rounding error or more; see docs/export.md for what was
measured. The same table serves for the precision in which the source itself computes."""
ALIASES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "q5_k_s": "q5_k_m", "q5_0": "q5_k_m", "q5_1": "q5_k_m",
    "q4_k_s": "q4_k_m", "q4_0": "q4_k_m", "q4_1": "q4_k_m", "q3_k_s": "q3_k_m", "q3_k_l": "q3_k_m",
}  # fmt: skip
ROUGHNESS = {
    "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3, "q8_0": 0.02, "q6_k": 0.04, "q5_k_m": 0.08, "q4_k_m": 0.15,
    "q3_k_m": 0.3, "q2_k": 0.6, "nf4": 0.15,
}  # fmt: skip
"""Largest root-mean-square error of a stored weight matrix, relative to that of its weights."""
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


def precision(name: str) -> str:
    """The row of `LIMITS` that a precision or quantisation belongs to."""
    return ALIASES.get(name, name)


def limits_of(stored: str, computed: str, *, base_in_4bit: bool) -> Limits:
    """What an export stored as `stored` may differ by from a source that computes in `computed`.

    `base_in_4bit`: the source was trained on 4-bit weights and the export holds the full ones, so that the rounding of the
    base stands between them.
    """
    found = LIMITS[precision(stored)].loosest(LIMITS[computed])
    return found.loosest(LIMITS["nf4"]) if base_in_4bit else replace(found)


def bytes_needed(what: str, parameters: int, adapter: int, quantization: str = "q4_k_m") -> int:
    """Bytes that an export takes while it is made, the intermediate ones included; a tenth is added for the rest.

    `parameters` is the number of weights of the model, `adapter` the size of the trained files in bytes.
    """
    half = 2 * parameters
    bits = {"float32": 32, "float16": 16, "bfloat16": 16, "q8_0": 8.5, "q6_k": 6.6, "q5_k_m": 5.7, "q4_k_m": 4.9,
            "q3_k_m": 4.0, "q2_k": 3.4}[precision(quantization)]  # fmt: skip
    gguf = half + parameters * bits / 8 + (half if quantization not in CONVERTED else 0)
    sizes = {"adapter": adapter, "merged-16bit": half, "merged-4bit": half + parameters, "gguf": gguf, "ollama": gguf}
    return int(1.1 * (sizes[what] + adapter)) + 32 * 1024 * 1024
