"""Check whether an SQLite query returns the expected rows, in a worker process.

SQLite's authorizer lets the model's query read tables only. The database is in memory or a file opened read-only. Time, rows,
bytes and all sizes that SQLite can limit are limited. Databases and expected queries come from the dataset, and run under the
same limits.

>>> judge("SELECT max(x) FROM t", "CREATE TABLE t (x); INSERT INTO t VALUES (1), (3)", None, "SELECT 3 FROM t LIMIT 1")
['ok', None]
"""

import contextlib
import json
import math
import re
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewards.components.final_text import column
from rewards.extract import Extracted, final_text, tagged_answer
from rewards.isolation import IsolatedComponent, Task
from rewards.protocol import Context, Sample, Score

MAX_ROWS = 10_000
MAX_BYTES = 10_000_000  # approximate size of a result
MAX_QUERY_CHARS = 20_000
_STEPS = 1_000  # virtual machine steps between checks of the time

_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 10_000_000,  # bytes of a text, a blob or a row
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10_000_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 32,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_QUERY_LENGTH = 1_000_000  # largest text, in bytes, that a model's query may create
_ON_FILES = frozenset({"load_extension", "readfile", "writefile"})
_NO_FUNCTIONS = _ON_FILES | {"edit", "fts3_tokenizer", "zeroblob", "randomblob", "random"}
_TIMEOUT = ["timeout", "the query ran out of time"]


class _Refused(Exception):
    """A query is refused; the arguments are status and reason."""


def judge_all(
    query: str,
    databases: list[list[str | None]],
    expected_query: str | None,
    expected_rows: list[list[Any]] | None,
    ordered: bool | None,
    seconds: float,
) -> list[str | None]:
    """Call `judge` for each database (pairs of script and path); return the first result that is not ok, else ok."""
    for setup, path in databases:
        result = judge(query, setup, path, expected_query, expected_rows, ordered, seconds)
        if result[0] != "ok":
            return result
    return ["ok", None]


def judge(
    query: str,
    setup: str | None,
    path: str | None,
    expected_query: str | None,
    expected_rows: list[list[Any]] | None = None,
    ordered: bool | None = None,
    seconds: float = 1.0,
) -> list[str | None]:
    """Return status and reason for the model's query: ok, wrong, timeout, or error if the dataset row is not usable.

    Args:
        query: the model's query.
        setup: script that fills a database in memory, or None.
        path: file of a database, or None.
        expected_query, expected_rows: the expected rows, as a query or directly; the query has precedence.
        ordered: whether to compare rows in order; None compares in order if the expected query ends with ORDER BY.
        seconds: time limit for each of the script, the expected query and the model's query.
    """
    failures = (sqlite3.Error, sqlite3.Warning, ValueError, OSError, _Refused)
    fault = "database cannot be opened"
    try:
        with contextlib.closing(_database(setup, path, seconds)) as connection:
            fault = "expected query fails"
            if expected_query is not None:
                expected, tables = _run(connection, expected_query, seconds)
            elif expected_rows is not None:
                expected, tables = [tuple(_canonical(value) for value in row) for row in expected_rows], True
            else:
                raise ValueError("neither expected query nor rows")
            if not expected:
                return ["error", "expects no rows, so that any empty result would be right"]
            try:
                rows, read = _run(connection, query, seconds)
            except _Refused as refusal:
                return list(refusal.args)
            except (*failures, MemoryError) as failure:
                return ["wrong", f"{type(failure).__name__}: {failure}"[:200]]
    except failures as failure:
        return ["error", f"{fault}: {failure.args[-1] if failure.args else type(failure).__name__}"[:200]]
    if tables and not read:
        return ["wrong", "reads no table"]
    if ordered is None:
        ordered = expected_query is not None and top_level_order(expected_query)
    # Column names are ignored; the order of columns is compared.
    if rows == expected or (not ordered and Counter(rows) == Counter(expected)):
        return ["ok", None]
    if len(rows) != len(expected):
        return ["wrong", f"{len(rows)} rows instead of {len(expected)}"]
    if len(rows[0]) != len(expected[0]):
        return ["wrong", f"{len(rows[0])} columns instead of {len(expected[0])}"]
    return ["wrong", "rows in another order" if Counter(rows) == Counter(expected) else "other rows"]


_QUOTED_OR_COMMENT = re.compile(r"""'[^']*'?|"[^"]*"?|`[^`]*`?|\[[^\]]*\]?|--[^\n]*|/\*.*?(?:\*/|\Z)""", re.DOTALL)
_INNERMOST = re.compile(r"\([^()]*\)")
_ORDER_BY = re.compile(r"\border\s+by\b", re.IGNORECASE)


def top_level_order(query: str) -> bool:
    """Return whether the result of the query is ordered: ORDER BY outside of parentheses, strings and comments."""
    bare = _QUOTED_OR_COMMENT.sub(" ", query)
    while (inner := _INNERMOST.sub(" ", bare)) != bare:
        bare = inner
    return _ORDER_BY.search(bare) is not None


def _database(setup: str | None, path: str | None, seconds: float) -> sqlite3.Connection:
    if path is not None:
        if not Path(path).is_file():
            raise OSError(f"no file {path}")
        connection = sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    else:
        connection = sqlite3.connect(":memory:")
    for limit, most in _LIMITS.items():
        connection.setlimit(limit, most)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA trusted_schema = OFF")
    if setup is not None and path is None:
        # The script may fill its database, but use no other files and no extensions.
        connection.set_authorizer(
            lambda action, *names: (
                sqlite3.SQLITE_DENY
                if action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)
                or (action == sqlite3.SQLITE_FUNCTION and (names[1] or "").lower() in _ON_FILES)
                else sqlite3.SQLITE_OK
            )
        )
        _limit_time(connection, seconds)
        connection.executescript(setup)
        connection.commit()
    return connection


def _run(connection: sqlite3.Connection, query: str, seconds: float) -> tuple[list[tuple[Any, ...]], bool]:
    """Return the rows of one SELECT, and whether it read a table of the database."""
    connection.set_authorizer(None)
    tables = {name.lower() for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    read: set[str] = set()

    def authorize(action: int, first: str | None, second: str | None, schema: str | None, trigger: str | None) -> int:
        if action == sqlite3.SQLITE_READ:
            if (first or "").lower().startswith(("sqlite_", "pragma_")):
                return sqlite3.SQLITE_DENY
            read.update({(first or "").lower()} & tables)
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION:
            return sqlite3.SQLITE_DENY if (second or "").lower() in _NO_FUNCTIONS else sqlite3.SQLITE_OK
        return sqlite3.SQLITE_OK if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE) else sqlite3.SQLITE_DENY

    if len(query) > MAX_QUERY_CHARS:
        raise _Refused("wrong", "query too long")
    connection.set_authorizer(authorize)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _QUERY_LENGTH)
    overrun = _limit_time(connection, seconds)
    try:
        cursor = connection.execute(query)
        if cursor.description is None:
            raise _Refused("wrong", "not a query")
        rows: list[tuple[Any, ...]] = []
        size = 0
        for row in cursor:
            size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
            if len(rows) == MAX_ROWS or size > MAX_BYTES:
                raise _Refused("wrong", f"more than {MAX_ROWS} rows or {MAX_BYTES} bytes")
            rows.append(tuple(_canonical(value) for value in row))
    except sqlite3.OperationalError as failure:
        if overrun:
            raise _Refused(*_TIMEOUT) from failure
        raise
    finally:
        connection.set_progress_handler(None, 0)
    return rows, bool(read)


def _limit_time(connection: sqlite3.Connection, seconds: float) -> list[bool]:
    """Interrupt statements on the connection after `seconds` from now; the returned list is not empty after an interrupt."""
    deadline, overrun = time.monotonic() + seconds, list[bool]()

    def check_time() -> int:
        if time.monotonic() < deadline:
            return 0
        overrun.append(True)
        return 1

    connection.set_progress_handler(check_time, _STEPS)
    return overrun


def _canonical(value: Any) -> Any:
    """Return numbers by value, to nine significant digits; text, blobs and NULL unchanged."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return repr(value)
        return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.9g}")
    return value


_BEGINNINGS = ("select", "with", "values")


@dataclass(frozen=True, kw_only=True)
class SqlAccuracy(IsolatedComponent):
    """1 if the query returns the expected rows on every database of the dataset row, else 0.

    Rows are compared in order if the expected query ends with ORDER BY (or column `ordered` is true), else as a multiset. A
    query that fails or writes is `wrong`; an expected query that fails or returns no rows is an `error`. `root` is the folder
    of relative database paths.
    """

    name: str = "accuracy"
    strict: bool = True
    seconds: float = 1.0
    root: str = "."

    def task(self, sample: Sample, ctx: Context) -> Task | Score:
        try:
            databases, expected_query, rows, ordered = _row(sample, self.root)
        except ValueError as failure:
            return Score(None, "error", {"reason": str(failure)[:300]})
        query = sample.once(find_query, self.strict).value
        if query is None:
            return Score(None, "format", {"reason": sample.once(find_query, self.strict).reason})
        if len(query) > MAX_QUERY_CHARS:
            return Score(None, "wrong", {"reason": "query too long"})
        arguments = (query, databases, expected_query, rows, ordered, self.seconds)
        return Task("rewards.components.sql:judge_all", arguments)

    def verdict(self, sample: Sample, result: Any) -> Score:
        status, reason = result
        query = sample.once(find_query, self.strict).value or ""
        info = {"extracted": query[:200]} | ({"reason": reason} if reason else {})
        return Score(self.high if status == "ok" else None, status, info)


def find_query(text: str, strict: bool = True) -> Extracted:
    """Return the query from `<answer>`, else the last fenced block, else a bare query; or the reason why there is none.

    `strict` rejects a second answer tag or fenced block. Texts with surrogates or NULs are rejected: SQLite cannot read them.
    """
    final = final_text(text)
    if final.value is None:
        return final
    body = final.value
    if "<answer>" in body or "</answer>" in body:
        tagged: Extracted = tagged_answer(text, strict)
        if tagged.value is None:
            return Extracted(None, tagged.reason)
        body = tagged.value
    parts = body.split("```")
    if len(parts) > 1:
        if len(parts) % 2 == 0:
            return Extracted(None, "unterminated")
        if strict and len(parts) > 3:
            return Extracted(None, "several blocks")
        body = parts[-2]
        first, newline, rest = body.partition("\n")
        body = rest if newline and first.strip().lower() in ("", "sql", "sqlite", "sqlite3") else body
        body = body.removeprefix("sql ")
    elif not body.lower().startswith(_BEGINNINGS):
        return Extracted(None, "no query")
    body = body.strip()
    if not body:
        return Extracted(None, "blank")
    if "\x00" in body or any("\ud800" <= character <= "\udfff" for character in body):
        return Extracted(None, "not text")
    return Extracted(body)


def _row(sample: Sample, root: str) -> tuple[list[list[str | None]], str | None, list[list[Any]] | None, bool | None]:
    """Return databases as pairs (script, path), the expected query or rows, and whether the order counts."""
    paths, scripts = column(sample, "db_path", "database"), column(sample, "setup", "sql_context", "context", "schema")
    databases: list[list[str | None]] = []
    if paths is not None:
        databases = [[None, str(Path(root) / str(path))] for path in (paths if isinstance(paths, list) else [paths])]
    elif scripts is not None:
        databases = [[str(script), None] for script in (scripts if isinstance(scripts, list) else [scripts])]
    if not databases:
        raise ValueError("no database: give SQL that fills one in column `setup`, or a file in `db_path`")
    rows = column(sample, "expected_rows", "rows")
    rows = json.loads(rows) if isinstance(rows, str) else rows
    if rows is not None and not (isinstance(rows, list) and all(isinstance(row, list) for row in rows)):
        raise ValueError("column `expected_rows` must be a list of lists, or JSON text of one")
    query = sample.reference if sample.reference is not None else column(sample, "sql", "query")
    if rows is not None:
        query = None
    elif not isinstance(query, str) or not query.strip():
        raise ValueError(f"no expected query: {query!r}; give SQL in `reference`, or rows in `expected_rows`"[:300])
    ordered = column(sample, "ordered")
    return databases, query, rows, ordered if isinstance(ordered, bool) else None
