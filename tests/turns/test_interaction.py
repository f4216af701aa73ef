"""`generation.tools` and `.environment`: loading, and errors with the code to write instead."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tiny_qwen import tiny_tokenizer

from kit.config import GenerationConfig
from kit.environments.calculator import Calculator, evaluate
from kit.errors import ConfigError, ModelError
from kit.generation.tools import ToolSetup, check_turns, load_tools

OWN = '''
def add(left: int, right: int) -> int:
    """
    Adds two numbers.

    Args:
        left: The first.
        right: The second.
    """
    return left + right

def bare(left, right):
    return left + right

def calculate(expression: str) -> str:
    """
    Another one.

    Args:
        expression: What to evaluate.
    """
    return expression

class NoReset:
    pass

class Narrow:
    def reset(self):
        pass

class Broken:
    def __init__(self, size):
        pass

class Bare:
    def reset(self, **columns):
        pass
    def act(self, move):
        return move
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def load(**keys: Any) -> ToolSetup:
    return load_tools(GenerationConfig(**keys))


def test_what_is_named_is_handed_to_trl(own: str) -> None:
    setup = load(tools=[f"{own}:add"], environment="kit.environments.calculator:Calculator")
    arguments = setup.trainer_arguments()
    assert [tool.__name__ for tool in arguments["tools"]] == ["add"]
    assert arguments["environment_factory"] is Calculator
    assert [tool.__name__ for tool in setup.all_tools()] == ["add", "calculate"]
    assert not load()
    assert load().trainer_arguments() == {}
    several = load(environment={"sums": "kit.environments.calculator:Calculator"})
    assert several.trainer_arguments()["environment_factory"] == {"sums": Calculator}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"tools": ["{own}:bare"]}, "A tool needs type hints, and a docstring"),
        ({"tools": ["{own}:nothing"]}, "has no function 'nothing'"),
        ({"tools": ["{own}:add", "{own}:add"]}, "two tools have the same name"),
        ({"environment": "{own}:NoReset"}, r"has no method reset\(self, \*\*row\)"),
        ({"environment": "{own}:Narrow"}, r"has no \*\*columns"),
        ({"environment": "{own}:Broken"}, r"Broken\(\) failed: TypeError"),
        ({"environment": "{own}:Bare"}, r"Bare.act cannot be described to the model"),
        (
            {"tools": ["{own}:calculate"], "environment": "kit.environments.calculator:Calculator"},
            "both have a tool called calculate",
        ),
    ],
)
def test_what_cannot_work_is_refused(own: str, keys: dict[str, Any], reason: str) -> None:
    named = {
        key: value.format(own=own) if isinstance(value, str) else [path.format(own=own) for path in value]
        for key, value in keys.items()
    }
    with pytest.raises(ConfigError, match=reason):
        load(**named)


def test_a_template_has_to_render_tools(tokenizer: Any) -> None:
    calculator = load(environment="kit.environments.calculator:Calculator")
    check_turns(calculator, tokenizer, chat=True, source="it")
    with pytest.raises(ConfigError, match="need messages"):
        check_turns(calculator, tokenizer, chat=False, source="it")
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = tiny_tokenizer().chat_template
    with pytest.raises(ModelError, match="does not render tool calls"):
        check_turns(calculator, plain, chat=True, source="it")
    mute = copy.deepcopy(tokenizer)
    mute.response_template = None
    with pytest.raises(ModelError, match="response_template"):
        check_turns(calculator, mute, chat=True, source="it")
    unsteady = copy.deepcopy(tokenizer)
    unsteady.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    with pytest.raises(ModelError, match="changes earlier turns"):
        check_turns(calculator, unsteady, chat=True, source="it")


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "1 / 0", "2 ** 99", "open('x')", "a", "True", "'a' * 3", "1" * 201, "9e307 * 99", "(" * 150, "1e400"],
)
def test_the_calculator_refuses_what_is_no_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError, match=r"[a-z]"):
        evaluate(expression)
