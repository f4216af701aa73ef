"""Cache of results by content: the function called, its arguments and the component's version."""

import contextlib
import hashlib
import json
import logging
import marshal
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)
_MAX_VALUE = 4_000  # characters of JSON that are kept
_MAX_RECENT = 50_000  # results in memory; when there are more, all are dropped
_AT_ONCE = 500
_NAMES = frozenset({"name", "floor", "low", "high", "version"})


def content_key(*parts: Any) -> str | None:
    """A digest of plain values, the same in every process; None when something is not plain.

    Values that differ in type differ: 1, 1.0, True and "1" give four keys.
    """
    try:
        return hashlib.sha256(marshal.dumps(parts, 2)).hexdigest()  # version 2 has no references: equal in, equal out
    except (ValueError, TypeError, MemoryError):
        return None


def component_key(component: Any, ignored: frozenset[str], *parts: Any) -> str | None:
    """A digest of a component's kind, version and fields, and of plain values; None when something is not plain.

    Args:
        component: a dataclass.
        ignored: fields beside its name and range that say how a result is got, not what it is.
    """
    names = [f.name for f in fields(component) if f.name not in _NAMES | ignored]
    kind = f"{type(component).__module__}.{type(component).__qualname__}"
    return content_key(kind, component.version, [(name, getattr(component, name)) for name in names], *parts)


def clear_recent() -> None:
    """Clear the results that this process keeps in memory."""
    with _lock:
        _memory.execute("DELETE FROM results")


class Cache:
    """Results that cost more than a look-up: in the memory of this process, or in a SQLite file that processes share.

    Values are kept as JSON, so nobody can change them. Nothing that goes wrong with the file raises while scoring: a value
    that cannot be read is not there, one that cannot be written is not kept, and the log says so once.

    Args:
        path: the file, made with its folder when first written; None for memory.

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
        values: dict[str, str] = {}

        def read(file: sqlite3.Connection) -> None:
            for start in range(0, len(unique), _AT_ONCE):
                some = unique[start : start + _AT_ONCE]
                marks = ", ".join("?" * len(some))
                values.update(file.execute(f"SELECT key, value FROM results WHERE key IN ({marks})", some))

        if self.path is None or self.path.is_file():
            self._on_file("read", read)
        return {key: json.loads(value) for key, value in values.items()}

    def put_many(self, values: Mapping[str, Any]) -> None:
        """Store plain values of up to 4,000 characters of JSON; skip others."""
        small = {}
        for key, value in values.items():
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                if len(text := json.dumps(value)) <= _MAX_VALUE:
                    small[key] = text

        def write(file: sqlite3.Connection) -> None:
            with file:
                if self.path is None and file.execute("SELECT count(*) FROM results").fetchone()[0] > _MAX_RECENT:
                    file.execute("DELETE FROM results")
                file.executemany("INSERT OR REPLACE INTO results VALUES (?, ?)", small.items())

        if small:
            self._on_file("written", write)

    def _on_file(self, verb: str, action: Callable[[sqlite3.Connection], None]) -> None:
        """Open a connection for this call alone, so that none to a file crosses a fork, a pickle or a thread."""
        if self.path is None:
            with _lock:
                action(_memory)
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(sqlite3.connect(self.path, timeout=5.0)) as file:
                file.execute("PRAGMA journal_mode=WAL")
                file.execute("PRAGMA synchronous=NORMAL")
                file.execute(_TABLE)
                action(file)
        except (sqlite3.Error, OSError) as failure:
            if not self._complained:
                _LOG.warning("The cache %s could not be %s, and is passed over: %s", self.path, verb, failure)
            self._complained = True


_TABLE = "CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID"
_lock = threading.Lock()
_memory = sqlite3.connect(":memory:", check_same_thread=False)
_memory.execute(_TABLE)
