"""The records of `data.source`, whatever it is: a task, a folder, a file, a hub id."""

from __future__ import annotations

from pathlib import Path

from kit.config import DataConfig
from kit.data.formats import TASK_PREFIX, read_files
from kit.data.rows import Source
from kit.errors import DataError


def read_source(config: DataConfig) -> Source:
    """The records of `config.source`, whatever it is. Raises `DataError` if it is not there or cannot be read."""
    from kit.data import folders, hub, tasks

    if config.source.startswith(TASK_PREFIX):
        return tasks.read_task(config.source.removeprefix(TASK_PREFIX), config)
    path = Path(config.source).expanduser()
    try:
        if path.is_dir():
            return folders.read_folder(path, config)
        if path.is_file():
            return read_files([path])
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    hub.refuse_unless_hub_id(config.source)
    return hub.read_hub(config.source, config)
