"""All screens and tabs against WCAG 2.2 A and AA, with axe in a browser: wide and light, narrow and dark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")
from axe_playwright_python.sync_playwright import Axe
from made_runs import make
from playwright.sync_api import Page as Tab
from test_browser import SCREENS, look, step, tab

from kit.ui import run
from kit.ui.new_run import STEPS

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
__all__ = ["tab"]
TABS = {"/new": tuple(STEPS), "/run": tuple(name.capitalize() for name in run.TABS)}
INNER = {"2 Reward": ("Try attacks", "Signal check")}
"""Tabs within a tab, but the first, which is open."""
RULES = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]},
    "resultTypes": ["violations"],
    "preload": False,  # would load style sheets again, for rules that are not used here
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, serve_here: Callable[..., Any]) -> Any:
    """A page with a finished run."""
    folder: Path = tmp_path_factory.mktemp("axe")
    make(folder / "runs", "one")
    return serve_here(folder)


def violations(page: Tab) -> list[str]:
    """The violations that axe reports, one line per element: rule, element and reason."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    broken = page.evaluate(f"axe.run({json.dumps(RULES)}).then(results => results.violations)")
    return [f"{rule['id']}: {node['html'][:200]} {node['failureSummary']}" for rule in broken for node in rule["nodes"]]


@pytest.mark.parametrize("screen", SCREENS)
def test_no_screen_has_a_violation(made: Any, tab: Callable[..., Tab], screen: str) -> None:
    page = tab(made, screen if screen in ("/", "/new", "/compare") else f"{screen}?run=one", 390, "dark")
    page.add_style_tag(content="* {transition: none !important}")  # colours have another contrast while they fade in
    faults: list[str] = []
    folded = {"1 Data": ("#yaml-fold", "#yaml .cm-line")}
    for width, scheme in ((390, "dark"), (1280, "light")):
        look(page, width, scheme)
        faults += violations(page)
        for title in TABS.get(screen, ()):
            for opened in (title, *INNER.get(title, ())):
                step(page, opened)
                if opened in folded:
                    fold, inside = folded.pop(opened)
                    page.locator(f"{fold} button.label-wrap").click()
                    page.locator(inside).first.wait_for()
                page.wait_for_timeout(300)
                faults += violations(page)
    assert faults == []
