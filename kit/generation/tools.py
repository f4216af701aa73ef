"""Loads and checks the tools and environments that a model may use in a completion.

They are configured by `generation.tools` and `generation.environment`; TRL runs the calls. Tools that TRL cannot run are
refused before a run starts, with advice.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kit.config import GenerationConfig
from kit.errors import ConfigError, DataError, EnvironmentUnsupported, ModelError, refuse
from kit.registry import import_object

if TYPE_CHECKING:
    from kit.data import DataSplit

TOOL_EXAMPLE = '''
    def calculate(expression: str) -> str:
        """
        Evaluates an arithmetic expression.

        Args:
            expression: What to evaluate, such as "12 * 7".
        """'''
CONTROL = ("reset", "get_reward")
"""Methods of an environment that are not tools."""
Factory = Callable[[], Any]


@dataclass(frozen=True)
class ToolSetup:
    """Loaded tools and environments. Keys of `environments` are values of the column `environment`; None: the only one."""

    tools: tuple[Callable[..., Any], ...] = ()
    environments: Mapping[str | None, Factory] | None = None
    max_iterations: int | None = None

    def __bool__(self) -> bool:
        """Whether TRL's loop of tool calls runs."""
        return bool(self.tools or self.environments)

    def trainer_arguments(self) -> dict[str, Any]:
        """Keywords of `trl.GRPOTrainer`."""
        arguments: dict[str, Any] = {}
        if self.tools:
            arguments["tools"] = list(self.tools)
        if self.environments is not None:
            single = None in self.environments
            arguments["environment_factory"] = self.environments[None] if single else dict(self.environments)
        return arguments

    def all_tools(self) -> list[Callable[..., Any]]:
        """Tools, and the methods of all environments."""
        return [*self.tools, *(tool for make in (self.environments or {}).values() for tool in methods_of(make()))]


NOTHING = ToolSetup()


def open_row(interaction: ToolSetup, row: Mapping[str, Any]) -> tuple[Any, Any, list[Callable[..., Any]]]:
    """Resets the environment of a row. Returns the prompt, the environment (or None) and the tools."""
    prompt, environments, tools = row["prompt"], interaction.environments, list(interaction.tools)
    if environments is None:
        return prompt, None, tools
    routed = None not in environments
    environment = environments[row["environment"] if routed else None]()
    columns = {name: value for name, value in row.items() if not routed or name != "environment"}
    observation = environment.reset(**columns)
    if observation is not None:
        last = prompt[-1]
        prompt = [*prompt[:-1], {**last, "content": last["content"] + observation}]
    return prompt, environment, tools + methods_of(environment)


def check_rows(interaction: ToolSetup, data: DataSplit) -> None:
    """Raises `DataError` for rows without a matching environment."""
    for rows in (data.train, data.heldout):
        if interaction.environments is None or None in interaction.environments:
            continue
        known = ", ".join(map(str, interaction.environments))
        if "environment" not in rows.column_names:
            raise DataError(
                f"generation.environment names several ({known}), so each row needs its name in a column environment."
            )
        strange = {name for name in rows["environment"] if name not in interaction.environments}
        if strange:
            raise DataError(
                f"The column environment contains {min(map(repr, strange))}, but generation.environment has {known}."
            )


def load_tools(config: GenerationConfig) -> ToolSetup:
    """Loads and checks the configured tools and environments, with one instance of each environment. Raises `KitError`."""
    from transformers.utils import get_json_schema

    tools = tuple(map(import_object, config.tools))
    named = config.environment
    paths: Mapping[Any, str] = {None: named} if isinstance(named, str) else named or {}
    environments = {name: import_object(path) for name, path in paths.items()} or None
    described = list(zip(config.tools, tools, strict=True))
    names = [tool.__name__ for tool in tools]
    refuse(
        ConfigError,
        (
            len(set(names)) < len(names),
            f"generation.tools: two tools have the same name ({', '.join(names)}).",
            "Rename one.",
        ),
    )
    for name, factory in (environments or {}).items():
        path = paths[name]
        methods = methods_of(_make(factory, path))
        described += [(f"{path}.{method.__name__}", method) for method in methods]
        taken = ", ".join(method.__name__ for method in methods if method.__name__ in names)
        refuse(
            ConfigError,
            (bool(taken), f"generation.tools and {path} both have a tool called {taken}.", "Rename one."),
        )
    for where, tool in described:
        try:
            get_json_schema(tool)
        except Exception as error:  # parsers of docstrings and type hints may raise any error
            raise ConfigError(
                f"The tool {where} cannot be described to the model: {str(error).strip().rstrip('.')}. A tool needs type hints, "
                f"and a docstring that describes it and each argument:{TOOL_EXAMPLE}"
            ) from error
    return ToolSetup(tools, environments, config.max_tool_calling_iterations)


def methods_of(environment: Any) -> list[Callable[..., Any]]:
    """The public methods of an environment's class except `reset` and `get_reward`. They are tools."""
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return [getattr(environment, name) for name, _ in members if name not in CONTROL and not name.startswith("_")]


def _make(factory: Factory, where: str) -> Any:
    """Creates an environment. Raises `ConfigError` if TRL cannot use it."""
    try:
        environment = factory()
    except Exception as error:
        raise ConfigError(
            f"generation.environment: {where}() failed: {type(error).__name__}: {error}. It must be callable without "
            "arguments and return an environment, once for each completion of a batch. Usually it is the class itself."
        ) from error
    has_reset = not isinstance(environment, type) and callable(getattr(type(environment), "reset", None))
    parameters = inspect.signature(environment.reset).parameters.values() if has_reset else ()
    refuse(
        ConfigError,
        (
            not has_reset,
            f"generation.environment: the result of {where}() ({type(environment).__name__}) has no method reset(self, **row).",
            "TRL calls it before every completion with the columns of the row. It returns None or text to add to the prompt.",
        ),
        (
            not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
            f"generation.environment: reset() of {where} has no **columns, but it is called with every column of the row.",
            "Write: def reset(self, **columns).",
        ),
    )
    return environment


def check_turns(interaction: ToolSetup, tokenizer: Any, *, chat: bool, source: str) -> None:
    """Raises `KitError` if the model's chat template does not support tools.

    If the tokenizer has no description of its format of calls, TRL's is set.
    """
    if not interaction:
        return
    if not chat:
        raise ConfigError(
            "generation.tools and .environment need messages, but data.chat: false sends plain text. Set data.chat: true."
        )
    templates = chat_template_utils()
    if not templates._SUPPORTS_RESPONSE_TEMPLATE and find_spec("jmespath") is None:
        raise EnvironmentUnsupported(
            "transformers below 5.13 needs jmespath to parse tool calls, but it is not installed. Install it with: "
            "pip install jmespath  (or: pip install 'transformers>=5.13')."
        )
    if not templates.supports_tool_calling(tokenizer):
        raise ModelError(
            f"The chat template of {source} does not render tool calls and their answers. Use a "
            "model with tool support (Qwen2.5/Qwen3 Instruct, Llama 3.1 Instruct, GPT-OSS), or set model.chat_template to a "
            "Jinja file that renders message.tool_calls and messages of the role tool."
        )
    if getattr(tokenizer, "response_template", None) is None and getattr(tokenizer, "response_schema", None) is None:
        try:
            templates.add_response_schema(tokenizer)
        except ValueError as error:
            raise ModelError(
                f"The format of tool calls of {source} is unknown: TRL has no parser for its chat template. Set "
                "response_template in the tokenizer's tokenizer_config.json (transformers' docs: response parsing), or use the "
                "original template of the model family."
            ) from error
    training_template(tokenizer, source)


def chat_template_utils() -> Any:
    """TRL's module of this name. If TRL is not imported yet, only this module is loaded, without TRL's __init__.

    A run is checked before its backend is active, and Unsloth must be imported before TRL.
    """
    if "trl" in sys.modules:
        return importlib.import_module("trl.chat_template_utils")
    spec = find_spec("trl")
    assert spec is not None
    package = sys.modules.setdefault("_trl_read_alone", ModuleType("_trl_read_alone"))
    package.__path__ = list(spec.submodule_search_locations or ())
    return importlib.import_module("_trl_read_alone.chat_template_utils")


def training_template(tokenizer: Any, source: str) -> str | None:
    """The template with which TRL replaces the tokenizer's; None if the tokenizer's is used. Raises `ModelError`."""
    templates = chat_template_utils()
    if templates.is_chat_template_prefix_preserving(tokenizer):
        return None
    try:
        template: str | None = templates.get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ModelError(
            f"The chat template of {source} changes earlier turns after the answer of a tool (e.g. removes their thinking), "
            "so the sampled tokens could not be trained. Set model.chat_template to a Jinja "
            "file whose rendering of a conversation begins with the rendering of its first turns."
        ) from error
    return template
