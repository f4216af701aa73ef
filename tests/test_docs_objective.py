"""docs/objective.md is what the code is: every hook with its defaults, formula and source, every recipe, every metric."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit import objective
from kit.cli.objective import KINDS, _call
from kit.objective import Objective, TokenBatch
from kit.objective.check import check_hook
from kit.objective.check_inputs import scale_of, token_batch, token_fields
from kit.objective.recipes import recipe, recipe_names
from kit.objective.schedules import Controller, schedules
from kit.registry import import_object
from kit.trainer.metric_log import PHASES

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "objective.md").read_text(encoding="utf-8")
TRL_TESTS = "\n".join(
    (ROOT / "tests/objective" / f"test_{name}.py").read_text() for name in ("trl_equality", "advantage")
)
HOOK_TESTS = "\n".join(path.read_text() for path in (ROOT / "tests/objective").glob("test_*.py"))
HOOKS = [(kind, name) for kind in KINDS for name in getattr(objective, f"{kind}s")]


def section(title: str) -> str:
    """What stands below a heading, up to the next of its level or above."""
    level = re.search(rf"^(#+) {re.escape(title)}$", DOC, re.MULTILINE)
    assert level, f"there is no heading '{title}'"
    rest = DOC[level.end() :]
    end = re.search(rf"^#{{2,{len(level[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def table(title: str, head: str) -> list[list[str]]:
    """Rows of the table below a heading whose first column is called `head`."""
    lines = section(title).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = re.split(r"(?<!\\)\|", line.strip())[1:-1]
        rows.append([cell.strip().replace("\\|", "|") for cell in cells])
    return rows


def hooks_in(kind: str) -> dict[str, list[str]]:
    """Name -> cells of its row."""
    rows = table(f"{kind.capitalize()}s", "hook and defaults")
    return {re.split(r"\W", row[0].strip("`"))[0]: row for row in rows}


@pytest.mark.parametrize("kind", KINDS)
def test_the_tables_hold_the_hooks_of_the_kit_and_no_others(kind: str) -> None:
    assert sorted(hooks_in(kind)) == list(getattr(objective, f"{kind}s"))


@pytest.mark.parametrize(("kind", "name"), HOOKS)
def test_defaults_formula_and_source_are_those_of_the_code(kind: str, name: str) -> None:
    hook = getattr(objective, f"{kind}s").build(name)
    call, formula, source, how = hooks_in(kind)[name]
    assert call == f"`{_call(hook.to_spec())}`"
    assert formula == re.sub(r"\{(\w+)\}", r"\1", hook.factory.formula)
    assert source == hook.factory.source
    assert how


@pytest.mark.parametrize(("kind", "name"), HOOKS)
def test_what_is_said_of_its_tests_has_a_test(kind: str, name: str) -> None:
    how = hooks_in(kind)[name][3]
    assert name in HOOK_TESTS
    if "equal to TRL" in how:
        assert name in TRL_TESTS


def test_the_recipes_are_those_of_the_code() -> None:
    rows = {row[0].strip("`"): row for row in table("Recipes", "recipe")}
    assert list(rows) == list(recipe_names())
    import kit.objective.recipes

    assert kit.objective.recipes.__doc__
    for name, row in rows.items():
        assert row[1:4] == [f"`{_call(recipe(name)[part])}`" for part in ("advantage", "clip", "reduction")]
        (line,) = re.findall(rf"^    {name} .*$", kit.objective.recipes.__doc__, re.MULTILINE)
        assert line.endswith(f"  {row[4]}")


def test_the_schedules_are_those_of_the_code_with_their_parameters() -> None:
    rows = [*table("Schedules and controllers", "schedule"), *table("Schedules and controllers", "controller")]
    calls = {row[0].strip("`").partition("(")[0]: row[0].strip("`)").partition("(")[2] for row in rows}
    assert sorted(calls) == list(schedules)
    for name, parameters in calls.items():
        fields = [field for field in dataclasses.fields(schedules[name]) if field.init]
        assert [each.partition("=")[0] for each in parameters.split(", ")] == [field.name for field in fields]
        for each, field in zip(parameters.split(", "), fields, strict=True):
            if issubclass(schedules[name], Controller) and each.partition("=")[2] not in ("", "min"):
                assert float(each.partition("=")[2]) == field.default


# --- metrics ---------------------------------------------------------------------------------------------------------


def patterns() -> dict[str, re.Pattern[str]]:
    """Each metric of the table as a pattern, `<name>` standing for a word."""
    names = [name for row in table("What is logged", "metric") for name in re.findall(r"`([^`]+)`", row[0])]
    return {name: re.compile(re.sub(r"<\w+>", r"[\\w-]+", name)) for name in names}


def everything_logged() -> set[str]:
    """Names that objectives with every clip, weight and regularizer log."""
    names: set[str] = set()
    weights = list(objective.weights)
    terms: list[Any] = [{"name": name, "coef": "linear(0.1, 0.2, 3)"} for name in objective.regularizers]
    terms += [{"name": "kl", "estimator": estimator} for estimator in ("k1", "k2", "abs", "full")]
    for clip in objective.clips:
        fields = token_fields(0)
        out = Objective(clip=clip, weights=weights, regularizers=terms).loss(
            token_batch(fields)[0], scale_of(fields["mask"])
        )
        names |= set(out.metrics)
    return {re.sub(r"_\d+$", "", name) for name in names}


def test_every_metric_of_the_table_is_real() -> None:
    logged = everything_logged()
    trainer = "\n".join(
        path.read_text()
        for folder in ("trainer", "scoring")
        for path in (ROOT / "kit" / folder).glob("*.py")
        if path.name != "dynamic_sampling.py"  # docs/selection.md has its table
    )
    for name, pattern in patterns().items():
        by_trainer = f'"{name}"' in trainer or name.removeprefix("seconds/") in PHASES
        quantile = re.fullmatch(r"(sampler/)?ratio/p\d\d", name) is not None
        assert by_trainer or quantile or any(pattern.fullmatch(each) for each in logged), name


def test_every_metric_of_the_objective_is_in_the_table() -> None:
    known = patterns().values()
    assert {name for name in everything_logged() if not any(pattern.fullmatch(name) for pattern in known)} == set()


def test_every_metric_of_the_trainer_is_in_the_table() -> None:
    trainer = "\n".join(
        path.read_text()
        for folder in ("trainer", "scoring")
        for path in (ROOT / "kit" / folder).glob("*.py")
        if path.name != "dynamic_sampling.py"  # docs/selection.md has its table
    )
    named = set(re.findall(r'"((?:value|masked|groups|advantage|ratio)/\w+)"', trainer))
    assert len(named) > 6
    assert {name for name in named if not any(pattern.fullmatch(name) for pattern in patterns().values())} == set()


def test_the_quantiles_are_those_of_the_code() -> None:
    from kit.objective.metrics import RATIO_QUANTILES, SAMPLED_TOKENS

    assert f"over up to {SAMPLED_TOKENS} tokens of each micro-batch" in section("What is logged")
    quantiles = [name for name in patterns() if name.startswith("ratio/p")]
    assert quantiles == [f"ratio/p{100 * level:02.0f}" for level in RATIO_QUANTILES]


# --- the hook of one's own -------------------------------------------------------------------------------------------


def own_hook(folder: Path) -> Callable[..., Tensor]:
    (code,) = re.findall(r"```python\n(.*?)```", section("A hook of your own"), re.DOTALL)
    assert len(code.strip().splitlines()) <= 15
    (folder / "my.py").write_text(code)
    function: Callable[..., Tensor] = import_object("my.py:sign_clip", base=folder)
    return function


def test_the_example_is_sound_and_computes_what_it_says(tmp_path: Path) -> None:
    hook = objective.clips.build(own_hook(tmp_path))
    assert {finding.result for finding in check_hook(hook)} == {"passed"}
    logps = torch.tensor([[0.0, 0.5]], requires_grad=True)
    batch = TokenBatch(logps, torch.zeros(1, 2), torch.tensor([[7.0]]), torch.ones(1, 2, dtype=torch.bool))
    assert hook(batch).tolist()[0] == pytest.approx([-1.0, -1.2])  # ratios 1 and 1.65, the second cut at 1 + eps


def test_the_commands_of_the_example_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from kit.cli.app import app
    from kit.config import load_config
    from kit.runner.prepare import build_objective

    own_hook(tmp_path)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```bash\n(.*?)```", section("A hook of your own"), re.DOTALL)
    check, train = [line.split()[1:] for line in block.strip().splitlines()]
    result = CliRunner().invoke(app, check)
    assert result.exit_code == 0, result.output
    assert train[0] == "train"
    overrides = [train[i + 1] for i, word in enumerate(train) if word == "-o"]
    assert build_objective(load_config(train[1], overrides)).to_spec()["clip"]["eps"] == 0.1


def test_the_checks_are_those_of_the_code() -> None:
    named = {row[0].strip("`") for row in table("A hook of your own", "check")}
    found = {f.name for kind in KINDS for f in check_hook(getattr(objective, f"{kind}s").build(EXAMPLES[kind]))}
    assert named == found


EXAMPLES = {"advantage": "gae", "clip": "ppo_clip", "weight": "drop_truncated"} | {
    "regularizer": "kl",
    "reduction": "token_mean",
}


def test_the_yaml_examples_can_be_run() -> None:
    import yaml

    blocks = re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        Objective.from_spec(yaml.safe_load(block)["objective"])


def test_the_needs_are_those_of_the_code() -> None:
    from kit.objective.hook import REMEDIES

    (line,) = re.findall(r"Known needs are(.*?)\.\n", DOC, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", line)) == set(REMEDIES)
