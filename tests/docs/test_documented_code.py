"""Code blocks of the pages: commands exist on the command line, YAML is valid, Python runs."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import code_blocks
import pytest
from code_blocks import ROOT, Block, commands, everything, shell

ALL = everything()
OUTSIDE = {
    "hf",
    "pip",
    "pipx",
    "uv",
    "apt-get",
    "accelerate",
    "torchrun",
    "trl",
    "tensorboard",
    "trackio",
    "git",
    "curl",
}
"""Programs of others."""
EXECUTED_AS_DOCTESTS = ("docs/rewards.md",)
"""By tests/rewards/test_docs.py."""
EXAMPLE = "quickstart-20260101-120000"
"""The run that examples speak of."""


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in ALL if block.language in languages and not block.not_run]


def test_languages_are_known() -> None:
    assert {str(block): block.language for block in ALL if block.language not in code_blocks.LANGUAGES} == {}


# --- shell -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", of("bash", "text", ""))
def test_commands_exist_with_their_options(block: Block) -> None:
    for words in commands(shell(block)):
        check_command(words)


def check_command(words: list[str]) -> None:
    """Raise `AssertionError` for a verb, an option, a key or a file that does not exist."""
    program, *rest = words
    program = program.removeprefix(".venv-vllm/bin/")  # created by .ci/vllm-environment, missing in a fresh clone
    if program == "grpo-rewards" or (program == "grpo-kit" and rest[0] == "reward"):
        from rewards.__main__ import parser

        parser().parse_args(rest if program == "grpo-rewards" else rest[1:])
    elif program == "grpo-kit":
        parse(rest)
    elif program in ("python", "python3"):
        module = f"{rest[1].replace('.', '/')}.py" if rest[0] == "-m" else rest[0]
        assert (ROOT / module).is_file(), words
    elif words[:2] == ["bash", ".ci/run"]:
        ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
        assert [stage for stage in rest[1:] if not re.search(rf"^{stage}\(\)", ci, re.MULTILINE)] == []
    elif program == "pytest":
        assert [word for word in rest if "/" in word and not (ROOT / word).exists()] == []
    else:
        assert program in OUTSIDE or (ROOT / program).is_file(), words


@functools.cache
def the_command() -> Any:
    from typer.main import get_command

    from kit.cli.app import app

    return get_command(app)


def parse(words: list[str]) -> None:
    command = the_command()
    path, left = "grpo-kit", list(words)
    if left[:1] in (["--help"], ["--version"]):
        return
    while hasattr(command, "commands"):
        assert left, f"{path} is an incomplete command"
        assert left[0] in command.commands, f"{path} has no verb {left[0]!r}"
        path, command = f"{path} {left[0]}", command.commands[left[0]]
        left.pop(0)
    try:
        context = command.make_context(path, left)
    except Exception as error:
        raise AssertionError(f"{path} {left}: {type(error).__name__} {error}") from error
    check_overrides(context.params)


def check_overrides(params: dict[str, Any]) -> None:
    """Check keys after -o, of the configuration and of the kit's hooks."""
    from kit.config import load_config, preset_names
    from kit.errors import ConfigError

    overrides = params.get("override") or []
    if not overrides or (params.get("name") and "." not in str(overrides[0]).partition("=")[0]):
        return
    config = params.get("config") if params.get("config") in preset_names() else "quickstart"
    try:
        loaded = load_config(config, [override for override in overrides if not override.startswith("clip.")])
    except ConfigError as error:
        raise AssertionError(str(error)) from error
    if any(override.startswith("objective.") and ".py:" not in " ".join(overrides) for override in overrides):
        from kit.errors import KitError
        from kit.runner.prepare import build_objective

        try:
            build_objective(loaded)
        except KitError as error:
            raise AssertionError(str(error)) from error


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_valid(block: Block) -> None:
    check_yaml(block.text)


def check_yaml(text: str) -> None:
    """Check a run's configuration; raise `AssertionError` if it is invalid."""
    import yaml

    from kit.config import RunConfig, load_config
    from kit.errors import KitError
    from kit.runner.prepare import build_objective

    tree = yaml.safe_load(text)
    try:
        assert set(tree) <= set(RunConfig.model_fields), f"not a run: {sorted(tree)}"
        config = load_config(tree)
        if "objective" in tree and ".py:" not in text:
            build_objective(config)
    except KitError as error:
        raise AssertionError(str(error)) from error


@pytest.mark.parametrize("block", of("json"))
def test_json_is_json(block: Block) -> None:
    for line in [block.text] if block.text.lstrip().startswith(("{\n", "[")) else block.text.splitlines():
        json.loads(line)


# --- Python ----------------------------------------------------------------------------------------------------------


def python_blocks() -> Iterator[Any]:
    for param in of("python"):
        name = str(param.values[0])
        if not name.startswith(EXECUTED_AS_DOCTESTS):
            yield param


@pytest.mark.docs
@pytest.mark.timeout(600)  # two processes one after the other, on a busy machine
@pytest.mark.parametrize("block", list(python_blocks()))
def test_python_runs(block: Block, names: dict[str, Any], tmp_path: Path) -> None:
    assert Path.cwd() == tmp_path
    if ">>>" in block.text:
        import doctest

        test = doctest.DocTestParser().get_doctest(block.text, names, str(block), None, 0)
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
        return
    code = block.text.replace("GRPOConfig(", "GRPOConfig(use_cpu=True, ")  # TRL's defaults are those of a GPU
    exec(compile(code.replace("TRIALS = 12", "TRIALS = 2"), str(block), "exec"), names)


@pytest.fixture
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names that code blocks use without defining them: a finished run, a model, a dataset. Runs are short, with a tiny model."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "notebooks")
    from smoke import SHORT

    import kit
    import kit.api

    resolve = kit.runner.prepare.resolve_config
    monkeypatch.setattr(
        kit.api,
        "resolve_config",
        lambda config, overrides=(), **short: resolve(config, [*overrides, *SHORT], **short),
    )
    monkeypatch.chdir(request.getfixturevalue("tmp_path"))
    made: dict[str, Any] = {"kit": kit}
    text = request.node.callspec.params["block"].text
    if EXAMPLE in text or (re.search(r"\brun\b", text) and "run = " not in text):
        folder = request.getfixturevalue("attempt")(f"run.id={EXAMPLE}").folder  # below tmp_path, where a block is run
        made["run"] = kit.Run(folder.id, folder.path.parent)
    if re.search(r"\bmodel,", text):
        made |= _model_and_data(request.getfixturevalue("model_folder"))
    return made


def _model_and_data(folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return {
        "model": AutoModelForCausalLM.from_pretrained(folder),
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": "1 + 1 ="}], "reference": "2"}] * 8),
    }


def test_pages_name_arguments_and_attributes_that_the_trainer_has() -> None:
    from trl import GRPOTrainer

    from kit.trainer.trainer import HookedGRPOTrainer

    known = set(inspect.signature(HookedGRPOTrainer.__init__).parameters) | set(
        inspect.signature(GRPOTrainer.__init__).parameters
    )
    sources = "".join(inspect.getsource(inspect.getmodule(each)) for each in (HookedGRPOTrainer, GRPOTrainer))
    wrong = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for call in re.findall(r"HookedGRPOTrainer\(([^()]*)\)", text):
            wrong += [(page.name, name) for name in re.findall(r"(\w+)=", call) if name not in known]
        if page.name != "coming-from.md":  # keys of other programs
            for name in re.findall(r"(?<![\w/.])trainer\.(?!py\b)([a-z_]\w*)", text):
                wrong += [] if hasattr(HookedGRPOTrainer, name) or f"self.{name} =" in sources else [(page.name, name)]
    assert wrong == []
