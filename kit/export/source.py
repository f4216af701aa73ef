"""Merge PEFT's update into the weights of a trained policy and write them."""

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
from kit.models.backend import overflows_in_float16
from kit.models.failures import converting_weights, raise_fatal
from kit.models.loading import end_where_turns_end, family_of, keep_only_tokens
from kit.models.memory import free_memory
from kit.runner.trained import Source

if TYPE_CHECKING:
    import torch


def link_weights(source: Source, folder: Path) -> None:
    """Hard-link the trained files into a folder, because a live run may remove old checkpoints during the export."""
    folder.mkdir()
    for path in source.weights.iterdir():
        if path.suffix not in (".pt", ".pth", ".bin") and path.is_file():
            try:
                os.link(path, folder / path.name)
            except FileNotFoundError:
                raise RunError(f"{source.weights} was removed by the run in the meantime. Try again.") from None
            except OSError:  # another file system, or one without links
                shutil.copyfile(path, folder / path.name)
    source.weights = folder
    if not source.lora:
        source.config.model.name = str(folder)
        source.files = replace(source.files, source=str(folder))


def fits_in_float32(source: Source) -> bool:
    """Whether the weights fit into main memory in float32, which most CPUs compute several times faster than 16 bits."""
    return 4 * source.files.parameters < free_memory("cpu")


def choose_rows(rows: Sequence[dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """Choose at most `count` rows by seed, in the order of the data."""
    chosen = random.Random(seed).sample(range(len(rows)), min(count, len(rows)))
    return [rows[index] for index in sorted(chosen)]


def prompt_ids(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The token ids of each row's rendered prompt."""
    from kit.generation.prompts import is_plain, render

    plain = is_plain([row["prompt"] for row in rows])
    texts = [render(tokenizer, row["prompt"]) for row in rows]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=plain)["input_ids"]
    return ids


def declared_ends(source: Source) -> list[int]:
    """Every token that ends a completion, read from the model's files without a GPU."""
    model = load_plain(source, source.base if source.lora else str(source.weights))
    family = family_of(source.files.config, source.tokenizer, chat=source.files.chat)
    if family is not None:
        end_where_turns_end(model, source.files, family)
    return end_tokens(model, source.tokenizer)


# --- merged weights ---------------------------------------------------------------------------------------------------


LEAST_KEPT = 0.9
"""Least share of the update that bfloat16 must keep for `dtype: auto` to choose it."""


def load_plain(source: Source, name: str, **keywords: Any) -> Any:
    """Load the model of a folder or hub id into main memory in the dtype of its files. Raises `ModelError`."""
    from kit.models.family import auto_class

    options = {"dtype": "auto", "trust_remote_code": source.config.model.trust_remote_code, "use_safetensors": True}
    if getattr(source.files.config.get_text_config(), "attn_logit_softcapping", None):
        options["attn_implementation"] = "eager"  # as in training; the default ignores the cap
    if name == source.files.source:
        options["revision"] = source.files.revision
    try:
        with converting_weights():
            model_class = auto_class(keywords.get("config", source.files.config))
            return model_class.from_pretrained(name, **{**options, **keywords})
    except (OSError, ValueError, RuntimeError) as error:
        raise_fatal(error)
        raise ModelError(f"{name}: its weights cannot be loaded ({error}).") from error


def merge(source: Source, dtype: str) -> tuple[Any, str, float | None]:
    """Add PEFT's update to each matrix in float32, in main memory, and cast all weights once.

    `dtype` is float32, float16, bfloat16, or `auto`: the 16-bit dtype that `choose_dtype` returns for an adapter, else the
    dtype in which the weights were saved. Returns the model, its dtype, and the share of the update that the cast weights keep
    (None without an adapter). Raises `ModelError` if the adapter belongs to another model.
    """
    import torch
    from peft.tuners.lora import LoraLayer, ParamWrapper

    from kit.models.start import TRAINED, put_on

    model = load_plain(source, source.base if source.lora else str(source.weights))
    update_kept, layers = None, []
    if source.lora:
        policy = put_on(model, source.weights)
        layers = [
            (m.get_param() if isinstance(m, ParamWrapper) else m.get_base_layer().weight, m)  # experts are parameters
            for m in policy.modules()
            if isinstance(m, LoraLayer)
        ]
    with torch.no_grad():
        if dtype == "auto":
            changes = ((weight, layer.get_delta_weight(TRAINED)) for weight, layer in layers)
            dtype = choose_dtype(model, changes) if source.lora else str(model.dtype).removeprefix("torch.")
        target = getattr(torch, dtype)
        projection = total = 0.0
        for weight, layer in layers:  # one matrix at a time, because all updates together may be larger than the model
            weight.data = base = weight.data.float()
            change = layer.get_delta_weight(TRAINED).float()
            weight.data = (base + change).to(target)
            total += float((change.double() ** 2).sum())
            projection += float(((weight.data.float() - base).double() * change.double()).sum())
        if layers:
            model, update_kept = policy.unload(), projection / total if total else 1.0
        model.to(target)
    model.config.dtype = target
    return model.eval(), dtype, update_kept


def choose_dtype(model: Any, changes: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Choose float16 if bfloat16 would round the update away and float16's range holds the model, else bfloat16.

    `changes` has each matrix of the model with its update.
    """
    import torch

    weights = list(model.parameters())
    if {weight.dtype for weight in weights} == {torch.float16}:
        return "float16"
    shares = [share_kept(weight.float(), change.float(), torch.bfloat16) for weight, change in changes]
    in_range = not overflows_in_float16(model.config)
    in_range &= all(float(weight.detach().abs().max()) < 3e4 for weight in weights if weight.numel())
    return "float16" if min(shares, default=1.0) < LEAST_KEPT and in_range else "bfloat16"


def share_kept(base: torch.Tensor, change: torch.Tensor, dtype: torch.dtype) -> float:
    """The share of an update that a cast keeps: 1 for all of it, 0 if rounding removes it.

    It is the inner product of the update after the cast with the update, divided by the squared norm of the update.
    """
    rounded, size = (base + change).to(dtype).float() - base, float((change.double() ** 2).sum())
    return float((rounded.double() * change.double()).sum()) / size if size else 1.0


def write_merged(source: Source, model: Any, tokenizer: Any, ends: list[int], folder: Path) -> None:
    """Write model, tokenizer and special tokens in the Hugging Face layout, without the base model's sampling settings."""
    keep_only_tokens(model)
    model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    save_tokenizer(source, tokenizer, folder)


def save_tokenizer(source: Source, tokenizer: Any, folder: Path) -> None:
    """Save the tokenizer without the padding of its last batch, and the processor if the model has one."""
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.no_truncation()
    if source.files.processor is not None:
        source.files.processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)  # last: its chat template may have been changed for a GGUF file
