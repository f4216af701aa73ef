"""The Compare screen: the compared runs, and the text of the result."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import make

from kit.studies.compare import compare_runs
from kit.ui import compare
from kit.ui.settings import Settings
from kit.ui.site import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    make(tmp_path / "runs")
    return Site(Settings(root=tmp_path / "runs", folder=tmp_path))


def test_a_comparison_shows_arms_verdict_curves_and_what_differs(site: Site) -> None:
    root = site.settings.root
    for name, rate, share in (("slow", 1e-5, 0.2), ("fast", 1e-3, 0.9)):
        for seed in (0, 1):
            overrides = (f"run.seed={seed}", f"optimisation.learning_rate={rate}")
            make(root, f"{name}-s{seed}", share=share, overrides=overrides)
    ids = [run.id for run in compare.chosen_runs(site, ["slow-s0", "slow-s1", "fast-s0", "fast-s1", "slow-s0"])]
    text = compare.result(compare_runs(ids, root))
    assert 'href="/run?run=fast-s1"' in text
    assert "optimisation.learning_rate" in text
    assert "<svg" in text
    same = compare.result(compare_runs(["slow-s0", "one"], root) | {"config_differences": {}})
    assert "Nothing but the seed" in same


def test_an_address_names_the_runs_that_are_compared(site: Site) -> None:
    for name in ("two", "three"):
        make(site.settings.root, name)
    assert compare._choices(site, "two,one").value == ["two", "one"]
    assert compare._choices(site, "one,../x,,none,one").value == ["one"]
    for nothing in ("", None, 3, "<b>"):
        assert compare._choices(site, nothing).value == []
