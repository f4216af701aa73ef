"""Completions that machines read: JSON that follows a schema, tool calls, and SQL."""

from rewards.components.json_schema import JsonFormat, JsonSchema
from rewards.components.sql import SqlAccuracy, find_query
from rewards.components.tags import Format
from rewards.components.tool_call import ToolCallAccuracy, ToolCallFormat
from rewards.preset import Preset, weighted


def json_schema(
    *,
    schema: str | None = None,
    format_weight: float = 0.1,
    partial: bool = False,
    strict: bool = True,
    deadline: float = 2.0,
) -> Preset:
    """One JSON value that follows a schema and, where the row has a reference, equals it.

    Formula: accuracy + 0.1 format. accuracy is 1 when the value follows the schema and equals the reference, if there
    is one (numbers by value, keys in any order); with `partial`, a value that follows the schema but differs earns the
    F1 over its (path, leaf) pairs; format is 1 when there is exactly one JSON value to read, no
    bare text or number where the schema asks for an object or array.
    Range: [0, 1.1].
    Checker: accuracy.
    Columns: `schema` or `json_schema`: JSON text (nested columns are filled with nulls by Arrow), OpenAI's
    `response_format` is unwrapped; `reference`, `answer`, `solution` or `ground_truth`: the expected value as JSON
    text, or nothing.
    Source: JSON Schema 2020-12 (older drafts by `$schema`), as checked by the jsonschema library.
    Hacks: filler that follows the schema (`{}` where nothing is required, empty strings): give a reference, or write
    `required`, `minLength` and `additionalProperties: false` into the schema. A bare number or text where the
    schema asks for an object: no format. Several values, one after the other or under one repeated key: refused. NaN and
    infinities, which pass as any number: not JSON. Completions that make the schema's own patterns backtrack: judged in a
    worker process, `timeout`.

    Args:
        schema: JSON text of the schema for rows that have none.
        format_weight: weight of readable JSON of the schema's kind; 0 leaves it out.
        partial: credit for values that follow the schema and are partly right.
        strict: refuse text after the value, further fenced blocks, and braces before an unfenced value.
        deadline: seconds that one check may take.

    Raises:
        PresetError: jsonschema is not installed, or `schema` is no JSON Schema.

    >>> from rewards import build_samples, load
    >>> schema = '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}'
    >>> texts = ['{"age": 7}', 'It is\\n```json\\n{"age": 8}\\n```', '{"age": "7"}', '{"age": 7, "age": 8}']
    >>> samples = build_samples(["How old?"] * 4, texts, schema=[schema] * 4, reference=['{"age": 7}'] * 4)
    >>> evaluation = load("json-schema").score(samples)
    >>> evaluation.totals, evaluation.statuses["accuracy"]
    ([1.1, 0.1, 0.1, 0.0], ['ok', 'wrong', 'wrong', 'format'])
    """
    accuracy = JsonSchema(schema=schema, partial=partial, strict=strict, deadline=deadline)
    layout = JsonFormat(schema=schema, strict=strict)
    return Preset(weighted((accuracy, 1.0), (layout, format_weight)), checker="accuracy")


def tool_call(*, format: str = "auto", format_weight: float = 1.0) -> Preset:
    """The expected tool calls, with credit for right names, parameters and values.

    Formula: accuracy + format. accuracy = 6 (names + parameters + values) / (1 + n + m) - 3 over the best matching of
    n expected calls with m parameters in all: names is the Jaccard index of the tool names, parameters sums the Jaccard
    index of the parameter names over expected calls, values counts the equal ones. format is 1 for calls that can be
    read, or for none where none is expected.
    Range: [-3, 4].
    Checker: accuracy, `ok` only when every call is right and there is none too many.
    Columns: `reference`, `answer`, `solution`, `ground_truth`, `tool_calls` or `calls`: JSON text of a list of
    {"name", "arguments"}, OpenAI's nesting under "function" included; `[]` where no call is wanted.
    Source: ToolRL (2504.13958, section 3.3). Different here: names are counted with repetition; only calls of the same
    name are matched; thinking tags are not part of the format.
    Hacks: the same call over and over, or a call to every tool: names are counted with repetition, and more than 64
    calls are no answer. Every parameter there is: lowers the Jaccard index. One key with several values: refused.
    Saying nothing where no call is wanted: blank text is no answer. A call in the thinking block does not count.

    Args:
        format: `hermes` (`<tool_call>` blocks of JSON), `openai` (`tool_calls` of the completion's messages), `json` (a
            list or object), or `auto`, whichever is used.
        format_weight: weight of calls that can be read; 0 leaves it out.

    Raises:
        PresetError: SciPy, which finds the best matching, is not installed.

    >>> from rewards import build_samples, load
    >>> right = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>'
    >>> texts = [right, right.replace("Rome", "Oslo"), "It will rain.", "<tool_call>weather"]
    >>> calls = '[{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]'
    >>> evaluation = load("tool-call").score(build_samples(["Weather?"] * 4, texts, reference=[calls] * 4))
    >>> evaluation.totals, evaluation.statuses["accuracy"]
    ([4.0, 2.5, -3.0, -3.0], ['ok', 'wrong', 'wrong', 'format'])
    """
    return Preset(
        weighted((ToolCallAccuracy(format=format), 1.0), (ToolCallFormat(format=format), format_weight)),
        checker="accuracy",
    )


def sql_exec(
    *,
    format_weight: float = 0.1,
    strict: bool = True,
    seconds: float = 1.0,
    deadline: float = 5.0,
    root: str = ".",
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
    pass, so give several databases. Empty results: rows that expect none are an `error`. Repeated rows:
    multisets count them. Writing, other files, pragmas, sqlite_master: refused by the authorizer. Endless recursion and
    huge texts: a clock, caps on rows and bytes, and a worker process with a deadline.

    Args:
        format_weight: weight of writing exactly one query; 0 leaves it out.
        strict: refuse several fenced blocks or answer tags.
        seconds: for the script, the expected query and the model's query, each.
        deadline: seconds for all databases of a row, after which the worker is replaced.
        root: directory that relative database paths start from.

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
    accuracy = SqlAccuracy(strict=strict, seconds=seconds, deadline=deadline, root=root)
    return Preset(
        weighted((accuracy, 1.0), (Format(scan=find_query, strict=strict), format_weight)), checker="accuracy"
    )
