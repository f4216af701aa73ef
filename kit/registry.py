"""Objects by name: a registry, and the import of `file.py:function` or `package.module:function`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from kit.errors import ConfigError

T = TypeVar("T")


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the nearest option, or an empty string when nothing is near."""
    near = difflib.get_close_matches(word, list(options), n=1, cutoff=0.55)
    return f" Did you mean '{near[0]}'?" if near else ""


class Registry(Generic[T]):
    """Objects of one kind by name. A name cannot be registered twice; the error for an unknown name has the nearest one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object as `name`. Raises `ConfigError` if the name is taken."""

        def add(item: T) -> T:
            if name in self._items:
                raise ConfigError(f"{self.kind} '{name}' is already registered; choose another name.")
            self._items[name] = item
            return item

        return add

    def __getitem__(self, name: str) -> T:
        try:
            return self._items[name]
        except KeyError:
            known = ", ".join(sorted(self._items))
            raise ConfigError(
                f"No {self.kind} is called '{name}'.{did_you_mean(name, self._items)} Known: {known}. "
                f"Write your own as 'file.py:function' or 'package.module:function'."
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))


def is_import_path(spec: str) -> bool:
    """Whether `spec` is `file.py:function` or `package.module:function`, and not a registered name."""
    return ":" in spec


def import_object(spec: str, *, base: Path | None = None) -> Any:
    """Import the function or class `file.py:name` or `package.module:name`.

    A relative file is below `base` (default: the current directory). Raises `ConfigError` if the file, module or name does
    not exist, or if its import fails; the message lists the functions of the file.
    """
    from rewards.errors import FunctionPathError
    from rewards.functions import load_function

    try:
        return load_function(spec, base=base)
    except FunctionPathError as error:
        raise ConfigError(str(error)) from error.__cause__
