"""NF4 weights (bitsandbytes, QLoRA's, arXiv 2305.14314) of a merged model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kit.export.source import Source


def quantize(source: Source, merged: Path, place: Path, dtype: str) -> None:
    """Reads a merged 16-bit folder with its linear layers rounded to NF4, and writes that to `place`."""
    import torch
    from transformers import GenerationConfig

    from kit.export.weights import load_plain, save_tokenizer
    from kit.models.backend import quantization_config

    precision, device = getattr(torch, dtype), source.files.backend.device
    how = {"dtype": precision, "quantization_config": quantization_config(precision, device)}
    if device == "cuda":
        how["device_map"] = {"": torch.cuda.current_device()}
    model = load_plain(source, str(merged), **how)
    model.generation_config = GenerationConfig.from_pretrained(merged)
    model.save_pretrained(place)
    save_tokenizer(source, source.tokenizer, place)
