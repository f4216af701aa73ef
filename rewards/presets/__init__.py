"""Presets by name. Their modules are imported on demand."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from rewards.errors import PresetError, UnknownParameterError, UnknownPresetError, nearest, require
from rewards.parameters import Parameter, parameters_of
from rewards.preset import Preset

__all__ = ["describe", "load", "names", "parameters"]

# Module of each preset and the package that it needs. The function that builds it has the name of the preset.
_PRESETS = {
    "classification-label": ("text", None),
    "code-function": ("code", None),
    "code-stdio": ("code", None),
    "countdown": ("reasoning", None),
    "gsm8k-hash": ("reasoning", None),
    "gsm8k-reasoning": ("reasoning", None),
    "gsm8k-xml": ("reasoning", None),
    "ifeval": ("text", "py3langid"),
    "json-schema": ("structured", "jsonschema"),
    "judge-ranking": ("judge", "httpx"),
    "judge-rubric": ("judge", "httpx"),
    "length-target": ("text", None),
    "math-dapo": ("math", "math-verify"),
    "math-verify": ("math", "math-verify"),
    "mcq-letter": ("reasoning", None),
    "qa-short": ("text", None),
    "r1-zero": ("reasoning", "math-verify"),
    "reasoning-gym": ("reasoning", None),
    "reward-model": ("reward_model", None),
    "sql-exec": ("structured", None),
    "text-overlap": ("text", "sacrebleu"),
    "tool-call": ("structured", "scipy"),
}


def names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted(_PRESETS)


def load(name: str, *, thinking_opened: bool | None = None, **params: Any) -> Preset:
    """Build the preset `name` with `params`; `describe(name)` lists its parameters.

    Args:
        thinking_opened: whether the prompt that the model reads ends with an open `<think>`. None checks the end of each
            prompt, without the text that a chat template adds; `kit` renders the template and sets this argument.

    Raises:
        UnknownPresetError: no preset has this name.
        UnknownParameterError: the preset has no such parameter, or a required one is missing.
        PresetError: a value is not usable, or a package is not installed.
    """
    build = _builder(name)
    specs = {parameter.name: parameter for parameter in parameters_of(build)}
    for param in params:
        if param not in specs:
            raise UnknownParameterError(f"Preset {name!r} has no parameter {param!r}. {nearest(param, specs)}")
    missing = [parameter.name for parameter in specs.values() if parameter.required and parameter.name not in params]
    if missing:
        raise UnknownParameterError(f"Preset {name!r} needs {', '.join(missing)}. Pass it as a parameter.")
    for param, value in params.items():
        if not specs[param].accepts(value):
            raise PresetError(f"Preset {name!r}: {param} is {value!r}. Pass {specs[param].accepted_values}."[:400])
    if package := _PRESETS[name][1]:
        require(name, package.replace("-", "_"), package)
    preset = build(**params)
    preset.name = name
    preset.thinking_opened = thinking_opened
    return preset


def describe(name: str) -> str:
    """Return the preset's documentation: formula, range, source, columns, parameters, example.

    Raises:
        UnknownPresetError: no preset has this name.
    """
    build = _builder(name)
    return f"{name}{inspect.signature(build)}\n\n{inspect.getdoc(build)}"


def parameters(name: str) -> list[Parameter]:
    """Return the preset's parameters with their meaning, range and default.

    Raises:
        UnknownPresetError: no preset has this name.
    """
    return parameters_of(_builder(name))


def _builder(name: str) -> Callable[..., Preset]:
    if name not in _PRESETS:
        raise UnknownPresetError(f"No preset {name!r}. {nearest(name, _PRESETS)}")
    module = importlib.import_module(f"rewards.presets.{_PRESETS[name][0]}")
    build: Callable[..., Preset] = getattr(module, name.replace("-", "_"))
    return build
