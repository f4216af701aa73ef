"""Merging in float32, and every tensor of an export against base + update, computed apart from PEFT."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import KitError, ModelError
from kit.export.formats import ROUGHNESS, precision

if TYPE_CHECKING:
    import torch

    from kit.export.source import Source

KEPT = 0.5
"""Least share of an update that must be found again in a stored matrix, before rounding counts as having lost it."""
KEPT_ENOUGH = 0.9
"""Share of the update from which on the base's own precision is good enough for `dtype: auto`."""
PAIR = (".lora_A.weight", ".lora_B.weight")
CERTAIN = 5.0
"""Standard errors that a lost update must lie outside of, where the rounding is as large as the update."""


def load_plain(source: Source, place: str, **keywords: Any) -> Any:
    """The model of a folder or hub id as its files have it, in RAM, in their own precision. Raises `ModelError`."""
    from kit.models.family import auto_class

    how = {"dtype": "auto", "trust_remote_code": source.config.model.trust_remote_code, "use_safetensors": True}
    if place == source.files.source:
        how["revision"] = source.files.revision
    try:
        return auto_class(source.files.config).from_pretrained(place, **{**how, **keywords})
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{place}: its weights cannot be loaded ({error}).") from error


def updates(adapter: Path) -> dict[str, torch.Tensor]:
    """The update of every adapted matrix by the matrix's name, float32: alpha / r (or / sqrt(r)) times B·A.

    Reads the adapter's files alone, so that it is a second way to what PEFT computes. Raises `ModelError` for adapters of
    another kind than the kit trains.
    """
    from safetensors.torch import load_file

    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    unusual = [
        key
        for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
        if config.get(key)
    ]
    if unusual or config.get("bias", "none") != "none" or config.get("peft_type") != "LORA":
        raise ModelError(
            f"{adapter}: an adapter with {', '.join(unusual) or 'biases'}, which cannot be checked and is not exported."
        )
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = load_file(adapter / "adapter_model.safetensors")
    pairs = {name.removesuffix(end) for name in tensors for end in PAIR if name.endswith(end)}
    odd = sorted(tensors.keys() ^ {stem + end for stem in pairs for end in PAIR})
    if odd:
        raise ModelError(
            f"{adapter}: '{odd[0]}' is {'there' if odd[0] in tensors else 'missing'}, and an adapter of the kit's has a pair "
            f"({' and '.join(end[1:] for end in PAIR)}) for each matrix and nothing else. It is not exported, as a part of what "
            "was trained would be left out."
        )
    return {
        stem.removeprefix("base_model.model.") + ".weight": scale
        * (tensors[stem + PAIR[1]].float() @ tensors[stem + PAIR[0]].float())
        for stem in sorted(pairs)
    }


class Difference(Mapping[str, "torch.Tensor"]):
    """What training of all weights did to each, float32, computed when it is asked for."""

    def __init__(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        self.before, self.after = before, after

    def __getitem__(self, name: str) -> torch.Tensor:
        change: torch.Tensor = self.after[name].detach().float() - self.before[name].detach().float()
        return change

    def __iter__(self) -> Iterator[str]:
        return iter(self.after)

    def __len__(self) -> int:
        return len(self.after)


def starting_weights(source: Source, trained: Mapping[str, Any]) -> dict[str, Any] | None:
    """What training of all weights began with, by name; None where it cannot be had, which is noted."""
    from kit.models.embedded import source_of

    try:
        model = load_plain(source, source_of(source.start), revision=source.start_revision)
    except KitError as error:
        source.note_no_start(error)
        return None
    found = dict(model.named_parameters())
    if {name: each.shape for name, each in found.items()} != {name: each.shape for name, each in trained.items()}:
        source.note_no_start(ModelError("its weights have other names or shapes than the trained ones"))
        return None
    return found


def merged(source: Source, dtype: str) -> tuple[Any, str]:
    """The model with its updates added in float32 and everything cast once, in RAM, and the precision it got.

    `dtype`: float32, float16, bfloat16, or `auto`: the base's own 16-bit precision if that keeps the update, else float16;
    with all weights trained, where there is no adapter to take instead, float32 if neither does.
    """
    import torch

    model = load_plain(source, source.base if source.lora else str(source.weights))
    tensors = dict(model.named_parameters())
    changes = updates(source.weights) if source.lora else {}
    if unknown := sorted(changes.keys() - tensors.keys()):
        raise ModelError(
            f"{source.base} has no weights '{unknown[0]}', which the adapter changes: it is another model."
        )
    if dtype != "auto":
        name = dtype
    elif source.lora:
        name = choose_dtype(model, tensors, changes)
    else:
        name = _choose_for_all(source, tensors)
    target = getattr(torch, name)
    with torch.no_grad():
        for key in list(changes):
            weight = tensors[key]
            weight.data = (weight.data.float() + changes.pop(key)).to(target)
        model.to(target)
    model.config.dtype = target
    return model.eval(), name


def _choose_for_all(source: Source, trained: Mapping[str, Any]) -> str:
    """The precision of a run that trained all weights."""
    import torch

    before = starting_weights(source, trained)
    if before is None:  # nothing tells the update from the rest: as close to the trained weights as float16 can be
        fits = in_range(trained) and all(
            float((each.detach().float() - each.detach().half().float()).norm())
            <= ROUGHNESS["float16"] * float(each.norm())
            for each in trained.values()
        )
        return "float16" if fits else "float32"
    changes = Difference(before, trained)
    name = choose_dtype(None, before, changes)
    halves = [share_kept(before[key].detach().float(), change, getattr(torch, name)) for key, change in changes.items()]
    if min(halves) >= KEPT_ENOUGH and (name == "bfloat16" or in_range(trained)):
        return name
    source.note("stored as float32: 16 bits would round away a part of what training did to the weights")
    return "float32"


def in_range(tensors: Mapping[str, Any]) -> bool:
    """Whether all numbers can be float16."""
    return all(float(tensor.detach().abs().max()) < 3e4 for tensor in tensors.values() if tensor.numel())


def choose_dtype(model: Any, tensors: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """float16 where bfloat16 would round the update away and the weights are within its range, else bfloat16."""
    import torch

    own = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if own == {"float16"}:
        return "float16"
    halves = [share_kept(tensors[key].data.float(), change, torch.bfloat16) for key, change in changes.items()]
    lost = bool(halves) and min(halves) < KEPT_ENOUGH
    return "float16" if lost and in_range(tensors) else "bfloat16"


def share_kept(base: torch.Tensor, change: torch.Tensor, dtype: torch.dtype) -> float:
    """How much of an update is left after the cast: 1 all of it, 0 nothing (all of it below half a step)."""
    return _projection((base + change).to(dtype).float() - base, change)


def _projection(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    size = float((wanted.double() ** 2).sum())
    return float((seen.double() * wanted.double()).sum()) / size if size else 1.0


def write_merged(source: Source, model: Any, tokenizer: Any, ends: list[int], place: Path) -> None:
    """Model, tokenizer and generation settings in HF layout."""
    model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    settings = model.generation_config
    if not settings.do_sample:  # settings that sampling alone reads are refused when they are saved
        for name in ("temperature", "top_p", "top_k", "min_p", "typical_p"):
            setattr(settings, name, None)
    model.save_pretrained(place)
    save_tokenizer(source, tokenizer, place)


def save_tokenizer(source: Source, tokenizer: Any, place: Path) -> None:
    """The tokenizer as the run used it, without the padding of its last batch; the processor where there is one."""
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.no_truncation()
    tokenizer.save_pretrained(place)
    if source.files.processor is not None:
        source.files.processor.save_pretrained(place)


@dataclass
class WeightCheck:
    """What was found in the tensors of an export. `faults` is empty for a good one."""

    tensors: int = 0
    updated: int = 0
    largest_error: float = 0.0
    kept: float | None = None
    faults: list[str] = field(default_factory=list)


def stored(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and float32 values of a model's parameters, 4-bit ones multiplied out."""
    for name, weight in model.named_parameters():
        state = getattr(weight, "quant_state", None)
        if state is not None:
            import bitsandbytes.functional as bnb

            yield name, bnb.dequantize_4bit(weight.data, state).float().cpu()
        else:
            yield name, weight.detach().float().cpu()


def check_weights(source: Source, export: Any, kind: str) -> WeightCheck:
    """Every tensor of a loaded export against base + update, to within the rounding of `kind`.

    For a trained matrix also how much of its update is in it: that tells a forgotten layer, even where the update is smaller
    than the rounding, as rounding errors do not point the way of the update. With all weights trained the update is what they
    differ by from what training began with.
    """
    import torch

    found = WeightCheck()
    base = dict(load_plain(source, source.base if source.lora else str(source.weights)).named_parameters())
    if source.lora:
        changes: Mapping[str, torch.Tensor] = updates(source.weights)
    else:
        trained, start = base, starting_weights(source, base)
        base, changes = (trained, {}) if start is None else (start, Difference(start, trained))
    limit, seen = ROUGHNESS[precision(kind)], set()
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
            kept = _projection(value - before, change)
            doubt = float((value - wanted).double().norm()) / math.sqrt(size * value.numel())
            dots, sizes = dots + kept * size, sizes + size
            if kept < KEPT and 1.0 - kept > CERTAIN * doubt:
                found.faults.append(f"'{name}' holds {max(kept, 0):.0%} of its update: forgotten, or lost in rounding")
    found.kept = dots / sizes if sizes else None
    found.faults += [f"'{name}' is missing" for name in sorted(base.keys() - seen)]
    found.faults += [f"the update of '{name}' belongs to no weights" for name in sorted(changes.keys() - seen)]
    return found
