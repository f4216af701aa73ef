"""Does the query give the expected rows?"""

import json
from dataclasses import dataclass
from typing import Any

from rewards.components.final_text import column, final_text
from rewards.components.sql_worker import MAX_QUERY_CHARS
from rewards.extract import Extracted, tagged_answer
from rewards.isolation import IsolatedComponent, Task
from rewards.protocol import Context, ItemComponent, Sample, Score

__all__ = ["SqlAccuracy", "SqlFormat", "find_query"]

_BEGINNINGS = ("select", "with", "values")


@dataclass(frozen=True, kw_only=True)
class SqlFormat(ItemComponent):
    """1 when the completion holds exactly one query, in a fenced block, in answer tags or alone, else 0."""

    name: str = "format"
    strict: bool = True

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        found, reason = sample.once(find_query, self.strict)
        return Score(self.high) if found is not None else Score(None, "format", {"reason": reason})


@dataclass(frozen=True, kw_only=True)
class SqlAccuracy(IsolatedComponent):
    """1 when the query's rows are the expected ones on every database of the row, else 0.

    Rows are compared as a list where the expected query ends with ORDER BY (or column `ordered` says so), else as a
    multiset. Queries that cannot be run, or write, are `wrong`; expected queries that cannot, or give no rows, `error`.
    `root` is the directory that relative database paths start from.
    """

    name: str = "accuracy"
    strict: bool = True
    seconds: float = 1.0
    root: str = "."
    allow_no_rows: bool = False

    def task(self, sample: Sample, ctx: Context) -> Task | Score:
        try:
            databases, expected_query, rows, ordered = _row(sample, self.root)
        except ValueError as failure:
            return Score(None, "error", {"reason": str(failure)[:300]})
        found, reason = sample.once(find_query, self.strict)
        if found is None:
            return Score(None, "format", {"reason": reason})
        if len(found) > MAX_QUERY_CHARS:
            return Score(None, "wrong", {"reason": "query too long"})
        arguments = (found, databases, expected_query, rows, ordered, self.seconds, self.allow_no_rows)
        return Task("rewards.components.sql_worker:judge_all", arguments)

    def verdict(self, sample: Sample, result: Any) -> Score:
        status, reason = result
        query = sample.once(find_query, self.strict)[0] or ""
        info = {"extracted": query[:200]} | ({"reason": reason} if reason else {})
        return Score(self.high if status == "ok" else None, status, info)


def find_query(text: str, strict: bool = True) -> tuple[str | None, str | None]:
    """The query and None, or None and the reason: the `<answer>`, else the last fenced block, else a bare query.

    `strict` refuses a second answer tag or fenced block. Surrogates and NULs, which SQLite cannot read, are no query.
    """
    final = final_text(text)
    if final.value is None:
        return None, final.reason
    body = final.value
    if "<answer>" in body or "</answer>" in body:
        found: Extracted = tagged_answer(text, strict)
        if found.value is None:
            return None, found.reason
        body = found.value
    parts = body.split("```")
    if len(parts) > 1:
        if len(parts) % 2 == 0:
            return None, "unterminated"
        if strict and len(parts) > 3:
            return None, "several blocks"
        body = parts[-2]
        first, newline, rest = body.partition("\n")
        body = rest if newline and first.strip().lower() in ("", "sql", "sqlite", "sqlite3") else body
        body = body.removeprefix("sql ")
    elif not body.lower().startswith(_BEGINNINGS):
        return None, "no query"
    body = body.strip()
    if not body:
        return None, "blank"
    if "\x00" in body or any("\ud800" <= character <= "\udfff" for character in body):
        return None, "not text"
    return body, None


def _row(sample: Sample, root: str) -> tuple[list[list[str | None]], str | None, list[list[Any]] | None, bool | None]:
    """Databases as pairs (script, path), the expected query or rows, and whether the order counts."""
    paths, scripts = column(sample, "db_path", "database"), column(sample, "setup", "sql_context", "context", "schema")
    databases: list[list[str | None]] = []
    if paths is not None:
        from pathlib import Path

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
