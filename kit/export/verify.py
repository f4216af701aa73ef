"""Is an export what was trained? Its files, its tokenizer and ends, and its answers to the same prompts."""

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
from kit.export.source import load_plain, prompt_ids
from kit.export.target import digest
from kit.models.failures import first_line, is_out_of_memory, raise_fatal, release
from kit.models.start import put_on, untrained
from kit.runner.trained import Source

LEAST_EFFECT = 0.02
"""Nats (root mean square) from which on the effect of training is large enough to be looked for in an export."""
EFFECT_KEPT = 0.5
"""Least share of that effect which the export must show."""

MOST_WRONG_ENDS = 0.25
"""Share of completions that may be the source's words and yet end elsewhere: rounding may flip a single end."""


@dataclass(frozen=True)
class Written:
    """A written export: the precision of its numbers, its GGUF file if it has one, and the share of the update that is left."""

    kind: str
    gguf: Path | None = None
    kept: float | None = None


@dataclass
class Measured:
    """What the source answers, taken once: prompts as rows and ids, greedy completions, scores with and without adapter."""

    rows: list[dict[str, Any]]
    prompts: list[list[int]]
    ends: list[int]
    pad: int
    longest: int
    computed: str
    answers: Answers
    base_logps: list[list[float]] | None = None


def measure(source: Source, rows: list[dict[str, Any]], longest: int) -> Measured:
    """Load the policy as it was trained and let it answer. Raises `ModelError` where memory is too small for it."""
    tokenizer, before = source.tokenizer, None
    try:
        model = source.load().eval()
        prompts, ends, pad = prompt_ids(tokenizer, rows), end_tokens(model, tokenizer), tokenizer.pad_token_id
        source.ends = ends
        greedy = generate(model, prompts, ends, pad, longest)
        answers = score(model, prompts, greedy)
        answers.greedy = greedy
        computed = next(str(weight.dtype) for weight in model.parameters() if weight.is_floating_point())
        if source.lora:
            with untrained(model):
                before = score(model, prompts, greedy).logps
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"There is no room for the model that was trained ({first_line(error)}), so the export cannot be verified. Free the "
            "GPU, verify on the CPU (CUDA_VISIBLE_DEVICES= before the command), or leave the verification out: --no-verify."
        ) from error
    return Measured(rows, prompts, ends, pad, longest, computed.removeprefix("torch."), answers, before)


@dataclass
class Verdict:
    """Whether an export is what was trained: `faults` says why not, `comparison` holds the figures."""

    comparison: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    update_kept: float | None = None
    """Share of the update that merged weights held before they were quantised; None for all else."""
    faults: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        """True where nothing was found wrong."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """For the result file."""
        return {"verified": self.verified, **asdict(self)}


def verify(source: Source, measured: Measured, folder: Path, what: str, written: Written) -> Verdict:
    """Loads an export from its files and compares its answers with those of the model that was trained.

    How much of the update its weights hold is a fault only where the answers cannot tell. What does not fit the GPU is
    verified on the CPU.
    """
    release()  # the model that was measured
    base_in_4bit = source.config.model.load_in_4bit and what != "adapter"
    limits = limits_of(written.kind, measured.computed, base_in_4bit=base_in_4bit)
    verdict = Verdict(limits=asdict(limits), update_kept=written.kept)
    faults, device = verdict.faults, source.files.backend.device
    try:
        verdict.comparison, wrong = _answers(source, measured, folder, what, written, device)
    except Exception as error:
        if device == "cpu" or what == "adapter" or not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        source.note(f"verified on the CPU, as the GPU had no room for it ({first_line(error)})")
        release()
        # In bfloat16 where it was measured in that, else float32: the CPU computes in no float16.
        computed = "bfloat16" if measured.computed == "bfloat16" else "float32"
        on_cpu = replace(measured, computed=computed)
        verdict.comparison, wrong = _answers(source, on_cpu, folder, what, written, "cpu")
    faults += wrong
    if not verdict.comparison:
        return verdict
    faults += judge(verdict.comparison, limits)
    if verdict.comparison["effect_kept"] is None and written.kept is not None and written.kept < EFFECT_KEPT:
        faults.append(
            f"its weights hold {written.kept:.0%} of the update, and the answers cannot tell whether that matters. What keeps "
            "it: --dtype float32, or --to adapter"
        )
    return verdict


def _answers(
    source: Source, measured: Measured, folder: Path, what: str, written: Written, device: str
) -> tuple[dict[str, Any], list[str]]:
    """What an export answers beside what was measured, and what is wrong with its files; no figures if it cannot be run."""
    try:
        model, tokenizer, faults = _open(source, measured, folder, what, written, device)
    except Exception as error:  # readers of damaged files raise any type
        raise_fatal(error)
        return {}, [f"it cannot be loaded: {type(error).__name__}: {first_line(error)}"]
    faults += check_tokenizer(source.tokenizer, tokenizer, measured.rows)
    ends = end_tokens(model, tokenizer)
    if ends != measured.ends:
        faults.append(f"completions end at the tokens {ends}, and at {measured.ends} in the source")
    if what == "adapter":
        places = (source.weights, folder)
        if len({digest(place / "adapter_model.safetensors") for place in places}) > 1:
            faults.append("adapter_model.safetensors is not what was trained")
    try:
        answers = score(model, measured.prompts, measured.answers.greedy)
        own = prompt_ids(tokenizer, measured.rows)
        answers.greedy = generate(model, own, ends, measured.pad, measured.longest)
        return compare(measured, answers), faults
    except (RuntimeError, ValueError, IndexError) as error:  # shapes that do not fit, ids beyond the vocabulary
        raise_fatal(error)
        return {}, [*faults, f"it cannot be run: {first_line(error)}"]


def _open(
    source: Source, measured: Measured, folder: Path, what: str, written: Written, device: str
) -> tuple[Any, Any, list[str]]:
    """Model and tokenizer as the files have them, and what was wrong with loading them."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig

    if written.gguf is not None:
        from kit.export.gguf import open_gguf

        return open_gguf(source, written.gguf, device, measured.ends)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=source.config.model.trust_remote_code)
    if what == "adapter":
        return put_on(source.load_base(), folder), tokenizer, []
    # Computed as the source is, from the numbers as they are stored.
    how: dict[str, Any] = {"dtype": getattr(torch, measured.computed), "output_loading_info": True}
    model, info = load_plain(source, str(folder), **how)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.to(device)
    words = {
        "missing_keys": "missing",
        "unexpected_keys": "not part of the model",
        "mismatched_keys": "of a wrong shape",
    }
    faults = [f"'{name}' is {word}" for kind, word in words.items() for name in sorted(map(str, info.get(kind) or ()))]
    return model.eval(), tokenizer, faults


def compare(measured: Measured, export: Answers) -> dict[str, Any]:
    """Greedy agreement and difference of log-probabilities (nats) on the source's greedy completions.

    `effect_kept` is the least-squares share of what training did to these log-probabilities that the export shows: 1 for a
    faithful one, 0 for the base model. None where training did too little to tell (`LEAST_EFFECT`).
    """
    source = measured.answers
    tokens, choices = (_flat(rows) for rows in (source.greedy, export.choices))
    trained, shown = (_flat(rows) for rows in (source.logps, export.logps))
    gaps, pairs = np.abs(trained - shown), list(zip(source.greedy, export.greedy, strict=True))
    # One is the beginning of the other: the same words, ended at another place.
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
        before = _flat(measured.base_logps)
        size = float(np.sum((trained - before) ** 2))
        result["training_effect"] = effect = math.sqrt(size / len(before))
        if effect >= LEAST_EFFECT:
            result["effect_kept"] = float(np.sum((shown - before) * (trained - before))) / size
    return result


def _flat(rows: Sequence[Sequence[float]]) -> np.ndarray[Any, Any]:
    return np.array([value for row in rows for value in row], float)


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
    share = comparison["effect_kept"]
    if share is not None and not EFFECT_KEPT <= share <= 2 - EFFECT_KEPT:
        faults.append(f"it shows {share:.0%} of what training did, expected 100 %, at most {1 - EFFECT_KEPT:.0%} off")
    return faults


# --- answers ----------------------------------------------------------------------------------------------------------


BATCH = 8
"""Prompts generated after, or scored, at once."""
PROBES = (
    "The answer is 42.",
    "  two  spaces\n\nand lines\t",
    "naïve — ünïcödé 漢字 🙂",
    "<think>1 + 1</think>",
    "def f(x):\n    return x**2",
)
"""Texts on which two tokenizers are compared besides the prompts."""


@dataclass
class Answers:
    """What a model does with prompts: its own greedy completions, and how it scores given ones.

    `logps` and `choices` have an entry for each token of the scored completions: its log-probability (nats), and the token
    that the model would choose there.
    """

    greedy: list[list[int]] = field(default_factory=list)
    logps: list[list[float]] = field(default_factory=list)
    choices: list[list[int]] = field(default_factory=list)


def generate(model: Any, prompts: list[list[int]], ends: list[int], pad: int, longest: int) -> list[list[int]]:
    """Greedy completions of `longest` tokens at most, up to and with the token that ends them."""
    import torch
    from transformers import GenerationConfig

    how = GenerationConfig(
        do_sample=False, max_new_tokens=longest, eos_token_id=ends or None, pad_token_id=pad, disable_compile=True
    )
    results: list[list[int]] = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=model.device)
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=how)
        for row in output[:, width:].tolist():
            end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
            results.append(row[: end + 1])
    return results


def score(model: Any, prompts: list[list[int]], completions: list[list[int]]) -> Answers:
    """Log-probabilities of given completions, and what the model would have chosen in place of each token."""
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
    """What a written tokenizer does otherwise than the one of training, on `PROBES` and the prompts of `rows`."""
    faults = []
    if (trained.chat_template or None) != (written.chat_template or None):
        faults.append("the chat template is not the one of training")
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        if getattr(trained, name) != getattr(written, name):
            faults.append(
                f"the tokenizer's {name} is {getattr(written, name)}, and {getattr(trained, name)} in training"
            )
    for text in PROBES:
        if trained(text, add_special_tokens=False)["input_ids"] != written(text, add_special_tokens=False)["input_ids"]:
            faults.append(f"the tokenizer splits {text!r} otherwise than in training")
            break
    try:
        differ = sum(a != b for a, b in zip(prompt_ids(trained, rows), prompt_ids(written, rows), strict=True))
    except Exception as error:  # a template may raise whatever it likes
        return [*faults, f"the prompts cannot be rendered: {error}"]
    return faults + ([f"{differ} of {len(rows)} prompts become other token ids than in training"] if differ else [])
