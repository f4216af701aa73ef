"""Pieces of HTML. Every text is escaped by `markupsafe`, so that a completion cannot become part of the page.

A piece is a `Markup`; `page(*pieces)` is the value of a `gr.HTML`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup, escape

from kit.report.charts import svg
from kit.report.panels import Panel
from kit.runs.files import duration
from kit.runs.secrets import redact

LEVELS = {
    "finished": "ok",
    "running": "live",
    "starting": "live",
    "queued": "live",
    "stopping": "warn",
    "stopped": "warn",
    "interrupted": "warn",
    "failed": "fail",
}
"""Colour of each state of a run."""


def page(*pieces: str) -> str:
    """Join pieces into the value of a `gr.HTML`."""
    return str(Markup('<div class="k">{}</div>').format(Markup("").join(pieces)))


def tag(name: str, content: Any = "", **attributes: str) -> Markup:
    """Return `<name class="...">content</name>`. `class_` and `data_label` become `class` and `data-label`."""
    pairs = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), pairs, content)


def join(pieces: Iterable[Any], between: str = "") -> Markup:
    """Join pieces; texts among them are escaped."""
    return Markup(between).join(escape(piece) for piece in pieces)


def badge(text: str, level: str = "") -> Markup:
    """Return a word in a pill, coloured by `level`: ok, warn, fail, live or plain."""
    return tag("span", text, class_=f"badge {level}".strip())


def state_badge(state: str) -> Markup:
    """Return a badge with a run's state, coloured by `LEVELS`."""
    return badge(state, LEVELS.get(state, ""))


def note(text: Any, level: str = "") -> Markup:
    """Return a paragraph with a coloured edge; line breaks are kept."""
    return tag("div", text, class_=f"note {level}".strip(), role="alert" if level == "fail" else "note")


def error(text: Any) -> str:
    """Return an error note. Keys that a library put into its message are hidden."""
    return page(note(redact(str(text)), "fail"))


def empty(title: str, text: Any = "") -> str:
    """Return a placeholder for missing content: a title, and what to do."""
    return page(tag("div", tag("b", title) + escape(text), class_="empty"))


def bar(share: float, level: str = "", label: str = "") -> Markup:
    """Return a filled bar; `share` is from 0 to 1."""
    width = f"width:{100 * min(1.0, max(0.0, share)):.1f}%"
    return tag("div", tag("i", "", class_=level, style=width), class_="bar", role="img", aria_label=label)


def panel(*pieces: Any) -> Markup:
    """Return a box with a frame."""
    return tag("div", join(pieces), class_="card")


def fold(title: str, *pieces: Any) -> Markup:
    """Return a title that unfolds the pieces below it."""
    return tag("details", tag("summary", title) + join(pieces), class_="fold")


def table(
    head: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Iterable[int] = (), stack: bool = True
) -> Markup:
    """Return a table; the columns `numbers` are aligned right. With `stack`, rows become cards on a phone."""
    right = set(numbers)

    def cell(name: str, at: int, content: Any) -> Markup:
        return tag(
            name,
            content,
            **({"class_": "n"} if at in right else {}),
            **({"data_label": head[at]} if name == "td" else {}),
        )

    body = join(tag("tr", join(cell("td", at, item) for at, item in enumerate(row))) for row in rows)
    top = tag("tr", join(cell("th", at, title) for at, title in enumerate(head)))
    kind = "t stack" if stack else "t"
    return tag("div", tag("table", tag("thead", top) + tag("tbody", body), class_=kind), class_="scroll")


def charts(panels: Iterable[Panel], marks: Sequence[tuple[float, str]] = ()) -> str:
    """Return the charts of the report in a grid; "" without panels. `marks` are (step, text) of vertical lines."""
    drawn = [panel(svg(each, marks=marks)) for each in panels]
    return page(tag("div", join(drawn), class_="svgs")) if drawn else ""


def chip(name: str, value: Any, status: str) -> Markup:
    """Return a component of a reward with its value and status."""
    words = join([name, tag("b", number(value, 2)), tag("small", status.replace("_", " "))], " ")
    return tag("span", words, class_=f"chip {status if status.isidentifier() else ''}".strip())


def reference(value: Any) -> Markup:
    """Return the reference of a prompt, or nothing for None."""
    return Markup("") if value is None else tag("div", tag("small", "reference ") + tag("code", str(value)[:400]))


def effect(advantage: float) -> str:
    """Say what training does to a completion with this advantage."""
    return "becomes more likely" if advantage > 0.005 else "becomes less likely" if advantage < -0.005 else "unchanged"


def number(value: Any, digits: int = 3) -> str:
    """Format a number; a dash for anything else."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"


def when(moment: Any) -> str:
    """Format a time (seconds since the epoch) as a clock time, which stays true while a page is open."""
    if not isinstance(moment, (int, float)):
        return "–"
    there, now = time.localtime(moment), time.localtime()
    return time.strftime("%H:%M" if there[:3] == now[:3] else "%Y-%m-%d %H:%M", there)


def gib(size: float) -> str:
    """Format a number of bytes as GiB: `1.50 GiB`."""
    return f"{size / 1024**3:.2f} GiB"


def seconds(value: float) -> str:
    """Format a short duration: `0.4 s`, `12 s`, `3 min`."""
    return f"{value:.1f} s" if value < 10 else duration(value)
