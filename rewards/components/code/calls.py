"""Parse the calls that test a generated function, from plain data or from assertions of test files (MBPP, HumanEval).

Values in test files are evaluated here, so only literals and a few harmless expressions are accepted. Expected values never
enter the sandbox.
"""

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewards.components.code.stdio import paired, unwrapped
from rewards.components.json_values import same_value

_MAX_ITEMS = 1_000_000
_MAX_BITS = 100_000

# Functions that tests apply to a result or an expected value; they are called outside the sandbox, on plain values.
WRAPPERS: dict[str, Callable[..., Any]] = {
    "set": set,
    "frozenset": frozenset,
    "sorted": sorted,
    "list": list,
    "tuple": tuple,
    "len": len,
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "round": round,
    "abs": abs,
    "sum": sum,
}


class NotLiteral(ValueError):
    """An expression whose value is not known without running code."""


def literal(node: ast.expr) -> Any:
    """Return the value of a literal, of arithmetic on literals, or of one of `WRAPPERS` applied to literals.

    Raises:
        NotLiteral: `node` is another expression, or its value is huge.
    """
    try:
        return _value(node)
    except NotLiteral:
        raise
    except Exception as failure:
        raise NotLiteral(f"{type(failure).__name__}: {failure}"[:200]) from failure


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
            return value
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item) for item in items)
        case ast.Set(elts=items):
            return {_value(item) for item in items}
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_value(k): _value(v) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return +_value(operand)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            return _arithmetic(_value(left), operator, _value(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in WRAPPERS:
            return WRAPPERS[name](*(_value(arg) for arg in args))
    raise NotLiteral(f"`{ast.unparse(node)}` is not a literal"[:200])


def _arithmetic(left: Any, operator: ast.operator, right: Any) -> Any:
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    match operator:
        case ast.Add() if numbers or type(left) is type(right):
            return left + right
        case ast.Sub() if numbers:
            return left - right
        case ast.Mult() if numbers or _size(left, right) <= _MAX_ITEMS:
            return left * right
        case ast.Div() if numbers:
            return left / right
        case ast.FloorDiv() if numbers:
            return left // right
        case ast.Mod() if numbers:
            return left % right
        case ast.Pow() if numbers and (isinstance(left, float) or left.bit_length() * abs(right) <= _MAX_BITS):
            return left**right
    raise NotLiteral("arithmetic on values that are not numbers, or with a huge result")


def _size(left: Any, right: Any) -> int:
    """Return the items of a repeated sequence; for other operands a number above the limit."""
    sequence, count = (right, left) if isinstance(left, int) else (left, right)
    if not isinstance(count, int) or not isinstance(sequence, str | list | tuple):
        return _MAX_ITEMS + 1
    return len(sequence) * max(0, count)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call and the value that it must return.

    `wrappers` are applied to the returned value, first to last, before the comparison. `truth` compares only truth values.
    `absolute` is an absolute tolerance. `from_json` says that the expected value comes from JSON, so that tuples equal lists.
    `alternatives` are further accepted values.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    expected: Any
    wrappers: tuple[str, ...] = ()
    truth: bool = False
    absolute: float = 0.0
    from_json: bool = False
    alternatives: tuple[Any, ...] = ()

    def accepts(self, value: Any, tolerance: float = 0.0) -> bool:
        """Return whether a plain value from the sandbox is accepted; `tolerance` is relative to max(1, |expected|)."""
        try:
            for wrapper in self.wrappers:
                value = WRAPPERS[wrapper](value)
            if self.truth:
                return bool(value) is self.expected
            if self.absolute:
                return not isinstance(value, bool) and bool(abs(value - self.expected) <= self.absolute)
            return any(
                same_value(right, value, tolerance=tolerance, tuples_are_lists=self.from_json)
                for right in (self.expected, *self.alternatives)
            )
        except Exception:
            return False  # the value has another type than the test expects


def parse_calls(reference: Any, function: str | None = None) -> tuple[str, list[Call]]:
    """Return the function's name and its calls.

    Forms: {function, calls: [{args, kwargs, expected}]}; {fn_name, inputs, outputs}; a list of {input, output} with one
    JSON value per line; assertions as text or a list of texts (see `calls_from_asserts`); any of these as JSON, and inside
    {test_cases: …}.

    Args:
        reference: the row's tests.
        function: name from another column, for tests that do not contain it.

    Raises:
        ValueError: another form, no calls, no name, or assertions whose expected values would have to enter the sandbox.
    """
    if not isinstance(reference, str) or reference.lstrip()[:1] in ("{", "["):
        reference, named = unwrapped(reference)
        function = function or named
    if isinstance(reference, str) or (isinstance(reference, list) and reference and isinstance(reference[0], str)):
        return calls_from_asserts(reference, function)
    if isinstance(reference, Mapping) and "calls" in reference:
        name, calls = reference.get("function", function), []
        for row in reference["calls"]:
            if "expected" not in row:
                raise ValueError(f"a call needs `args` and `expected`, got {row!r}"[:200])
            args, kwargs = tuple(row.get("args") or ()), row.get("kwargs") or {}
            calls.append(Call(args=args, kwargs=kwargs, expected=row["expected"], from_json=True))
    elif isinstance(reference, Mapping) and "inputs" in reference:
        name, calls = reference.get("fn_name", function), []
        for args, output in paired(reference):
            # These datasets wrap some outputs into a list of one element, others not.
            others = tuple(output) if isinstance(output, list) and len(output) == 1 else ()
            calls.append(Call(args=tuple(args), expected=output, from_json=True, alternatives=others))
    elif isinstance(reference, list) and all(isinstance(row, Mapping) for row in reference):
        name = function or next((row["fn_name"] for row in reference if row.get("fn_name")), None)
        calls = []
        for row in reference:
            kind = row.get("type", row.get("testtype", "functional"))
            if kind not in ("functional", "function_call"):
                raise ValueError(f"a test of type {kind!r} calls no function: use the preset code-stdio"[:200])
            args = tuple(json.loads(line) for line in str(row["input"]).splitlines() if line.strip())
            calls.append(Call(args=args, expected=json.loads(str(row["output"])), from_json=True))
    else:
        raise ValueError("no calls: give {function, calls: [{args, expected}]} or assertions")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"no function name: give `function` or a column `entry_point`, got {name!r}"[:200])
    if not calls:
        raise ValueError("no calls: a row without tests accepts everything")
    return name, calls


_REL_TOL = 1e-9  # default of math.isclose


def calls_from_asserts(tests: str | Sequence[str], function: str | None = None) -> tuple[str, list[Call]]:
    """Return the function's name and its calls.

    Accepts `assert f(…) == value` in either order with one of `WRAPPERS` around either side, `is True/False/None`,
    `abs(f(…) - value) < eps`, `math.isclose`, `assert f(…)`, `assert not f(…)`, `and` of these, and HumanEval's
    `def check(candidate):` or pytest's `def test_…():` around them.

    Args:
        tests: source text, or a list of source texts.
        function: name of the function; by default the function that the assertions call.

    Raises:
        ValueError: the expected value of an assertion would have to enter the sandbox, there is no assertion, or the
            assertions call several functions. A part of the tests is never used alone: it would be an easier task.
    """
    source = tests if isinstance(tests, str) else "\n".join(tests)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as failure:
        raise ValueError(f"tests are not Python: {failure}"[:200]) from failure
    reader = _Reader(function)
    calls = [call for expression in _assertions(tree.body) for call in reader.read(expression)]
    if not calls or reader.function is None:
        raise ValueError("no assertion that calls a function")
    return reader.function, calls


def _assertions(body: Sequence[ast.stmt]) -> Iterator[ast.expr]:
    for statement in body:
        match statement:
            case ast.Assert(test=ast.Constant(value=value)) if value:
                continue
            case ast.Assert(test=test):
                yield test
            case ast.FunctionDef(name="check", args=ast.arguments(args=[ast.arg(arg="candidate")])):
                yield from _assertions(statement.body)
            case ast.FunctionDef(name=name, args=ast.arguments(args=[])) if name.startswith("test"):
                yield from _assertions(statement.body)
            case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Import() | ast.ImportFrom():
                continue
            case ast.Expr(value=ast.Call(func=ast.Name(id="check"))):
                continue
            case ast.Assign(targets=[ast.Name(id="METADATA")]):
                continue
            case _:
                raise _refused(statement)


def _refused(node: ast.AST) -> ValueError:
    return ValueError(
        f"cannot be tested with its expected value outside the sandbox: `{ast.unparse(node)}`"[:240]
        + "; give calls with `args` and `expected`"
    )


class _Reader:
    """Converts assertions to calls of a single function."""

    def __init__(self, function: str | None) -> None:
        self.function = function

    def read(self, test: ast.expr) -> list[Call]:
        try:
            return list(self._read(test))
        except NotLiteral as failure:
            raise _refused(test) from failure

    def _read(self, test: ast.expr) -> Iterator[Call]:
        match test:
            case ast.BoolOp(op=ast.And(), values=parts):
                for part in parts:
                    yield from self._read(part)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                yield self._call(inner, False, truth=True)
            case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
                result, expected = (left, right) if self._holds_call(left) else (right, left)
                yield self._call(result, literal(expected))
            case ast.Compare(
                left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=left, op=ast.Sub(), right=right)]),
                ops=[ast.Lt() | ast.LtE()],
                comparators=[limit],
            ):
                result, expected = (left, right) if self._holds_call(left) else (right, left)
                yield self._call(result, literal(expected), absolute=float(literal(limit)))
            case ast.Call(func=ast.Name(id="isclose") | ast.Attribute(attr="isclose"), args=[left, right]):
                result, expected = (left, right) if self._holds_call(left) else (right, left)
                limits = {keyword.arg: float(literal(keyword.value)) for keyword in test.keywords}
                value = literal(expected)
                distance = limits.get("rel_tol", _REL_TOL) * abs(float(value))
                yield self._call(result, value, absolute=max(limits.get("abs_tol", 0.0), distance))
            case _:
                yield self._call(test, True, truth=True)

    def _holds_call(self, node: ast.expr) -> bool:
        inner, _ = self._unwrapped(node)
        return isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id not in WRAPPERS

    def _unwrapped(self, node: ast.expr) -> tuple[ast.expr, tuple[str, ...]]:
        wrappers: list[str] = []
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WRAPPERS:
            if len(node.args) != 1 or node.keywords or node.func.id == self.function:
                break
            wrappers.insert(0, node.func.id)
            node = node.args[0]
        return node, tuple(wrappers)

    def _call(self, node: ast.expr, expected: object, *, truth: bool = False, absolute: float = 0.0) -> Call:
        node, wrappers = self._unwrapped(node)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise NotLiteral("not a call")
        name = node.func.id
        if self.function is None:
            self.function = name
        if name not in (self.function, "candidate"):
            raise NotLiteral(f"calls {name} as well as {self.function}")
        if any(keyword.arg is None for keyword in node.keywords):
            raise NotLiteral("unpacked arguments")
        return Call(
            args=tuple(literal(arg) for arg in node.args),
            kwargs={str(keyword.arg): literal(keyword.value) for keyword in node.keywords},
            expected=expected,
            wrappers=wrappers,
            truth=truth,
            absolute=absolute,
        )
