"""Files of a run: crash-safe writing, reading while they grow, and disk errors as clear messages."""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kit.errors import RunError


def free_bytes(path: Path) -> int | None:
    """Free bytes on the file system of `path` or of its nearest existing parent; None if the system call fails."""
    for folder in (path, *path.absolute().parents):
        if folder.exists():
            try:
                return shutil.disk_usage(folder).free
            except OSError:
                return None
    return None


def human_size(size: float) -> str:
    """`1.5 GB`: bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def clock(seconds: float) -> str:
    """`0:42`, `1:05` or `2:03:10`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: Any) -> str:
    """`45 s`, `12 min` or `3.4 h`; a dash for anything that is not a number of seconds."""
    if not isinstance(seconds, (int, float)) or not seconds >= 0:
        return "–"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def shorten(text: str, limit: int = 2500) -> str:
    """The text, or its first `limit` characters and the number of the remaining ones."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def one_line(text: str, limit: int) -> str:
    """The text with single spaces, cut to at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn disk errors (full, read-only, no permission, ...) into a `RunError` that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = free_bytes(path)
            size = "unknown" if free is None else human_size(free)
            what = (
                f"No space left while writing {path} (free there: {size}). Free some space, lower run.keep_checkpoints,"
            )
            raise RunError(f"{what} or set run.root to a folder on another disk.") from error
        reason = {
            errno.EROFS: "lies on a read-only file system",
            errno.EACCES: "may not be written by this user",
            errno.EPERM: "may not be written by this user",
            errno.ENOTDIR: "cannot be made: a file stands where a folder is needed",
            errno.EEXIST: "cannot be made: a file stands where a folder is needed",
        }.get(error.errno or 0, f"cannot be written: {error.strerror or error}")
        raise RunError(f"{path} {reason}. Set run.root to a folder that can be written.") from error


def write_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace the file `path` atomically: readers see the old text or the new one. Raises `RunError` if writing fails.

    durable: wait until the text is on the disk; otherwise the file may be empty after a power cut.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    with disk_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Completions may contain lone surrogates, which UTF-8 cannot encode.
            with open(temporary, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def to_disk(path: Path) -> None:
    """Wait until a file or folder is on the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some file systems do not support fsync of folders
            raise
    finally:
        os.close(handle)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line. An incomplete last line, which a crash or a full disk left, is removed first.

    Raises `RunError` if writing fails; the file then ends with its last complete line.
    """
    data = (to_json(record) + "\n").encode("utf-8", "replace")
    with disk_errors(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = end = os.fstat(handle).st_size
            newline = -1
            while end > 0 and newline < 0:
                start = max(0, end - 4096)
                newline = os.pread(handle, end - start, start).rfind(b"\n")
                end = start + newline + 1
            if end < size:
                os.ftruncate(handle, end)
            try:
                while data:
                    data = data[os.write(handle, data) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, end)
                raise
        finally:
            os.close(handle)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete JSON lines, without an incomplete last one; an empty list if there is no file.

    Raises `RunError` if a line before the last is invalid: an interrupted write cannot be the reason.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise RunError(f"{path}, line {number}: not a JSON object. The file is damaged; remove the line.")
        records.append(record)
    return records


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file is missing, or damaged by a crash or a full disk."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_result(path: Path) -> dict[str, Any]:
    """The JSON object in a file of held-out scores. Raises `RunError` if the file cannot be read."""
    try:
        result: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}. Remove it and evaluate again.") from error
    return result


def read_last_lines(path: Path, size: int = 65536) -> Iterator[dict[str, Any]]:
    """The complete JSON lines in the last `size` bytes, the last first, without invalid ones; none if there is no file.

    Raises `RunError` if the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - size)
            file.seek(start)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error
    for line in reversed(lines[1 if start else 0 : -1]):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


class Log:
    """A growing text file and the position up to which it was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def tail(self, lines: int) -> str:
        """The last `lines` lines, or an empty text if there is no file. `added` returns the text after them."""
        text = self.added()
        return "".join(text.splitlines(keepends=True)[-lines:]) if lines else ""

    def added(self) -> str:
        """Return the text added since the last call; the complete text if the file was replaced by a shorter one."""
        try:
            with open(self.path, "rb") as file:
                if file.seek(0, os.SEEK_END) < self._position:
                    self._position = 0
                file.seek(self._position)
                data = file.read()
                self._position = file.tell()
                return self._decoder.decode(data)
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}.") from error


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinities become null, arrays and tensors become lists or numbers, paths become text."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # arrays, tensors and scalars of numpy, torch, ...
        return _plain(value.tolist())
    return str(value)
