"""Assertions of test files (MBPP, HumanEval) as calls whose expected values stay outside the sandbox."""

import ast
from collections.abc import Iterator, Sequence

from rewards.components.code.calls import Call
from rewards.components.code.literals import WRAPPERS, NotLiteral, literal

__all__ = ["calls_from_asserts"]

_REL_TOL = 1e-9  # default of math.isclose


def calls_from_asserts(tests: str | Sequence[str], function: str | None = None) -> tuple[str, list[Call]]:
    """The function's name and its calls.

    Understood: `assert f(…) == value` in either order with `set`, `sorted`, `len` and the like around either side, `is
    True/False/None`, `abs(f(…) - value) < eps`, `math.isclose`, `assert f(…)`, `assert not f(…)`, `and` of these, and
    HumanEval's `def check(candidate):` around them.

    Args:
        tests: one source text, or a list of them.
        function: by default the one function that the assertions call.

    Raises:
        ValueError: an assertion whose expected value cannot stay outside, no assertion at all, or more than one
            function. The whole row is refused: a part of its tests would be an easier task.
    """
    source = tests if isinstance(tests, str) else "\n".join(tests)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as failure:
        raise ValueError(f"tests are no Python: {failure}"[:200]) from failure
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
    """Turns assertions into calls, all of one function."""

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
            case ast.Compare(left=left, ops=[ast.Lt() | ast.LtE()], comparators=[limit]):
                yield self._distance(left, float(literal(limit)))
            case ast.Call(func=ast.Name(id="isclose") | ast.Attribute(attr="isclose"), args=[result, expected]):
                yield self._isclose(test, result, expected)
            case _:
                yield self._call(test, True, truth=True)

    def _distance(self, left: ast.expr, limit: float) -> Call:
        match left:
            case ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=first, op=ast.Sub(), right=second)]):
                result, expected = (first, second) if self._holds_call(first) else (second, first)
                return self._call(result, literal(expected), absolute=limit)
        raise NotLiteral("a comparison other than of a distance")

    def _isclose(self, test: ast.Call, result: ast.expr, expected: ast.expr) -> Call:
        if not self._holds_call(result):
            result, expected = expected, result
        given = {keyword.arg: float(literal(keyword.value)) for keyword in test.keywords}
        value = literal(expected)
        return self._call(
            result, value, absolute=max(given.get("abs_tol", 0.0), given.get("rel_tol", _REL_TOL) * abs(float(value)))
        )

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
            raise NotLiteral(f"calls {name} beside {self.function}")
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
