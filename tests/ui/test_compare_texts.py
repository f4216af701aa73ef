"""What the Compare screen makes of runs: arms, differences of configuration, and what is drawn of the verdict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from made_runs import make

from kit.errors import RunError
from kit.ui import compare
from kit.ui.curves import Library
from kit.ui.settings import Settings
from kit.ui.site import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    make(tmp_path / "runs")
    return Site(Settings(root=tmp_path / "runs", folder=tmp_path))


def test_runs_of_one_method_are_one_arm(site: Site) -> None:
    root = site.settings.root
    runs = [make(root, f"{name}-s{seed}", overrides=(f"run.seed={seed}", f"optimisation.learning_rate={rate}"))
            for name, rate in (("slow", 1e-5), ("fast", 1e-3)) for seed in (0, 1)]  # fmt: skip
    arms = compare.arms_of(runs, together=True)
    assert [[run.id for run in arm] for arm in arms] == [["slow-s0", "slow-s1"], ["fast-s0", "fast-s1"]]
    assert compare.arm_names(arms) == ["slow", "fast"]
    assert len(compare.arms_of(runs, together=False)) == 4
    configs = [compare.configuration(arm[0]) for arm in arms]
    text = compare.differences(["slow", "fast"], configs, compare.NOT_THE_METHOD)
    assert text.count("<tr>") == 2  # the head and the one key
    assert "optimisation.learning_rate" in text
    packed = compare.overlaid(Library(), arms, ["slow", "fast"])
    reward = packed["panels"][0]["series"]
    assert [(one["name"], one["color"], one["grid"]) for one in reward] == [
        ("slow-s0", 0, 0), ("slow-s1", 0, 1), ("fast-s0", 1, 2), ("fast-s1", 1, 3)
    ]  # fmt: skip
    same = compare.differences(["a", "b"], [configs[0], configs[0]], ())
    assert "Nothing but the seed" in same


def test_configurations_that_cannot_be_read_are_not_the_same(site: Site) -> None:
    root = site.settings.root
    runs = [make(root, name) for name in ("lost-s0", "lost-s1", "good")]
    for run in runs[:2]:
        run.config.write_text("{ half a")
    arms = compare.arms_of(runs, together=True)
    assert [[run.id for run in arm] for arm in arms] == [["lost-s0"], ["lost-s1"], ["good"]]
    configs = [compare.configuration(run) for run in runs]
    text = compare.differences(["a", "b"], configs[:2], ())
    assert "config.yaml of a, b cannot be read" in text
    assert "luck" not in text
    changed = configs[2] | {"optimisation.steps": 7}
    text = compare.differences(["a", "b", "c"], [configs[0], configs[2], changed], ())
    assert "config.yaml of a cannot be read" in text
    assert "optimisation.steps" in text


def test_an_address_names_the_runs_that_are_compared(site: Site) -> None:
    for name in ("two", "three"):
        make(site.settings.root, name)
    assert compare._choices(site, "two,one").value == ["two", "one"]
    assert compare._choices(site, "one,../x,,none,one").value == ["one"]
    for nothing in ("", None, 3, "<b>"):
        assert compare._choices(site, nothing).value == []


def test_an_interval_ends_before_its_axis_does() -> None:
    """One that filled its whole axis looked like a bar of progress."""
    gap = {"low": -0.02, "value": 0.0, "high": 0.02}
    found = {"comparisons": [{"arm": "b", "difference": gap}], "baseline": "a", "problems": 200}
    text = str(compare._forest(found, "accuracy"))
    ((left, width),) = re.findall(r"left:([\d.]+)%;width:([\d.]+)%", text)
    (zero,) = re.findall(r'<u style="left:([\d.]+)', text)
    assert 2 < float(left) < 15
    assert 85 < float(left) + float(width) < 98
    assert float(zero) == 50


def test_too_many_runs_are_refused(site: Site) -> None:
    with pytest.raises(RunError, match="at most"):
        compare.chosen_runs(site, [f"run-{number}" for number in range(40)])
