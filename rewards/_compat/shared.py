"""What the functions of `rewards.compat` have in common."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from rewards.samples import completion_text

__all__ = ["Completions", "LogExtra", "lengths", "is_ids", "within"]

Completions: TypeAlias = Sequence[Any]
LogExtra: TypeAlias = Callable[[str, list[Any]], None]
F = TypeVar("F", bound=Callable[..., Any])


def within(low: float, high: float) -> Callable[[F], F]:
    """Declares the range, which presets made of functions check their weights against."""

    def declare(function: F) -> F:
        function.low, function.high = low, high  # type: ignore[attr-defined]
        return function

    return declare


def lengths(completions: Completions, completion_ids: Sequence[Sequence[int]] | None) -> list[int]:
    if completion_ids is not None:
        return [len(ids) for ids in completion_ids]
    return [len(completion_text(completion)) for completion in completions]


def is_ids(value: Any) -> bool:
    """Whether this is a completion's token ids, not its messages or text."""
    return not isinstance(value, str) and hasattr(value, "__len__") and all(isinstance(item, int) for item in value)
