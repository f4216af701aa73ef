"""Check whether an expression of the given numbers has the target value."""

import ast
import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rewards.components.final_text import AnswerComponent, unboxed_answer, verdict
from rewards.components.math_text import parse_number
from rewards.protocol import Sample, Score, shown

MAX_CHARS = 500
MAX_NUMBERS = 50
_ALLOWED = frozenset("0123456789+-*/() ")
_SPELLED = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")", "\n": " ", "\t": " "})
_LATEX = (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("\\left", ""), ("\\right", ""), ("$", ""))
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value_and_numbers(expression: str) -> tuple[Fraction, list[int]] | None:
    """Return the exact value of an arithmetic expression and the integers in it; None for other texts or a division by zero.

    The expression may contain `+ - * /`, signs and parentheses. No code is evaluated.

    >>> value_and_numbers("(1 + 2) / 4")
    (Fraction(3, 4), [1, 2, 4])
    >>> value_and_numbers("2 ** 9"), value_and_numbers("1 / 0"), value_and_numbers("__import__('os')")
    (None, None, None)
    """
    if len(expression) > MAX_CHARS or not set(expression) <= _ALLOWED:
        return None
    numbers: list[int] = []
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, numbers)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, numbers), _value(node.right, numbers))
    raise ValueError(f"not plain arithmetic: {type(node).__name__}")


@dataclass(frozen=True, kw_only=True)
class CountdownAccuracy(AnswerComponent):
    """1 if the expression has the target's value and uses each of the given numbers exactly once, else 0.

    Columns: `nums` or `numbers`, a list of whole numbers (or its JSON); `target`, else the reference; or a reference
    with both. `= target` may follow the expression, or `target =` precede it. With `use_all=False`, numbers may remain
    unused. Rows without a task are an `error`.
    """

    find = staticmethod(unboxed_answer)

    use_all: bool = True

    def expected(self, sample: Sample) -> tuple[Counter[int], Fraction]:
        task = {**sample.reference, **sample.columns} if isinstance(sample.reference, Mapping) else sample.columns
        cell = task.get("nums", task.get("numbers"))
        numbers, goal = _numbers(cell), _parsed(task.get("target", sample.reference))
        is_number = isinstance(goal, int | float) and not isinstance(goal, bool) and math.isfinite(goal)
        target = Fraction(goal) if is_number else None
        if numbers is None or target is None:
            reason = f"no task: nums {shown(cell, 100)}, target {shown(sample.columns.get('target'), 50)}"
            raise ValueError(f"{reason}; give whole numbers in columns `nums` and `target`")
        return numbers, target

    def judge(self, answer: str, expected: tuple[Counter[int], Fraction], sample: Sample) -> Score:
        numbers, target = expected
        result = value_and_numbers(_expression(answer, target))
        if result is None:
            return verdict(False, answer, reason="not plain arithmetic")
        value, operands = result
        if Counter(operands) - numbers or (numbers - Counter(operands) and self.use_all):
            return verdict(False, answer, reason=f"uses {sorted(operands)} of {sorted(numbers.elements())}"[:200])
        if value != target:
            return verdict(False, answer, reason=f"has the value {value}"[:200])
        return verdict(True, answer)


def _expression(answer: str, target: Fraction) -> str:
    """Return the expression in ASCII, without `= target` after it or `target =` before it."""
    if len(answer) > MAX_CHARS:
        return answer
    for command, symbol in _LATEX:
        answer = answer.replace(command, symbol)
    answer = answer.translate(_SPELLED)
    left, equals, right = answer.rpartition("=")
    if equals and parse_number(right) == target:
        return left
    return right if equals and parse_number(left) == target else answer


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value[:MAX_CHARS])
    except (ValueError, RecursionError):
        return None


def _numbers(value: Any) -> Counter[int] | None:
    value = _parsed(value)
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_NUMBERS:
        return None
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in value):
        return None
    return Counter(value)
