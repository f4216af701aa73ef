"""A calculator: a minimal environment. It records the expressions that it evaluates.

    generation:
      environment: kit.environments.calculator:Calculator

Rewards get the instances as the column `environments`. `environment.expressions` has the expressions in order.
"""

from __future__ import annotations

import ast
import math
import re
from typing import Any

from rewards.components.code.calls import literal

ARITHMETIC = re.compile(r"[\d\s.()+*/%eE-]{1,200}", re.ASCII)


class Calculator:
    """The calculator of one completion."""

    def __init__(self) -> None:
        self.expressions: list[str] = []

    def reset(self, **columns: Any) -> None:
        """Clears the list of expressions. The prompt does not change."""
        self.expressions = []

    def calculate(self, expression: str) -> str:
        """
        Evaluates an arithmetic expression.

        Args:
            expression: Numbers, brackets and the signs + - * / // %, such as "12 * 7".

        Returns:
            The value as a decimal number.
        """
        self.expressions.append(expression)
        return evaluate(expression)


def evaluate(expression: str) -> str:
    """The value of an arithmetic expression; integers without a decimal point.

    Raises `ValueError` with the reason. The model gets it as the answer of the failed call.

    >>> evaluate("(2 + 3) * 4"), evaluate("7 / 2"), evaluate("6 / 3")
    ('20', '3.5', '2')
    """
    if not isinstance(expression, str) or not ARITHMETIC.fullmatch(expression) or "**" in expression:
        raise ValueError("only numbers, brackets and the signs + - * / // % are known, in at most 200 characters")
    try:
        value = literal(ast.parse(expression.strip(), mode="eval").body)
        if not math.isfinite(value):
            raise OverflowError
    except (SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError("this is no arithmetic expression") from None
    except OverflowError:
        raise ValueError("this has no value: a number too large") from None
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)
