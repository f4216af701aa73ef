"""How a comparison looks: arms, what differs, scores with intervals, the verdict in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from kit.studies.compare import METHOD, interval
from kit.ui import markup as m
from kit.ui.jobs import Job
from kit.ui.run_files import shown
from kit.ui.site import address

LOOK = {"better": "ok", "worse": "fail", "not distinguishable": "warn", "not comparable": "fail"}
COLORS = 6


def few(there: int) -> str:
    """What stands where fewer than two runs are chosen."""
    if there < 2:
        return m.empty(
            "Two runs are needed",
            m.join(
                ["Start another on ", m.tag("a", "New run", href="/new"), ", with one change, or with another seed."]
            ),
        )
    return m.empty(
        "Choose two runs or more",
        "The first is the one that the others are compared with. Several seeds of the same configuration make one arm.",
    )


def arms(names: Sequence[str], ids: Sequence[Sequence[str]], states: Mapping[str, str]) -> str:
    """Each arm with its runs, in its colour."""
    cards = []
    for at, (name, runs) in enumerate(zip(names, ids, strict=True)):
        links = m.join(
            (
                m.tag("span", m.join([m.tag("a", run, href=address("run", run)), " ", m.state_badge(states[run])]))
                for run in runs
            ),
            " ",
        )
        head = m.tag("b", name) + (m.badge("compared with") if at == 0 else Markup(""))
        style = f"border-left: 5px solid var(--series{1 + at % COLORS})"
        cards.append(
            m.tag(
                "div", m.tag("div", head, class_="row") + m.tag("div", links, class_="row"), class_="card", style=style
            )
        )
    return m.page(m.tag("div", m.join(cards), class_="grid"))


def differences(names: Sequence[str], configs: Sequence[Mapping[str, Any]], without: Sequence[str]) -> str:
    """Only the keys in which the arms differ, those whose configuration cannot be read aside."""
    unread = [name for name, config in zip(names, configs, strict=True) if not config]
    if unread:
        note = m.note(
            f"config.yaml of {', '.join(unread)} cannot be read, so what else differs is not known. "
            "Choose runs whose config.yaml is there and whole.",
            "fail",
        )
        read = [at for at, config in enumerate(configs) if config]
        rest = differences([names[at] for at in read], [configs[at] for at in read], without) if len(read) > 1 else ""
        return m.page(note, Markup(rest))
    keys = dict.fromkeys(key for config in configs for key in config if key not in without)
    rows = []
    for key in keys:
        values = [shown(config[key]) if key in config else "not set" for config in configs]
        if len(set(values)) > 1:
            rows.append([m.tag("code", key), *values])
    if not rows:
        return m.page(m.note("Nothing but the seed: any difference between the arms is luck."))
    return m.page(m.table(["key", *names], rows))


def progress(job: Job | None) -> str:
    """Where the comparison is, or its result."""
    if job is None:
        return ""
    if job.state == "running":
        return m.page(
            m.card(
                m.tag("b", "Comparing"), m.tag("p", job.line or "Reading the scores of single problems …", class_="dim")
            )
        )
    if job.state == "failed":
        return m.error(job.error)
    return result(job.result) if job.state == "done" else m.page(m.note("Stopped."))


def result(found: Mapping[str, Any]) -> str:
    """Verdicts first, then scores, then what else differs."""
    metric = str(found["metric"]).replace("_", " ")
    parts = [_verdict(each) for each in found["comparisons"]]
    parts += [m.note(warning, "warn") for warning in found["warnings"]]
    parts.append(_forest(found, metric))
    parts.append(_scores(found, metric))
    parts.append(m.tag("details", m.tag("summary", "What else differs") + _quantities(found)))
    notes = m.join(m.tag("p", text) for text in [METHOD, *found["notes"]])
    parts.append(m.tag("details", m.tag("summary", "How to read this") + notes))
    return m.page(m.tag("div", m.join(parts), class_="stack-notes"))


def _verdict(each: Mapping[str, Any]) -> Markup:
    level = LOOK.get(each["verdict"], "")
    head = m.tag(
        "div",
        m.join([m.tag("b", f"{each['arm']} against {each['baseline']}"), m.badge(each["verdict"], level)]),
        class_="spread",
    )
    return m.tag("div", head + m.tag("p", each["text"]), class_=f"verdict {level}")


def _forest(found: Mapping[str, Any], metric: str) -> Markup:
    """The differences with their intervals on one axis, zero marked."""
    ends = [each["difference"][end] for each in found["comparisons"] for end in ("low", "value", "high")]
    low, high = min(0.0, *ends), max(0.0, *ends)
    room = 0.08 * ((high - low) or 1.0)  # so that an end of an interval is seen to be one
    low, span = low - room, high - low + 2 * room

    def at(value: float) -> str:
        return f"{100 * (value - low) / span:.1f}%"

    rows = []
    for each in found["comparisons"]:
        gap = each["difference"]
        line = m.tag(
            "i", "", style=f"left:{at(gap['low'])};width:{100 * (gap['high'] - gap['low']) / span:.1f}%"
        ) + m.tag("b", "", style=f"left:{at(gap['value'])}")
        zero = m.tag("u", "", style=f"left:{at(0.0)}")
        words = f"{gap['value']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}]"
        rows.append(m.tag("div", m.tag("div", m.tag("span", each["arm"]) + m.tag("span", words, class_="num"), class_="spread")
                          + m.tag("div", zero + line, class_="ci", role="img", aria_label=words)))  # fmt: skip
    title = m.tag(
        "b", f"Difference in {metric} to {found['baseline']}, 95 % interval over {found['problems']} held-out problems"
    )
    return m.card(title, m.tag("div", m.join(rows), class_="forest"), m.tag("small", "The line marks no difference."))


def _scores(found: Mapping[str, Any], metric: str) -> Markup:
    rows = [
        [
            arm["name"],
            f"{arm['value']:.3f}",
            len(arm["runs"]),
            m.join((f"{run} {value:.3f}" for run, value in zip(arm["runs"], arm["by_run"], strict=True)), ", "),
        ]
        for arm in found["arms"]
    ]
    return m.table(["arm", metric, "seeds", "by run"], rows, numbers={1, 2})


def _quantities(found: Mapping[str, Any]) -> Markup:
    first, *others = [arm["name"] for arm in found["arms"]]
    head = ["quantity", first, *(cell for other in others for cell in (other, "difference"))]
    rows = []
    for row in found["quantities"]:
        cells = [f"{row['name'].replace('_', ' ')} ({row['unit']})", _short(row["arms"][first])]
        for other in others:
            cells += [_short(row["arms"][other]), interval(row["differences"][other])]
        rows.append(cells)
    return m.table(head, rows, numbers=range(1, len(head)))


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
