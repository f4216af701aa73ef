"""Datasets in hub layout: by id from the Hugging Face hub, or from a folder."""

from __future__ import annotations

import re
from pathlib import Path

from kit.config import DataConfig
from kit.data.formats import READERS, TASK_PREFIX
from kit.data.rows import Source
from kit.errors import DataError
from kit.registry import did_you_mean

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


def refuse_unless_hub_id(source: str) -> None:
    """Raises `DataError` if a source that is not on this disk cannot be a hub id; the message names what is near."""
    path = Path(source).expanduser()
    is_path = path.suffix.lower() in READERS or source.startswith(("/", ".", "~")) or "\\" in source
    if is_path or source.count("/") > 1:
        raise DataError(_missing_file(path))
    if not HUB_ID.fullmatch(source):
        near = did_you_mean(source.partition(":")[0] + ":", [TASK_PREFIX]) if ":" in source else ""
        raise DataError(
            f"data.source: '{source}' is no file or folder here, and cannot be a hub id.{near} Expected "
            f"{TASK_PREFIX}TASK, a {', '.join(READERS)} file, a folder, or owner/name."
        )


def read_hub(source: str, config: DataConfig) -> Source:
    """One split of a dataset that `datasets.load_dataset` finds, downloaded if need be. Raises `DataError`."""
    from datasets import Dataset, load_dataset

    from kit.data import arrow

    try:
        dataset = load_dataset(source, config.subset, split=config.split, revision=config.revision)
    except Exception as error:  # the loader raises whatever its parsers and its network layer raise
        raise DataError(_explain(error, source, config)) from error
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"data.split: '{config.split}' of {config.source} is not one split; name a single one, e.g. train."
        )
    return arrow.source_from_dataset(dataset, [])


def _missing_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"data.source: there is no file {path}; its folder {folder} does not exist, either."
    names = _data_names(folder)
    listed = f" Data files and folders in {folder}: {', '.join(names[:10])}." if names else ""
    return f"data.source: there is no file or folder {path}.{did_you_mean(path.name, names)}{listed}"


def _data_names(folder: Path) -> list[str]:
    """Names in a folder that could be a source; none where there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(child.name for child in folder.iterdir() if child.is_dir() or child.suffix.lower() in READERS)


def _explain(error: Exception, source: str, config: DataConfig) -> str:
    """What was tried, what went wrong, what to do."""
    wanted = f"split '{config.split}'" + (f" of subset '{config.subset}'" if config.subset else "")
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if error.__cause__ is not None and type(error).__name__.startswith("DatasetGeneration"):
        reason += f" ({str(error.__cause__).strip().partition(chr(10))[0]})"
    if Path(source).is_absolute():
        return (
            f"The folder {config.source}, read as a dataset in hub layout, did not give {wanted}: {reason}\n"
            "Check data.split and data.subset, or name one of its files."
        )
    near = did_you_mean(Path(source).name, _data_names(Path(source).parent))
    local = f"There is no file or folder '{source}' in {Path.cwd()}.{near} It was taken for a hub id. "
    if isinstance(error, ConnectionError):
        return (
            f"{local}The hub could not be reached: {reason}.\nCheck the connection (and HF_HUB_OFFLINE), or download "
            f"the dataset elsewhere and give its folder as data.source.{_near_task(source)}"
        )
    if type(error).__name__ == "DatasetNotFoundError":
        return (
            f"{local}The hub has no dataset of that name, or it is private or gated: {reason}.\nCheck the name; for a "
            f"private one, log in with `hf auth login`.{_near_task(source)}"
        )
    return (
        f"{local}The hub dataset did not give {wanted}: {reason}\n"
        "Check data.subset, data.split and data.revision on the dataset's page."
    )


def _near_task(source: str) -> str:
    """A hint for someone who wrote a task without its prefix."""
    from kit.data.tasks import task_names

    return f" Did you mean '{TASK_PREFIX}{source}'?" if "/" not in source and source in task_names() else ""
