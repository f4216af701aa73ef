"""How completions look: groups, single ones, and one prompt over time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape

from kit.ui import markup as m
from kit.ui.completions import MOST_FOUND, Group, Moment, Row, Scan, components, key_of

LONGEST, LONGEST_PROMPT = 6000, 3000
"""Letters of a completion and of a prompt that are shown; the file has them all."""
LARGEST_PULL = 2.0
"""Advantage at which its bar is full."""


def group(found: Group, search: str = "") -> Markup:
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
    line = m.tag("div", m.join(m.tag("small", fact) for fact in facts) + over_time(found.prompt), class_="row")
    body = m.join(completion(same[0], search, times=len(same)) for same in alike(rows))
    return m.tag("div", m.card(head, line, prompt(rows[0], search), body), class_="group")


def alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Completions of the same text and reward together, in the order of the first of each."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(
            (row.get("completion"), row["total"], row.get("advantage"), row.get("finish_reason")), []
        ).append(row)
    return list(found.values())


def over_time(text: str) -> Markup:
    """A button that asks for the prompt over time."""
    return m.tag("button", "this prompt over time", type="button", class_="badge live", data_prompt=key_of(text))


def prompt(row: Row, search: str = "") -> Markup:
    """The prompt and its reference."""
    text = str(row.get("prompt") or "")
    reference = row.get("reference")
    known = (
        m.tag("div", m.tag("small", "reference ") + m.tag("code", short(str(reference), 400)))
        if reference is not None
        else Markup("")
    )
    return m.tag("div", marked(short(text, LONGEST_PROMPT), search), class_="prompt", tabindex="0") + known


def completion(row: Row, search: str = "", *, origin: bool = False, times: int = 1) -> Markup:
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
        chips.append(over_time(str(row.get("prompt") or "")))
    text = str(row.get("completion") or "")
    said = m.tag("div", marked(short(text, LONGEST), search) or "(empty)", class_="said", tabindex="0")
    parts = [m.tag("div", m.join(chips), class_="row"), said, *details(row)]
    if origin:
        parts.insert(1, m.tag("details", m.tag("summary", short(_last_line(row), 110)) + prompt(row, search)))
    return m.tag("div", m.tag("div", m.join(left)) + m.tag("div", m.join(parts)), class_="completion")


def _last_line(row: Row) -> str:
    lines = [line for line in str(row.get("prompt") or "").splitlines() if line.strip()]
    return f"Prompt: {lines[-1].strip()}" if lines else "Prompt"


def pull(advantage: Any) -> Markup:
    """A bar from the middle: to the right what is made likelier, to the left what is made less likely."""
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


def course(
    moments: Sequence[Moment], prompt_row: Row | None, first: Group | None, last: Group | None, scan: Scan
) -> str:
    """One prompt over time."""
    if not moments or prompt_row is None:
        return m.empty("Not found", "None of the steps that were read has this prompt.")
    rows = [
        [
            m.number(one.step),
            m.number(one.mean),
            f"{m.number(one.low)} to {m.number(one.high)}",
            f"{one.tokens:.0f}",
            f"{one.cut} of {one.size}",
        ]
        for one in moments
    ]
    table = m.table(["step", "mean reward", "lowest to highest", "tokens", "cut off"], rows, numbers={0, 1, 2, 3, 4})
    parts = [
        m.card(m.tag("b", f"One prompt, {len(moments)} time{'s' * (len(moments) != 1)}"), prompt(prompt_row), table)
    ]
    if len(moments) == 1:
        parts.append(m.note("It came once so far: with more steps than prompts they come again."))
    elif first is not None and last is not None:
        pair = m.tag("div", best_and_worst(first, "then") + best_and_worst(last, "now"), class_="pair")
        parts.append(pair)
    return m.page(reach(scan), *parts)


def best_and_worst(found: Group, when: str) -> Markup:
    """The highest and the lowest rewarded completion of a group."""
    ranked = sorted((row for row in found.rows if row["total"] is not None), key=lambda row: row["total"])
    shown = [ranked[-1], ranked[0]] if len(ranked) > 1 else ranked
    body = m.join(completion(row) for row in shown)
    return m.card(m.tag("b", f"{when.capitalize()}, step {found.step}: highest and lowest of {len(found.rows)}"), body)


def no_weights() -> Markup:
    """What is said where rewards are sums without weights."""
    return m.note(
        "The weights of the reward's parts cannot be read from the run's env.json: each part counts 1 in the rewards below, "
        "which may differ from those that were trained on.",
        "warn",
    )


def reach(scan: Scan) -> Markup:
    """How far a look over many steps came, and which files could not be read."""
    parts = []
    if not scan.whole:
        parts.append(
            m.note(f"Read the latest {scan.read:,} of {scan.steps:,} steps, back to step {scan.reached:,}.", "warn")
        )
    if scan.cut is not None:
        words = f"Step {scan.cut[0]:,} alone has {scan.cut[1]:,} like that; its first {MOST_FOUND:,} are shown."
        parts.append(m.note(f"{words} 'List of a step' has them all.", "warn"))
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
