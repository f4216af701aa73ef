"""Presets for structured completions: JSON that follows a schema, tool calls, and SQL."""

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
    """One JSON value that follows a schema and equals the reference, if the row has one.

    Formula: accuracy + 0.1 format. accuracy is 1 if the value follows the schema and equals the reference, if there is
    one (numbers by value, keys in any order); with `partial`, a value that follows the schema but differs earns the F1
    over its (path, leaf) pairs; format is 1 for exactly one JSON value, which is an object or array if the schema allows
    nothing else.
    Range: [0, 1.1].
    Checker: accuracy.
    Columns: `schema` or `json_schema`: JSON text (in nested columns, Arrow would add nulls), also inside OpenAI's
    `response_format`; `reference`, `answer`, `solution` or `ground_truth`, optional: the expected value as JSON text.
    Source: JSON Schema 2020-12 (older drafts by `$schema`), with the jsonschema library.
    Attacks: filler that follows the schema (`{}` if nothing is required, empty strings): not detected without a reference,
    so add one, or `required`, `minLength` and `additionalProperties: false` in the schema. A bare number or text if the
    schema requires an object: no format. Several values, in sequence or under a repeated key: rejected. NaN and infinities,
    which satisfy every number: not JSON. Completions that make the schema's patterns backtrack: `timeout` in a worker
    process.

    Args:
        schema: JSON text of the schema, for rows without one.
        format_weight: weight of the format; 0 removes the component.
        partial: whether values that follow the schema and are partly right earn partial credit.
        strict: reject text after the value, further fenced blocks, and braces before an unfenced value.
        deadline: time limit of one check in seconds.

    Raises:
        PresetError: jsonschema is not installed, or `schema` is not a JSON Schema.

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
    """The expected tool calls, with partial credit for right names, parameters and values.

    Formula: accuracy + format. accuracy = 6 (names + parameters + values) / (1 + n + m) - 3 over the best matching of
    n expected calls with m parameters in total: names is the Jaccard index of the tool names, parameters sums the Jaccard
    index of the parameter names over expected calls, values counts equal values. format is 1 for calls that can be
    parsed, or for text without calls if none is expected.
    Range: [-3, 4].
    Checker: accuracy, `ok` only if the calls are exactly the expected ones.
    Columns: `reference`, `answer`, `solution`, `ground_truth`, `tool_calls` or `calls`: JSON text of a list of
    {"name", "arguments"}, also nested under "function" as in OpenAI's API; `[]` if no call is expected.
    Source: ToolRL (2504.13958, section 3.3). Differences: names are counted with repetition; only calls with equal names
    are matched; thinking tags are not part of the format.
    Attacks: the same call repeated, or a call of every tool: names are counted with repetition, and more than 64 calls are
    no answer. All possible parameters: they lower the Jaccard index. A key with several values: rejected. Blank text if no
    call is expected: no answer. A call in the thinking block: ignored.

    Args:
        format: `hermes` (`<tool_call>` blocks of JSON), `openai` (`tool_calls` of the completion's messages), `json` (a
            list or object), or `auto`, which detects the format.
        format_weight: weight of the format; 0 removes the component.

    Raises:
        PresetError: SciPy is not installed.

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
    *, format_weight: float = 0.1, strict: bool = True, seconds: float = 1.0, deadline: float = 5.0, root: str = "."
) -> Preset:
    """One SQLite query that returns the rows of the expected query.

    Formula: accuracy + 0.1 format. accuracy is 1 if the query returns the expected rows on every database of the dataset
    row: in order if the expected query ends with ORDER BY, else as a multiset; numbers by value to nine digits, columns by
    position. format is 1 for one query, in a fenced block, in answer tags or alone. Table-valued functions (json_each) are
    not available.
    Range: [0, 1.1].
    Checker: accuracy.
    Columns: `setup`, `sql_context`, `context` or `schema`: SQL that creates and fills a database in memory, or a list of
    such scripts; or `db_path` or `database`: a file, opened read-only, or a list of files. `reference`, `answer`,
    `solution`, `ground_truth`, `sql` or `query`: the expected query; or `expected_rows`: a list of rows, or JSON text,
    with `ordered` if their order counts.
    Source: execution accuracy of Spider (1809.08887) and BIRD (2305.03111), whose sets hide repeated rows; several
    databases per query as in test-suite accuracy (2010.02840).
    Attacks: the expected values as constants: a query that reads no table is wrong; constants in a query of a table pass, so
    provide several databases. Empty results: dataset rows that expect none are an `error`. Repeated rows: counted in the
    multiset. Writing, other files, pragmas, sqlite_master: denied by the authorizer. Endless recursion and huge texts: a
    time limit, limits of rows and bytes, and a worker process with a deadline.

    Args:
        format_weight: weight of the format; 0 removes the component.
        strict: reject several fenced blocks or answer tags.
        seconds: time limit for each of the script, the expected query and the model's query.
        deadline: seconds for all databases of a row, after which the worker is replaced.
        root: folder of relative database paths.

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
