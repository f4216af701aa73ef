"""Names to objects: a registry that refuses doubles, and imports by `file.py:function` or `package.module:function`."""

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
    """Objects of one kind by name. A name registered twice is an error; an unknown name is met with the nearest one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files an object under `name`. Raises `ConfigError` if the name is taken."""

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
                f"Your own goes by 'file.py:function' or 'package.module:function'."
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))

    def __len__(self) -> int:
        return len(self._items)


def is_import_path(spec: str) -> bool:
    """True for `file.py:function` and `package.module:function`, false for a registered name."""
    return ":" in spec


def import_object(spec: str, *, base: Path | None = None) -> Any:
    """The function or class named by `file.py:name` or `package.module:name`.

    A relative file is looked for below `base` (default: the current directory). Raises `ConfigError` when the file,
    module or name does not exist, or when importing it fails; the message lists what was found.
    """
    from rewards.errors import FunctionPathError
    from rewards.functions import load_function

    try:
        return load_function(spec, base=base)
    except FunctionPathError as error:
        raise ConfigError(str(error)) from error.__cause__
