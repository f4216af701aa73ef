"""Compare: overlaid charts and what differs in configuration at once; scores, intervals and the verdict by a child process."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gradio as gr
from markupsafe import Markup

from kit.config.loading import leaves
from kit.errors import KitError, RunError
from kit.report.panels import Panel, Series, panels
from kit.report.record import read_tree
from kit.runs.files import to_json
from kit.runs.store import RunDir
from kit.studies.compare import METHOD, interval
from kit.ui import markup as m
from kit.ui.children import Job
from kit.ui.curves import Library, charts, pack
from kit.ui.run_texts import shown
from kit.ui.site import QUIET, RUN_FROM_ADDRESS, Site, address, number_of, poll, run_box, stamp, to_address

LOOK = {"better": "ok", "worse": "fail", "not distinguishable": "warn", "not comparable": "fail"}
COLORS = 6


def _too_few(there: int) -> str:
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


def arm_list(names: Sequence[str], ids: Sequence[Sequence[str]], states: Mapping[str, str]) -> str:
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
            m.panel(
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
    return m.panel(title, m.tag("div", m.join(rows), class_="forest"), m.tag("small", "The line marks no difference."))


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


JOB = "kit.studies.compare"
MOST_RUNS = 12
METRICS = ("as the runs say", "greedy_accuracy", "greedy_reward", "pass@1")
BUDGET = 90_000
"""Characters of all curves together."""
NOT_THE_METHOD = ("run.id", "run.root", "run.seed", "run.threads", "run.report_to", "run.save_completions", "run.save_every",
                  "run.keep_checkpoints")  # fmt: skip


def chosen_runs(site: Site, ids: Any) -> list[RunDir]:
    """The runs of ids that a browser sent, each once. Raises `RunError`."""
    named = [one for one in ids if isinstance(one, str)] if isinstance(ids, list) else []
    if len(named) > MOST_RUNS:
        raise RunError(f"{len(named)} runs are chosen; at most {MOST_RUNS} are compared at once.")
    return [site.run(one) for one in dict.fromkeys(named)]


def arms_of(runs: Sequence[RunDir], together: bool) -> list[list[RunDir]]:
    """Runs by arm: with `together`, those whose configurations differ in nothing but the seed are one."""
    if not together:
        return [[run] for run in runs]
    found: dict[str, list[RunDir]] = {}
    for run in runs:
        whole = configuration(run)
        # One that cannot be read is like no other.
        method: Any = [pair for pair in whole.items() if pair[0] not in NOT_THE_METHOD] if whole else run.id
        found.setdefault(json.dumps(method, sort_keys=True, default=str), []).append(run)
    return list(found.values()) if len(found) > 1 else [[run] for run in runs]


def arm_names(arms: Sequence[Sequence[RunDir]]) -> list[str]:
    """`base` of base-s0 and base-s1; each name once."""
    names: list[str] = []
    for runs in arms:
        stems = {re.sub(r"-(s|seed)?-?\d+$", "", run.id) for run in runs}
        stem = min(stems) if len(stems) == 1 and len(runs) > 1 else runs[0].id
        names.append(runs[0].id if stem in names else stem)
    return names


def configuration(run: RunDir) -> dict[str, Any]:
    """config.yaml by dotted keys; {} where it cannot be read."""
    found = read_tree(run.config)
    return dict(leaves(found)) if found else {}


def overlaid(library: Library, arms: Sequence[Sequence[RunDir]], names: Sequence[str]) -> dict[str, Any]:
    """The charts of all runs over one another, a colour an arm."""
    found: dict[str, Panel] = {}
    for color, (runs, name) in enumerate(zip(arms, names, strict=True)):
        for run in runs:
            try:
                columns = library.columns(run)
            except RunError:
                columns = {}
            for panel in panels(columns, library.evaluations(run)):
                _overlay(found, panel, name if len(runs) == 1 else run.id, color)
    return pack(list(found.values()), budget=BUDGET)


def _overlay(found: dict[str, Panel], panel: Panel, name: str, color: int) -> None:
    """Adds a run's series, without their bands; a chart for each where a run has several."""
    for one in panel.series:
        alone = len(panel.series) == 1 or panel.title.startswith("Held-out reward")
        title = panel.title if alone else f"{panel.title}: {one.name}"
        label = panel.label if one.dots or one.low is None else panel.label.partition(",")[0].partition(":")[0]
        line = replace(one, name=name, color=color) if one.dots else Series(name, one.x, one.y, color=color)
        series = found[title].series if title in found else []
        # A chart that stacks the parts of one run does not stack runs on one another.
        found[title] = replace(panel, title=title, label=label, series=[*series, line], stacked=False)


class Screen:
    """`look` gives [seen, arms, charts, configuration, verdict, stop button]."""

    def __init__(self, site: Site) -> None:
        self.site, self.library = site, Library(most=2 * MOST_RUNS)

    def look(self, ids: Any, together: Any, key: Any, seen: Any) -> list[Any]:
        known = seen if isinstance(seen, dict) else {}
        try:
            runs = chosen_runs(self.site, ids)
        except KitError as problem:
            runs, text = [], m.error(problem)
        else:
            text = ""
        job = self.site.jobs.get(key)
        files = [path for run in runs for path in (run.metrics_file, run.config, run.eval)]
        now = {
            "runs": stamp(files, ([run.id for run in runs], bool(together), text)),
            "job": job.stamp if job else str(key),
        }
        if known == now:
            return [gr.skip()] * 6
        found: list[Any] = [now] + [gr.skip()] * 5
        if known.get("runs") != now["runs"]:
            found[1:4] = self._of(runs, together is not False, text)
        if known.get("job") != now["job"]:
            found[4], found[5] = progress(job), gr.Button(visible=job is not None and job.state == "running")
        return found

    def _of(self, runs: list[RunDir], together: bool, text: str) -> list[str]:
        if text or len(runs) < 2:
            return [text or _too_few(len(self.site.runs())), "", ""]
        arms = arms_of(runs, together)
        names = arm_names(arms)
        packed = overlaid(self.library, arms, names)
        statuses = {run.id: run.status()["state"] for run in runs}
        return [
            arm_list(names, [[run.id for run in of] for of in arms], statuses),
            json.dumps(packed, separators=(",", ":")) if packed["panels"] else "",
            differences(names, [configuration(of[0]) for of in arms], NOT_THE_METHOD),
        ]

    def judge(self, ids: Any, together: Any, metric: Any, effect: Any) -> list[Any]:
        """[key of the job, what stands in place of the verdict]."""
        try:
            runs = chosen_runs(self.site, ids)
            if len(runs) < 2:
                raise RunError("Choose two runs or more.")
            matters = number_of(effect, "Difference that matters", 0, 1e6)
            arms = [[run.id for run in of] for of in arms_of(runs, together is not False)]
            request = {
                "runs": arms,
                "root": str(self.site.settings.root),
                "metric": metric if metric in METRICS[1:] else None,
                "effect": matters or None,  # where none is too small to matter there is no bound either
            }
            state = stamp([run.eval for run in runs] + [run.metrics_file for run in runs])
            key = f"{JOB}:{hashlib.sha256(to_json([request, state]).encode()).hexdigest()[:16]}"
            known = self.site.jobs.get(key)
            if known is None or known.state != "done":
                self.site.jobs.start(key, JOB, request)
        except KitError as problem:
            return ["", m.error(problem)]
        return [key, gr.skip()]


def build(site: Site, blocks: gr.Blocks) -> None:
    """The screen."""
    screen = Screen(site)
    named, key, seen = run_box(), gr.State(""), gr.State({})
    with gr.Row(elem_classes="tight"):
        ids = gr.Dropdown(
            [],
            multiselect=True,
            label="Runs, the one to compare with first",
            allow_custom_value=True,
            scale=5,
            min_width=260,
            elem_id="compare-runs",
        )
        metric = gr.Dropdown(list(METRICS), value=METRICS[0], label="Score that decides", scale=2, min_width=170)
        effect = gr.Textbox(
            label="Difference that matters", placeholder="optional, e.g. 0.02", max_length=40, scale=2, min_width=150,
            elem_id="compare-effect",
        )  # fmt: skip
    together = gr.Checkbox(
        True, label="Runs that differ in nothing but the seed are one arm", elem_id="compare-together"
    )
    with gr.Row(elem_classes="tight"):
        judge = gr.Button("Which is better?", variant="primary", elem_id="compare-judge")
        stop = gr.Button("Stop", variant="stop", visible=False)
    arms, verdict = gr.HTML(elem_id="compare-arms"), gr.HTML(elem_id="compare-verdict")
    with gr.Accordion("What differs in configuration", open=True):
        differences = gr.HTML(elem_id="compare-config")
    drawing = charts("compare-charts")
    outputs = [seen, arms, drawing, differences, verdict, stop]
    look: dict[str, Any] = {"fn": screen.look, "inputs": [ids, together, key, seen], "outputs": outputs} | QUIET
    blocks.load(lambda wanted: _choices(site, wanted), [named], [ids], js=RUN_FROM_ADDRESS, **QUIET).then(**look)
    for one in (ids, together):
        one.input(lambda: ["", ""], [], [key, verdict], **QUIET).then(**look)
    ids.input(None, [ids], [], js=to_address("compare"))
    judge.click(screen.judge, [ids, together, metric, effect], [key, verdict], **QUIET).then(**look)
    stop.click(lambda name: site.jobs.stop(name), [key], [], queue=False, api_visibility="private")
    poll(look["fn"], look["inputs"], outputs)


def _choices(site: Site, wanted: Any) -> Any:
    """Runs; those of the address, with commas between them, are chosen."""
    try:
        found = [run.id for run in site.runs()]
    except RunError:
        found = []
    named = dict.fromkeys(wanted.split(",") if isinstance(wanted, str) else ())
    chosen = [name for name in named if name in found][:MOST_RUNS]
    return gr.Dropdown(choices=found, value=chosen, multiselect=True)
