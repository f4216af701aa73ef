"""`file.py:function` and `package.module:function` to the function itself."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rewards.errors import FunctionPathError, nearest
from rewards.protocol import failure_reason

__all__ = ["load_function"]


def load_function(path: str) -> Callable[..., Any]:
    """The function that `path` names. The file is executed; loading it twice gives two separate modules.

    Raises:
        FunctionPathError: not of this form, no such file or module, the file fails to load, or no such function in it;
            the message lists the functions that were found.
    """
    where, _, name = path.rpartition(":")
    if not where or not name.isidentifier():
        raise FunctionPathError(
            f"{path!r} is no path to a function. Write file.py:function or package.module:function."
        )
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise FunctionPathError(f"{where} has no function {name!r}. {nearest(name, _functions(module))}")
    result: Callable[..., Any] = function
    return result


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        siblings = [f.name for f in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise FunctionPathError(f"No file {file} (seen from {Path.cwd()}). {nearest(file.name, siblings)}")
    # A name of its own per file: two users' rewards.py must not replace one another, nor this package.
    name = f"reward_file_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise FunctionPathError(f"{file} cannot be loaded as a Python file.")
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look their module up while it is being executed
    try:
        spec.loader.exec_module(module)
    except Exception as failure:
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
        raise FunctionPathError(f"{file} fails to load: {failure_reason(failure)}") from failure
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as failure:
        raise FunctionPathError(
            f"Module {name!r} cannot be imported: {failure_reason(failure)}. "
            "For a file, write its path with .py: my_rewards.py:function."
        ) from failure


def _functions(module: ModuleType) -> list[str]:
    """Public callables that the module itself defines."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
