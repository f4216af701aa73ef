"""The page around a report: one HTML file that loads nothing, runs nothing, and suits light, dark, phone and paper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from jinja2 import Template

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Section:
    """A heading with what stands below it. `body` is HTML if it is `Markup`, else text."""

    title: str
    body: str

    @property
    def anchor(self) -> str:
        """The heading as the end of an address."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-") or "section"


def page(title: str, sections: Sequence[Section | tuple[str, str]], *, subtitle: str = "") -> str:
    """A whole HTML document.

    Sections are `Section`s or (title, body) pairs. A body made by `kit.report.html` or `kit.report.charts` is HTML; any
    plain text is escaped. The document forbids its reader's browser every script and every request.
    """
    made = [part if isinstance(part, Section) else Section(*part) for part in sections]
    style = Markup((HERE / "style.css").read_text(encoding="utf-8"))
    return _template().render(title=title, subtitle=subtitle, sections=made, style=style)


@cache
def _template() -> Template:
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((HERE / "page.html").read_text(encoding="utf-8"))
