"""Cache of results by content: the function called, its arguments and the component's version."""

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
_MAX_VALUE = 4_000  # characters of JSON that are kept
_MAX_RECENT = 50_000  # results in memory

_recent: OrderedDict[str, str] = OrderedDict()  # of all caches of this process, least recently used first
_lock = threading.Lock()


def content_key(*parts: Any) -> str | None:
    """A digest of plain values, the same in every process; None when something is not plain.

    Values that differ in type differ: 1, 1.0, True and "1" give four keys.
    """
    try:
        return hashlib.sha256(marshal.dumps(parts, 2)).hexdigest()  # version 2 has no references: equal in, equal out
    except (ValueError, TypeError, MemoryError):
        return None


def clear_recent() -> None:
    """Clear the results that this process keeps in memory."""
    with _lock:
        _recent.clear()


class Cache:
    """Results that cost more than a look-up: the latest in memory, all of them in a SQLite file that processes share.

    Values are kept as JSON, so nobody can change them. Nothing that goes wrong with the file raises while scoring: a value
    that cannot be read is not there, one that cannot be written is not kept, and the log says so once.

    Args:
        path: the file, made with its folder when first written; None for memory alone.

    >>> import tempfile
    >>> cache = Cache(Path(tempfile.mkdtemp()) / "results.sqlite")
    >>> cache.put_many({"key": {"passed": 3}})
    >>> cache.get_many(["key", "other"])
    {'key': {'passed': 3}}
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._complained = False

    def get_many(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the values of the known ones among `keys`."""
        unique = list(dict.fromkeys(keys))
        with _lock:
            known = {key: _recent[key] for key in unique if key in _recent}
            for key in known:
                _recent.move_to_end(key)
        stored = self._read([key for key in unique if key not in known])
        _remember(stored)
        return {key: json.loads(value) for key, value in (known | stored).items()}

    def put_many(self, values: Mapping[str, Any]) -> None:
        """Store plain values of up to 4,000 characters of JSON; skip others."""
        small = {}
        for key, value in values.items():
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                if len(text := json.dumps(value)) <= _MAX_VALUE:
                    small[key] = text
        _remember(small)
        if self.path is None or not small:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(_open(self.path)) as file, file:
                file.executemany("INSERT OR REPLACE INTO results VALUES (?, ?)", small.items())
        except (sqlite3.Error, OSError) as failure:
            self._complain("written", failure)

    def _read(self, keys: list[str]) -> dict[str, str]:
        if self.path is None or not keys or not self.path.is_file():
            return {}
        values: dict[str, str] = {}
        try:
            with contextlib.closing(_open(self.path)) as file:
                for start in range(0, len(keys), 500):
                    some = keys[start : start + 500]
                    marks = ", ".join("?" * len(some))
                    values |= dict(file.execute(f"SELECT key, value FROM results WHERE key IN ({marks})", some))
        except (sqlite3.Error, OSError) as failure:
            self._complain("read", failure)
        return values

    def _complain(self, verb: str, failure: Exception) -> None:
        if not self._complained:
            _LOG.warning("The cache %s could not be %s, and is passed over: %s", self.path, verb, failure)
            self._complained = True


def _remember(values: Mapping[str, str]) -> None:
    with _lock:
        _recent.update(values)
        while len(_recent) > _MAX_RECENT:
            _recent.popitem(last=False)


def _open(path: Path) -> sqlite3.Connection:
    """Open a connection for this call alone, so that none crosses a fork, a pickle or a thread."""
    file = sqlite3.connect(path, timeout=5.0)
    try:
        file.execute("PRAGMA journal_mode=WAL")
        file.execute("PRAGMA synchronous=NORMAL")
        file.execute("CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
    except BaseException:
        file.close()
        raise
    return file
