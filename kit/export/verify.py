"""Verify an export: compare its files, tokenizer, end tokens and answers with those of the trained model."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kit.errors import ModelError
from kit.evaluation.heldout import end_tokens
from kit.export.request import Limits, limits_of
from kit.export.source import fits_in_float32, load_plain, prompt_ids
from kit.export.target import digest
from kit.models.failures import first_line, is_out_of_memory, raise_fatal, release
from kit.models.start import put_on, untrained
from kit.runner.trained import Source

LEAST_EFFECT = 0.02
"""Least effect of training, in nats (root mean square), that the verification looks for in an export."""
EFFECT_KEPT = 0.5
"""Least share of that effect that the export must show."""
MOST_WRONG_ENDS = 0.25
"""Largest share of completions that have the source's tokens but end elsewhere. Rounding may flip an end token."""


@dataclass(frozen=True)
class Written:
    """A written export: the dtype or quantisation of its weights, its GGUF file, and the share of the update that is left."""

    kind: str
    gguf: Path | None = None
    update_kept: float | None = None


@dataclass
class Measured:
    """The answers of the source: prompts as rows and token ids, greedy completions, and scores with and without adapter."""

    rows: list[dict[str, Any]]
    prompts: list[list[int]]
    ends: list[int]
    pad: int
    longest: int
    computed: str
    answers: Answers
    base_logps: list[list[float]] | None = None
    changes: dict[str, Any] = field(default_factory=dict)  # keys of `model` that differed from the run's


def measure(source: Source, rows: list[dict[str, Any]], longest: int, **changes: Any) -> Measured:
    """Load the trained policy (`Source.load`) and measure its answers. Raises `ModelError` if it does not fit into memory."""
    tokenizer, base_logps = source.tokenizer, None
    try:
        model = source.load(**changes).eval()
        prompts, ends, pad = prompt_ids(tokenizer, rows), end_tokens(model, tokenizer), tokenizer.pad_token_id
        source.ends = ends
        greedy = generate(model, prompts, ends, pad, longest)
        answers = score(model, prompts, greedy)
        answers.greedy = greedy
        computed = next(str(weight.dtype) for weight in model.parameters() if weight.is_floating_point())
        if source.lora:
            with untrained(model):
                base_logps = score(model, prompts, greedy).logps
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"The trained model does not fit into memory ({first_line(error)}), so the export cannot be verified. Free the "
            "GPU, verify on the CPU (CUDA_VISIBLE_DEVICES= before the command), or skip the verification with --no-verify."
        ) from error
    return Measured(rows, prompts, ends, pad, longest, computed.removeprefix("torch."), answers, base_logps, changes)


@dataclass
class Verdict:
    """The result of a verification: `faults` has the reasons for a failure, `comparison` the figures."""

    comparison: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    update_kept: float | None = None
    """Share of the update in the merged weights before they were quantised; None for other formats."""
    faults: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        """Whether there are no faults."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the result file."""
        return {"verified": self.verified, **asdict(self)}


def verify(source: Source, measured: Measured, folder: Path, export_format: str, written: Written) -> Verdict:
    """Load an export from its files and compare its answers with those of the trained model.

    A small share of the update in the weights is a fault only if the answers cannot show the effect of training. An export
    that does not fit on the GPU is verified on the CPU.
    """
    release()  # free the measured model
    base_in_4bit = source.config.model.load_in_4bit and export_format != "adapter" and not source.unrounded
    limits = limits_of(written.kind, measured.computed, base_in_4bit=base_in_4bit)
    verdict = Verdict(limits=asdict(limits), update_kept=written.update_kept)
    device = source.files.backend.device
    try:
        verdict.comparison, faults = _compare_answers(source, measured, folder, export_format, written, device)
    except Exception as error:
        if device == "cpu" or export_format == "adapter" or not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        source.note(f"verified on the CPU, because it does not fit on the GPU ({first_line(error)})")
        release()
        on_cpu = replace(measured, computed="float32" if fits_in_float32(source) else measured.computed)
        verdict.comparison, faults = _compare_answers(source, on_cpu, folder, export_format, written, "cpu")
    verdict.faults += faults
    if not verdict.comparison:
        return verdict
    if (verdict.comparison["training_effect"] or 0.0) < 3 * limits.mean:  # of pure rounding the export would show half
        verdict.comparison["effect_kept"] = None
    verdict.faults += judge(verdict.comparison, limits)
    update_kept = 1.0 if written.update_kept is None else written.update_kept
    if verdict.comparison["effect_kept"] is None and update_kept < EFFECT_KEPT:
        verdict.faults.append(
            f"its weights have {update_kept:.0%} of the update, and the answers cannot show whether that matters. To "
            "keep all of it, use --dtype float32 or --to adapter"
        )
    return verdict


def _compare_answers(
    source: Source, measured: Measured, folder: Path, export_format: str, written: Written, device: str
) -> tuple[dict[str, Any], list[str]]:
    """The figures of the comparison (none if the export cannot be run), and the faults of its files."""
    try:
        model, tokenizer, faults = _open(source, measured, folder, export_format, written, device)
    except Exception as error:  # a reader of a damaged file may raise any type
        raise_fatal(error)
        return {}, [f"it cannot be loaded: {type(error).__name__}: {first_line(error)}"]
    faults += check_tokenizer(source.tokenizer, tokenizer, measured.rows)
    ends = end_tokens(model, tokenizer)
    if ends != measured.ends:
        faults.append(f"completions end at the tokens {ends}, but at {measured.ends} in the source")
    if export_format == "adapter":
        files = (place / "adapter_model.safetensors" for place in (source.weights, folder))
        if len(set(map(digest, files))) > 1:
            faults.append("adapter_model.safetensors is not the trained file")
    try:
        answers = score(model, measured.prompts, measured.answers.greedy)
        prompts = prompt_ids(tokenizer, measured.rows)
        answers.greedy = generate(model, prompts, ends, measured.pad, measured.longest)
        return compare(measured, answers), faults
    except (RuntimeError, ValueError, IndexError) as error:  # shapes that do not fit, ids beyond the vocabulary
        raise_fatal(error)
        return {}, [*faults, f"it cannot be run: {first_line(error)}"]


def _open(
    source: Source, measured: Measured, folder: Path, export_format: str, written: Written, device: str
) -> tuple[Any, Any, list[str]]:
    """Load model and tokenizer from the files. The list has the faults of the weights."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig

    if written.gguf is not None:
        from kit.export.gguf import open_gguf

        return open_gguf(source, written.gguf, device, measured.ends, getattr(torch, measured.computed))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=source.config.model.trust_remote_code)
    if export_format == "adapter":
        return put_on(source.load_base(**measured.changes), folder), tokenizer, []
    # Compute in the dtype of the source, with the stored weights.
    model, info = load_plain(source, str(folder), dtype=getattr(torch, measured.computed), output_loading_info=True)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.to(device)
    problems = {
        "missing_keys": "missing",
        "unexpected_keys": "not part of the model",
        "mismatched_keys": "of a wrong shape",
    }
    faults = [
        f"'{name}' is {problem}"
        for kind, problem in problems.items()
        for name in sorted(map(str, info.get(kind) or ()))
    ]
    return model.eval(), tokenizer, faults


def compare(measured: Measured, export: Answers) -> dict[str, Any]:
    """Compare greedy choices and log-probabilities (nats) on the source's greedy completions.

    `effect_kept` is the share of training's effect on these log-probabilities that the export shows, by least squares: 1 for
    an exact export, 0 for the base model. It is None if training changed them by less than `LEAST_EFFECT`.
    """
    source = measured.answers
    tokens, choices = (_flat(rows) for rows in (source.greedy, export.choices))
    trained, exported = (_flat(rows) for rows in (source.logps, export.logps))
    gaps, pairs = np.abs(trained - exported), list(zip(source.greedy, export.greedy, strict=True))
    # One completion is a prefix of the other: the same tokens with another end.
    wrong_ends = sum(
        len(row) != len(other) and all(a == b for a, b in zip(row, other, strict=False)) for row, other in pairs
    )
    result: dict[str, Any] = {
        "prompts": len(pairs),
        "tokens": len(tokens),
        "token_agreement": float(np.mean(tokens == choices)),
        "prompt_agreement": float(np.mean([row == other for row, other in pairs])),
        "wrong_ends": wrong_ends,
        "logp_difference_mean": float(gaps.mean()),
        "logp_difference_max": float(gaps.max()),
        "finite": bool(np.isfinite(gaps).all()),
        "training_effect": None,
        "effect_kept": None,
    }
    if measured.base_logps is not None:
        base = _flat(measured.base_logps)
        size = float(np.sum((trained - base) ** 2))
        result["training_effect"] = effect = math.sqrt(size / len(base))
        if effect >= LEAST_EFFECT:
            result["effect_kept"] = float(np.sum((exported - base) * (trained - base))) / size
    return result


def _flat(rows: Sequence[Sequence[float]]) -> np.ndarray[Any, Any]:
    return np.array([value for row in rows for value in row], float)


def judge(comparison: dict[str, Any], limits: Limits) -> list[str]:
    """A message for each figure above its limit."""
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
        faults.append(f"{comparison['wrong_ends']} completions do not end where the source's do")
    share = comparison["effect_kept"]
    if share is not None and not EFFECT_KEPT <= share <= 2 - EFFECT_KEPT:
        faults.append(
            f"it shows {share:.0%} of the effect of training; expected 100 %, at most {1 - EFFECT_KEPT:.0%} off"
        )
    return faults


# --- answers ----------------------------------------------------------------------------------------------------------


BATCH = 8
"""Prompts that are generated for at once."""
PROBES = (
    "The answer is 42.",
    "  two  spaces\n\nand lines\t",
    "naïve — ünïcödé 漢字 🙂",
    "<think>1 + 1</think>",
    "def f(x):\n    return x**2",
)
"""Texts on which two tokenizers are compared, in addition to the prompts."""


@dataclass
class Answers:
    """The greedy completions of a model, and its scores of the source's completions.

    `logps` and `choices` have one entry for each token of the scored completions: its log-probability (nats), and the token
    that the model would choose there.
    """

    greedy: list[list[int]] = field(default_factory=list)
    logps: list[list[float]] = field(default_factory=list)
    choices: list[list[int]] = field(default_factory=list)


def generate(model: Any, prompts: list[list[int]], ends: list[int], pad: int, longest: int) -> list[list[int]]:
    """Generate greedy completions of at most `longest` tokens, including the end token."""
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=False, max_new_tokens=longest, eos_token_id=ends or None, pad_token_id=pad, disable_compile=True
    )
    results: list[list[int]] = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=model.device)
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        for row in output[:, width:].tolist():
            end = next((index for index, token in enumerate(row) if token in ends), len(row) - 1)
            results.append(row[: end + 1])
    return results


def score(model: Any, prompts: list[list[int]], completions: list[list[int]]) -> Answers:
    """Score completions: the log-probability of each token, and the token that the model would choose."""
    import torch

    answers = Answers()
    for prompt, completion in zip(prompts, completions, strict=True):  # a row at a time: logits of a batch fill a GPU
        ids = torch.tensor([prompt + completion], device=model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]  # (L, V)
            rows = logits[len(prompt) - 1 : -1].float()  # (T, V)
            chosen = ids[0, len(prompt) :]
            answers.logps.append(torch.nn.functional.cross_entropy(rows, chosen, reduction="none").neg().tolist())
            answers.choices.append(rows.argmax(-1).tolist())
    return answers


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def check_tokenizer(trained: Any, written: Any, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Compare a written tokenizer with the one of training on `PROBES` and the prompts of `rows`; return the differences."""
    faults = []
    if (trained.chat_template or None) != (written.chat_template or None):
        faults.append("the chat template differs from training")
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        if getattr(trained, name) != getattr(written, name):
            faults.append(
                f"the tokenizer's {name} is {getattr(written, name)}, but {getattr(trained, name)} in training"
            )
    for text in PROBES:
        if trained(text, add_special_tokens=False)["input_ids"] != written(text, add_special_tokens=False)["input_ids"]:
            faults.append(f"the tokenizer splits {text!r} differently than in training")
            break
    try:
        differ = sum(a != b for a, b in zip(prompt_ids(trained, rows), prompt_ids(written, rows), strict=True))
    except Exception as error:  # a template may raise any type
        return [*faults, f"the prompts cannot be rendered: {error}"]
    return faults + ([f"{differ} of {len(rows)} prompts have other token ids than in training"] if differ else [])
