"""Pieces of HTML. Every text goes through `markupsafe`, so that a completion cannot become part of the page.

A piece is a `Markup`; `page(*pieces)` is what a `gr.HTML` is given.
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
"""How a run's state is coloured."""


def page(*pieces: str) -> str:
    """Pieces as the value of a `gr.HTML`."""
    return str(Markup('<div class="k">{}</div>').format(Markup("").join(pieces)))


def tag(name: str, content: Any = "", **attributes: str) -> Markup:
    """`<name class="...">content</name>`; `class_` and `data_label` stand for `class` and `data-label`."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, content)


def join(pieces: Iterable[Any], between: str = "") -> Markup:
    """Pieces one after the other, texts among them escaped."""
    return Markup(between).join(escape(piece) for piece in pieces)


def badge(text: str, level: str = "") -> Markup:
    """A word in a pill: ok, warn, fail, live or plain."""
    return tag("span", text, class_=f"badge {level}".strip())


def state_badge(state: str) -> Markup:
    """A badge with a run's state, coloured by `LEVELS`."""
    return badge(state, LEVELS.get(state, ""))


def note(text: Any, level: str = "") -> Markup:
    """A paragraph with a coloured edge; line breaks are kept."""
    return tag("div", text, class_=f"note {level}".strip(), role="alert" if level == "fail" else "note")


def error(text: Any) -> str:
    """What went wrong, as the kit says it; without keys that a library may have put into its message."""
    return page(note(redact(str(text)), "fail"))


def empty(title: str, text: Any = "") -> str:
    """What stands where there is nothing yet, with what to do."""
    return page(tag("div", tag("b", title) + escape(text), class_="empty"))


def bar(share: float, level: str = "", label: str = "") -> Markup:
    """A filled bar; `share` from 0 to 1."""
    width = f"width:{100 * min(1.0, max(0.0, share)):.1f}%"
    return tag("div", tag("i", "", class_=level, style=width), class_="bar", role="img", aria_label=label)


def panel(*pieces: Any) -> Markup:
    """A box with a frame."""
    return tag("div", join(pieces), class_="card")


def fold(title: str, *pieces: Any) -> Markup:
    """Pieces below a title that unfolds them."""
    return tag("details", tag("summary", title) + join(pieces), class_="fold")


def table(
    head: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Iterable[int] = (), stack: bool = True
) -> Markup:
    """A table; columns `numbers` are set right. With `stack` rows become cards on a phone."""
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
    """The charts of the report, side by side; "" without panels. `marks` are (step, text) of vertical lines."""
    drawn = [panel(svg(each, marks=marks)) for each in panels]
    return page(tag("div", join(drawn), class_="svgs")) if drawn else ""


def chip(name: str, value: Any, status: str) -> Markup:
    """A component of a reward: its value and status."""
    words = join([name, tag("b", number(value, 2)), tag("small", status.replace("_", " "))], " ")
    return tag("span", words, class_=f"chip {status if status.isidentifier() else ''}".strip())


def reference(value: Any) -> Markup:
    """The right answer of a prompt; nothing where there is none."""
    return Markup("") if value is None else tag("div", tag("small", "reference ") + tag("code", str(value)[:400]))


def effect(advantage: float) -> str:
    """What training does to a completion with this advantage."""
    return "made likelier" if advantage > 0.005 else "made less likely" if advantage < -0.005 else "unchanged"


def number(value: Any, digits: int = 3) -> str:
    """A number for people; a dash where there is none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"


def when(moment: Any) -> str:
    """A time (seconds since the epoch) by the clock, which stays true while a page is open."""
    if not isinstance(moment, (int, float)):
        return "–"
    there, now = time.localtime(moment), time.localtime()
    return time.strftime("%H:%M" if there[:3] == now[:3] else "%Y-%m-%d %H:%M", there)


def gib(size: float) -> str:
    """Format a number of bytes as GiB: `1.50 GiB`."""
    return f"{size / 1024**3:.2f} GiB"


def seconds(value: float) -> str:
    """`0.4 s`, `12 s`, `3 min`: of a single step."""
    return f"{value:.1f} s" if value < 10 else duration(value)
