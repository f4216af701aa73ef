"""Queries that are right when their result is."""

from rewards.components.sql import SqlAccuracy, SqlFormat
from rewards.preset import Preset, Weighted

__all__ = ["sql_exec"]


def sql_exec(
    *,
    format_weight: float = 0.1,
    strict: bool = True,
    seconds: float = 1.0,
    deadline: float = 5.0,
    root: str = ".",
    allow_no_rows: bool = False,
) -> Preset:
    """One SQLite query whose rows are those of the expected query.

    Formula: accuracy + 0.1 format. accuracy is 1 when the query's rows are the expected ones on every database of the
    row: in order where the expected query ends with ORDER BY, else as a multiset; numbers by value to nine digits,
    columns by place. format is 1 for one query, in a fenced block, in answer tags or alone. Table-valued functions
    (json_each) are not available.
    Range: [0, 1.1].
    Checker: accuracy.
    Columns: `setup`, `sql_context`, `context` or `schema`: SQL that makes and fills a database in memory, or a list of
    such scripts; or `db_path` or `database`: a file, opened read-only, or a list of files. `reference`, `answer`,
    `solution`, `ground_truth`, `sql` or `query`: the expected query; or `expected_rows`: a list of rows, or JSON text,
    with `ordered` if their order counts.
    Source: execution accuracy of Spider (1809.08887) and BIRD (2305.03111), where sets hide repeated rows; several
    databases a query as in test-suite accuracy (2010.02840).
    Hacks: the expected values as constants: a query that reads no table is wrong, and constants beside a table still
    pass, so give several databases. Empty results: rows that expect none are an `error` unless allowed. Repeated rows:
    multisets count them. Writing, other files, pragmas, sqlite_master: refused by the authorizer. Endless recursion and
    huge texts: a clock, caps on rows and bytes, and a worker process with a deadline.

    Args:
        format_weight: weight of writing exactly one query; 0 leaves it out.
        strict: refuse several fenced blocks or answer tags.
        seconds: for the script, the expected query and the model's query, each.
        deadline: seconds for all databases of a row, after which the worker is replaced.
        root: directory that relative database paths start from.
        allow_no_rows: accept rows of the data set whose expected query gives no rows.

    >>> from rewards import build_samples, load
    >>> setup = "CREATE TABLE t (name, age); INSERT INTO t VALUES ('Ann', 30), ('Bo', 20)"
    >>> fenced = "```sql\\n{}\\n```"
    >>> queries = ["SELECT name FROM t WHERE age > 25", "SELECT name FROM t", "SELECT 'Ann'", "DELETE FROM t"]
    >>> samples = build_samples(
    ...     ["Who is over 25?"] * 4,
    ...     [fenced.format(query) for query in queries],
    ...     setup=[setup] * 4,
    ...     reference=["SELECT name FROM t WHERE age >= 30"] * 4,
    ... )
    >>> load("sql-exec").score(samples).totals
    [1.1, 0.1, 0.1, 0.1]
    """
    accuracy = SqlAccuracy(strict=strict, seconds=seconds, deadline=deadline, root=root, allow_no_rows=allow_no_rows)
    components = [Weighted(accuracy, 1.0)]
    if format_weight:
        components.append(Weighted(SqlFormat(strict=strict), format_weight))
    return Preset(components, name="sql-exec", checker="accuracy")
