"""The policy as it was trained: where its weights lie, how it is loaded, and its weights merged and written.

Merging is done in float32 from the adapter's own files, so that it is a second way to what PEFT computes.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig, load_config
from kit.errors import ModelError, RunError
from kit.evaluation.results import checkpoint_now, weights_of
from kit.models.failures import raise_fatal
from kit.models.start import Start, find_start, put_on, with_merged

if TYPE_CHECKING:
    import torch

    from kit.models.loading import ModelFiles
    from kit.runs.store import RunDir


@dataclass
class Source:
    """A run's policy at one step: its weights on disk and the base model that they belong to. Loaded by `load`."""

    run: RunDir
    config: RunConfig
    files: ModelFiles
    step: int
    weights: Path
    base: str
    """What the adapter is put on when it is merged: the model's 16-bit weights."""
    run_name: str = ""
    """The model as the run's configuration names it."""
    ends: list[int] | None = None
    """Every token that ends a completion, once that is known."""
    start: str = ""
    """With all weights trained: the model that training began with."""
    start_revision: str | None = None
    notes: list[str] = field(default_factory=list)
    """What there is to say of this export."""
    below: Start | None = None
    """What training started from, while `weights` hold only what was trained on top of it."""

    @property
    def lora(self) -> bool:
        """Whether an adapter was trained, not every weight."""
        return self.config.model.lora is not None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the run used, its chat template included."""
        return self.files.tokenizer

    def load(self) -> Any:
        """Base and adapter as they were trained, on the run's device. Raises `ModelError`."""
        return put_on(self.load_base(), self.weights, self.below) if self.lora else self.load_base()

    def load_base(self) -> Any:
        """The base as it was loaded for training; with all weights trained, these."""
        from kit.models.loading import load_model

        return load_model(self.files, self.config.model).model

    def load_start(self) -> Any:
        """With all weights trained: the model that training began with, loaded as the trained one is. Raises `ModelError`."""
        from kit.models.embedded import source_of
        from kit.models.loading import load_model

        files = replace(self.files, source=source_of(self.start, self.start_revision), revision=self.start_revision)
        return load_model(files, self.config.model).model.eval()

    def note(self, text: str) -> None:
        """Adds a remark to the result, once."""
        if text not in self.notes:
            self.notes.append(text)


def open_source(
    run: RunDir, which: str | None, base: str | None, *, quantized: bool = False
) -> tuple[Source, str | None]:
    """The run's policy, files found and no weights loaded, and what there is to remark. Raises `KitError`.

    Loads the libraries for it, with those for 4-bit weights if the export is to be `quantized`.
    """
    from kit.models.libraries import load_libraries
    from kit.models.loading import find_model

    now = checkpoint_now(run, which)
    step, weights = weights_of(run, now)
    note = None
    if now != which:
        state = run.status()["state"]
        note = f"Run '{run.id}' is {state}: these are the weights of its last whole checkpoint, step {step}."
    config = load_config(run.config)
    load_libraries(config.model, training=False, quantized=quantized)
    named = config.model.name
    # Unsloth's models are transformers' underneath, and its adapters PEFT's.
    config.model.backend = "transformers"
    start, began = find_start(config.model), (named, config.model.revision)
    if start is not None and start.mode == "merge":  # from here on the merged model is the one that was trained
        place = with_merged(find_model(config.model, chat=config.data.chat), config.model).source
        start, began = None, (place, None)
        config.model = config.model.model_copy(update={"name": place, "revision": None, "adapter": None})
    if config.model.lora is None:
        config.model = config.model.model_copy(update={"name": str(weights)})
    files = find_model(config.model, chat=config.data.chat, template=config.data.chat_template_kwargs)
    source = Source(run, config, files, step, weights, base or files.source, named, below=start)
    source.start, source.start_revision = began
    quantised = getattr(files.config, "quantization_config", None) is not None
    if quantised and source.lora and base is None:
        raise ModelError(
            f"{named} holds quantised weights, and merging into those would round the update away. Name the 16-bit model that "
            "they were made of: --base ID_OR_FOLDER."
        )
    return source, note


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


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a completion, in order."""
    declared = model.generation_config.eos_token_id
    declared = [declared] if isinstance(declared, int) else list(declared or [])
    return sorted({tokenizer.eos_token_id, *declared} - {None})


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


def projection(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of `wanted` that `seen` contains: their inner product over the squared norm of `wanted`; 1 if that is 0."""
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
