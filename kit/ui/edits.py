"""Edits that are still on their way. A click sends the draft that the browser has, and the answer to what was typed just
before it may not be there yet: so the browser keeps each edit until a draft has come back that knows of it, and sends it along.

An answer to an edit may also come too late: when "Start over" or a later edit has been answered already. It is then dropped by
the browser (`TAKEN`), as it would bring the old draft back.

A draft of the browser has, beside what `Draft.read` takes: `turn`, which a replacement of the whole draft changes; `seen`, the
number of the last edit in it; `edited`, the components that the last edits came from; `aside`, the draft that a replacement
took the place of; and, on its way here, `edits`.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from typing import Any

import gradio as gr

from kit.errors import ConfigError
from kit.ui import markup as m
from kit.ui.draft import Draft, Key, changed, keys, lookup, shown
from kit.ui.site import said

MOST = 20
"""Edits that are on their way at once, at most: the oldest are left out."""
_KEPT = """const known = draft || {}, turn = known.turn ?? 0;
  let kept = (window.kitEdits || []).filter(one => one.turn === turn && one.serial > (known.seen ?? 0));"""


TAKEN = """(text, draft, problem) => {
  const found = JSON.parse(text || '{}'), known = draft || {};
  const same = (found.turn ?? 0) === (known.turn ?? 0);
  const older = found.draft && (found.draft.seen ?? 0) < (known.seen ?? 0);
  return same && !older ? [found.draft || draft, found.problem || ''] : [draft, problem];
}"""
"""JavaScript for an answer to an edit: [the draft, what is wrong with it], as they were where the answer is too old."""


def recorded(key: Key, place: int) -> str:
    """JavaScript for the event of the component at `place`: keeps its edit, and sends what is on its way."""
    return f"""(draft, value) => {{
  {_KEPT}
  const serial = window.kitSerial = Math.max(Date.now(), (window.kitSerial || 0) + 1);
  kept = kept.filter(one => one.place !== {place}).slice(1 - {MOST});
  kept.push({{turn, serial, place: {place}, name: '{key.name}', value}});
  window.kitEdits = kept;
  return [{{...known, edits: kept}}, value];
}}"""


def late(inputs: int = 1) -> str:
    """JavaScript for a click whose first of so many inputs is the draft: sends what is on its way with it."""
    return f"""(draft, ...rest) => {{
  {_KEPT}
  return [{{...known, edits: kept}}, ...rest.slice(0, {inputs - 1})];
}}"""


def latest(value: Any) -> Draft:
    """The draft that a browser sent, with the edits that it sent along. Raises `ConfigError`."""
    draft = Draft.read(value)
    for edit in _edits(value):
        draft = _applied(draft, edit["name"], edit.get("value"))
    return draft


def answered(value: Any, key: Key, place: int, given: Any) -> str:
    """`edited` as a text for `TAKEN`: with the turn that the edit belongs to, and never twice the same."""
    draft, problem = edited(value, key, place, given)
    found = {"draft": draft if isinstance(draft, dict) and "preset" in draft else None, "problem": problem}
    return json.dumps(found | {"turn": turn(value), "at": time.time_ns()})


def edited(value: Any, key: Key, place: int, given: Any) -> list[Any]:
    """[the draft after an edit, what is wrong with it]; what is no value of that key at all changes nothing."""
    edits = _edits(value)
    edits = edits if any(one.get("place") == place for one in edits) else [*edits, {"name": key.name, "value": given}]
    problem = ""

    def try_(draft: Draft, edit: Mapping[str, Any]) -> Draft:
        def refuse(text: str) -> Draft:
            nonlocal problem
            problem = m.error(text)
            return draft

        found: Draft = said(lambda: _applied(draft, edit["name"], edit.get("value")), refuse)
        return found

    def work() -> list[Any]:
        base = Draft.read(value)
        draft = functools.reduce(try_, edits, base)
        if draft == base and not problem:
            return [gr.skip(), ""]  # only passed through: an answer would undo what a click replaces the draft by
        marks = {
            name: value[name] for name in ("turn", "seen") if isinstance(value, Mapping) and _whole(value.get(name))
        } | _aside(value)
        serials = [edit["serial"] for edit in edits if _whole(edit.get("serial"))]
        places = sorted({place, *(edit["place"] for edit in edits if _whole(edit.get("place")))})
        return [draft.as_dict() | marks | ({"seen": max(serials)} if serials else {}) | {"edited": places}, problem]

    found: list[Any] = said(work, lambda text: [gr.skip(), m.error(text)])
    return found


def whole(draft: Draft, before: Any = None) -> dict[str, Any]:
    """A draft with changes made by a click: every component shows it, and edits of the one `before` are not sent on."""
    return draft.as_dict() | {"turn": time.time_ns() // 1_000_000} | _aside(before)


def instead(draft: Draft, before: Any) -> dict[str, Any]:
    """A draft that takes the place of the one that a browser sent, which is kept aside if it had changes."""
    try:
        old = latest(before)
    except ConfigError:  # what was typed last is no value
        old = said(lambda: Draft.read(before), lambda text: Draft())
    lost = old.changes and (old.preset, old.changes) != (draft.preset, draft.changes)
    return whole(draft, before) | ({"aside": old.as_dict()} if lost else {})


def aside(value: Any) -> Draft | None:
    """The draft that was put aside, or None. Raises `ConfigError` for one that no page sends."""
    found = _aside(value)
    return Draft.read(found["aside"]) if found else None


def _aside(value: Any) -> dict[str, Any]:
    found = value.get("aside") if isinstance(value, Mapping) else None
    return {"aside": found} if isinstance(found, Mapping) else {}


def turn(value: Any) -> int:
    """Tells a draft from the one that it took the place of; 0 where there was none."""
    found = value.get("turn") if isinstance(value, Mapping) else None
    return found if isinstance(found, int) and _whole(found) else 0


def places(value: Any) -> list[int] | None:
    """Components that the last edits of a draft came from; None for a draft that replaced another."""
    found = value.get("edited") if isinstance(value, Mapping) else None
    return [one for one in found if _whole(one)] if isinstance(found, list) else None


@functools.cache
def _known() -> dict[str, Key]:
    return {key.name: key for key in keys()}


def _edits(value: Any) -> list[dict[str, Any]]:
    found = value.get("edits") if isinstance(value, Mapping) else None
    good = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return [one for one in good if isinstance(one.get("name"), str) and one["name"] in _known()][-MOST:]


def _applied(draft: Draft, name: str, given: Any) -> Draft:
    key = _known()[name]
    if given == shown(key, lookup(draft.tree(), name)):
        return draft  # the box was left as it was
    return Draft.read(changed(draft, key, given).as_dict())


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
