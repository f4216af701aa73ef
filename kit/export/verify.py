"""Is an export what was trained? Its files, its tokenizer and ends, every tensor, and its answers to the same prompts."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import ModelError
from kit.export.request import ROUGHNESS, Limits, limits_of, precision
from kit.export.source import load_plain, prompt_ids, updates
from kit.export.target import digest
from kit.models.backend import TRANSFORMERS, Backend
from kit.models.failures import first_line, is_out_of_memory, raise_fatal, release
from kit.models.start import put_on, untrained
from kit.runner.trained import Source, end_ids

if TYPE_CHECKING:
    import torch

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
    answers: Answers
    base_logps: list[list[float]] | None = None


def measure(source: Source, rows: list[dict[str, Any]], longest: int) -> Measured:
    """Load the policy as it was trained and let it answer. Raises `ModelError` where memory is too small for it."""
    try:
        return _measure(source, rows, longest)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"There is no room for the model that was trained ({first_line(error)}), so the export cannot be verified. Free the "
            "GPU, verify on the CPU (CUDA_VISIBLE_DEVICES= before the command), or leave the verification out: --no-verify."
        ) from error


def _measure(source: Source, rows: list[dict[str, Any]], longest: int) -> Measured:
    model = source.load().eval()
    tokenizer = source.tokenizer
    prompts, ends = prompt_ids(tokenizer, rows), end_ids(model, tokenizer)
    source.ends = ends
    pad = tokenizer.pad_token_id
    greedy = generate(model, prompts, ends, pad, longest)
    answers = score(model, prompts, greedy)
    answers.greedy = greedy
    computed = next(str(weight.dtype) for weight in model.parameters() if weight.is_floating_point())
    before = None
    if source.lora:
        with untrained(model):
            before = score(model, prompts, greedy).logps
    return Measured(rows, prompts, ends, pad, longest, computed.removeprefix("torch."), answers, before)


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
    """Loads an export from its files and compares. `kind` is the precision that its numbers are stored in.

    An export is judged by its answers. Its tensors are base + update as `kind` rounds them; how much of the update that leaves
    is a fault only where the answers cannot tell. What does not fit the GPU is verified on the CPU.
    """
    release()  # the model that was measured
    try:
        return _verify(source, measured, folder, what, kind, gguf)
    except Exception as error:
        if source.files.backend.device == "cpu" or not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        source.note(f"verified on the CPU, as the GPU had no room for it ({first_line(error)})")
    release()
    # In bfloat16 where it was measured in that, else float32: the CPU trains in no float16.
    dtype = "bfloat16" if measured.computed == "bfloat16" else "float32"
    model = source.config.model.model_copy(update={"dtype": dtype})
    files = replace(source.files, backend=Backend(TRANSFORMERS, "cpu", "the GPU has no room"))
    on_cpu = replace(source, files=files, config=source.config.model_copy(update={"model": model}))
    return _verify(on_cpu, measured, folder, what, kind, gguf)


def _verify(source: Source, measured: Measured, folder: Path, what: str, kind: str, gguf: Path | None) -> Verdict:
    limits = limits_of(kind, measured.computed, base_in_4bit=source.config.model.load_in_4bit and what != "adapter")
    verdict = Verdict(limits=asdict(limits))
    faults = verdict.faults
    try:
        model, tokenizer, loading = _open(source, measured, folder, what, gguf)
    except Exception as error:  # readers of damaged files raise any type
        raise_fatal(error)
        faults.append(f"it cannot be loaded: {type(error).__name__}: {first_line(error)}")
        return verdict
    faults += loading
    faults += check_tokenizer(source.tokenizer, tokenizer, PROBES, measured.rows)
    faults += check_ends(measured.ends, model, tokenizer)
    if what == "adapter":
        if len({digest(place / "adapter_model.safetensors") for place in (source.weights, folder)}) > 1:
            faults.append("adapter_model.safetensors is not what was trained")
    else:
        verdict.weights, wrong = check_weights(source, model, kind)
        faults += wrong[:8]
    try:
        answers = answers_of(model, tokenizer, measured)
        verdict.comparison = compare(measured, answers)
    except (RuntimeError, ValueError, IndexError) as error:  # shapes that do not fit, ids beyond the vocabulary
        raise_fatal(error)
        faults.append(f"it cannot be run: {first_line(error)}")
        return verdict
    faults += judge(verdict.comparison, limits)
    update = verdict.weights["update_kept"] if verdict.weights else None
    if verdict.comparison["effect_kept"] is None and update is not None and update < EFFECT_KEPT:
        faults.append(
            f"its weights hold {update:.0%} of the update, and the answers cannot tell whether that matters. What keeps it: "
            "--dtype float32, or --to adapter"
        )
    return verdict


def _open(source: Source, measured: Measured, folder: Path, what: str, gguf: Path | None) -> tuple[Any, Any, list[str]]:
    """Model and tokenizer as the files have them, and what was wrong with loading them."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig

    from kit.models.loading import keep_differentiable, place_of

    device = source.files.backend.device
    if gguf is not None:
        from kit.export.gguf import open_gguf

        return open_gguf(source, gguf, device, measured.ends)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=source.config.model.trust_remote_code)
    if what == "adapter":
        model = put_on(source.load_base(), folder)
        return model, tokenizer, []
    # Computed as the source is, from the numbers as they are stored.
    how: dict[str, Any] = {"dtype": getattr(torch, measured.computed), "output_loading_info": True}
    if what == "merged-4bit":
        how["device_map"] = place_of(device, quantized=True)
    model, info = load_plain(source, str(folder), **how)
    if what == "merged-4bit" and device == "cpu":
        keep_differentiable(model)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    if device == "cuda" and what != "merged-4bit":
        model.to(device)
    return model.eval(), tokenizer, check_loading(info)


def answers_of(model: Any, tokenizer: Any, measured: Measured) -> Answers:
    """What an export says by itself, from its own ids to its own ends, and how it scores what the source said."""
    prompts = prompt_ids(tokenizer, measured.rows)
    answers = score(model, measured.prompts, measured.answers.greedy)
    answers.greedy = generate(model, prompts, end_ids(model, tokenizer), measured.pad, measured.longest)
    return answers


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
    # One is the beginning of the other: the same words, ended at another place.
    wrong_ends = sum(
        len(row) != len(other) and all(a == b for a, b in zip(row, other, strict=False)) for row, other in pairs
    )
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


# --- files and tokenizer ----------------------------------------------------------------------------------------------


def check_loading(info: dict[str, Any]) -> list[str]:
    """Faults that transformers noticed while it loaded the weights."""
    words = {
        "missing_keys": "missing",
        "unexpected_keys": "not part of the model",
        "mismatched_keys": "of a wrong shape",
    }
    return [f"'{name}' is {word}" for kind, word in words.items() for name in sorted(map(str, info.get(kind) or ()))]


def check_tokenizer(trained: Any, written: Any, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """The written tokenizer gives the same ids for texts and prompts, the same text back, and has the same template."""

    faults = []
    if len(trained) != len(written):
        faults.append(f"the tokenizer has {len(written)} tokens, and {len(trained)} in training")
    if (trained.chat_template or None) != (written.chat_template or None):
        faults.append("the chat template is not the one of training")
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        if getattr(trained, name) != getattr(written, name):
            faults.append(
                f"the tokenizer's {name} is {getattr(written, name)}, and {getattr(trained, name)} in training"
            )
    for text in texts:
        ids = trained(text, add_special_tokens=False)["input_ids"]
        if ids != written(text, add_special_tokens=False)["input_ids"]:
            faults.append(f"the tokenizer splits {text!r} otherwise than in training")
            break
        if trained.decode(ids) != written.decode(ids):
            faults.append(f"the tokenizer puts {text!r} together otherwise than in training")
            break
    try:
        differ = sum(a != b for a, b in zip(prompt_ids(trained, rows), prompt_ids(written, rows), strict=True))
    except Exception as error:  # a template may raise whatever it likes
        return [*faults, f"the prompts cannot be rendered: {error}"]
    return faults + ([f"{differ} of {len(rows)} prompts become other token ids than in training"] if differ else [])


def check_ends(expected: list[int], model: Any, tokenizer: Any) -> list[str]:
    """The export's own settings end a completion at the source's end tokens and no others, and are sound."""

    ends = end_ids(model, tokenizer)
    faults = [] if ends == expected else [f"completions end at the tokens {ends}, and at {expected} in the source"]
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        faults.append(f"generation_config.json is not sound: {first_line(error)}")
    return faults


# --- tensors ----------------------------------------------------------------------------------------------------------


def stored(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and float32 values of a model's parameters; 4-bit ones are dequantised."""
    for name, weight in model.named_parameters():
        state = getattr(weight, "quant_state", None)
        if state is not None:
            import bitsandbytes.functional as bnb

            yield name, bnb.dequantize_4bit(weight.data, state).float().cpu()
        else:
            yield name, weight.detach().float().cpu()


def check_weights(source: Source, export: Any, kind: str) -> tuple[dict[str, Any], list[str]]:
    """Compares every tensor of a loaded export with base + update, to within the rounding of `kind`.

    Returns the figures and the faults. `update_kept` is the share of all updates that the tensors hold (least squares):
    rounding errors do not point the way of the update, so it tells also where the update is smaller than the rounding.
    """

    # Files in safetensors are mapped, not read, so that the base takes no memory of its own beside the export.
    base = dict(load_plain(source, source.base if source.lora else str(source.weights)).named_parameters())
    changes: Mapping[str, torch.Tensor] = updates(source.weights) if source.lora else {}
    limit, names, faults = ROUGHNESS[precision(kind)], set(), []
    largest = dots = sizes = 0.0
    for name, value in stored(export):
        names.add(name)
        if name not in base:
            faults.append(f"'{name}' is in the export and not in the base")
            continue
        before, change = base[name].detach().float(), changes.get(name)
        expected = before if change is None else before + change
        if value.shape != expected.shape:
            faults.append(f"'{name}' is of shape {tuple(value.shape)}, expected {tuple(expected.shape)}")
            continue
        error = float((value - expected).norm() / expected.norm().clamp_min(1e-30)) if expected.numel() else 0.0
        largest = max(largest, error)
        if not error <= limit:
            faults.append(f"'{name}' is off by {error:.2g} of its size, more than {kind} explains ({limit:g})")
        if change is not None:
            dots += float(((value - before).double() * change.double()).sum())
            sizes += float((change.double() ** 2).sum())
    faults += [f"'{name}' is missing" for name in sorted(base.keys() - names)]
    faults += [f"the update of '{name}' belongs to no weights" for name in sorted(changes.keys() - names)]
    figures = {"tensors": len(names), "updated": len(changes), "largest_error": largest,
               "update_kept": dots / sizes if sizes else None}  # fmt: skip
    return figures, faults
