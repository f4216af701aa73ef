"""Is an export what was trained? Its files, its tokenizer and ends, every tensor, and its answers to the same prompts."""

from __future__ import annotations

import json
import math
import struct
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import ModelError
from kit.export.request import ROUGHNESS, Limits, limits_of, precision
from kit.export.source import (
    Source,
    end_ids,
    load_plain,
    projection,
    prompt_ids,
    updates,
)
from kit.export.target import digest
from kit.models.backend import TRANSFORMERS, Backend
from kit.models.failures import first_line, is_out_of_memory, raise_fatal, release
from kit.models.start import put_on, untrained

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
    tied: bool
    """Whether input and output embeddings are one matrix."""
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
    tied, before = is_tied(model), None
    if source.lora:
        with untrained(model):
            before = score(model, prompts, greedy).logps
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
    """Loads an export from its files and compares. `kind` is the precision that its numbers are stored in.

    An export is judged by its answers. Its tensors have to be base + update as `kind` rounds them; how much of the update that
    leaves is a fault only where the answers cannot tell. What does not fit the GPU is verified on the CPU.
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
    return _verify(_on_the_cpu(source, measured), measured, folder, what, kind, gguf)


def _on_the_cpu(source: Source, measured: Measured) -> Source:
    """The source for the CPU, in bfloat16 where it was measured in that, else float32: the CPU trains in no float16."""
    files = replace(source.files, backend=Backend(TRANSFORMERS, "cpu", "the GPU has no room"))
    dtype = "bfloat16" if measured.computed == "bfloat16" else "float32"
    model = source.config.model.model_copy(update={"dtype": dtype})
    return replace(source, files=files, config=source.config.model_copy(update={"model": model}))


def _verify(source: Source, measured: Measured, folder: Path, what: str, kind: str, gguf: Path | None) -> Verdict:
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
        raise_fatal(error)
        faults.append(f"it cannot be loaded: {type(error).__name__}: {first_line(error)}")
        return verdict
    faults += loading
    faults += check_tokenizer(source.tokenizer, tokenizer, PROBES, measured.rows)
    faults += check_ends(measured.ends, model, tokenizer)
    faults += check_tied(measured.tied, model)
    found = check_adapter(source, folder) if what == "adapter" else check_weights(source, model, kind)
    faults += found.faults[:8]
    verdict.weights = {name: value for name, value in vars(found).items() if name not in ("faults", "rounded")}
    try:
        answers = answers_of(model, tokenizer, measured)
        verdict.comparison = compare(measured, answers)
    except (RuntimeError, ValueError, IndexError) as error:  # shapes that do not fit, ids beyond the vocabulary
        raise_fatal(error)
        faults.append(f"it cannot be run: {first_line(error)}")
        return verdict
    behaviour = judge(verdict.comparison, limits)
    faults += behaviour
    if found.rounded:
        lost = f"{kind} rounds away more than half of the update of {len(found.rounded)} matrices ({found.rounded[0]})"
        if behaviour or verdict.comparison["effect_kept"] is None:
            faults.append(f"{lost}, lost in rounding. What keeps it: --dtype float32, or --to adapter")
        else:
            source.note(f"{lost}; its answers are those of the trained model, which is what counts")
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
    found = score(model, measured.prompts, measured.answers.greedy)
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


def check_safetensors(folder: Path) -> list[str]:
    """Faults of the weight files: cut short, damaged, not those that the index names."""
    faults, names = [], set()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return ["there are no weights (*.safetensors)"]
    for path in files:
        fault, found = _read_header(path)
        names |= found
        faults += [f"{path.name} {fault}"] if fault else []
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        faults += [f"{name} is missing" for name in sorted(set(placed.values()) - {path.name for path in files})]
        faults += [f"'{key}' of the index is in no file" for key in sorted(placed.keys() - names)]
    return faults


def _read_header(path: Path) -> tuple[str | None, set[str]]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length < size else None
    except (struct.error, ValueError):
        header = None
    if not isinstance(header, dict):
        return "is damaged: its header cannot be read", set()
    header.pop("__metadata__", None)
    expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != expected:
        return f"has {size} bytes in place of {expected}: it was cut short", set(header)
    return None, set(header)


def check_loading(info: dict[str, Any]) -> list[str]:
    """Faults that transformers noticed while it loaded the weights."""
    words = {
        "missing_keys": "missing",
        "unexpected_keys": "not part of the model",
        "mismatched_keys": "of a wrong shape",
    }
    return [f"'{name}' is {word}" for kind, word in words.items() for name in sorted(map(str, info.get(kind) or ()))]


def check_tied(wanted: bool, export: Any) -> list[str]:
    """Input and output embeddings are one in the export if they are one in the source (`wanted`), and two if they are two."""
    tied = is_tied(export)
    if tied == wanted:
        return []
    return [
        f"input and output embeddings are {'one' if tied else 'two'} matrices, and {'one' if wanted else 'two'} in the source"
    ]


def is_tied(model: Any) -> bool:
    """Whether input and output embeddings are one matrix."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    return first is not None and last is not None and first.weight.data_ptr() == last.weight.data_ptr()


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


def check_ends(wanted: list[int], model: Any, tokenizer: Any) -> list[str]:
    """The export's own settings end a completion at the source's end tokens and no others, and are sound."""

    found = end_ids(model, tokenizer)
    faults = [] if found == wanted else [f"completions end at the tokens {found}, and at {wanted} in the source"]
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        faults.append(f"generation_config.json is not sound: {first_line(error)}")
    return faults


# --- tensors ----------------------------------------------------------------------------------------------------------


KEPT = 0.5
"""Least share of an update that must be found again in a stored matrix, before rounding counts as having lost it."""
CERTAIN = 5.0
"""Standard errors that a lost update must lie outside of, where the rounding is as large as the update."""


@dataclass
class WeightCheck:
    """What was found in the tensors of an export. `faults` is empty for a good one."""

    tensors: int = 0
    updated: int = 0
    largest_error: float = 0.0
    update_kept: float | None = None
    faults: list[str] = field(default_factory=list)
    rounded: list[str] = field(default_factory=list)
    """Matrices that hold their update as well as this precision can, which is less than half of it."""


def stored(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and float32 values of a model's parameters, 4-bit ones multiplied out."""
    for name, weight in model.named_parameters():
        state = getattr(weight, "quant_state", None)
        if state is not None:
            import bitsandbytes.functional as bnb

            yield name, bnb.dequantize_4bit(weight.data, state).float().cpu()
        else:
            yield name, weight.detach().float().cpu()


def check_adapter(source: Source, folder: Path) -> WeightCheck:
    """The written adapter is the one that was trained, to the bit."""
    from safetensors import safe_open

    trained, written = (place / "adapter_model.safetensors" for place in (source.weights, folder))
    with safe_open(written, framework="pt") as tensors:
        count = len(tensors.keys())
    same = digest(trained) == digest(written)
    return WeightCheck(count, count // 2, faults=[] if same else [f"{written.name} is not what was trained"])


def check_weights(source: Source, export: Any, kind: str) -> WeightCheck:
    """Every tensor of a loaded export against base + update, to within the rounding of `kind`.

    For a trained matrix also how much of its update is in it: that tells a forgotten layer, even where the update is smaller
    than the rounding, as rounding errors do not point the way of the update.
    """
    import torch

    found = WeightCheck()
    # Files in safetensors are mapped, not read, so that the base takes no memory of its own beside the export.
    base = dict(load_plain(source, source.base if source.lora else str(source.weights)).named_parameters())
    changes: Mapping[str, torch.Tensor] = updates(source.weights) if source.lora else {}
    limit, seen = ROUGHNESS[precision(kind)], set()
    stored_as = getattr(torch, precision(kind), None)  # None: a quantised form
    dots = sizes = 0.0
    for name, value in stored(export):
        if name not in base:
            found.faults.append(f"'{name}' is in the export and not in the base")
            continue
        seen.add(name)
        before = base[name].detach().float()
        change = changes.get(name)
        wanted = before if change is None else before + change
        found.tensors += 1
        if value.shape != wanted.shape:
            found.faults.append(f"'{name}' is of shape {tuple(value.shape)}, expected {tuple(wanted.shape)}")
            continue
        if not torch.isfinite(value).all():
            found.faults.append(f"'{name}' holds numbers that are not finite")
            continue
        error = float((value - wanted).norm() / wanted.norm().clamp_min(1e-30)) if wanted.numel() else 0.0
        if float(wanted.norm()) == 0.0:
            error = float(value.norm())
        found.largest_error = max(found.largest_error, error)
        if error > limit:
            found.faults.append(f"'{name}' is off by {error:.2g} of its size, more than {kind} explains ({limit:g})")
        if change is not None:
            size = float((change.double() ** 2).sum())
            if size == 0.0:
                continue
            found.updated += 1
            kept = projection(value - before, change)
            doubt = float((value - wanted).double().norm()) / math.sqrt(size * value.numel())
            dots, sizes = dots + kept * size, sizes + size
            possible = projection(wanted.to(stored_as).float() - before, change) if stored_as is not None else 1.0
            if kept < KEPT and possible < KEPT and kept > KEPT * possible - 1e-6:
                found.rounded.append(name)
            elif kept < KEPT and 1.0 - kept > CERTAIN * doubt:
                found.faults.append(f"'{name}' holds {max(kept, 0):.0%} of its update: forgotten, or lost in rounding")
    found.update_kept = dots / sizes if sizes else None
    found.faults += [f"'{name}' is missing" for name in sorted(base.keys() - seen)]
    found.faults += [f"the update of '{name}' belongs to no weights" for name in sorted(changes.keys() - seen)]
    return found
