"""HTML pages and parts of pages from templates, without scripts and requests, for light, dark, phone and paper."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from kit.report.charts import number
from kit.runs.files import shorten

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


def page(title: str, sections: Iterable[tuple[str, str]], *, subtitle: str = "") -> str:
    """An HTML document of (heading, body) pairs.

    A body from `piece` or `kit.report.charts` is HTML; plain text is escaped. The document's content security policy forbids all
    scripts and requests.
    """
    template = _environment().get_template("page.html")
    return template.render(title=title, subtitle=subtitle, sections=list(sections))


def piece(template: str, macro: str, *arguments: Any, **more: Any) -> Markup:
    """A part of a page: the result of a macro of a file in `templates` with plain data."""
    return Markup(getattr(_environment().get_template(template).module, macro)(*arguments, **more))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )

    def anchor(heading: str) -> str:
        """A heading as the fragment of a URL."""
        return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "section"

    environment.filters |= {"shorten": shorten, "number": number, "anchor": anchor}
    return environment
