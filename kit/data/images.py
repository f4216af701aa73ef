"""Pictures of rows: converts paths, bytes or stored images to the format of a `datasets` image column.

Files are read when a row is used. A digest of their content identifies equal prompts.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

from kit.config import DataConfig

IMAGES = "images"
"""The column with pictures of a run's rows: a list, empty for a row without pictures."""
CUSTOMARY = ("images", "image")
NONE = "none"
Picture = dict[str, Any]  # {"bytes": bytes | None, "path": str | None}, as `datasets` stores an image


def read_pictures(value: Any, column: str, folder: Path | None) -> list[Picture]:
    """The pictures of a row; [] for None and an empty list. Raises `ValueError` for other values.

    value: a path (from `folder`), bytes, `{"bytes", "path"}`, or a list of these.
    """
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [_picture(item, place, column, folder) for place, item in enumerate(values, start=1)]


def digest(pictures: list[Picture]) -> str:
    """Returns the hex digest of the content of pictures, in order; an empty text for none."""
    if not pictures:
        return ""
    total = hashlib.sha256()
    for picture in pictures:
        total.update(hashlib.sha256(_content(picture)).digest())
    return total.hexdigest()


def opened(pictures: list[Any]) -> list[Any]:
    """PIL pictures in RGB, from stored or open ones."""
    from PIL import Image

    images = []
    for picture in pictures:
        if isinstance(picture, dict):
            picture = Image.open(io.BytesIO(_content(picture)))
        images.append(picture.convert("RGB"))
    return images


def folder_of(config: DataConfig) -> Path | None:
    """The folder of the source, to which paths of pictures are relative."""
    source = Path(config.source).expanduser()
    return source if source.is_dir() else source.parent if source.is_file() else None


def _picture(value: Any, place: int, column: str, folder: Path | None) -> Picture:
    where = f"picture {place} of '{column}'"
    if isinstance(value, (bytes, bytearray)):
        stored: Picture = {"bytes": bytes(value), "path": None}
    elif isinstance(value, str):
        stored = {"bytes": None, "path": value}
    elif isinstance(value, dict) and (value.get("bytes") or value.get("path")):
        stored = {"bytes": value.get("bytes"), "path": value.get("path")}
    else:
        raise ValueError(
            f"{where} is of type {type(value).__name__}; expected a path, bytes, or an image of `datasets`"
        )
    if not stored["bytes"] and stored["path"]:
        path = Path(str(stored["path"])).expanduser()
        candidates = [(folder or Path()) / path, path]  # an absolute path stays as it is
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if file is None:
            inside = f" in {folder}" if folder and not path.is_absolute() else ""
            raise ValueError(f"{where}: there is no file {stored['path']}{inside}")
        stored["path"] = str(file.resolve())
    from PIL import Image

    try:
        with Image.open(io.BytesIO(stored["bytes"]) if stored["bytes"] else stored["path"]):
            pass
    except Exception as error:  # decoders may raise any error
        name = stored["path"] or f"{len(stored['bytes'] or b'')} bytes"
        raise ValueError(f"{where} cannot be read as a picture ({name}): {error}") from None
    return stored


def _content(picture: Picture) -> bytes:
    return bytes(picture["bytes"]) if picture["bytes"] else Path(picture["path"]).read_bytes()
