"""The completions of a run: the groups of a step, or the matches of a search in all steps. Shows a page at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr
from markupsafe import Markup, escape

from kit.errors import KitError
from kit.runs.files import shorten
from kit.runs.store import RunDir
from kit.ui import completions
from kit.ui import markup as m
from kit.ui.completions import Group, Row
from kit.ui.site import QUIET, Site, whole

LONGEST, LONGEST_PROMPT = 6000, 3000
"""Characters of a completion and of a prompt that are shown; the file has all of them."""
FULL_PULL = 2.0
"""Advantage whose bar is full."""
GROUPS_A_PAGE, MATCHES_SHOWN = 3, 24
LONGEST_SEARCH = 200
LONGEST_CALL = 2000
"""Characters of a tool call that are shown."""
FARTHEST = 100_000_000


def show_group(group: Group) -> Markup:
    """Show one prompt with all its completions."""
    cut = sum(row.get("finish_reason") == "length" for row in group.rows)
    facts = [f"mean reward {m.number(group.mean)}"]
    facts += [f"{m.number(min(group.totals))} to {m.number(max(group.totals))}"] if group.totals else ["no reward"]
    facts += [f"{cut} of {len(group.rows)} cut off"] if cut else []
    return show_rows(f"Step {group.step}, group {group.number + 1}", group.rows, facts, show_prompt(group.rows[0]))


def show_rows(title: str, rows: list[Row], facts: Sequence[str], about: Markup) -> Markup:
    """Show completions of one prompt below a title, `facts` and `about`, and whether their rewards differ."""
    differs = m.badge("rewards differ: this group teaches", "ok")
    flat = m.badge("all rewards equal: nothing to learn", "warn") if len(rows) > 1 else Markup("")
    head = m.tag("div", m.tag("b", title) + (differs if Group(0, 0, rows).differs else flat), class_="spread")
    line = m.tag("div", m.join(m.tag("small", fact) for fact in facts), class_="row")
    body = m.join(show_completion(same[0], times=len(same)) for same in alike(rows))
    return m.tag("div", m.panel(head, line, about, body), class_="group")


def alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Group completions of the same text and reward, in the order of their first ones."""
    equal: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (row.get("completion"), row["total"], row.get("advantage"), row.get("finish_reason"))
        equal.setdefault(key, []).append(row)
    return list(equal.values())


def show_prompt(row: Row, search: str = "") -> Markup:
    """Show the prompt and its reference."""
    text = marked(shorten(str(row.get("prompt") or ""), LONGEST_PROMPT), search)
    return m.tag("div", text, class_="prompt", tabindex="0") + m.reference(row.get("reference"))


def show_completion(row: Row, search: str = "", *, origin: bool = False, times: int = 1) -> Markup:
    """Show a completion with reward, advantage, components and extracted answers.

    `origin` adds its step and prompt, `times` how often it was generated.
    """
    left = [m.tag("div", m.number(row["total"], 2), class_="big"), m.tag("small", "reward"), pull(row.get("advantage"))]
    chips = [
        m.chip(name, row.get(f"reward/{name}"), str(row.get(f"reward/{name}/status") or ""))
        for name in completions.components(row)
    ]
    if row.get("finish_reason") == "length":
        chips.append(m.badge("cut at the limit", "fail"))
    elif row.get("finish_reason") not in ("stop", None):
        chips.append(m.badge(str(row["finish_reason"]), "warn"))
    if row.get("tokens") is not None:
        chips.append(m.tag("small", f"{m.number(row['tokens'])} tokens"))
    if times > 1:
        chips.insert(0, m.badge(f"{times} alike", "live"))
    if origin:
        chips.insert(0, m.badge(f"step {row.get('step')}, group {row['group'] + 1}"))
    parts = [m.tag("div", m.join(chips), class_="row"), _text(row, search), *details(row)]
    if origin:
        parts.insert(1, m.tag("details", m.tag("summary", "Prompt") + show_prompt(row, search)))
    return m.tag("div", m.tag("div", m.join(left)) + m.tag("div", m.join(parts)), class_="completion")


def _text(row: Row, search: str) -> Markup:
    """Show the turns of a completion, or its text if it has only one turn."""
    if messages := turns(row):
        shown = [_turn(number, message, search) for number, message in enumerate(messages, 1)]
        return m.tag("div", m.join(shown), class_="turns")
    text = marked(shorten(str(row.get("completion") or ""), LONGEST), search)
    return m.tag("div", text or "(empty)", class_="said", tabindex="0")


def turns(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the messages of a completion with several turns; [] if it has only one, or they cannot be read."""
    try:
        messages = json.loads(row.get("turns") or "[]")
    except (TypeError, ValueError):
        return []
    messages = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    return messages if len(messages) > 1 or any(message.get("tool_calls") for message in messages) else []


def _turn(number: int, message: Mapping[str, Any], search: str) -> Markup:
    """Show a message: the model's own messages are trained, the answers of tools are not."""
    role = str(message.get("role") or "assistant")
    trains = role == "assistant"
    name = f"{message.get('name') or 'tool'} answers" if role == "tool" else "model" if trains else role
    head = m.tag("b", f"{number}. {name}") + m.badge("trains" if trains else "does not train", "ok" if trains else "")
    content = message.get("content")
    words = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    parts = [m.tag("div", head, class_="row")]
    if words:
        parts.append(m.tag("div", marked(shorten(words, LONGEST), search), class_="said", tabindex="0"))
    parts += [_call(call) for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    return m.tag("div", m.join(parts), class_=f"turn {'own' if trains else 'other'}")


def _call(call: Mapping[str, Any]) -> Markup:
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    code = m.tag("code", f"{function.get('name')}({arguments})"[:LONGEST_CALL])
    return m.tag("div", m.join([m.tag("small", "calls "), code]), class_="call")


def pull(advantage: Any) -> Markup:
    """Show the advantage as a bar from the middle, to the right if it is positive, else to the left."""
    if not isinstance(advantage, (int, float)):
        return Markup("")
    share = min(1.0, abs(advantage) / FULL_PULL) * 50
    side, words = "up" if advantage > 0 else "down", m.effect(advantage)
    bar = m.tag("div", m.tag("i", "", class_=side, style=f"width:{share:.0f}%"), class_="pull", title=words)
    return bar + m.tag("small", f"advantage {round(advantage, 2) + 0.0:+.2f}", class_="nowrap", title=words)


def details(row: Row) -> list[Markup]:
    """Show extracted answers, reasons and other reports of the components."""
    lines = []
    for key, value in row.items():
        name, _, what = key.removeprefix("reward/").rpartition("/")
        if not key.startswith("reward/") or not name or what == "status" or value in (None, ""):
            continue
        words = f"{name} read: " if what == "extracted" else f"{name}: " if what == "reason" else f"{name}, {what}: "
        piece = m.tag("code" if what == "extracted" else "small", shorten(str(value), 400))
        lines.append(m.tag("div", m.tag("small", words) + piece))
    return lines


def marked(text: str, search: str) -> Markup:
    """Escape the text and mark the matches of the search."""
    if not search:
        return escape(text)
    pieces = re.split(f"({re.escape(search)})", text, flags=re.I)
    return m.join(m.tag("mark", piece) if number % 2 else piece for number, piece in enumerate(pieces))


class Explorer:
    """The tab. `look` with `inputs` fills `outputs`: [step, page, HTML]."""

    inputs: list[Any]
    outputs: list[Any]

    def __init__(self, site: Site) -> None:
        self.site = site

    def look(self, run_id: Any, step: Any, search: Any, page: Any) -> list[Any]:
        """Return [step, page, HTML] for values that a browser sent; invalid ones are ignored."""
        text = search.strip()[:LONGEST_SEARCH] if isinstance(search, str) else ""
        try:
            run = self.site.run(run_id)
            files = completions.steps(run)
            if not files:
                words = "Each step saves them unless run.save_completions is off."
                return [gr.skip(), gr.Number(visible=False), m.empty("No completions saved", words)]
            at = min(files, key=lambda each: abs(each - whole(step))) if whole(step) else max(files)
            if text:
                pages, number, html = 1, 1, _searched(run, text)
            else:
                groups = completions.groups(run, files[at])
                pages = max(1, -(-len(groups) // GROUPS_A_PAGE))
                number = min(max(1, whole(page)), pages)
                teach = sum(group.differs for group in groups)
                words = f"Step {at:,}: {teach} of {len(groups)} groups teach" if groups else "This step has no rows."
                note = m.note(words, "ok" if teach * 2 >= len(groups) else "warn")
                shown = groups[(number - 1) * GROUPS_A_PAGE : number * GROUPS_A_PAGE]
                weights_note = _weights_note(run, groups[0].rows if groups else [])
                html = m.page(weights_note, note, *map(show_group, shown))
        except KitError as problem:
            return [gr.skip(), gr.Number(visible=False), m.error(problem)]
        slider = gr.Slider(
            minimum=min(files), maximum=max(max(files), min(files) + 1), value=at, step=1, visible=not text,
            info=f"{len(files):,} saved steps",
        )  # fmt: skip
        return [slider, gr.Number(value=number, label=f"Page, of {pages}", visible=pages > 1), html]


def _searched(run: RunDir, text: str) -> str:
    """Show the completions of all steps that contain the text."""
    folded = text.casefold()
    matches = completions.search(
        run,
        lambda row: any(folded in str(row.get(key) or "").casefold() for key in ("completion", "prompt", "reference")),
    )
    notes = [_weights_note(run, matches.rows)]
    if matches.read < matches.steps:
        notes.append(m.note(f"Read the latest {matches.read:,} of {matches.steps:,} steps.", "warn"))
    if matches.broken:
        notes.append(m.note(f"{len(matches.broken)} files cannot be read: {matches.broken[0]}", "fail"))
    head = m.tag("p", m.tag("small", f"{len(matches.rows):,} completions in {matches.read:,} steps"))
    shown = [show_completion(row, text, origin=True) for row in matches.rows[:MATCHES_SHOWN]]
    return m.page(*notes, head, m.panel(*shown) if shown else m.note("No completion contains this text."))


def _weights_note(run: RunDir, rows: list[Row]) -> Markup:
    """Return a note if the rewards cannot be weighted as in training."""
    if not rows or len(completions.weights(run)) == len(completions.components(rows[0])):
        return Markup("")
    return m.note("env.json has no weights of the reward's components: each counts 1 in the rewards below.", "warn")


def build(site: Site, chosen: gr.Dropdown) -> Explorer:
    """Build the tab."""
    explorer = Explorer(site)
    with gr.Row(elem_classes="tight"):
        # Wide bounds: after a restart, the server checks values against these and not against those of the run.
        step = gr.Slider(0, FARTHEST, value=0, step=1, label="Step", visible=False, scale=4, min_width=200, buttons=[],
                         elem_id="completions-step")  # fmt: skip
        search = gr.Textbox(label="Search all steps", placeholder="in prompts, completions, references", scale=3,
                            min_width=180, max_length=LONGEST_SEARCH, elem_id="completions-search")  # fmt: skip
        page = gr.Number(1, minimum=1, precision=0, label="Page", visible=False, scale=1, min_width=110,
                         elem_id="completions-page")  # fmt: skip
    shown = gr.HTML(elem_id="completions-shown")
    explorer.inputs, explorer.outputs = [chosen, step, search, page], [step, page, shown]
    look: dict[str, Any] = {"fn": explorer.look, "inputs": explorer.inputs, "outputs": explorer.outputs} | QUIET
    for event in (search.submit, search.blur, step.input):
        event(lambda: 1, [], [page], trigger_mode="always_last", **QUIET).then(**look)
    page.submit(**look)
    page.blur(**look)
    return explorer
