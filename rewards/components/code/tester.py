r"""Tests that are programs themselves: loops, helpers, `!=`, `in`, `round(f(x), 5) ==`, `pytest.raises`.

They run in a sandbox of their own, apart from the generated program: there the function under test is a stand-in that writes
down what it is called with. The program answers these calls in another sandbox, as for plain assertions, and the tests run
again with its answers. So no expected value, and nothing that decides, is ever where the program is. Where later calls
depend on earlier answers this goes on for some rounds.
"""

import ast
import builtins
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rewards.components.code.values import ENCODE_AND_DECODE

_ROUNDS = 12
_KNOWN = frozenset(dir(builtins)) | {"__name__", "candidate"}


@dataclass(frozen=True, kw_only=True)
class ProgramTests:
    """Source of tests, of what they need beside themselves, and the name of the function under test."""

    function: str
    source: str
    before: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Test functions and statements that passed, of how many, and why the first did not; None passed where nobody can tell."""

    passed: int | None
    total: int = 0
    reason: str = ""


def read_tests(tests: str | Sequence[str], function: str | None, setup: str = "", prompt: str = "") -> ProgramTests:
    """The tests of a row as a program.

    Args:
        tests: one source text, or a list of them.
        function: name of the function under test; needed where there is no single one that the tests call by its name.
        setup: source that stands in front of tests and program.
        prompt: what the model was asked; helpers that the tests use and do not define are taken from its Python source.

    Raises:
        ValueError: no Python, no function to test, or names that nothing but the program under test could define: it
            could define them to its liking.
    """
    source = tests if isinstance(tests, str) else "\n".join(tests)
    try:
        tree = ast.parse(source)
        given = _definitions(setup)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as failure:
        raise ValueError(f"tests are no Python: {failure}"[:200]) from failure
    missing = _used(tree) - _defined(tree) - _KNOWN - given.keys()
    helpers = _definitions(prompt, strict=False)
    if function is None:
        called = sorted(missing - helpers.keys())
        if len(called) != 1:
            raise ValueError(
                f"no function name: give a column `entry_point`; the tests call {', '.join(called) or 'none'}"
            )
        function = called[0]
    wanted, before = missing - {function}, [setup] if setup else []
    if unknown := sorted(wanted - helpers.keys()):
        raise ValueError(f"the tests use {', '.join(unknown)}, which neither they nor the setup nor the prompt define")
    if wanted:
        before += [text for name, text in helpers.items() if name != function]
    return ProgramTests(function=function, source=source, before="\n".join(before))


def _definitions(source: str, strict: bool = True) -> dict[str, str]:
    """Imports, functions, classes and constants at the top of a source, each name with its statement's text."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        if strict:
            raise
        return {}
    return {name: ast.unparse(statement) for statement in tree.body for name in _defined(ast.Module([statement], []))}


def _defined(tree: ast.AST) -> set[str]:
    """Every name that is bound anywhere."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name.partition(".")[0])
    return names


def _used(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def run_tests(
    tests: ProgramTests,
    run_tester: Callable[[str], str | None],
    answer_calls: Callable[[list[Any]], list[Any]],
) -> Verdict:
    """
    Args:
        run_tester: runs `TESTER` with this request on stdin; its output, or None where it did not end by itself.
        answer_calls: the program's answers to calls (encoded arguments), in order: {"value": …} or {"raised": text}; fewer
            where it did not get so far.

    Raises:
        ValueError: the tests cannot be run by themselves, whatever the program is.
    """
    request: dict[str, Any] = {"function": tests.function, "before": tests.before, "source": tests.source}
    known: list[Any] = []
    for _ in range(_ROUNDS):
        printed = run_tester(json.dumps(request | {"answers": known}))
        try:
            told = json.loads((printed or "").splitlines()[-1])
        except (ValueError, IndexError):
            if known:  # with the program's answers they run out of time
                return Verdict(passed=None, reason="the tests did not end")
            raise ValueError("the tests do not end, or say nothing") from None
        if "broken" in told:
            raise ValueError(f"the tests cannot be run: {told['broken']}")
        if not told["open"]:
            failed = told["failed"]
            return Verdict(passed=told["units"] - len(failed), total=told["units"], reason=failed[0] if failed else "")
        calls = told["calls"]
        answers = answer_calls(calls)
        known = [[call, answers[at] if at < len(answers) else None] for at, call in enumerate(calls)]
    return Verdict(passed=None, reason=f"the tests still had new calls to make after {_ROUNDS} rounds")


TESTER = """
import ast, json, os, random, re, sys, types

answers_out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogatepass")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
request = json.loads(sys.stdin.read())
sys.stdin = open(os.devnull)
random.seed(0)
calls, state = [], {"open": False}


class NoAnswer(BaseException):
    pass


class Anything:
    "Stands for a value that is not known yet: whatever is asked of it goes on."

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args, **kwargs):
        return Anything()

    __hash__ = object.__hash__
    __bool__ = __contains__ = lambda self, *rest: True
    __len__ = __int__ = __index__ = lambda self: 1
    __float__ = lambda self: 1.0
    __iter__ = lambda self: iter((Anything(), Anything()))
    __getitem__ = lambda self, key: Anything()


def anything(self, *rest):
    return Anything()


for name in "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs round".split():
    setattr(Anything, "__" + name + "__", anything)
for name in "eq ne lt le gt ge".split():
    setattr(Anything, "__" + name + "__", lambda self, other: True)


ENCODE_AND_DECODE


def raised(text):
    kind, _, message = text.partition(": ")
    known = getattr(__builtins__, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(message)
        except Exception:
            pass
    return type(kind if kind.isidentifier() else "Error", (Exception,), {})(message)


def candidate(*args, **kwargs):
    if len(calls) >= 5000:
        state["many"] = True
        raise NoAnswer
    call = [encode(args), encode(kwargs)]
    at = len(calls)
    calls.append(call)
    if state["open"] or at >= len(request["answers"]) or request["answers"][at][0] != call:
        state["open"] = True
        return Anything()
    answer = request["answers"][at][1]
    if not isinstance(answer, dict) or not ("value" in answer or "raised" in answer):
        raise NoAnswer("no plain answer")
    if "raised" in answer:
        raise raised(answer["raised"])
    return decode(answer["value"])


class Raises:
    def __init__(self, expected, match=None, **rest):
        self.expected, self.match, self.value = expected, match, None

    def __enter__(self):
        return self

    def __exit__(self, kind, failure, trace):
        if failure is None:
            if state["open"]:
                return False
            raise AssertionError("did not raise")
        self.value = failure
        return isinstance(failure, self.expected) and (self.match is None or re.search(self.match, str(failure)) is not None)


class Approx:
    def __init__(self, expected, rel=None, abs=None):
        self.expected, self.rel, self.abs = expected, 1e-6 if rel is None else rel, 1e-12 if abs is None else abs

    def __eq__(self, value):
        return isinstance(value, Anything) or self.near(self.expected, value)

    def near(self, expected, value):
        if isinstance(expected, (list, tuple)):
            return type(expected) is type(value) and len(expected) == len(value) and all(map(self.near, expected, value))
        if isinstance(expected, dict):
            return isinstance(value, dict) and expected.keys() == value.keys() and all(
                self.near(item, value[key]) for key, item in expected.items())
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and abs(expected - value) <= max(self.abs, self.rel * abs(expected))


def parametrize(names, rows, **rest):
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [dict(zip(names, row if len(names) > 1 else (row,))) for row in rows]

    def mark(function):
        function.rows = [{**row, **other} for row in rows for other in getattr(function, "rows", [{}])]
        return function

    return mark


pytest = types.ModuleType("pytest")
pytest.raises, pytest.approx = Raises, Approx
pytest.mark = types.SimpleNamespace(parametrize=parametrize)
sys.modules["pytest"] = pytest


def shown(node, failure):
    text = type(failure).__name__ + (": " + str(failure) if str(failure) else "")
    trace, line = failure.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "tests.py":
            line = trace.tb_lineno
        trace = trace.tb_next
    lines = request["source"].splitlines()
    return (lines[line - 1].strip() + "  " if line and line <= len(lines) else "") + text


class Patient(ast.NodeTransformer):
    "An assertion about a value that is not known yet may fail: what comes after it is called in the same round."

    def visit_Assert(self, node):
        unknown = ast.Call(ast.Name("__open__", ast.Load()), [], [])
        node.test = ast.BoolOp(ast.Or(), [node.test, unknown])
        return node


def units(space):
    "Every statement at the top, and then every test function that nothing at the top calls."
    tree = ast.fix_missing_locations(Patient().visit(ast.parse(request["source"])))
    named = {node.func.id for part in tree.body if isinstance(part, ast.Expr) for node in ast.walk(part)
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    for statement in tree.body:
        code = compile(ast.Module([statement], []), "tests.py", "exec")
        tested = not isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign))
        tested = tested and not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        yield tested, lambda: exec(code, space)
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name not in named:
            function = space[statement.name]
            if statement.name == "check":
                yield True, lambda: function(candidate)
            elif statement.name.startswith("test"):
                for row in getattr(function, "rows", [{}]):
                    yield True, lambda: function(**row)


def main():
    space = {"__name__": "tests", "__builtins__": __builtins__}
    exec(compile(request["before"], "setup.py", "exec"), space)
    space.update({"candidate": candidate, request["function"]: candidate, "__open__": lambda: state["open"]})
    total, failed = 0, []
    for tested, unit in units(space):
        total += tested
        try:
            unit()
        except BaseException as failure:
            if not tested and not state["open"]:
                raise
            failed.append(shown(None, failure)[:200])
    if "many" in state:
        raise ValueError("more than 5000 calls")
    if not total or not calls:
        raise ValueError("no test calls " + request["function"])
    return {"calls": calls, "open": state["open"], "units": total, "failed": failed}


try:
    told = main()
except BaseException as failure:
    told = {"broken": (type(failure).__name__ + ": " + str(failure))[:200]}
answers_out.write(json.dumps(told) + "\\n")
answers_out.flush()
os._exit(0)
""".replace("ENCODE_AND_DECODE", ENCODE_AND_DECODE)
