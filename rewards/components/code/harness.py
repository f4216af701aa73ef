"""Call a generated function in the sandbox, and encode plain Python values as JSON.

The source of this module runs as a program (`python3 -c SOURCE`) on Python 3.7 or later; the library imports the functions.
"""

from __future__ import annotations

import itertools
import json
import os
import sys

TYPE_CHECKING = False  # importing typing would delay every program by milliseconds
if TYPE_CHECKING:
    from typing import Any

_MAX_DEPTH = 100
_JSON_INT = 1 << 53
_MOST_ITEMS = 100_000  # items that are read from an iterator


class NotPlain(ValueError):
    """A value is not None, a bool, a number, text, or a list, tuple, set or dict of plain values."""


def encode(value: Any, depth: int = 0) -> Any:
    """Return the JSON form of a plain value; all values except None, bools, text and small integers get a type tag.

    Numbers and text must have exact types, because a subclass could redefine equality. Subclasses of containers (Counter,
    defaultdict, named tuples) are read by the methods of the base class, and become that class.

    Raises:
        NotPlain: the value has another type, or nests deeper than 100.
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
            if issubclass(kind, plain):
                return {plain.__name__: [encode(item, depth + 1) for item in plain.__iter__(value)]}
        if issubclass(kind, dict):
            return {"dict": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)]}
    raise NotPlain("not a plain value: " + kind.__name__)


def decode(tagged: Any, depth: int = 0) -> Any:
    """Return the value that `encode` encoded.

    Raises:
        NotPlain: `tagged` is not an output of `encode`.
    """
    if tagged is None or isinstance(tagged, (bool, str, int)):
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
            return {decode(key, depth + 1): decode(item, depth + 1) for key, item in content}
        items = [decode(item, depth + 1) for item in content]
        kind: Any = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[tag]
        return kind(items)
    except (TypeError, ValueError, KeyError, OverflowError) as failure:
        raise NotPlain("not an encoded value") from failure


def main() -> None:
    """Make the calls of the request on stdin, and print a line of JSON for each call.

    The request is {before, source, function, calls: [[args, kwargs, iterate]]}. A line is {value} or {raised}; a single line
    {missing} means that the program does not define the function.
    """
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(10000)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogatepass")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    request = json.loads(sys.stdin.read())
    sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))

    def answer(**line: Any) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    plain = (bool, int, float, str, list, tuple, set, frozenset, dict)
    space: dict[str, Any] = {"__name__": "solution", "__builtins__": __builtins__}
    exec(compile(request["before"], "setup.py", "exec"), space)
    exec(compile(request["source"], "solution.py", "exec"), space)
    function = space.get(request["function"])
    if function is None and isinstance(space.get("Solution"), type):
        function = getattr(space["Solution"](), request["function"], None)
    if not callable(function):
        answer(missing=True)
        return
    for args, kwargs, iterate in request["calls"]:
        try:
            value = function(*decode(args), **decode(kwargs))
            if iterate and not issubclass(type(value), plain) and hasattr(value, "__iter__"):
                value = list(itertools.islice(value, _MOST_ITEMS))
            value = encode(value)
        except Exception as failure:
            answer(raised=(type(failure).__name__ + ": " + str(failure))[:200])
        else:
            answer(value=value)


if __name__ == "__main__":
    main()
