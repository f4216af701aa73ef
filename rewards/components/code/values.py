"""Plain Python values as JSON, and their comparison: what crosses the border of the sandbox, and the program that sends it."""

import math
from collections import Counter
from collections.abc import Collection
from typing import Any, TypeVar

T = TypeVar("T")
_MAX_DEPTH = 100
_JSON_INT = 1 << 53
_ALIKE = 64


class NotPlain(ValueError):
    """A value that is not None, a truth value, a number, text, or a list, tuple, set or dict of such."""


def encode(value: Any, depth: int = 0) -> Any:
    """JSON for a plain value: None, truth values, text, floats and small integers as they are, all else tagged.

    Numbers and text of exact types only: a subclass could lie about what it equals. Containers that derive from the plain
    ones (Counter, defaultdict, named tuples) are read by the plain ones' own methods, and are plain from then on. The
    harness holds a copy of this function's rules.

    Raises:
        NotPlain: anything else, or nesting deeper than 100.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < _JSON_INT else {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    if depth < _MAX_DEPTH:
        plain: Any
        for plain in (list, tuple, set, frozenset):
            if isinstance(value, plain):
                items = plain.__iter__(value)
                return {plain.__name__.removeprefix("frozen"): [encode(item, depth + 1) for item in items]}
        if isinstance(value, dict):
            return {"dict": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)]}
    raise NotPlain(f"not a plain value: {kind.__name__}")


def decode(tagged: Any, depth: int = 0) -> Any:
    """The value that `encode` wrote.

    Raises:
        NotPlain: not what `encode` writes.
    """
    if tagged is None or isinstance(tagged, bool | str | int):
        return tagged
    if not isinstance(tagged, dict) or len(tagged) != 1 or depth >= _MAX_DEPTH:
        raise NotPlain("not an encoded value")
    [(tag, content)] = tagged.items()
    try:
        if tag == "int":
            return int(content, 16)
        if tag == "float":
            return float.fromhex(content)
        if tag == "dict":
            keys = spread([decode(key, depth + 1) for key, _ in content])
            return dict(zip(keys, (decode(item, depth + 1) for _, item in content), strict=True))
        items = [decode(item, depth + 1) for item in content]
        if tag == "set":
            return frozenset(spread(items))
        return {"list": items, "tuple": tuple(items)}[tag]
    except (TypeError, ValueError, KeyError, OverflowError) as failure:
        raise NotPlain("not an encoded value") from failure


def spread(items: Collection[T]) -> Collection[T]:
    """The items, unless many different ones share a hash: a set of those would take quadratic time.

    Raises:
        NotPlain: they do.
    """
    if len(items) > _ALIKE:
        # Equal items may repeat; different ones that are made to collide may not.
        hashes = Counter(hash(item) for item in items)
        if any(count > _ALIKE and _different(items, key) for key, count in hashes.most_common(8)):
            raise NotPlain("items made to collide")
    return items


def _different(items: Collection[Any], key: int) -> bool:
    """Whether among the items of this hash there are more than a few different ones."""
    distinct: list[Any] = []
    for item in items:
        if hash(item) == key and item not in distinct:
            distinct.append(item)
            if len(distinct) > _ALIKE:
                return True
    return False


def same_value(expected: Any, value: Any, *, tolerance: float = 0.0, tuples_are_lists: bool = False) -> bool:
    """Python's equality for plain values, without its surprises: a truth value equals no number, NaN equals NaN.

    Integers and floats compare by value, floats within tolerance × max(1, |expected|). `tuples_are_lists` is for
    expectations that were written as JSON, which knows no tuples.
    """
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return _same_number(expected, value, tolerance)
    if isinstance(expected, list | tuple) and isinstance(value, list | tuple):
        if not tuples_are_lists and isinstance(expected, list) != isinstance(value, list):
            return False
        return len(expected) == len(value) and all(
            same_value(e, v, tolerance=tolerance, tuples_are_lists=tuples_are_lists)
            for e, v in zip(expected, value, strict=True)
        )
    if isinstance(expected, dict) and isinstance(value, dict):
        return expected.keys() == value.keys() and all(
            same_value(item, value[key], tolerance=tolerance, tuples_are_lists=tuples_are_lists)
            for key, item in expected.items()
        )
    if isinstance(expected, set | frozenset) and isinstance(value, set | frozenset):
        return _typed(expected) == _typed(value)
    return type(expected) is type(value) and bool(expected == value)


def _typed(items: "set[Any] | frozenset[Any]") -> "set[tuple[bool, Any]]":
    return {(isinstance(item, bool), item) for item in items}


def _same_number(expected: float, value: float, tolerance: float) -> bool:
    if expected == value or (expected != expected and value != value):
        return True
    try:
        if not tolerance or not (math.isfinite(expected) and math.isfinite(value)):
            return False
        return abs(expected - value) <= tolerance * max(1.0, abs(expected))
    except OverflowError:
        return False


SOURCE_FILE = "solution.py"

CODE = """
import itertools, json, os, sys

sys.set_int_max_str_digits(0) if hasattr(sys, "set_int_max_str_digits") else None
sys.setrecursionlimit(10000)
answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogatepass")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
request = json.loads(sys.stdin.read())
sys.stdin = open(os.devnull)


def encode(value, depth=0):
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < 1 << 53 else {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    if depth < 100:
        for plain in (list, tuple, set, frozenset):
            if issubclass(kind, plain):
                return {plain.__name__.replace("frozen", ""): [encode(item, depth + 1) for item in plain.__iter__(value)]}
        if issubclass(kind, dict):
            return {"dict": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)]}
    raise TypeError("not a plain value: " + kind.__name__)


def decode(tagged):
    if not isinstance(tagged, dict):
        return tagged
    [(tag, content)] = tagged.items()
    if tag == "int":
        return int(content, 16)
    if tag == "float":
        return float.fromhex(content)
    if tag == "dict":
        return {decode(key): decode(item) for key, item in content}
    return {"list": list, "tuple": tuple, "set": set}[tag](decode(item) for item in content)


def listed(value):
    if issubclass(type(value), (bool, int, float, str, list, tuple, set, frozenset, dict)) or not hasattr(value, "__iter__"):
        return value
    return list(itertools.islice(value, 100000))


def answer(line):
    answers.write(json.dumps(line) + "\\n")
    answers.flush()


def main():
    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    space = {"__name__": "solution", "__builtins__": __builtins__}
    exec(compile(request["before"], "setup.py", "exec"), space)
    exec(compile(source, "solution.py", "exec"), space)
    function = space.get(request["function"])
    if function is None and isinstance(space.get("Solution"), type):
        function = getattr(space["Solution"](), request["function"], None)
    if not callable(function):
        answer({"missing": True})
        return
    for args, kwargs, iterate in request["calls"]:
        try:
            value = function(*decode(args), **decode(kwargs))
            value = encode(listed(value) if iterate else value)
        except Exception as failure:
            answer({"raised": (type(failure).__name__ + ": " + str(failure))[:200]})
        else:
            answer({"value": value})


main()
"""
