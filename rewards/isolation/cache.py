"""Results by content: what was called, with which arguments, by which version of a component."""

import contextlib
import hashlib
import json
import logging
import marshal
import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)
_MAX_VALUE = 64_000  # characters of JSON that are kept on disk
_MAX_RECENT = 4_000  # and in memory


def content_key(*parts: Any) -> str | None:
    """A digest of plain values, the same in every process; None when something is not plain.

    Values that differ in type differ: 1, 1.0, True and "1" give four keys.
    """
    try:
        return hashlib.sha256(marshal.dumps(parts, 2)).hexdigest()  # version 2 has no references: equal in, equal out
    except (ValueError, TypeError, MemoryError):
        return None


class MemoryCache:
    """The latest results of this process, least recently used out first. Values are kept as JSON, so nobody can change
    them. Threads may share it."""

    def __init__(self, size: int = 20_000) -> None:
        self.size = size
        self._values: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def get_many(self, keys: Iterable[str]) -> dict[str, Any]:
        """The known ones among `keys`."""
        found: dict[str, str] = {}
        with self._lock:
            for key in keys:
                if key in self._values:
                    self._values.move_to_end(key)
                    found[key] = self._values[key]
        return {key: json.loads(value) for key, value in found.items()}

    def put_many(self, values: Mapping[str, Any]) -> None:
        """Keeps plain values of up to 4,000 characters of JSON; others are passed over."""
        small = _small(values, _MAX_RECENT)
        with self._lock:
            self._values.update(small)
            while len(self._values) > self.size:
                self._values.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()


class Cache:
    """Results on disk, in one SQLite file that processes share: for judges and code, which cost more than a look-up.

    Nothing that goes wrong with the file raises while scoring: a value that cannot be read is not there, one that
    cannot be written is not kept, and the log says so once.

    Args:
        path: the file; made with its folder when first written.

    >>> import tempfile
    >>> cache = Cache(Path(tempfile.mkdtemp()) / "results.sqlite")
    >>> cache.put("key", {"passed": 3})
    >>> cache.get("key"), cache.get("other", "unknown")
    ({'passed': 3}, 'unknown')
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._complained = False

    def __repr__(self) -> str:
        return f"Cache({str(self.path)!r})"

    def get(self, key: str, default: Any = None) -> Any:
        return self.get_many([key]).get(key, default)

    def put(self, key: str, value: Any) -> None:
        self.put_many({key: value})

    def get_many(self, keys: Iterable[str]) -> dict[str, Any]:
        """The known ones among `keys`."""
        wanted = list(keys)
        if not wanted or not self.path.is_file():
            return {}
        found: dict[str, Any] = {}
        try:
            with contextlib.closing(self._open()) as file:
                for start in range(0, len(wanted), 500):
                    some = wanted[start : start + 500]
                    marks = ", ".join("?" * len(some))
                    rows = file.execute(f"SELECT key, value FROM results WHERE key IN ({marks})", some)
                    found.update((key, json.loads(value)) for key, value in rows)
        except (sqlite3.Error, OSError, ValueError) as failure:
            self._complain("read", failure)
        return found

    def put_many(self, values: Mapping[str, Any]) -> None:
        """Keeps plain values of up to 64,000 characters of JSON; others are passed over."""
        small = _small(values, _MAX_VALUE)
        if not small:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(self._open()) as file, file:
                file.executemany("INSERT OR REPLACE INTO results VALUES (?, ?)", small.items())
        except (sqlite3.Error, OSError) as failure:
            self._complain("write", failure)

    def _open(self) -> sqlite3.Connection:
        """A connection of this call alone: nothing to carry over a fork, a pickle or a thread."""
        file = sqlite3.connect(self.path, timeout=5.0)
        try:
            file.execute("PRAGMA journal_mode=WAL")
            file.execute("PRAGMA synchronous=NORMAL")
            file.execute("CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
        except BaseException:
            file.close()
            raise
        return file

    def _complain(self, verb: str, failure: Exception) -> None:
        if not self._complained:
            _LOG.warning("The cache %s could not be %s, and is passed over: %s", self.path, verb, failure)
            self._complained = True


class LayeredCache:
    """A memory before a file: what was read from disk once is not read again. Without `disk` the memory alone."""

    def __init__(self, memory: MemoryCache, disk: Cache | None = None) -> None:
        self.memory, self.disk = memory, disk

    def get_many(self, keys: Iterable[str]) -> dict[str, Any]:
        """The known ones among `keys`."""
        wanted = list(dict.fromkeys(keys))
        known = self.memory.get_many(wanted)
        if self.disk is not None and (unknown := [key for key in wanted if key not in known]):
            kept = self.disk.get_many(unknown)
            self.memory.put_many(kept)
            known |= kept
        return known

    def put_many(self, values: Mapping[str, Any]) -> None:
        """Keeps plain values, in both."""
        self.memory.put_many(values)
        if self.disk is not None:
            self.disk.put_many(values)


def _small(values: Mapping[str, Any], limit: int) -> dict[str, str]:
    found = {}
    for key, value in values.items():
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            continue
        if len(text) <= limit:
            found[key] = text
    return found
