"""Pieces of a page. Text is data and is escaped; only what these functions and the charts return counts as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

Cell = str | Markup | None


def join(parts: Iterable[str]) -> Markup:
    """Pieces one after the other."""
    return Markup("\n").join(parts)


def paragraph(text: str, kind: str = "") -> Markup:
    """A paragraph; `kind` is a class of the page's style: `note`, say."""
    return Markup("<p{}>{}</p>").format(_class(kind), text)


def notice(text: str, kind: str = "info") -> Markup:
    """A line that stands out; `kind` is info, good, warning or error."""
    return Markup('<p class="notice {}">{}</p>').format(kind, text)


def table(
    head: Sequence[Cell], rows: Iterable[Sequence[Cell]], *, numbers: Sequence[int] = (), kind: str = ""
) -> Markup:
    """A table that scrolls sideways where the screen is narrow. Columns in `numbers` are set to the right.

    `kind`: `stack` makes every row a block of its own on a narrow screen, `facts` breaks long values instead.
    """

    body = Markup("\n").join(Markup("<tr>{}</tr>").format(_cells(head, row, numbers)) for row in rows)
    return Markup('<div class="scroll"><table{}>{}<tbody>{}</tbody></table></div>').format(
        _class(kind), _head(head, numbers), body
    )


def facts(rows: Iterable[Sequence[Cell]]) -> Markup:
    """Names with their values, one pair a row."""
    return table(("", ""), rows, kind="facts")


def _head(head: Sequence[Cell], numbers: Sequence[int]) -> Markup:
    if not any(head):
        return Markup("")
    cells = (
        Markup('<th scope="col"{}>{}</th>').format(_class("number" if i in numbers else ""), content)
        for i, content in enumerate(head)
    )
    return Markup("<thead><tr>{}</tr></thead>").format(Markup("").join(cells))


def _cells(head: Sequence[Cell], row: Sequence[Cell], numbers: Sequence[int]) -> Markup:
    """The cells of one row, each with its column's name, which a stacked table shows."""
    return Markup("").join(
        Markup('<td{} data-column="{}">{}</td>').format(
            _class("number" if i in numbers else ""), head[i] or "", "" if content is None else content
        )
        for i, content in enumerate(row)
    )


def pre(text: str) -> Markup:
    """Text as it is: completions, YAML, commands. Long lines wrap."""
    return Markup("<pre>{}</pre>").format(text)


def code(text: str) -> Markup:
    """A name or a short command within a sentence."""
    return Markup("<code>{}</code>").format(text)


def details(summary: str, body: str, *, opened: bool = False) -> Markup:
    """Something folded behind its summary."""
    return Markup("<details{}><summary>{}</summary>{}</details>").format(
        Markup(" open") if opened else "", summary, body
    )


def tiles(pairs: Iterable[tuple[str, str]]) -> Markup:
    """Figures with their labels, side by side."""
    items = Markup("").join(Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(name, value) for name, value in pairs)
    return Markup('<dl class="tiles">{}</dl>').format(items)


def grid(parts: Iterable[str], kind: str = "charts") -> Markup:
    """Pieces side by side as far as the screen is wide; `kind` is charts or pair."""
    cells = Markup("").join(Markup("<div>{}</div>").format(part) for part in parts)
    return Markup('<div class="{}">{}</div>').format(kind, cells)


def beside(main: Markup, small: Markup) -> Markup:
    """Something wide with something small at its side, or below it where the screen is narrow."""
    return Markup('<div class="beside"><div>{}</div>{}</div>').format(
        main, Markup('<div class="card">{}</div>').format(small) if small else ""
    )


def _class(kind: str) -> Markup:
    return Markup(' class="{}"').format(kind) if kind else escape("")
