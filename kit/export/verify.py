"""The same prompts through source and export, and the verdict."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kit.errors import KitError
from kit.export.formats import Limits, limits_of
from kit.export.layout import check_ends, check_loading, check_safetensors, check_tied, check_tokenizer
from kit.export.source import PROBES, Answers, Source, end_ids, generate, prompt_ids, put_on, score
from kit.export.weights import WeightCheck, check_weights, load_plain

LEAST_EFFECT = 0.02
"""Nats (root mean square) from which on the effect of training is large enough to be looked for in an export."""
EFFECT_KEPT = 0.5
"""Least share of that effect which the export must show."""

MOST_WRONG_ENDS = 0.25
"""Share of completions that may be the source's words and yet end elsewhere: rounding may flip a single end."""


@dataclass
class Measured:
    """What the source answers, taken once: prompts as rows and ids, greedy completions, scores with and without adapter."""

    rows: list[dict[str, Any]]
    prompts: list[list[int]]
    ends: list[int]
    pad: int
    longest: int
    computed: str
    tied_like: Any
    answers: Answers
    base_logps: list[list[float]] | None = None


class _Tied:
    """Stands for a model that is gone: whether its embeddings were one matrix."""

    def __init__(self, model: Any) -> None:
        self.first, self.last = model.get_input_embeddings(), model.get_output_embeddings()

    def get_input_embeddings(self) -> Any:
        return self.first

    def get_output_embeddings(self) -> Any:
        return self.last


def measure(source: Source, rows: list[dict[str, Any]], longest: int) -> Measured:
    """Loads the policy as it was trained and lets it answer."""
    model = source.load().eval()
    tokenizer = source.tokenizer
    prompts, ends = prompt_ids(tokenizer, rows), end_ids(model, tokenizer)
    source.ends = ends
    pad = tokenizer.pad_token_id
    greedy = generate(model, prompts, ends, pad, longest)
    answers = score(model, prompts, greedy, pad)
    answers.greedy = greedy
    computed = next(str(weight.dtype) for weight in model.parameters() if weight.is_floating_point())
    tied, before = _Tied(model), None
    if source.lora:
        with model.disable_adapter():
            before = score(model, prompts, greedy, pad).logps
    else:
        del model  # never two models at once
        try:
            before = score(source.load_start(), prompts, greedy, pad).logps
        except (KitError, RuntimeError, IndexError) as error:  # another model's shapes and vocabulary, too
            source.note_no_start(error)
    return Measured(rows, prompts, ends, pad, longest, computed.removeprefix("torch."), tied, answers, before)


@dataclass
class Verdict:
    """Whether an export is what was trained: `faults` says why not, `comparison` and `weights` hold the figures."""

    comparison: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Any] | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        """True where nothing was found wrong."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """For the result file."""
        return {"verified": self.verified, **asdict(self)}


def verify(source: Source, measured: Measured, folder: Path, what: str, kind: str, gguf: Path | None = None) -> Verdict:
    """Loads an export from its files and compares. `kind` is the precision that its numbers are stored in."""
    limits = limits_of(kind, measured.computed, base_in_4bit=source.config.model.load_in_4bit and what != "adapter")
    verdict = Verdict(limits=asdict(limits))
    faults = verdict.faults
    if gguf is None:
        faults += check_safetensors(folder)
        if faults:
            return verdict
    try:
        model, tokenizer, loading = _open(source, measured, folder, what, gguf)
    except Exception as error:  # readers of damaged files raise what they like; that they do is the finding
        faults.append(
            f"it cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
        return verdict
    faults += loading
    faults += check_tokenizer(source.tokenizer, tokenizer, PROBES, measured.rows)
    faults += check_ends(measured.ends, model, tokenizer)
    faults += check_tied(measured.tied_like, model)
    if what == "adapter":
        verdict.weights = _check_adapter(source, folder, faults)
    else:
        found = check_weights(source, model, kind)
        verdict.weights = _figures(found)
        faults += found.faults[:8]
    try:
        verdict.comparison = compare(measured, answers_of(model, tokenizer, measured))
    except (RuntimeError, ValueError, IndexError) as error:  # shapes that do not fit, ids beyond the vocabulary
        faults.append(f"it cannot be run: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        return verdict
    faults += judge(verdict.comparison, limits)
    return verdict


def _open(source: Source, measured: Measured, folder: Path, what: str, gguf: Path | None) -> tuple[Any, Any, list[str]]:
    """Model and tokenizer as the files have them, and what was wrong with loading them."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig

    device = source.files.backend.device
    if gguf is not None:
        from kit.export.gguf import open_gguf

        return open_gguf(source, gguf, device, measured.ends)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=source.config.model.trust_remote_code)
    if what == "adapter":
        model = put_on(source.load_base(), folder)
        return model, tokenizer, []
    # Computed as the source is, from the numbers as they are stored.
    how = {"dtype": getattr(torch, measured.computed), "output_loading_info": True}
    model, info = load_plain(source, str(folder), **how)
    if what == "merged-4bit" and device == "cpu":
        from kit.models.loading import keep_differentiable

        keep_differentiable(model)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    if device == "cuda" and what != "merged-4bit":
        model.to(device)
    return model.eval(), tokenizer, check_loading(info)


def answers_of(model: Any, tokenizer: Any, measured: Measured) -> Answers:
    """What an export says by itself, from its own ids to its own ends, and how it scores what the source said."""
    prompts = prompt_ids(tokenizer, measured.rows)
    found = score(model, measured.prompts, measured.answers.greedy, measured.pad)
    found.greedy = generate(model, prompts, end_ids(model, tokenizer), measured.pad, measured.longest)
    return found


def compare(measured: Measured, export: Answers) -> dict[str, Any]:
    """Greedy agreement and difference of log-probabilities (nats) on the source's greedy completions.

    `effect_kept` is the least-squares share of what training did to these log-probabilities that the export shows: 1 for a
    faithful one, 0 for the base model. None where training did too little to tell (`LEAST_EFFECT`).
    """
    source = measured.answers
    same = [
        a == b
        for row, other in zip(source.greedy, export.choices, strict=True)
        for a, b in zip(row, other, strict=True)
    ]
    gaps = [
        abs(a - b)
        for row, other in zip(source.logps, export.logps, strict=True)
        for a, b in zip(row, other, strict=True)
    ]
    pairs = list(zip(source.greedy, export.greedy, strict=True))
    wrong_ends = sum(_ends_otherwise(row, other) for row, other in pairs)
    result: dict[str, Any] = {
        "prompts": len(pairs),
        "tokens": len(same),
        "token_agreement": sum(same) / max(1, len(same)),
        "prompt_agreement": sum(row == other for row, other in pairs) / max(1, len(pairs)),
        "wrong_ends": wrong_ends,
        "logp_difference_mean": math.fsum(gaps) / max(1, len(gaps)),
        "logp_difference_max": max(gaps, default=0.0),
        "finite": all(map(math.isfinite, gaps)),
        "training_effect": None,
        "effect_kept": None,
    }
    if measured.base_logps is not None:
        before = [value for row in measured.base_logps for value in row]
        trained = [value for row in source.logps for value in row]
        shown = [value for row in export.logps for value in row]
        size = math.fsum((s - b) ** 2 for s, b in zip(trained, before, strict=True))
        result["training_effect"] = effect = math.sqrt(size / max(1, len(before)))
        if effect >= LEAST_EFFECT:
            result["effect_kept"] = (
                math.fsum((e - b) * (s - b) for e, s, b in zip(shown, trained, before, strict=True)) / size
            )
    return result


def _ends_otherwise(source: list[int], export: list[int]) -> bool:
    """One is the beginning of the other: the same words, ended at another place."""
    shared = min(len(source), len(export))
    return len(source) != len(export) and source[:shared] == export[:shared]


def judge(comparison: dict[str, Any], limits: Limits) -> list[str]:
    """What is past its limit, in words."""
    faults = []
    if not comparison["finite"]:
        faults.append("some log-probabilities are not finite")
    if comparison["token_agreement"] < limits.agreement:
        faults.append(
            f"greedy choices agree on {comparison['token_agreement']:.1%} of tokens, less than {limits.agreement:.1%}"
        )
    for key, limit in (("mean", limits.mean), ("max", limits.largest)):
        if not comparison[f"logp_difference_{key}"] <= limit:
            faults.append(
                f"log-probabilities differ by {comparison[f'logp_difference_{key}']:.4g} nats ({key}), more than {limit:g}"
            )
    if comparison["wrong_ends"] > MOST_WRONG_ENDS * comparison["prompts"]:
        faults.append(f"{comparison['wrong_ends']} completions end at another place than the source's")
    kept = comparison["effect_kept"]
    if kept is not None and not EFFECT_KEPT <= kept <= 2 - EFFECT_KEPT:
        faults.append(f"it shows {kept:.0%} of what training did, expected 100 %, at most {1 - EFFECT_KEPT:.0%} off")
    return faults


def _figures(found: WeightCheck) -> dict[str, Any]:
    return {
        "tensors": found.tensors, "updated": found.updated, "largest_error": found.largest_error, "update_kept": found.kept,
    }  # fmt: skip


def _check_adapter(source: Source, folder: Path, faults: list[str]) -> dict[str, Any]:
    """The written tensors are those that were trained, all of them and to the bit."""
    import torch
    from safetensors.torch import load_file

    trained, written = (load_file(place / "adapter_model.safetensors") for place in (source.weights, folder))
    names = sorted(trained.keys() | written.keys())
    other = [
        name for name in names
        if name not in trained or name not in written or not torch.equal(trained[name], written[name])
    ]  # fmt: skip
    bad = [name for name in written if not torch.isfinite(written[name]).all()]
    faults += [f"'{name}' is not what was trained" for name in other[:4]]
    faults += [f"'{name}' holds numbers that are not finite" for name in bad[:4]]
    return {"tensors": len(names), "updated": len(names) // 2, "largest_error": 0.0, "update_kept": None}
