"""Values written in test files: literals, and the few harmless expressions that stand beside them."""

import ast
from collections.abc import Callable
from typing import Any

from rewards.components.code.values import spread

__all__ = ["WRAPPERS", "NotLiteral", "literal"]

_MAX_ITEMS = 1_000_000
_MAX_BITS = 100_000

# Functions of plain values that tests put around a result or an expectation; applied outside the sandbox.
WRAPPERS: dict[str, Callable[..., Any]] = {
    "set": lambda items: set(spread(items)),
    "frozenset": lambda items: frozenset(spread(items)),
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
    """An expression that would have to be run to know its value."""


def literal(node: ast.expr) -> Any:
    """The value of a literal, of arithmetic on literals, or of a wrapper around one.

    Raises:
        NotLiteral: anything else, or a value that would be huge.
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
    raise NotLiteral("arithmetic on other things than numbers, or with a huge result")


def _size(left: Any, right: Any) -> int:
    """Items of a repeated sequence, or more than allowed for anything else."""
    sequence, count = (right, left) if isinstance(left, int) else (left, right)
    if not isinstance(count, int) or not isinstance(sequence, str | list | tuple):
        return _MAX_ITEMS + 1
    return len(sequence) * max(0, count)
