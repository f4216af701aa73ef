"""The site builds in strict mode without a network, and its pages load nothing from other servers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docs" / "site" / "mkdocs.yml"


def test_the_reference_has_every_key_of_the_configuration() -> None:
    from kit.config import RunConfig, Section

    def keys(section: Section, prefix: str = "") -> list[str]:
        names = []
        for name in type(section).model_fields:
            value = getattr(section, name)
            names += keys(value, f"{prefix}{name}.") if isinstance(value, Section) else [f"{prefix}{name}"]
        return names

    page = load_script("docs/site/pages.py").configuration()
    rows = {row.group(1): row.group(0) for row in re.finditer(r"^\| `([\w.]+)` \|.*$", page, re.MULTILINE)}
    assert set(keys(RunConfig())) == set(rows)
    assert all(len(re.split(r"(?<!\\)\|", row)) == 6 for row in rows.values()), "bars in cells must be escaped"
    assert "(0, 1]" in page or "> 0" in page
    assert all(not row.endswith("|  |") for row in rows.values()), "every key must have a meaning"


def test_the_reference_has_every_verb() -> None:
    from typer.main import get_command

    from kit.cli.app import app

    page = load_script("docs/site/pages.py").command_line()
    command: Any = get_command(app)
    for name, verb in command.commands.items():
        for inner in getattr(verb, "commands", {"": None}):
            assert f"## {' '.join(filter(None, ('grpo-kit', name, inner)))}\n" in page


def test_the_page_of_files_has_a_sentence_for_each() -> None:
    page = load_script("docs/site/pages.py").files()
    assert "| `train.py` | The main loop" in page
    rows = set(re.findall(r"^\| `(\w+\.py)` \| \S.* \|$", page, re.MULTILINE))
    modules = {path.name for part in ("kit", "rewards") for path in (ROOT / part).rglob("*.py")}
    assert rows == modules - {"__init__.py"}
    assert "|  |" not in page


@pytest.mark.docs
def test_the_pictures_are_what_the_code_draws() -> None:
    assert load_script("docs/draw_concepts.py").differences() == [], "run: python docs/draw_concepts.py"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.docs
def test_it_is_built_without_a_warning_and_links_lead_somewhere(site: Path) -> None:
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {"index.html", "concepts.html", "reference/configuration.html", "reference/python.html"} <= pages
    sources = {
        path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")
    }
    assert sources <= pages


@pytest.mark.docs
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    tags = r"<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc|<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref"
    fetched = rf"(?:{tags})=[\"']?(?:https?:)?//"
    for page in site.rglob("*.html"):
        assert re.search(fetched, page.read_text(encoding="utf-8")) is None, page
    for style in site.rglob("*.css"):
        assert re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")) is None, style


@pytest.mark.docs
def test_the_reference_of_python_shows_signatures_and_arguments(site: Path) -> None:
    page = (site / "reference/python.html").read_text(encoding="utf-8")
    assert 'id="kit.api.train"' in page
    assert "optimiser steps" in page
    assert 'id="kit.errors.ConfigError"' in page
