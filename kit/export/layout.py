"""What is in an export's files: whole, finite, no key too few or too many, the right tokenizer, template and ends."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def listing(folder: Path) -> list[dict[str, Any]]:
    """Name, size in bytes and sha256 of every file, by name."""
    return [
        {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    ]


def digest(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def check_tied(source: Any, export: Any) -> list[str]:
    """Input and output embeddings are one in the export if they are one in the source, and two if they are two."""
    tied, wanted = _is_tied(export), _is_tied(source)
    if tied == wanted:
        return []
    return [
        f"input and output embeddings are {'one' if tied else 'two'} matrices, and {'one' if wanted else 'two'} in the source"
    ]


def _is_tied(model: Any) -> bool:
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    return first is not None and last is not None and first.weight.data_ptr() == last.weight.data_ptr()


def check_tokenizer(trained: Any, written: Any, texts: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """The written tokenizer gives the same ids for texts and prompts, the same text back, and has the same template."""
    from kit.export.source import prompt_ids

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
    from kit.export.source import end_ids

    found = end_ids(model, tokenizer)
    faults = [] if found == wanted else [f"completions end at the tokens {found}, and at {wanted} in the source"]
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:
        faults.append(f"generation_config.json is not sound: {str(error).splitlines()[0]}")
    return faults
