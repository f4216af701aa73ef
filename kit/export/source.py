"""The weights of a trained policy, merged and written.

Merging is done in float32 from the adapter's own files, so that it is a second way to what PEFT computes.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import ModelError, RunError
from kit.models.failures import raise_fatal
from kit.runner.trained import Source, end_ids

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
    return end_ids(model, source.tokenizer)


# --- its weights, merged ----------------------------------------------------------------------------------------------


KEPT_ENOUGH = 0.9
"""Share of the update from which on the base's own precision is good enough for `dtype: auto`."""
PAIR = (".lora_A.weight", ".lora_B.weight")


def load_plain(source: Source, place: str, **keywords: Any) -> Any:
    """The model of a folder or hub id as its files have it, in RAM, in their own precision. Raises `ModelError`."""
    from kit.models.family import auto_class

    how = {"dtype": "auto", "trust_remote_code": source.config.model.trust_remote_code, "use_safetensors": True}
    if place == source.files.source:
        how["revision"] = source.files.revision
    try:
        return auto_class(source.files.config).from_pretrained(place, **{**how, **keywords})
    except (OSError, ValueError, RuntimeError) as error:
        raise_fatal(error)
        raise ModelError(f"{place}: its weights cannot be loaded ({error}).") from error


class Products(Mapping[str, "torch.Tensor"]):
    """`scale` times B·A of each adapted matrix, float32, computed on demand: all of them together outgrow the model."""

    def __init__(self, factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scale: float) -> None:
        self.factors, self.scale = factors, scale

    def __getitem__(self, name: str) -> torch.Tensor:
        down, up = self.factors[name]
        product: torch.Tensor = self.scale * (up.float() @ down.float())
        return product

    def __iter__(self) -> Iterator[str]:
        return iter(self.factors)

    def __len__(self) -> int:
        return len(self.factors)


def updates(adapter: Path) -> Mapping[str, torch.Tensor]:
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
    factors = {
        stem.removeprefix("base_model.model.") + ".weight": (tensors[stem + PAIR[0]], tensors[stem + PAIR[1]])
        for stem in sorted(pairs)
    }
    return Products(factors, scale)


def merged(source: Source, dtype: str) -> tuple[Any, str]:
    """The model with its updates added in float32 and everything cast once, in RAM, and the precision it got.

    `dtype`: float32, float16, bfloat16, or `auto`: the base's own 16-bit precision if that keeps the update, else float16.
    With all weights trained `auto` is the precision that they were saved in.
    """
    import torch

    model = load_plain(source, source.base if source.lora else str(source.weights))
    tensors = dict(model.named_parameters())
    changes: Mapping[str, torch.Tensor] = updates(source.weights) if source.lora else {}
    if unknown := sorted(changes.keys() - tensors.keys()):
        raise ModelError(
            f"{source.base} has no weights '{unknown[0]}', which the adapter changes: it is another model."
        )
    if dtype == "auto":
        dtype = choose_dtype(tensors, changes) if source.lora else str(model.dtype).removeprefix("torch.")
    target = getattr(torch, dtype)
    with torch.no_grad():
        for key, change in changes.items():
            weight = tensors[key]
            weight.data = weight.data.float().add_(change).to(target)
        model.to(target)
    model.config.dtype = target
    return model.eval(), dtype


def in_range(tensors: Mapping[str, Any]) -> bool:
    """Whether all numbers can be float16."""
    return all(float(tensor.detach().abs().max()) < 3e4 for tensor in tensors.values() if tensor.numel())


def choose_dtype(tensors: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
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
    return projection((base + change).to(dtype).float() - base, change)


def projection(vector: torch.Tensor, direction: torch.Tensor) -> float:
    """Share of `wanted` that `seen` contains: their inner product over the squared norm of `wanted`; 1 if that is 0."""
    size = float((direction.double() ** 2).sum())
    return float((vector.double() * direction.double()).sum()) / size if size else 1.0


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


def quantize(source: Source, merged: Path, place: Path, dtype: str) -> None:
    """Reads a merged 16-bit folder with its linear layers rounded to NF4, and writes that to `place`."""
    import torch
    from transformers import GenerationConfig

    from kit.models.backend import quantization_config
    from kit.models.loading import place_of

    precision, device = getattr(torch, dtype), source.files.backend.device
    how = {"dtype": precision, "quantization_config": quantization_config(precision, device)}
    how["device_map"] = place_of(device, quantized=True)
    model = load_plain(source, str(merged), **how)
    model.generation_config = GenerationConfig.from_pretrained(merged)
    model.save_pretrained(place)
    save_tokenizer(source, source.tokenizer, place)
