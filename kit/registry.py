"""Names to objects: a registry that refuses doubles, and imports by `file.py:function` or `package.module:function`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
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
    """The object named by `file.py:name` or `package.module:name`.

    A relative file is looked for below `base` (default: the current directory). Raises `ConfigError` when the file,
    module or name does not exist, or when importing it fails; the message lists what was found.
    """
    target, _, name = spec.rpartition(":")
    if not target or not name:
        raise ConfigError(f"'{spec}' is not of the form 'file.py:function' or 'package.module:function'.")
    module = _load_file(Path(target), base, spec) if target.endswith(".py") else _load_module(target, spec)
    try:
        return getattr(module, name)
    except AttributeError:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"'{target}' has no '{name}'.{did_you_mean(name, public)} "
            f"It defines: {', '.join(public) or 'nothing callable'}."
        ) from None


def _load_file(path: Path, base: Path | None, spec: str) -> ModuleType:
    path = (path if path.is_absolute() else (base or Path.cwd()) / path).resolve()
    if not path.is_file():
        raise ConfigError(f"'{spec}': there is no file {path}. Paths are relative to the folder you start from.")
    # One module a file, so that pickling, isinstance and module state behave as with an ordinary import.
    key = f"kit_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if key in sys.modules:
        return sys.modules[key]
    _search_last(path.parent)
    loader = importlib.util.spec_from_file_location(key, path)
    if loader is None or loader.loader is None:
        raise ConfigError(f"'{spec}': {path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(loader)
    sys.modules[key] = module
    try:
        loader.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[key]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise ConfigError(f"'{spec}': importing {path} failed with {type(error).__name__}: {error}") from error
    return module


def _search_last(folder: Path) -> None:
    """Lets modules in `folder` be imported, but never in place of an installed one of the same name."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _load_module(target: str, spec: str) -> ModuleType:
    _search_last(Path.cwd())
    try:
        return importlib.import_module(target)
    except ImportError as error:
        raise ConfigError(f"'{spec}': module '{target}' cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"'{spec}': importing '{target}' failed with {type(error).__name__}: {error}") from error
