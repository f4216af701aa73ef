"""Presets by name: where each is built, loaded only when asked for."""

import importlib
import inspect
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from rewards.errors import UnknownParameterError, UnknownPresetError, nearest
from rewards.parameters import Parameter, check_values, parameters_of
from rewards.preset import Preset

__all__ = ["describe", "load", "names", "parameters"]

_BUILDERS = MappingProxyType(
    {
        "classification-label": "rewards.presets.qa:classification_label",
        "code-contest": "rewards.presets.code:code_contest",
        "code-function": "rewards.presets.code:code_function",
        "code-stdio": "rewards.presets.code:code_stdio",
        "countdown": "rewards.presets.countdown:countdown",
        "gsm8k-hash": "rewards.presets.gsm8k:gsm8k_hash",
        "gsm8k-reasoning": "rewards.presets.gsm8k:gsm8k_reasoning",
        "gsm8k-xml": "rewards.presets.gsm8k:gsm8k_xml",
        "ifeval": "rewards.presets.instructions:ifeval",
        "json-schema": "rewards.presets.structured:json_schema",
        "judge-ranking": "rewards.presets.judge:judge_ranking",
        "judge-rubric": "rewards.presets.judge:judge_rubric",
        "length-target": "rewards.presets.length:length_target",
        "math-boxed": "rewards.presets.math:math_boxed",
        "math-cosine": "rewards.presets.math_length:math_cosine",
        "math-dapo": "rewards.presets.math_length:math_dapo",
        "math-kimi-length": "rewards.presets.math_length:math_kimi_length",
        "math-length-budget": "rewards.presets.math_length:math_length_budget",
        "math-match": "rewards.presets.math:math_match",
        "math-verify": "rewards.presets.math:math_verify",
        "mcq-letter": "rewards.presets.choice:mcq_letter",
        "qa-short": "rewards.presets.qa:qa_short",
        "r1-zero": "rewards.presets.r1_zero:r1_zero",
        "reasoning-gym": "rewards.presets.reasoning_gym:reasoning_gym",
        "reward-model": "rewards.presets.reward_model:reward_model",
        "sql-exec": "rewards.presets.sql:sql_exec",
        "summarize": "rewards.presets.text:summarize",
        "tool-call": "rewards.presets.structured:tool_call",
        "translate": "rewards.presets.text:translate",
    }
)

# What 0.1 had, and what there is in its place.
_GONE = MappingProxyType(
    {
        "factuality": "'reward-model' with an entailment model that reads the document in the prompt (label='entailment'), or "
        "'judge-rubric'",
        "fluency": "'reward-model' with a model trained on preferences; perplexity alone pays for loops and set phrases",
        "safe-style": "'reward-model' with model=..., label='toxic', wanted=False, reads='completion'",
        "semantic-answer": "'qa-short' for short answers, 'judge-rubric' for others",
        "sentiment": "'reward-model' with model=..., label='POSITIVE', reads='completion'",
    }
)
_GONE_PARAMETERS = MappingProxyType(
    {
        ("summarize", name): "Put the presets 'summarize' and 'reward-model' (or 'judge-rubric') together instead."
        for name in ("semantic_model", "semantic_weight")
    }
)


def names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(_BUILDERS)


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
    if "strict" in params and "lenient" in signature.parameters and "strict" not in signature.parameters:
        new = {"lenient": not params.pop("strict")}  # its name until 0.1
        warnings.warn(f"Preset {name!r}: strict is now lenient; pass {new}.", DeprecationWarning, stacklevel=2)
        params = new | params
    for param in params:
        if param not in signature.parameters:
            instead = _GONE_PARAMETERS.get((name, param)) or nearest(param, signature.parameters)
            raise UnknownParameterError(f"Preset {name!r} has no parameter {param!r}. {instead}")
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
    if name in _GONE:
        raise UnknownPresetError(f"Preset {name!r} was removed after 0.1. Use {_GONE[name]}.")
    if name not in _BUILDERS:
        raise UnknownPresetError(f"No preset {name!r}. {nearest(name, _BUILDERS)}")
    module, _, function = _BUILDERS[name].partition(":")
    build: Callable[..., Preset] = getattr(importlib.import_module(module), function)
    return build
