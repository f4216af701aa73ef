"""How a chat looks: whether the model is loaded, the two answers, their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from kit.ui import markup as m

LONGEST = 20_000
NAMES = {"base": "Base, as it was", "tuned": "Tuned, after this run"}


def no_runs() -> str:
    return m.empty(
        "No trained model yet", m.join([m.tag("a", "Train one", href="/new"), " first; then both can be asked here."])
    )


def idle(ready: bool) -> str:
    """Before the model is loaded."""
    if not ready:
        return m.empty("This run has no weights yet", "They come with its first checkpoint, or at its end.")
    return m.page(m.note("The model is loaded by the first question, and given back after ten minutes without one."))


def ready(about: Mapping[str, Any], total: int | None, shown: int, search: str) -> str:
    """What is loaded."""
    words = f"Loaded: {about.get('model')} with the weights of step {about.get('step')}, on {about.get('device')}."
    if total is not None:
        words += (
            f" {total:,} held-out prompts"
            + (f" with '{search}'" if search else "")
            + (f", the first {shown} in the list." if shown < total else ".")
        )
    note = m.note(str(about["note"]), "warn") if about.get("note") else Markup("")
    return m.page(m.note(words, "ok"), note)


def waiting(text: str) -> str:
    return m.page(m.card(m.tag("p", text, class_="dim")))


def pair(
    sides: Sequence[str],
    answers: Mapping[str, Mapping[str, Any]],
    done: Mapping[str, Any] | None,
    how: Mapping[str, Any],
) -> str:
    """The prompt once it is known, and the answers side by side."""
    parts = []
    if done is not None:
        reference = done.get("reference")
        known = (
            m.tag("div", m.tag("small", "reference ") + m.tag("code", str(reference)[:400]))
            if reference is not None
            else Markup("")
        )
        parts.append(
            m.card(
                m.tag("div", str(done.get("prompt"))[:LONGEST], class_="prompt"),
                known,
                m.tag("small", _made_with(how)),
            )
        )
        parts.append(_verdict(answers))
    parts.append(columns(sides, answers, how.get("step")))
    return m.page(m.tag("div", m.join(parts), class_="stack-notes"))


def _made_with(how: Mapping[str, Any]) -> str:
    """Seed, temperature, limit and step; what is not known is left out."""
    heat = how.get("temperature")
    parts = [
        f"seed {how['seed']} on both sides",
        *([f"temperature {heat:g}" + (" (greedy)" if heat == 0 else "")] if isinstance(heat, (int, float)) else []),
        *([f"at most {how['max_tokens']:,} tokens"] if isinstance(how.get("max_tokens"), int) else []),
        *([f"weights of step {how['step']}"] if how.get("step") is not None else []),
    ]
    return ", ".join(parts)


def _verdict(answers: Mapping[str, Mapping[str, Any]]) -> Markup:
    """Which answer the reward likes better."""
    totals = {side: (one.get("reward") or {}).get("total") for side, one in answers.items()}
    base, tuned = totals.get("base"), totals.get("tuned")
    if not isinstance(base, (int, float)) or not isinstance(tuned, (int, float)):
        return Markup("")
    if abs(base - tuned) < 1e-9:
        return m.note(
            "The reward makes no difference between the two answers. One prompt says little; the held-out score says more."
        )
    better, gap = ("tuned", tuned - base) if tuned > base else ("base", base - tuned)
    return m.note(
        f"The reward likes the {better} answer better, by {gap:.2f}. One prompt says little; the held-out score says more.",
        "ok" if better == "tuned" else "warn",
    )


def columns(sides: Sequence[str], answers: Mapping[str, Mapping[str, Any]], step: Any = None) -> Markup:
    """One card a side; `step` is that of the tuned weights."""
    cards = (_answer(side, answers.get(side), step) for side in sides)
    return m.tag("div", m.join(cards), class_="pair", aria_live="polite")


def _answer(side: str, one: Mapping[str, Any] | None, step: Any) -> Markup:
    name = NAMES[side] + (f", step {step}" if side == "tuned" and step is not None else "")
    if one is None:
        return m.card(m.tag("b", name), m.tag("p", "waits for its turn …", class_="dim"))
    text = str(one.get("text") or "")[:LONGEST]
    badge = m.badge("writing", "live") if one.get("writing") else _ended(one)
    head = m.tag("div", m.tag("b", name) + badge, class_="spread")
    return m.card(
        head,
        _reward(one.get("reward")),
        m.tag("div", text or ("…" if one.get("writing") else "(empty)"), class_="said", tabindex="0"),
        _facts(one),
    )


def _ended(one: Mapping[str, Any]) -> Markup:
    words = {"stop": ("complete", "ok"), "length": ("cut at the limit", "fail"), "cancelled": ("stopped", "warn"),
             "tool_calls": ("last call not answered", "fail")}  # fmt: skip
    return m.badge(*words.get(str(one.get("finish")), ("ended", "")))


def _facts(one: Mapping[str, Any]) -> Markup:
    if one.get("writing") or one.get("tokens") is None:
        return Markup("")
    return m.tag("small", f"{m.number(one.get('tokens'))} tokens in {m.seconds(float(one.get('seconds') or 0))}")


def _reward(found: Any) -> Markup:
    """The total and a chip a component; nothing where no reference is known."""
    if not isinstance(found, Mapping):
        return Markup("")
    chips = [
        m.tag(
            "span",
            m.join(
                [
                    name,
                    " ",
                    m.tag("b", m.number(part.get("value"), 2)),
                    " ",
                    m.tag("small", str(part.get("status")).replace("_", " ")),
                ]
            ),
            class_=f"chip {part.get('status')}",
        )
        for name, part in (found.get("components") or {}).items()
    ]
    total = m.tag("span", m.number(found.get("total"), 2), class_="big")
    return m.tag("div", total + m.tag("small", "reward") + m.join(chips), class_="row")
