"""docs/objective.md lists every metric, check and field for hooks, and the generated page every hook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script

from kit import objective
from kit.cli.objective import KINDS
from kit.objective import Objective
from kit.objective.check import check_hook, scale_of, token_batch, token_fields
from kit.objective.recipes import recipe_names
from kit.objective.schedules import schedules
from kit.trainer.metric_log import PHASES

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "objective.md").read_text(encoding="utf-8")
HOOK_TESTS = "\n".join(path.read_text() for path in (ROOT / "tests/objective").glob("test_*.py"))


def section(title: str) -> str:
    """Return the text below a heading, up to the next heading of the same or a higher level."""
    level = re.search(rf"^(#+) {re.escape(title)}$", DOC, re.MULTILINE)
    assert level, f"there is no heading '{title}'"
    rest = DOC[level.end() :]
    end = re.search(rf"^#{{2,{len(level[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def table(title: str, head: str) -> list[list[str]]:
    """Return the rows of the table below a heading whose first column has the header `head`."""
    lines = section(title).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = re.split(r"(?<!\\)\|", line.strip())[1:-1]
        rows.append([cell.strip().replace("\\|", "|") for cell in cells])
    return rows


def test_the_generated_page_has_every_recipe_hook_and_schedule() -> None:
    pages = load_script("docs/site/pages.py")
    rows = re.findall(r"^\| `(\w+)(?:\([^`]*\))?` \| (.+) \|$", pages.hooks(), re.MULTILINE)
    names = [name for kind in KINDS for name in getattr(objective, f"{kind}s")]
    assert sorted(name for name, _ in rows) == sorted([*recipe_names(), *names, *schedules])
    assert all(len(re.split(r"(?<!\\)\|", cells)) in (1, 3, 4) for _, cells in rows), "a bar in a cell is escaped"


@pytest.mark.parametrize("kind", KINDS)
def test_every_hook_is_named_in_a_test(kind: str) -> None:
    assert [name for name in getattr(objective, f"{kind}s") if name not in HOOK_TESTS] == []


# --- metrics ---------------------------------------------------------------------------------------------------------


def patterns() -> dict[str, re.Pattern[str]]:
    """Return regular expressions for the metrics of the table; `<name>` matches a word."""
    names = [name for row in table("Metrics", "metric") for name in re.findall(r"`([^`]+)`", row[0])]
    return {name: re.compile(re.sub(r"<\w+>", r"[\\w-]+", name)) for name in names}


def everything_logged() -> set[str]:
    """Return the names of the metrics that objectives with every clip, weight and regularizer log."""
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
        for folder in ("kit/trainer", "kit/scoring", "rewards/adaptors")
        for path in (ROOT / folder).glob("*.py")
        if path.name != "dynamic_sampling.py"  # its metrics are in docs/selection.md
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
        if path.name != "dynamic_sampling.py"  # its metrics are in docs/selection.md
    )
    named = set(re.findall(r'"((?:value|masked|groups|advantage|ratio)/\w+)"', trainer))
    assert len(named) > 4
    assert {name for name in named if not any(pattern.fullmatch(name) for pattern in patterns().values())} == set()


def test_the_quantiles_are_those_of_the_code() -> None:
    from kit.objective.metrics import RATIO_QUANTILES, SAMPLED_TOKENS

    assert f"over up to {SAMPLED_TOKENS} tokens of each micro-batch" in section("Metrics")
    quantiles = [name for name in patterns() if name.startswith("ratio/p")]
    assert quantiles == [f"ratio/p{100 * level:02.0f}" for level in RATIO_QUANTILES]


# --- hooks of the user ------------------------------------------------------------------------------------------------


def test_the_checks_are_those_of_the_code() -> None:
    named = {row[0].strip("`") for row in table("Objective check", "check")}
    checks = {f.name for kind in KINDS for f in check_hook(getattr(objective, f"{kind}s").build(EXAMPLES[kind]))}
    assert named == checks


EXAMPLES = {"advantage": "gae", "clip": "ppo_clip", "weight": "drop_truncated"} | {
    "regularizer": "kl",
    "reduction": "token_mean",
}


def test_the_needs_are_those_of_the_code() -> None:
    from kit.objective.batch import REWARD_FIELDS, TOKEN_FIELDS

    names = re.findall(r"^\| (`.*?`) \(need\) \|", section("What a hook sees"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(names))) == {*REWARD_FIELDS, *TOKEN_FIELDS}
