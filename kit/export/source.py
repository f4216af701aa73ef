"""The weights of a trained policy, merged by PEFT's update of each matrix, and written."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import ModelError, RunError
from kit.evaluation.heldout import end_tokens
from kit.models.failures import converting_weights, raise_fatal
from kit.runner.trained import Source

if TYPE_CHECKING:
    import torch


def keep_weights(source: Source, place: Path) -> None:
    """Hard-links the trained files into a folder: a run under way may remove old checkpoints during the export."""
    place.mkdir()
    for path in source.weights.iterdir():
        if path.suffix not in (".pt", ".pth", ".bin") and path.is_file():
            try:
                os.link(path, place / path.name)
            except FileNotFoundError:
                raise RunError(f"{source.weights} was removed by the run meanwhile. Try again.") from None
            except OSError:  # another file system, or one without links
                shutil.copyfile(path, place / path.name)
    source.weights = place
    if not source.lora:
        source.config.model.name = str(place)
        source.files = replace(source.files, source=str(place))


def choose_rows(rows: Sequence[dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """`count` rows at most, the same ones for the same seed, in the order of the data."""
    chosen = random.Random(seed).sample(range(len(rows)), min(count, len(rows)))
    return [rows[index] for index in sorted(chosen)]


def prompt_ids(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The ids that a model is given for each row: those of its rendered prompt."""
    from kit.generation.prompts import is_plain, render

    plain = is_plain([row["prompt"] for row in rows])
    texts = [render(tokenizer, row["prompt"]) for row in rows]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=plain)["input_ids"]
    return ids


def declared_ends(source: Source) -> list[int]:
    """Every token that ends a completion, from the model's files alone: no weights are read, no GPU is used."""
    from kit.models.loading import end_where_turns_end, family_of

    model = load_plain(source, source.base if source.lora else str(source.weights))
    family = family_of(source.files.config, source.tokenizer, chat=source.files.chat)
    if family is not None:
        end_where_turns_end(model, source.files, family)
    return end_tokens(model, source.tokenizer)


# --- its weights, merged ----------------------------------------------------------------------------------------------


KEPT_ENOUGH = 0.9
"""Share of the update from which on the base's own precision is good enough for `dtype: auto`."""


def load_plain(source: Source, place: str, **keywords: Any) -> Any:
    """The model of a folder or hub id as its files have it, in RAM, in their own precision. Raises `ModelError`."""
    from kit.models.family import auto_class

    how = {"dtype": "auto", "trust_remote_code": source.config.model.trust_remote_code, "use_safetensors": True}
    if place == source.files.source:
        how["revision"] = source.files.revision
    try:
        with converting_weights():
            return auto_class(source.files.config).from_pretrained(place, **{**how, **keywords})
    except (OSError, ValueError, RuntimeError) as error:
        raise_fatal(error)
        raise ModelError(f"{place}: its weights cannot be loaded ({error}).") from error


def merged(source: Source, dtype: str) -> tuple[Any, str, float | None]:
    """The model with PEFT's update added to each matrix in float32 and everything cast once, in RAM.

    `dtype`: float32, float16, bfloat16, or `auto`: the base's own 16-bit precision if that keeps the update, else float16.
    With all weights trained `auto` is the precision that they were saved in. Returns the model, its precision, and the share of
    the update that its numbers hold (None without an adapter). Raises `ModelError` for an adapter of another model.
    """
    import torch
    from peft.tuners.lora import LoraLayer

    from kit.models.start import TRAINED, put_on

    model = load_plain(source, source.base if source.lora else str(source.weights))
    kept, layers = None, []
    if source.lora:
        policy = put_on(model, source.weights)
        layers = [(m.get_base_layer().weight, m) for m in policy.modules() if isinstance(m, LoraLayer)]
    with torch.no_grad():
        if dtype == "auto":
            changes = ((weight, layer.get_delta_weight(TRAINED)) for weight, layer in layers)
            dtype = choose_dtype(model, changes) if source.lora else str(model.dtype).removeprefix("torch.")
        target = getattr(torch, dtype)
        held = total = 0.0
        for weight, layer in layers:  # one matrix at a time: all updates together outgrow the model
            before, change = weight.data.float(), layer.get_delta_weight(TRAINED).float()
            weight.data = (before + change).to(target)
            total += float((change.double() ** 2).sum())
            held += float(((weight.data.float() - before).double() * change.double()).sum())
        if layers:
            model, kept = policy.unload(), held / total if total else 1.0
        model.to(target)
    model.config.dtype = target
    return model.eval(), dtype, kept


def choose_dtype(model: Any, changes: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """float16 where bfloat16 would round the update away and the weights are within its range, else bfloat16.

    changes: matrices of the model with what is added to each.
    """
    import torch

    weights = list(model.parameters())
    if {weight.dtype for weight in weights} == {torch.float16}:
        return "float16"
    shares = [share_kept(weight.float(), change.float(), torch.bfloat16) for weight, change in changes]
    in_range = all(float(weight.detach().abs().max()) < 3e4 for weight in weights if weight.numel())
    return "float16" if min(shares, default=1.0) < KEPT_ENOUGH and in_range else "bfloat16"


def share_kept(base: torch.Tensor, change: torch.Tensor, dtype: torch.dtype) -> float:
    """How much of an update is left after the cast: 1 all of it, 0 nothing (all of it below half a step).

    The inner product of what the cast leaves with the update, over the squared norm of the update.
    """
    left, size = (base + change).to(dtype).float() - base, float((change.double() ** 2).sum())
    return float((left.double() * change.double()).sum()) / size if size else 1.0


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
