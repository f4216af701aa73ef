"""Step 2: the data, as it is read: rows, columns, lengths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
from markupsafe import Markup

from kit.errors import KitError
from kit.ui import markup as m
from kit.ui.edits import late

if TYPE_CHECKING:
    from kit.ui.screen import Screen

TASKS = ("chain_sum", "basic_arithmetic", "countdown", "gcd", "leg_counting", "spell_backward", "letter_counting")
"""Some of reasoning-gym's; any other can be written."""
FILES = (".jsonl", ".csv", ".parquet")
A_PAGE = 5


def build(screen: Screen) -> None:
    """The step."""
    fields = screen.fields
    fields.add("data.source", label="Source", choices=choices(screen), allow_custom_value=True)
    with gr.Row():
        fields.add("data.prompt_column", label="Prompt column")
        fields.add("data.reference_column", label="Reference column")
    fields.add("data.system_prompt", label="System prompt", lines=2)
    with gr.Row():
        fields.add("data.limit", label="Rows at most")
        fields.add("data.heldout", label="Held-out rows")
        fields.add("data.max_prompt_tokens", label="Longest prompt (tokens)")
    fields.add("data.task_params", label="Task parameters")
    start = gr.State(0)
    with gr.Row(elem_classes="tight"):
        look = gr.Button("Show rows", variant="primary", size="md", min_width=110)
        back = gr.Button("← Earlier", size="md", min_width=110)
        more = gr.Button("Later →", size="md", min_width=110)
        count = gr.Button("Lengths in tokens", size="md", min_width=160)
    rows = gr.HTML(
        m.empty("Not looked at yet", "Show rows reads the source and says what is used, left out and held out.")
    )
    lengths = gr.HTML()
    outputs = [rows, start]
    listen: dict[str, Any] = {"api_visibility": "private", "concurrency_limit": 4}
    look.click(lambda draft: preview(screen, draft, 0), [screen.draft], outputs, js=late(), **listen)
    back.click(
        lambda draft, at: preview(screen, draft, at, -A_PAGE), [screen.draft, start], outputs, js=late(2), **listen
    )
    more.click(
        lambda draft, at: preview(screen, draft, at, A_PAGE), [screen.draft, start], outputs, js=late(2), **listen
    )
    count.click(lambda draft: tokens(screen, draft), [screen.draft], [lengths], js=late(), **listen)


def choices(screen: Screen) -> list[str]:
    """Data files nearby and some tasks."""
    return [*files(screen.site.settings.folder), *(f"reasoning-gym:{task}" for task in TASKS)]


def files(base: Path) -> list[str]:
    """Data files in `base` and in its folders, relative to it."""
    found: list[str] = []
    try:
        nearby = [
            base,
            *(path for path in sorted(base.iterdir()) if path.is_dir() and not path.name.startswith((".", "runs"))),
        ]
        for folder in nearby[:50]:
            found += [str(path.relative_to(base)) for path in sorted(folder.iterdir()) if path.suffix in FILES]
    except OSError:
        pass
    return found[:40]


def preview(screen: Screen, value: Any, at: Any, step: int = 0) -> list[Any]:
    """[rows as HTML, place of the first]."""
    start = max(0, (at if isinstance(at, int) else 0) + step)
    try:
        config = screen.read(value).config(screen.site.settings)
        found = screen.site.benches.ask("rows", config, start=start, count=A_PAGE)
    except KitError as problem:
        return [m.error(problem), 0]
    if not found["rows"]:
        return [gr.skip(), gr.skip()]
    return [m.page(_summary(found), *(_row(row, found["info"]) for row in found["rows"])), found["start"]]


def _summary(found: dict[str, Any]) -> Markup:
    info = found["info"]
    counts = m.join(
        m.tag("span", m.tag("b", f"{count:,}") + " " + name.replace("_", " "), class_="chip")
        for name, count in info["rows"].items()
        if count
    )
    mapping = ", ".join(
        f"{ours} ← {theirs}" for ours, theirs in (info.get("mapping") or {}).items() if isinstance(theirs, str)
    )
    notes = m.join(m.note(text, "warn") for text in [*info["notes"], *map(_fault, info.get("bad_rows") or [])])
    letters = ", ".join(f"{name} {value:,}" for name, value in found["letters"].items())
    return m.card(
        m.tag("div", m.tag("h3", info["source"]) + m.tag("div", counts, class_="row"), class_="spread"),
        m.tag("p", f"columns: {', '.join(info['columns'])}" + (f"; {mapping}" if mapping else ""), class_="dim"),
        m.tag("p", f"prompt length in letters: {letters}", class_="dim num"),
        notes,
    )


def _fault(fault: Any) -> str:
    if not isinstance(fault, dict):
        return str(fault)
    return " ".join(f"{name} {value}" for name, value in fault.items() if value)


def _row(row: dict[str, Any], info: dict[str, Any]) -> Markup:
    columns = [(name, text) for name, text in row.items() if name not in ("place", "prompt", "reference") and text]
    rest = m.join(m.tag("p", m.tag("small", name) + m.tag("div", text, class_="said")) for name, text in columns)
    fold = (
        m.tag("details", m.tag("summary", f"{len(columns)} further columns", class_="dim") + rest)
        if columns
        else Markup("")
    )
    return m.tag(
        "div",
        m.card(
            m.tag("small", f"training row {row['place']}"),
            m.tag("div", row["prompt"], class_="said"),
            m.tag("p", m.tag("small", "reference ") + m.tag("code", row.get("reference") or "none")),
            fold,
        ),
        style="margin-top:8px",
    )


def tokens(screen: Screen, value: Any) -> str:
    """Lengths as the model's tokenizer counts them."""
    try:
        found = screen.site.benches.ask("lengths", screen.read(value).config(screen.site.settings))
    except KitError as problem:
        return m.error(problem)
    highest = max(count for _, _, count in found["histogram"])
    bars = m.join(
        m.tag("i", "", style=f"flex:1;background:var(--live);height:{max(2, round(60 * count / highest)) if count else 0}px",
              title=f"{low} to {high - 1} tokens: {count}")
        for low, high, count in found["histogram"]
    )  # fmt: skip
    words = ", ".join(f"{name} {value}" for name, value in found["tokens"].items())
    over = f"{found['over']} of {found['counted']} are over the limit of {found['limit']} and are left out."
    level = "warn" if found["over"] else "ok"
    picture = m.tag(
        "div", bars, style="display:flex;gap:2px;align-items:flex-end;height:60px", role="img", aria_label=words
    )
    return m.page(
        m.card(m.tag("h3", "Prompt length in tokens"), picture, m.tag("p", words, class_="num"), m.note(over, level))
    )
