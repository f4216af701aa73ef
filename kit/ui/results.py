"""HTML for results of the Reward Lab: scored completions, attacks, the audit, and the signal check with its suggestion."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup

from kit.runs.files import one_line
from kit.ui import markup as m
from kit.ui.explorer import show_rows
from kit.ui.steps import LABELS

LEVELS = {"will learn": "ok"} | dict.fromkeys(("too easy", "sample more", "borderline", "slow reward"), "warn")
"""Colours of verdicts of the signal check; any other verdict is a failure."""
SHOWN_ATTACKS = 10
COMMANDS = {
    "; test it with: grpo-kit reward test": "; test it in the tab Score",
    "grpo-kit reward list": "see the list at the top of this step",
}
"""Texts of a verdict about the command line, and their equivalents on the page."""
RATES = {
    "pass@1": "right at the first try (pass@1)",
    "spread_share": "groups whose rewards differ: what GRPO learns from",
    "truncated_share": "cut at the token limit",
    "wrong_format_share": "not in the required format",
    "failure_share": "reward failed",
}


def show_row(row: dict[str, Any]) -> str:
    """Show a training row."""
    reference = m.reference(row.get("reference") or "none")
    return m.page(
        m.panel(m.tag("small", f"training row {row['place']}"), m.tag("div", row["prompt"], class_="said"), reference)
    )


def show_group(answer: dict[str, Any]) -> Markup:
    """Show completions of one row component by component, as the Run screen does for those of training."""
    rows = [
        {"total": item["total"], "advantage": advantage, "completion": item["text"]}
        | {
            f"reward/{part['name']}{end}": part.get(key)
            for part in item["parts"]
            for end, key in (("", "value"), ("/status", "status"), ("/extracted", "extracted"), ("/reason", "reason"))
        }
        for item, advantage in zip(answer["items"], answer["advantages"], strict=True)
    ]
    weights = ", ".join(f"{name} × {weight:g}" for name, weight in answer["weights"].items())
    about = m.reference(answer["reference"] or "none") + m.tag("small", f"total = {weights}")
    return show_rows("One group", rows, [], about)


def show_attacks(audit: dict[str, Any]) -> str:
    """Show the attacks, those that work first."""
    honest = [case["total"] for case in audit["cases"] if case["kind"] == "good" and case["total"] is not None]
    bar = min(honest, default=None)
    tried = [case for case in audit["cases"] if case["kind"] == "attack"]
    works = [case for case in tried if bar is not None and case["total"] is not None and case["total"] >= bar - 1e-9]
    if audit["problems"]:
        verdict = m.note("\n".join(audit["problems"][:8]), "fail")
    elif bar is None:
        verdict = m.note("There is no right answer to compare with; write one above.", "warn")
    else:
        verdict = m.note(f"None of {len(tried)} attacks reaches the honest answer's {bar:.2f}.", "ok")
    notes = m.join(m.note(note, "warn") for note in audit["notes"])
    order = sorted(
        audit["cases"], key=lambda case: ({"good": 0, "bad": 1}.get(case["kind"], 2), -(case["total"] or 0.0))
    )
    rows = [_case(case, case in works) for case in order]
    head, first = ["", "what", "reward", "completion", "why"], SHOWN_ATTACKS + len(works)
    rest = m.tag(
        "details",
        m.tag("summary", f"{len(rows) - first} more that earn no more") + m.table(head, rows[first:], numbers={2}),
    )
    fold = rest if len(rows) > first else Markup("")
    context = m.tag(
        "p", f"right: {audit['right'][:80]} · wrong: {audit['wrong'][:80]} · style: {audit['style']}", class_="dim"
    )
    return m.page(verdict, notes, context, m.table(head, rows[:first], numbers={2}), fold)


def audit_table(audit: dict[str, Any]) -> Markup:
    """Show how often the reward pays each attack, with examples."""
    results = audit["results"]
    if audit["passed"]:
        verdict = m.note(f"No attack is paid on any of {results[0]['rows']} rows.", "ok")
    else:
        verdict = m.note("\n".join(audit["problems"]), "fail")
    rows = []
    for attack in results:
        if attack["attack"] in ("right", "spellings"):
            badge = m.badge("honest", "ok" if attack["paid"] == attack["rows"] else "warn")
        else:
            badge = m.badge("paid", "fail") if attack["paid"] else m.badge("attack")
        name, paid = m.tag("span", attack["attack"], class_="nowrap"), f"{attack['paid']} of {attack['rows']}"
        examples = " · ".join(f"{example['name']} for {example['reference']}" for example in attack["examples"][:2])
        rows.append([badge, name, paid, m.number(attack["seconds"], 2), _said(examples) if examples else ""])
    return verdict + m.table(["", "what", "rows paid", "longest, s", "example"], rows, numbers={3})


def _case(case: dict[str, Any], works: bool) -> list[Any]:
    kind = {"good": ("honest", "ok"), "bad": ("wrong", "warn")}.get(
        case["kind"], ("works", "fail") if works else ("attack", "")
    )
    name = {"good": "right answer", "bad": "wrong answer"}.get(case["kind"], case["name"])
    return [m.badge(*kind), name, m.number(case["total"], 2), _said(case["completion"]), case["why"]]


def _said(text: str | None) -> Markup:
    if text is None or not text.strip():
        return m.tag("small", "no completion at all" if text is None else "(empty)")
    return m.tag("code", one_line(text, 110))


def show_verdict(check: dict[str, Any]) -> Markup:
    """Show the verdict of the signal check, and the suggested change."""
    verdict = check["verdict"]
    level = LEVELS.get(verdict["verdict"], "fail")
    text = change_of(check)
    change = m.tag("p", m.tag("b", "What to do: ") + text) if text else Markup("")
    words = m.tag("div", verdict["verdict"].capitalize(), class_="big") + m.tag("p", f"{verdict['because']}.")
    return m.tag("div", words + change, class_=f"verdict {level}")


def show_card(check: dict[str, Any]) -> Markup:
    """Show the verdict, and whether the audit found an attack that pays."""
    audit = check.get("audit")
    note = Markup("")
    if audit and audit["passed"]:
        note = m.note(f"No known attack works: none is paid on {audit['results'][0]['rows']} rows.", "ok")
    elif audit:
        note = m.note(f"{audit['problems'][0]} See 2 Reward, Signal check.", "warn")
    return m.tag("div", show_verdict(check) + note, class_="stack-notes")


def show_signal(check: dict[str, Any]) -> str:
    """Show the verdict, the rates with their intervals, a few answers, the time of a batch, and the audit."""
    head = show_verdict(check)
    names = {**RATES, f"pass@{check['k']}": f"right in one of {check['k']} tries (pass@{check['k']})"}
    rows = [
        [
            names[name],
            interval(check[name]),
            f"{check[name]['value']:.0%} [{check[name]['low']:.0%}, {check[name]['high']:.0%}]",
        ]
        for name in (*RATES, f"pass@{check['k']}")
        if check.get(name) and name in names
    ]
    seconds = check["seconds"]
    facts = [
        ("reward", m.number((check.get("reward") or {}).get("value"))),
        ("completion", f"{check['completion_tokens_mean']:.0f} tokens"),
        ("a batch", f"completions {m.seconds(seconds['rollout'])}, rewards {m.seconds(seconds['reward'])}"),
    ]
    chips = m.join(m.tag("span", m.join([name, " ", m.tag("b", value)]), class_="chip") for name, value in facts)
    failure = m.note(f"A reward failed: {check['failure']}", "fail") if check.get("failure") else Markup("")
    title = f"{check['prompts']} prompts × {check['k']} completions"
    answers = [
        [
            _said(f"… {sample['prompt'][-100:]}"),
            _said(sample["completion"]),
            m.number(sample["reward"], 2),
            sample["why"],
        ]
        for sample in check.get("samples") or []
    ]
    return m.page(
        head,
        failure,
        m.table([title, "", "95 % interval"], rows, numbers={2}),
        m.tag("div", chips, class_="row"),
        m.table(["prompt", "answer of the untrained model", "reward", "why"], answers, numbers={2}) if answers else "",
        m.tag("h3", "Audit of the reward") + audit_table(check["audit"]) if check.get("audit") else "",
    )


def interval(estimate: dict[str, float]) -> Markup:
    """Show a share from 0 to 1 as a mark and its interval as a band."""
    low, value, high = (min(1.0, max(0.0, estimate[end])) for end in ("low", "value", "high"))
    band = m.tag("i", "", style=f"left:{100 * low:.1f}%;width:{max(1.0, 100 * (high - low)):.1f}%")
    mark = m.tag("b", "", style=f"left:{100 * value:.1f}%")
    return m.tag(
        "div", band + mark, class_="ci", role="img", aria_label=f"{value:.0%}, between {low:.0%} and {high:.0%}"
    )


def actions_of(check: dict[str, Any]) -> list[str]:
    """Return the settings that the check suggests, as `key=value`."""
    return re.findall(r"-o (\S+=\S+)", check["verdict"]["change"] or "")


def in_words(actions: list[str]) -> str:
    """Name settings (`key=value`) by the labels of the form: `Set Group size to 16`."""
    pairs = (action.partition("=") for action in actions)
    return one_line(f"Set {' and '.join(f'{LABELS.get(key, key)} to {value}' for key, _, value in pairs)}", 140)


def change_of(check: dict[str, Any]) -> str:
    """Describe the suggested change without options of the command line."""
    change = str(check["verdict"]["change"] or "")
    if actions := actions_of(check):
        return f"{in_words(actions)}."
    if match := re.fullmatch(r"--prompts (\d+)", change):
        return f"Sample {match[1]} prompts."
    for command, words in COMMANDS.items():
        change = change.replace(command, words)
    return change
