"""A calculator: the smallest environment that is worth asking. It keeps what was asked of it.

    generation:
      environment: kit.environments.calculator:Calculator

Rewards see the instances in the column `environments`: `environment.asked` are the expressions, in order.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

LONGEST = 200
"""Characters of an expression."""
LARGEST = 10**30
"""Absolute value of a number on the way."""
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator:
    """One calculator a completion."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def reset(self, **columns: Any) -> None:
        """Forgets what was asked. The prompt stays as it is."""
        self.asked = []

    def calculate(self, expression: str) -> str:
        """
        Evaluates an arithmetic expression.

        Args:
            expression: Numbers, brackets and the signs + - * / // %, such as "12 * 7".

        Returns:
            The value, as it is written in decimal.
        """
        self.asked.append(expression)
        return evaluate(expression)


def evaluate(expression: str) -> str:
    """The value of an arithmetic expression; whole values without a point.

    Raises `ValueError` with the reason, which the model is shown: a call that fails is answered, too.

    >>> evaluate("(2 + 3) * 4"), evaluate("7 / 2"), evaluate("6 / 3")
    ('20', '3.5', '2')
    """
    if not isinstance(expression, str) or len(expression) > LONGEST:
        raise ValueError(f"an expression is a text of at most {LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("this is no arithmetic expression") from None
    except (ZeroDivisionError, OverflowError):
        raise ValueError("this has no value: a division by zero, or a number too large") from None
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if whole else value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _within(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        return _within(BINARY[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return _within(UNARY[type(node.op)](_value(node.operand)))
    raise ValueError("only numbers, brackets and the signs + - * / // % are known")


def _within(value: Any) -> int | float:
    number: int | float = value
    if not abs(number) < LARGEST:
        raise OverflowError
    return number
