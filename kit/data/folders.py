"""Folders: files of one kind, a saved `datasets` folder, or a dataset in hub layout."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from kit.config import DataConfig
from kit.data.formats import READERS, read_files
from kit.data.rows import Source
from kit.errors import DataError
from kit.registry import did_you_mean

SPLIT_WORD = re.compile(r"(?:^|[-_.])(train|training|test|testing|validation|valid|val|dev|eval)(?=$|[-_.\d])")


def read_folder(path: Path, config: DataConfig) -> Source:
    """The records of a folder. Raises `DataError` if it holds nothing readable, or files of several kinds."""
    from kit.data import hub

    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _read_saved(path, config)
    files = _data_files(path)
    nested = any(_data_files(child) for child in path.iterdir() if child.is_dir())
    if (path / "README.md").is_file() or (nested and not files):
        return hub.read_hub(str(path.resolve()), config)
    if not files:
        names = ", ".join(sorted(child.name for child in path.iterdir())[:10]) or "nothing"
        raise DataError(f"The folder {path} has no {', '.join(READERS)} file. It holds: {names}.")
    kinds = Counter(file.suffix.lower() for file in files)
    if len(kinds) > 1:
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise DataError(
            f"The folder {path} has files of several kinds: {listed}. Name one file, or keep one kind in it."
        )
    chosen, notes = _of_split(files, path, config.split)
    source = read_files(chosen)
    source.notes += notes
    return source


def _data_files(folder: Path) -> list[Path]:
    """Files of a known kind directly in the folder, by name."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and file.suffix.lower() in READERS and not file.name.startswith((".", "_"))
    )


def _of_split(files: list[Path], folder: Path, split: str) -> tuple[list[Path], list[str]]:
    """Where file names tell splits (train-0.jsonl, test.jsonl), the files of the wanted one; else all of them."""
    words = {file: found.group(1) for file in files if (found := SPLIT_WORD.search(file.stem.lower()))}
    if not words:
        return files, []
    chosen = [file for file in files if words.get(file) == split]
    if not chosen:
        raise DataError(
            f"data.split: the folder {folder} has no file of the split '{split}'.{did_you_mean(split, words.values())} "
            f"Its files: {', '.join(file.name for file in files)}."
        )
    left_out = [file.name for file in files if file not in chosen]
    return chosen, [f"Files of other splits are left out: {', '.join(left_out)}."] if left_out else []


def _read_saved(path: Path, config: DataConfig) -> Source:
    """A folder written by `save_to_disk`."""
    from datasets import DatasetDict, load_from_disk

    from kit.data import arrow

    saved: Any
    try:
        saved = load_from_disk(str(path))
    except Exception as error:  # a damaged folder fails in many ways
        raise DataError(f"{path} looks like a saved dataset, but cannot be loaded: {error}") from error
    if isinstance(saved, DatasetDict):
        if config.split not in saved:
            raise DataError(
                f"data.split: {path} has no split '{config.split}'.{did_you_mean(config.split, saved)} "
                f"Splits: {', '.join(saved)}."
            )
        saved = saved[config.split]
    return arrow.source_from_dataset(saved, [path.name])
