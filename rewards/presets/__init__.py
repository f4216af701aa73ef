"""Presets by name: where each is built, loaded only when asked for."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from rewards.errors import UnknownParameterError, UnknownPresetError, nearest
from rewards.parameters import Parameter, check_values, parameters_of
from rewards.preset import Preset

__all__ = ["describe", "load", "names", "parameters"]

# The module of each preset; the function that builds it has its name.
_MODULES = {
    "classification-label": "text",
    "code-contest": "code",
    "code-function": "code",
    "code-stdio": "code",
    "countdown": "reasoning",
    "gsm8k-hash": "reasoning",
    "gsm8k-reasoning": "reasoning",
    "gsm8k-xml": "reasoning",
    "ifeval": "text",
    "json-schema": "structured",
    "judge-ranking": "judge",
    "judge-rubric": "judge",
    "length-target": "text",
    "math-boxed": "math",
    "math-cosine": "math",
    "math-dapo": "math",
    "math-kimi-length": "math",
    "math-length-budget": "math",
    "math-match": "math",
    "math-verify": "math",
    "mcq-letter": "reasoning",
    "qa-short": "text",
    "r1-zero": "reasoning",
    "reasoning-gym": "reasoning",
    "reward-model": "reward_model",
    "sql-exec": "structured",
    "summarize": "text",
    "tool-call": "structured",
    "translate": "text",
}


def names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(_MODULES)


def load(name: str, *, thinking_opened: bool | None = None, **params: Any) -> Preset:
    """The preset of this name, built with `params`; `describe(name)` says which there are.

    Args:
        thinking_opened: whether the model is shown an open `<think>` before it writes. None looks at the end of each
            prompt, where one that the chat template adds does not stand; `kit` asks the template itself.

    Raises:
        UnknownPresetError: no preset has this name.
        UnknownParameterError: the preset has no such parameter, or one that it needs is missing.
        PresetError: the parameters do not make a usable preset.
    """
    build = _builder(name)
    signature = inspect.signature(build)
    for param in params:
        if param not in signature.parameters:
            near = nearest(param, signature.parameters)
            raise UnknownParameterError(f"Preset {name!r} has no parameter {param!r}. {near}")
    required = [p.name for p in signature.parameters.values() if p.default is p.empty and p.name not in params]
    if required:
        raise UnknownParameterError(f"Preset {name!r} needs {', '.join(required)}. Pass it as a parameter.")
    check_values(name, build, params)
    preset = build(**params)
    preset.thinking_opened = thinking_opened
    return preset


def describe(name: str) -> str:
    """The preset's documentation: formula, range, source, columns, parameters, example.

    Raises:
        UnknownPresetError: no preset has this name.
    """
    build = _builder(name)
    return f"{name}{inspect.signature(build)}\n\n{inspect.getdoc(build)}"


def parameters(name: str) -> list[Parameter]:
    """The preset's parameters with their meaning, range and default, for a form.

    Raises:
        UnknownPresetError: no preset has this name.
    """
    return parameters_of(_builder(name))


def _builder(name: str) -> Callable[..., Preset]:
    if name not in _MODULES:
        raise UnknownPresetError(f"No preset {name!r}. {nearest(name, _MODULES)}")
    module = importlib.import_module(f"rewards.presets.{_MODULES[name]}")
    build: Callable[..., Preset] = getattr(module, name.replace("-", "_"))
    return build
