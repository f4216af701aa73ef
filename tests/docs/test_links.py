"""Links of all pages have a target, and docs/index.md lists every page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from code_blocks import ROOT, pages
from scripts import load_script

DOCS = ROOT / "docs"
LINKED = [*pages(), ROOT / "CHANGELOG.md"]
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


@cache
def written_with_the_site() -> dict[str, Callable[[], str]]:
    """Functions that write the pages that exist only on the site, by path below docs/."""
    return dict(load_script("docs/site/pages.py").PAGES)


def exists(page: Path) -> bool:
    return page.exists() or (page.is_relative_to(DOCS) and page.relative_to(DOCS).as_posix() in written_with_the_site())


def text_of(page: Path) -> str:
    if page.exists():
        return page.read_text(encoding="utf-8")
    return written_with_the_site()[page.relative_to(DOCS).as_posix()]()


def anchors(text: str) -> set[str]:
    """The anchors of the headings, on GitHub and on the site."""
    headings = re.findall(r"^#+ (.+?) *$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path, text: str) -> Iterator[str]:
    """Yield the links of a page to files or headings that do not exist."""
    for target in re.findall(r"\]\(([^()\s]+)\)", FENCED.sub("", text)):
        if re.match(r"(https?|mailto):", target):
            continue
        name, _, anchor = target.partition("#")
        leads_to = (page.parent / name).resolve() if name else page
        if not exists(leads_to) or (anchor and anchor not in anchors(text_of(leads_to))):
            yield target


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken(page, page.read_text(encoding="utf-8"))) == []


def test_readme_links_to_nothing_that_only_the_site_has() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in written_with_the_site() if name in readme] == []


def test_the_map_has_every_page() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = {target.partition("#")[0] for target in re.findall(r"\]\(([^()\s]+)\)", text)}
    every = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert sorted((every | set(written_with_the_site())) - linked - {"index.md"}) == []
