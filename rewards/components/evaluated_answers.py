"""Answers that a reasoning-gym verifier would hand to `eval` or to SymPy's parser, which is `eval` too.

`__import__("os").system(...)` is a valid answer to those. Only shapes that cannot call anything may pass; the verifiers
are not changed. This keeps code from running, not slow algebra from being slow.
"""

import ast
import re

__all__ = ["may_be_evaluated"]

# Tasks of reasoning-gym 0.1.25, by what they evaluate.
_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
_ARITHMETIC = frozenset({"countdown", "puzzle24"})
_ALGEBRA = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})

_ALGEBRA_TOKEN = re.compile(r"[A-Za-z]+|[0-9]+(?:\.[0-9]*)?|\*\*|[-+*/^() ]")
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh"}
    | {"exp", "log", "ln", "sqrt", "pi"}
)
_MAX_POWER = 99


def may_be_evaluated(task: str, answer: str) -> bool:
    """Whether `answer` is harmless for the verifier of `task`: always, for tasks that evaluate nothing.

    Python literals, or text that is no Python at all, for board and list tasks; digits, `+ - * / ( ) .` for
    arithmetic; single letters, common functions and literal powers up to 99 for algebra.
    """
    if task in _LITERALS:
        return _is_literal_or_no_python(answer)
    if task in _ARITHMETIC:
        return set(answer) <= set("0123456789+-*/(). \n") and "**" not in answer and "//" not in answer
    return task not in _ALGEBRA or _is_plain_algebra(answer)


def _is_literal_or_no_python(answer: str) -> bool:
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except SyntaxError:
        return True  # the verifier's eval cannot read it either, and nothing runs
    except (ValueError, RecursionError, MemoryError):
        return False
    try:
        ast.literal_eval(tree)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        return False
    return True


def _is_plain_algebra(answer: str) -> bool:
    position, tokens = 0, []
    while position < len(answer):
        match = _ALGEBRA_TOKEN.match(answer, position)
        if match is None:
            return False
        tokens.append(match[0])
        position = match.end()
    tokens = [token for token in tokens if token != " "]
    stacked = 1  # product of the powers of parentheses: ((2**99)**99)**99... must not get far
    for index, token in enumerate(tokens):
        if token.isalpha() and len(token) > 1 and token not in _FUNCTIONS:
            return False
        if token in ("**", "^") and not _is_literal_power(tokens[index + 1 : index + 7]):
            return False
        if token in ("**", "^") and tokens[index - 1] == ")":
            stacked *= max([int(t) for t in tokens[index + 1 : index + 3] if t.isdigit()], default=1)
    return stacked <= _MAX_POWER


def _is_literal_power(tokens: list[str]) -> bool:
    """Whether what follows a power sign is a small number, a fraction in parentheses, or one plain symbol."""
    inside = [token for token in tokens if token not in ("(", "-")]
    first = inside[0] if inside else ""
    if tokens[:1] != ["("] and len(inside) > 1 and inside[1] in ("**", "^"):
        return False
    if first.isalpha():
        return len(first) == 1
    return first.isdigit() and len(first) <= 2 and int(first) <= _MAX_POWER
