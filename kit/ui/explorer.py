"""The completions explorer: the groups of a step, or what a search finds in all steps. Pages, never all rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from markupsafe import Markup, escape

from kit.errors import KitError
from kit.runs.store import RunDir
from kit.ui import markup as m
from kit.ui import tokens
from kit.ui.completions import MOST_FOUND, Batches, Group, Row, Scan, components, failed, unweighted
from kit.ui.site import QUIET, Site

LONGEST, LONGEST_PROMPT = 6000, 3000
"""Letters of a completion and of a prompt that are shown; the file has them all."""
LARGEST_PULL = 2.0
"""Advantage at which its bar is full."""


def show_group(found: Group, search: str = "") -> Markup:
    """One prompt with all its completions."""
    rows = found.rows
    if found.spread > 1e-9:
        verdict = m.badge("rewards differ: this group teaches", "ok")
    else:
        verdict = m.badge("all alike: no lesson", "warn")
    cut = sum(row.get("finish_reason") == "length" for row in rows)
    facts = [
        f"mean reward {m.number(found.mean)}",
        f"{m.number(min(found.totals))} to {m.number(max(found.totals))}" if found.totals else "no reward",
        *([f"{cut} of {len(rows)} cut off"] if cut else []),
    ]
    head = m.tag("div", m.tag("b", f"Step {found.step}, group {found.place + 1}") + verdict, class_="spread")
    line = m.tag("div", m.join(m.tag("small", fact) for fact in facts), class_="row")
    body = m.join(show_completion(same[0], search, times=len(same)) for same in alike(rows))
    return m.tag("div", m.panel(head, line, show_prompt(rows[0], search), body), class_="group")


def alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Completions of the same text and reward together, in the order of the first of each; one with token values leads."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda each: each.get("kept") is None):
        found.setdefault(
            (row.get("completion"), row["total"], row.get("advantage"), row.get("finish_reason")), []
        ).append(row)
    return list(found.values())


def show_prompt(row: Row, search: str = "") -> Markup:
    """The prompt and its reference."""
    text = str(row.get("prompt") or "")
    reference = row.get("reference")
    known = (
        m.tag("div", m.tag("small", "reference ") + m.tag("code", short(str(reference), 400)))
        if reference is not None
        else Markup("")
    )
    return m.tag("div", marked(short(text, LONGEST_PROMPT), search), class_="prompt", tabindex="0") + known


def show_completion(row: Row, search: str = "", *, origin: bool = False, times: int = 1) -> Markup:
    """Reward, pull, components, extracted answers and text. `origin` says where it is from, `times` how often it came."""
    advantage = row.get("advantage")
    left = [m.tag("div", m.number(row["total"], 2), class_="big"), m.tag("small", "reward"), pull(advantage)]
    chips = [chip(row, name) for name in components(row)]
    if row.get("finish_reason") == "length":
        chips.append(m.badge("cut at the limit", "fail"))
    elif row.get("finish_reason") not in ("stop", None):
        chips.append(m.badge(str(row["finish_reason"]), "warn"))
    chips.append(m.tag("small", f"{m.number(row.get('tokens'))} tokens"))
    if times > 1:
        chips.insert(0, m.badge(f"{times} alike", "live"))
    if origin:
        chips.insert(0, m.badge(f"step {row.get('step')}, group {row['group'] + 1}"))
    said = what_was_said(row, search)
    parts = [m.tag("div", m.join(chips), class_="row"), said, *details(row)]
    if origin:
        parts.insert(1, m.tag("details", m.tag("summary", short(_last_line(row), 110)) + show_prompt(row, search)))
    return m.tag("div", m.tag("div", m.join(left)) + m.tag("div", m.join(parts)), class_="completion")


def what_was_said(row: Row, search: str) -> Markup:
    """The completion: its tokens in colour where they are known and asked for, its turns where it has some, else its text."""
    kept = row.get("kept")
    if kept is not None and row.get("colour"):
        return tokens.show(kept, str(row["colour"]))
    turns = tokens.turns(row)
    if turns:
        return tokens.conversation(turns, lambda text: marked(short(text, LONGEST), search))
    text = str(row.get("completion") or "")
    said = m.tag("div", marked(short(text, LONGEST), search) or "(empty)", class_="said", tabindex="0")
    missing = m.tag("small", "Of this completion no token values were kept.") if row.get("colour") else Markup("")
    return said + missing


def _last_line(row: Row) -> str:
    lines = [line for line in str(row.get("prompt") or "").splitlines() if line.strip()]
    return f"Prompt: {lines[-1].strip()}" if lines else "Prompt"


def pull(advantage: Any) -> Markup:
    """The advantage as a bar from the middle: right for a positive one, left for a negative one."""
    if not isinstance(advantage, (int, float)):
        return Markup("")
    share = min(1.0, abs(advantage) / LARGEST_PULL) * 50
    side = "up" if advantage > 0 else "down"
    words = "made likelier" if advantage > 0.005 else "made less likely" if advantage < -0.005 else "left as it is"
    bar = m.tag("div", m.tag("i", "", class_=side, style=f"width:{share:.0f}%"), class_="pull", title=words)
    return bar + m.tag("small", f"advantage {round(advantage, 2) + 0.0:+.2f}", class_="nowrap", title=words)


def chip(row: Row, name: str) -> Markup:
    """A component's value with its status."""
    status = str(row.get(f"reward/{name}/status") or "")
    words = [
        name,
        " ",
        m.tag("b", m.number(row.get(f"reward/{name}"), 2)),
        " ",
        m.tag("small", status.replace("_", " ")),
    ]
    return m.tag("span", m.join(words), class_=f"chip {status if status.isidentifier() else ''}".strip())


def details(row: Row) -> list[Markup]:
    """Extracted answers, reasons and whatever else a component has reported."""
    found = []
    for key, value in row.items():
        name, _, what = key.removeprefix("reward/").rpartition("/")
        if not key.startswith("reward/") or not name or what == "status" or value in (None, ""):
            continue
        words = f"{name} read: " if what == "extracted" else f"{name}: " if what == "reason" else f"{name}, {what}: "
        piece = m.tag("code", short(str(value), 400)) if what == "extracted" else m.tag("small", short(str(value), 400))
        found.append(m.tag("div", m.tag("small", words) + piece))
    return found


def _no_weights() -> Markup:
    """A note that rewards are sums without weights."""
    return m.note(
        "The weights of the reward's parts cannot be read from the run's env.json: each part counts 1 in the rewards below, "
        "which may differ from those that were trained on.",
        "warn",
    )


def show_reach(scan: Scan) -> Markup:
    """How many steps a search has read, and which files could not be read."""
    parts = []
    if not scan.whole:
        parts.append(
            m.note(f"Read the latest {scan.read:,} of {scan.steps:,} steps, back to step {scan.reached:,}.", "warn")
        )
    if scan.cut is not None:
        words = f"Step {scan.cut[0]:,} alone has {scan.cut[1]:,} like that; its first {MOST_FOUND:,} are shown."
        parts.append(m.note(f"{words} The step itself has them all.", "warn"))
    if scan.broken:
        parts.append(m.note(f"{len(scan.broken)} files cannot be read: {scan.broken[0]}", "fail"))
    return m.join(parts)


def marked(text: str, search: str) -> Markup:
    """The text, escaped, with what was searched for marked."""
    if not search:
        return escape(text)
    pieces = re.split(f"({re.escape(search)})", text, flags=re.I)
    return m.join(m.tag("mark", piece) if number % 2 else piece for number, piece in enumerate(pieces))


def short(text: str, limit: int) -> str:
    """The text, or its beginning with what is left out."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more letters)"


KEEP = (
    "all",
    "cut at the limit",
    "not cut",
    "made likelier",
    "made less likely",
    "reward failed",
    "groups that teach",
    "groups that do not teach",
)
GROUPS_A_PAGE, ROWS_A_PAGE = 3, 12
LONGEST_SEARCH = 200
FARTHEST = 100_000_000


@dataclass(frozen=True)
class Query:
    """What is to be shown, of values that a browser sent: what is none of the choices becomes the first one."""

    step: int
    keep: str
    search: str
    page: int
    before: int | None
    colour: str = ""
    """Of tokens: one of `kit.ui.tokens.COLOURS`, or none."""

    @classmethod
    def of(cls, step: Any, keep: Any, search: Any, page: Any, before: Any, colour: Any = None) -> Query:
        return cls(
            _whole(step),
            keep if keep in KEEP else KEEP[0],
            search.strip()[:LONGEST_SEARCH] if isinstance(search, str) else "",
            max(1, _whole(page)),
            _whole(before) or None,
            colour if isinstance(colour, str) and colour in tokens.COLOURS else "",
        )

    def wants(self, row: Row) -> bool:
        """Whether a single completion is to be shown."""
        advantage, cut = row.get("advantage") or 0.0, row.get("finish_reason") == "length"
        kept = {
            "cut at the limit": cut,
            "not cut": not cut,
            "made likelier": advantage > 0.005,
            "made less likely": advantage < -0.005,
            "reward failed": failed(row),
        }.get(self.keep, True)
        return kept and self.found_in(row)

    def found_in(self, row: Row) -> bool:
        """Whether the text that is searched for stands in it."""
        wanted = self.search.casefold()
        return any(wanted in str(row.get(key) or "").casefold() for key in ("completion", "prompt", "reference"))

    def wants_group(self, group: Group) -> bool:
        if self.keep == "groups that teach" and group.spread <= 1e-9:
            return False
        if self.keep == "groups that do not teach" and group.spread > 1e-9:
            return False
        return any(self.wants(row) for row in group.rows)


def _whole(value: Any) -> int:
    try:
        return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
    except (ValueError, OverflowError):
        return 0


class Explorer:
    """The tab. `look` gives [steps, page, HTML, further, the earliest step that was searched]."""

    inputs: list[Any]
    outputs: list[Any]

    def __init__(self, site: Site) -> None:
        self.site, self.batches = site, Batches()

    def look(self, run_id: Any, *asked: Any) -> list[Any]:
        query = Query.of(*asked)
        try:
            run = self.site.run(run_id)
            files = dict(self.batches.steps(run))
            if not files:
                return self._nothing(
                    m.empty(
                        "No completions on record", "They are saved with every step unless run.save_completions is off."
                    )
                )
            step = min(files, key=lambda each: abs(each - query.step)) if query.step else max(files)
            if query.search:
                text, pages, reached = self._searched(run, query)
            else:
                (text, pages), reached = self._groups(run, query, files[step], step), None
        except KitError as problem:
            return self._nothing(m.error(problem))
        steps = list(files)
        slider = gr.Slider(minimum=steps[0], maximum=max(steps[-1], steps[0] + 1), value=step, step=1,
                           visible=not query.search, info=f"{len(steps):,} steps on record")  # fmt: skip
        return [
            slider,
            gr.Number(value=min(query.page, pages), label=f"Page, of {pages}", visible=pages > 1),
            text,
            gr.Button(visible=reached is not None, value=f"Search steps before {reached:,}" if reached else ""),
            reached or 0,
        ]

    def _nothing(self, text: str) -> list[Any]:
        return [gr.skip(), gr.Number(visible=False), text, gr.Button(visible=False), 0]

    def _groups(self, run: RunDir, query: Query, path: Any, step: int) -> tuple[str, int]:
        """(the groups of a step that are wanted, number of pages)."""
        groups = self._coloured(run, query, self.batches.groups(run, path))
        chosen = [group for group in groups if query.wants_group(group)]
        pages, shown = paged(chosen, query.page, GROUPS_A_PAGE)
        head = [_weighed(run, groups[0].rows if groups else []), _counts(groups, chosen, step)]
        return m.page(*head, *(show_group(group) for group in shown)), pages

    def _searched(self, run: RunDir, query: Query) -> tuple[str, int, int | None]:
        """(completions of all steps in which the text stands, number of pages, earliest step read where others are left)."""
        rows, scan = self.batches.search(run, query.wants, query.before)
        pages, found = paged(rows, query.page, ROWS_A_PAGE)
        head = m.tag("p", m.tag("small", f"{len(rows):,} completions in {scan.read:,} steps"))
        body = (
            m.panel(*(show_completion(row, query.search, origin=True) for row in found))
            if found
            else m.note("None is like that. Change what is shown, or the text that is searched for.")
        )
        return m.page(_weighed(run, rows), show_reach(scan), head, body), pages, scan.reached

    def _coloured(self, run: RunDir, query: Query, groups: list[Group]) -> list[Group]:
        """The groups with what is known of single tokens, where a colour is asked for; those that have it come first."""
        if not query.colour:
            return groups
        kept = self.batches.with_tokens(run, groups)
        rows = [
            [row | {"colour": query.colour, "kept": kept.get(row["row"])} for row in group.rows] for group in groups
        ]
        found = [Group(group.step, group.place, of) for group, of in zip(groups, rows, strict=True)]
        return sorted(found, key=lambda group: all(row["kept"] is None for row in group.rows))


def _weighed(run: RunDir, rows: list[Row]) -> Any:
    """A note where the rewards of these rows are not those of training."""
    return _no_weights() if unweighted(run, rows[0] if rows else None) else ""


def _counts(groups: list[Group], chosen: list[Group], step: int) -> Any:
    teach = sum(group.spread > 1e-9 for group in groups)
    words = f"Step {step:,}: {teach} of {len(groups)} groups teach" + (
        f"; {len(chosen)} shown" if len(chosen) < len(groups) else ""
    )
    return m.note(words, "ok" if teach * 2 >= len(groups) else "warn")


def paged(items: list[Any], page: int, size: int) -> tuple[int, list[Any]]:
    """(number of pages, those of this page)."""
    pages = max(1, -(-len(items) // size))
    start = (min(page, pages) - 1) * size
    return pages, items[start : start + size]


def build(site: Site, chosen: gr.Dropdown) -> Explorer:
    """The tab's parts; `look` with `inputs` fills `outputs`."""
    explorer = Explorer(site)
    with gr.Row(elem_classes="tight"):
        # Bounds that hold after a restart of the server, too, which forgets those of a run.
        step = gr.Slider(0, FARTHEST, value=0, step=1, label="Step", visible=False, scale=4, min_width=200, buttons=[],
                         elem_id="completions-step")  # fmt: skip
        keep = gr.Dropdown(list(KEEP), value=KEEP[0], label="Only", scale=2, min_width=150, elem_id="completions-keep")
        colour = gr.Dropdown([tokens.NO_COLOUR, *tokens.COLOURS], value=tokens.NO_COLOUR, label="Colour tokens by", scale=2,
                             min_width=150, elem_id="completions-colour")  # fmt: skip
        search = gr.Textbox(label="Search all steps", placeholder="in prompts, completions, references", scale=3,
                            min_width=180, max_length=LONGEST_SEARCH, elem_id="completions-search")  # fmt: skip
        page = gr.Number(
            1, minimum=1, precision=0, label="Page", visible=False, scale=1, min_width=110, elem_id="completions-page"
        )
    before, reached = (
        gr.Number(0, visible="hidden", elem_classes="hidden-box", label=name) for name in ("before", "reached")
    )
    shown = gr.HTML(elem_id="completions-shown")
    further = gr.Button("", visible=False, size="sm", elem_id="completions-further")
    explorer.inputs = [chosen, step, keep, search, page, before, colour]
    explorer.outputs = [step, page, shown, further, reached]
    look: dict[str, Any] = {"fn": explorer.look, "inputs": explorer.inputs, "outputs": explorer.outputs} | QUIET
    for event in (keep.input, colour.input, search.submit, search.blur, step.input):  # of the slider also by keyboard
        event(lambda: [1, 0], [], [page, before], trigger_mode="always_last", **QUIET).then(**look)
    page.submit(**look)
    page.blur(**look)
    further.click(lambda at: [at, 1], [reached], [before, page], **QUIET).then(**look)
    return explorer
