"""A calculator: the smallest environment that is worth asking. It records the expressions that it evaluates.

    generation:
      environment: kit.environments.calculator:Calculator

Rewards see the instances in the column `environments`: `environment.asked` are the expressions, in order.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 200
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator:
    """One calculator a completion."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def reset(self, **columns: Any) -> None:
        """Clears the list of expressions. The prompt does not change."""
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
    if not isinstance(expression, str) or len(expression) > MAX_CHARACTERS:
        raise ValueError(f"an expression is a text of at most {MAX_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        if not math.isfinite(value):
            raise OverflowError
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("this is no arithmetic expression") from None
    except (ZeroDivisionError, OverflowError):
        raise ValueError("this has no value: a division by zero, or a number too large") from None
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(left), _value(right))  # type: ignore[no-any-return]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(operand))  # type: ignore[no-any-return]
    raise ValueError("only numbers, brackets and the signs + - * / // % are known")
