"""Load and check the tools and environments that a model may use while it completes.

YAML names them (`generation.tools`, `generation.environment`); TRL gets them from here and runs the
calls. What TRL could not run is refused before a run starts, with what to write instead.
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
"""Methods of an environment that are no tools."""
Factory = Callable[[], Any]


@dataclass(frozen=True)
class ToolSetup:
    """Loaded tools and environments. `environments` go by the dataset's column `environment`; None is the only one."""

    tools: tuple[Callable[..., Any], ...] = ()
    environments: Mapping[str | None, Factory] | None = None
    max_iterations: int | None = None

    def __bool__(self) -> bool:
        """Whether TRL's loop of calls and answers runs."""
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
        """Tools and the methods of all environments."""
        return [*self.tools, *(tool for make in (self.environments or {}).values() for tool in methods_of(make()))]


NOTHING = ToolSetup()


def open_row(interaction: ToolSetup, row: Mapping[str, Any]) -> tuple[Any, Any, list[Callable[..., Any]]]:
    """The prompt of a row after its environment was reset, that environment (None: there is none), and its tools."""
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
    """Refuses rows that the environments could not serve. Raises `DataError`."""
    for rows in (data.train, data.heldout):
        if interaction.environments is None or None in interaction.environments:
            continue
        known = ", ".join(map(str, interaction.environments))
        if "environment" not in rows.column_names:
            raise DataError(
                f"generation.environment names several ({known}), so each row needs a column environment that says which one."
            )
        strange = {name for name in rows["environment"] if name not in interaction.environments}
        if strange:
            raise DataError(
                f"The column environment holds {min(map(repr, strange))}; generation.environment has {known}."
            )


def load_tools(config: GenerationConfig) -> ToolSetup:
    """The tools and environments of a configuration, checked: one instance of each environment is made. Raises `KitError`."""
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
            f"generation.tools: two tools have one name ({', '.join(names)}); the model calls them by it.",
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
        except Exception as error:  # a parser of docstrings and type hints raises what it likes
            raise ConfigError(
                f"The tool {where} cannot be described to the model: {str(error).strip().rstrip('.')}. A tool needs type hints, "
                f"and a docstring that says what it does and what each argument is:{TOOL_EXAMPLE}"
            ) from error
    return ToolSetup(tools, environments, config.max_tool_calling_iterations)


def methods_of(environment: Any) -> list[Callable[..., Any]]:
    """The public methods of an environment's class, which are tools, but for `reset` and `get_reward`."""
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return [getattr(environment, name) for name, _ in members if name not in CONTROL and not name.startswith("_")]


def _make(factory: Factory, where: str) -> Any:
    """One environment. Raises `ConfigError` for what TRL could not drive."""
    try:
        environment = factory()
    except Exception as error:
        raise ConfigError(
            f"generation.environment: {where}() failed: {type(error).__name__}: {error}. It is called without arguments, once "
            "for each completion of a batch, and returns an environment: usually it is the class itself."
        ) from error
    has_reset = not isinstance(environment, type) and callable(getattr(type(environment), "reset", None))
    parameters = inspect.signature(environment.reset).parameters.values() if has_reset else ()
    refuse(
        ConfigError,
        (
            not has_reset,
            f"generation.environment: what {where}() makes ({type(environment).__name__}) has no method reset(self, **row).",
            "It is called before every completion with the columns of the row, and returns None or text to add to the prompt.",
        ),
        (
            not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
            f"generation.environment: reset() of {where} takes no **columns, and is called with every column of the row.",
            "Write: def reset(self, **columns).",
        ),
    )
    return environment


def check_turns(interaction: ToolSetup, tokenizer: Any, *, chat: bool, source: str) -> None:
    """Refuses a model whose template cannot hold a conversation with tools. Raises `KitError`.

    The tokenizer is given TRL's description of how its template writes calls, where it has none of its own.
    """
    if not interaction:
        return
    if not chat:
        raise ConfigError(
            "generation.tools and .environment need messages; data.chat: false sends plain text. Set it true."
        )
    templates = chat_template_utils()
    if not templates._SUPPORTS_RESPONSE_TEMPLATE and find_spec("jmespath") is None:
        raise EnvironmentUnsupported(
            "Calls of tools are read with jmespath in transformers below 5.13, and it is not installed. Install it with: "
            "pip install jmespath  (or: pip install 'transformers>=5.13')."
        )
    if not templates.supports_tool_calling(tokenizer):
        raise ModelError(
            f"The chat template of {source} does not render calls of tools and their answers, so the model could not see them. "
            "Use a model made for tools (Qwen2.5/Qwen3 Instruct, Llama 3.1 Instruct, GPT-OSS), or set model.chat_template to a "
            "Jinja file that renders message.tool_calls and messages of the role tool."
        )
    if getattr(tokenizer, "response_template", None) is None and getattr(tokenizer, "response_schema", None) is None:
        try:
            templates.add_response_schema(tokenizer)
        except ValueError as error:
            raise ModelError(
                f"How {source} writes its calls is not known: its chat template is none of those that TRL has a parser for. Set "
                "response_template in the tokenizer's tokenizer_config.json (transformers' docs: response parsing), or use the "
                "original template of the model family."
            ) from error
    training_template(tokenizer, source)


def chat_template_utils() -> Any:
    """TRL's module of that name. Before TRL is imported it is read alone, as part of a package without TRL's beginnings.

    A run is checked before its backend is active, and Unsloth can only rewrite a TRL that was not imported yet.
    """
    if "trl" in sys.modules:
        return importlib.import_module("trl.chat_template_utils")
    spec = find_spec("trl")
    assert spec is not None
    package = sys.modules.setdefault("_trl_read_alone", ModuleType("_trl_read_alone"))
    package.__path__ = list(spec.submodule_search_locations or ())
    return importlib.import_module("_trl_read_alone.chat_template_utils")


def training_template(tokenizer: Any, source: str) -> str | None:
    """The template that TRL renders with in place of the tokenizer's, None where that one serves. Raises `ModelError`."""
    templates = chat_template_utils()
    if templates.is_chat_template_prefix_preserving(tokenizer):
        return None
    try:
        template: str | None = templates.get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ModelError(
            f"The chat template of {source} renders earlier turns otherwise once a tool has answered (it drops their thinking, "
            "for example), so the tokens that the model saw could not be trained on. Set model.chat_template to a Jinja "
            "file whose rendering of a conversation begins with the rendering of its first turns."
        ) from error
    return template
