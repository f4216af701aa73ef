"""Run: state and alerts above; Charts, Completions, Log, Config and Checkpoints below. One timer asks for what is shown.

Nothing is kept of a run but how far its files have been read: two browsers, or a page that was started anew, see the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from markupsafe import Markup

from kit.config import RunConfig
from kit.config.loading import leaves
from kit.errors import KitError, RunError
from kit.report.panels import MOST_POINTS, Numbers, panels
from kit.report.record import read_tree, words
from kit.runs.files import human_size, read_lines
from kit.runs.secrets import redact
from kit.runs.store import ALIVE, RunDir, step_of, whole_checkpoints
from kit.ui import explorer
from kit.ui import markup as m
from kit.ui.curves import Library, charts, pack
from kit.ui.home import ask_to_stop, phase, steps, time_left
from kit.ui.site import POLL_SECONDS, QUIET, RUN_FROM_ADDRESS, Site, address, is_id, run_box, stamp, to_address

Event = Mapping[str, Any]
BUTTONS = ("stop", "save", "now", "resume", "force", "report")
RESUME, AGAIN = "Resume", "Start again from the beginning"
TABS = ("charts", "completions", "log", "config", "checkpoints")
MARKED = ("resumed", "early_stop", "rollback", "out_of_memory", "alert")
"""Events that stand as vertical lines in the charts."""
MOST_MARKS = 24
ENDED_POLL_SECONDS = 8.0
"""Between two looks at a run that has ended: somebody may resume it, nothing else happens."""
TITLES = {
    "zero_spread": "Most groups teach nothing",
    "truncated": "Completions are cut off",
    "length_collapse": "Completions have collapsed",
    "length_explosion": "Completions grow fast",
    "entropy_collapse": "Completions have become copies of each other",
    "kl_spike": "The policy has jumped away from the reference",
    "gradient_overflow": "Steps are skipped: the gradient overflows",
    "reward_hacking": "The reward may be hacked: training reward up, held-out score down",
}
LEVELS = {"error": "fail", "warning": "warn", "info": ""}
MOST_ALERTS = 6
FLAT_STEPS = 100
"""Steps within which a flat reward is no bad sign."""
EARLY = (
    "What counts now: groups whose rewards differ, and completions that are not cut off. A loss around 0 is right in GRPO "
    "and tells nothing."
)
EARLY_ALIKE = (
    "But most groups teach nothing so far: all completions of a group got the same reward. If that stays, the problems are "
    "too easy or too hard."
)
UNSCORED = (
    "The training reward is measured on what is trained on. Only the held-out score tells whether it has learned; set "
    "evaluation.every to see it during training."
)
AFTER_UNSCORED = (
    "There is no held-out score after training, so nothing tells whether it has learned more than its training prompts. "
    "Score it with: grpo-kit eval RUN_ID"
)
AFTER_FLAT = (
    "The training reward ends about where it began. Usual reasons: problems too hard or too easy (see groups without a "
    "lesson), too few steps, or too low a learning rate. The signal check on New run tells which."
)
ABOUT_CHARTS = (
    f"At most {MOST_POINTS} points a curve over the whole range, with the lowest and highest value of each stretch. Dashed "
    "lines: alerts, resumes and the like. Point at a chart, or focus it and use the arrow keys."
)
LOG_BYTES = 24_000
"""Of the end of a log, at most: a poll stays small."""
LONGEST_YAML = 2_000_000
"""Letters of config.yaml that are shown, at most."""


def buttons(status: Mapping[str, Any] | None, *, anew: bool = False) -> list[Any]:
    """Which of `BUTTONS` a run in this state has. `anew`: it has no checkpoint to go on from."""
    live = status is not None and status["state"] in ALIVE
    ended = status is not None and not live
    resumable = ended and status is not None and status["state"] != "finished"
    return [
        gr.Button(visible=live),
        gr.Button(visible=live),
        gr.Button(visible=live),
        gr.Button(AGAIN if anew else RESUME, visible=resumable),
        gr.Checkbox(visible=resumable and bool(status and status.get("refused"))),
        gr.Button(visible=status is not None),
    ]


def _build_actions(site: Site, chosen: gr.Dropdown) -> tuple[list[Any], list[Any]]:
    """The row of buttons, in the order of `BUTTONS`, and the events after which the run is another."""

    def button(name: str, label: str, width: int, variant: Any = "secondary") -> gr.Button:
        return gr.Button(label, variant, visible=False, size="md", scale=0, min_width=width, elem_id=f"run-{name}")

    with gr.Row(elem_classes="tight"):
        stop = button("stop", "Stop & save", 130, "stop")
        save = button("save", "Save a checkpoint now", 210)
        now = button("now", "Stop now …", 120)
        resume = button("resume", RESUME, 120, "primary")
        force = gr.Checkbox(
            label="Resume although that has changed (it is recorded)", visible=False, elem_id="run-force"
        )
        report = button("report", "Write report.html", 160)
    asked = gr.State("")  # the run that the confirmation names
    with gr.Group(visible=False, elem_classes="danger-zone") as sure:
        warning = gr.HTML(elem_id="run-now-asked")
        with gr.Row():
            yes = gr.Button("Yes, stop it now", variant="stop", size="sm", elem_id="run-now-yes")
            no = gr.Button("No, let it run", size="sm", elem_id="run-now-no")
    said = gr.HTML(elem_id="run-said")
    listen: dict[str, Any] = {"api_visibility": "private"}
    stopped = stop.click(lambda run_id: ask_to_stop(site, run_id), [chosen], [said], queue=False, **listen)
    save.click(lambda run_id: save_now(site, run_id), [chosen], [said], queue=False, **listen)
    now.click(confirmation, [chosen], [sure, warning, asked], queue=False, **listen)
    no.click(lambda: gr.Group(visible=False), [], [sure], queue=False, **listen)
    killed = yes.click(lambda: gr.Group(visible=False), [], [sure], queue=False, **listen).then(
        lambda run_id: stop_now(site, run_id), [asked], [said], concurrency_limit=2, **listen
    )
    # Forced once: what is refused the next time may be something else.
    listen_once = listen | {"concurrency_limit": 1}
    resumed = resume.click(
        lambda run_id, forced: [go_on(site, run_id, forced), False], [chosen, force], [said, force], **listen_once
    )
    # Nothing that was opened, ticked or said of one run is there for the next.
    chosen.input(lambda: [gr.Group(visible=False), "", False, ""], [], [sure, asked, force, said], **QUIET)
    written = report.click(lambda run_id: write_report(site, run_id), [chosen], [said], **listen_once)
    return [stop, save, now, resume, force, report], [stopped, killed, resumed, written]


def confirmation(run_id: Any) -> list[Any]:
    """[the question, its words, the run that it is about]."""
    if not is_id(run_id):
        return [gr.Group(visible=False), "", ""]
    words = (
        f"Stop {run_id} now? It ends the process at once. What was learned since the last checkpoint is lost. Stop & save "
        "ends after the step in progress and loses nothing."
    )
    return [gr.Group(visible=True), m.page(m.note(words, "fail")), run_id]


def save_now(site: Site, run_id: Any) -> str:
    """Leaves the sentinel for a checkpoint after this step."""
    try:
        run = site.run(run_id)
        if run.status()["state"] not in ALIVE:
            return m.page(m.note(f"{run.id} has ended already."))
        run.write_text("control/save", "page\n")
    except KitError as problem:
        return m.error(problem)
    return m.page(m.note("A checkpoint is written when the next step ends; see Checkpoints.", "ok"))


def stop_now(site: Site, run_id: Any) -> str:
    """Ends the run at once, by signals. Waits until it has ended, a few seconds."""
    from kit.runs.stopping import stop

    try:
        run = site.run(run_id)
        status = stop(run, now=True)
    except KitError as problem:
        return m.error(problem)
    return m.page(m.note(f"{run.id} has ended: {status['state']}.", "ok"))


def go_on(site: Site, run_id: Any, forced: Any) -> str:
    """Resumes a run in a process of its own. What is refused at once is said here, the rest above, by its status.

    `forced` counts only for a run whose resumption was refused: what to resume "although" must have been seen.
    """
    from kit.api.launch import resume

    try:
        run = site.run(run_id)
        force = forced is True and bool(run.status().get("refused"))
        where = run.where_resumed()  # asked before: the run may write its first checkpoint at any moment from now on
        resume(run.id, site.settings.root, force=force, detach=True)
    except KitError as problem:
        return m.error(problem)
    return m.page(m.note(f"{run.id} {where}.", "ok"))


def write_report(site: Site, run_id: Any) -> str:
    """Makes report.html anew of what there is now."""
    from kit.report.run_report import write_report as write

    try:
        run = site.run(run_id)
        if not run.config.is_file():
            raise RunError(f"Run '{run.id}' has no config.yaml, so there is nothing to report.")
        write(run)
    except KitError as problem:
        return m.error(problem)
    link = m.tag("a", "Open it", href=f"/runs/{run.id}/report.html", target="_blank", rel="noopener")
    return m.page(m.note(m.join(["The report is written. ", link]), "ok"))


class View:
    """The parts of the screen that a poll fills, in their order."""

    parts = ("head", "notes", "charts", "empty", "log", "about", "yaml", "checkpoints", "timer")

    def __init__(self, site: Site, library: Library) -> None:
        self.site, self.library = site, library

    def look(self, run_id: Any, tab: Any, seen: Any) -> list[Any]:
        """[what the browser has now, *parts, *buttons]: what has not changed is skipped."""
        nothing = [gr.skip()] * (len(self.parts) + len(BUTTONS))
        known = seen if isinstance(seen, dict) else {}
        try:
            if not run_id and self.site.runs():
                return [gr.skip(), *nothing]  # the address has not been read yet
            run = self.site.run(run_id)
            if known.get("run") != run.id:
                known = {"run": run.id}
            fresh = self._fresh(run, tab if tab in TABS else TABS[0], known)
        except KitError as problem:
            if known.get("problem") == str(problem):
                return [gr.skip(), *nothing]
            return [{"problem": str(problem)}, *self._problem(run_id, str(problem))]
        if not fresh:
            return [gr.skip(), *nothing]
        stamps = fresh.pop("stamps")
        found = [fresh.get(name, gr.skip()) for name in self.parts]
        return [known | stamps, *found, *fresh.get("buttons", [gr.skip()] * len(BUTTONS))]

    def _problem(self, run_id: Any, text: str) -> list[Any]:
        blank: list[Any] = ["" for _ in self.parts[2:]] + [gr.Timer(ENDED_POLL_SECONDS)]
        if not run_id:
            text_or_empty = m.empty("No run yet", m.join(["Start one on ", m.tag("a", "New run", href="/new"), "."]))
        else:
            text_or_empty = m.error(text)
        return [text_or_empty, *blank, *buttons(None)]

    def _fresh(self, run: RunDir, tab: str, known: Mapping[str, Any]) -> dict[str, Any]:
        """Parts by name that are not as the browser has them, and their stamps; {} when all are."""
        status = run.status()
        state = (status["state"], status.get("reason"), status.get("refused"))
        report = run.path / "report.html"
        now = {
            "head": stamp([run.status_file, run.metrics_file, run.events_file, run.adapter, report], state),
            tab: f"{tab}:{self._stamp(run, tab)}",
        }
        changed = {name: text for name, text in now.items() if known.get(name) != text}
        if not changed:
            return {}
        found: dict[str, Any] = {"stamps": {"run": run.id} | now}
        if "head" in changed or (tab == "charts" and tab in changed):
            found |= self._numbers(run, status, tab, changed)
        if tab == "log" and tab in changed:
            found["log"] = log_tail(run)
        elif tab == "config" and tab in changed:
            found["about"], found["yaml"] = configuration(run)
        elif tab == "checkpoints" and tab in changed:
            found["checkpoints"] = checkpoint_table(run, self.library.evaluations(run))
        return found

    def _stamp(self, run: RunDir, tab: str) -> str:
        if tab == "charts":
            scores = sorted(run.eval.glob("*.json"))
            return stamp([run.metrics_file, run.events_file, *scores], len(scores))
        if tab == "log":
            return stamp([run.log])
        if tab == "config":
            return stamp([run.config, run.data, run.env])
        if tab == "checkpoints":
            return stamp([run.path / "best.json", run.adapter, run.eval, *run.checkpoints])
        return ""

    def _numbers(self, run: RunDir, status: dict[str, Any], tab: str, changed: Mapping[str, str]) -> dict[str, Any]:
        problem = ""
        try:
            columns = self.library.columns(run)
        except RunError as error:
            columns, problem = {}, str(error)
        events, scores = _events(run), self.library.evaluations(run)
        found: dict[str, Any] = {}
        if "head" in changed:
            found["head"] = head(run, status, columns, (run.path / "report.html").is_file())
            text = expectation(status, columns, any(name != "before" for name in scores))
            notes = [m.note(problem, "fail")] if problem else []
            notes += [alerts(events)] + ([m.note(text, "live")] if text else [])
            found["notes"] = m.page(m.tag("div", m.join(notes), class_="stack-notes")) if any(notes) else ""
            live = status["state"] in ALIVE
            found["buttons"] = buttons(status, anew=not live and run.last_checkpoint is None)
            found["timer"] = gr.Timer(POLL_SECONDS if live else ENDED_POLL_SECONDS)
        if tab == "charts":
            packed = pack(panels(columns, scores), _marks(events))
            found["charts"] = json.dumps(packed, separators=(",", ":")) if packed["panels"] else ""
            found["empty"] = "" if packed["panels"] else _no_charts(status)
        return found


def _no_charts(status: Mapping[str, Any]) -> str:
    if status["state"] in ALIVE:
        return m.empty("No step yet", "Charts begin with the first step; scores of the model as it is come before it.")
    return m.empty(
        "No step was made", "The run ended before its first step. What is known of why stands above and in its log."
    )


def _events(run: RunDir) -> list[dict[str, Any]]:
    try:
        return read_lines(run.events_file)
    except RunError:
        return []


def _marks(events: list[dict[str, Any]]) -> list[tuple[float, str]]:
    chosen = [event for event in events if event.get("kind") in MARKED and isinstance(event.get("step"), int)]
    return [(event["step"], words(event)[:200]) for event in chosen[-MOST_MARKS:]]


def build(site: Site, blocks: gr.Blocks) -> None:
    """The screen."""
    view = View(site, Library())
    named, tab, seen = run_box(), gr.State(TABS[0]), gr.State({})
    chosen = gr.Dropdown([], label="Run", allow_custom_value=True, elem_id="run-chosen", filterable=True)
    head, notes = (
        gr.HTML(m.page(m.panel(m.tag("p", "Reading the run …", class_="dim"))), elem_id="run-head"),
        gr.HTML(elem_id="run-notes"),
    )
    buttons, actions = _build_actions(site, chosen)
    timer = gr.Timer(POLL_SECONDS)
    with gr.Tabs(elem_id="run-tabs"):
        with gr.Tab("Charts", id="charts") as charts_tab:
            drawing, nothing = charts("run-charts"), gr.HTML()
            gr.HTML(m.page(m.tag("small", ABOUT_CHARTS)))
        with gr.Tab("Completions", id="completions") as completions_tab:
            opened = explorer.build(site, chosen)
        with gr.Tab("Log", id="log") as log_tab:
            log = gr.HTML(elem_id="run-log", autoscroll=True)
        with gr.Tab("Config", id="config") as config_tab:
            about = gr.HTML()
            yaml = gr.Code(language="yaml", label="config.yaml", interactive=False, max_lines=40)
        with gr.Tab("Checkpoints", id="checkpoints") as checkpoints_tab:
            checkpoints = gr.HTML()
    outputs = [seen, head, notes, drawing, nothing, log, about, yaml, checkpoints, timer, *buttons]
    inputs = [chosen, tab, seen]
    tabs = dict(zip(TABS, (charts_tab, completions_tab, log_tab, config_tab, checkpoints_tab), strict=True))
    for name, one in tabs.items():
        event = one.select(lambda name=name: name, [], [tab], **QUIET).then(view.look, inputs, outputs, **QUIET)
        if name == "completions":
            event.then(opened.look, opened.inputs, opened.outputs, **QUIET)
    blocks.load(lambda wanted: _choices(site, wanted), [named], [chosen], js=RUN_FROM_ADDRESS, **QUIET).then(
        view.look, inputs, outputs, **QUIET
    )
    chosen.input(view.look, inputs, outputs, **QUIET).then(opened.look, opened.inputs, opened.outputs, **QUIET)
    chosen.input(None, [chosen], [], js=to_address("run"))
    for action in actions:
        action.then(view.look, inputs, outputs, **QUIET)
    timer.tick(view.look, inputs, outputs, **QUIET)


def _choices(site: Site, wanted: Any) -> Any:
    """All runs, and the one that the address names, else a live one, else the latest."""
    try:
        found = site.statuses()
    except RunError:
        found = []
    ids = [run.id for run, _ in found]
    live = [run.id for run, status in found if status["state"] in ALIVE]
    first = wanted if is_id(wanted) else next(iter([*live, *ids]), None)
    return gr.Dropdown(choices=ids, value=first)


# --- what a run's page says ---------------------------------------------------------------------------------------------


def head(run: RunDir, status: Mapping[str, Any], columns: Mapping[str, Numbers], link: bool) -> str:
    """State, progress, figures, and what can be done with a run in this state. `link`: there is a report to read."""
    step, total, state = status.get("step"), status.get("total_steps"), str(status["state"])
    share = step / total if isinstance(step, int) and isinstance(total, int) and total else 0.0
    title = m.tag("div", m.tag("h2", run.id) + m.state_badge(state), class_="spread")
    level = {"finished": "ok", "failed": "fail", "interrupted": "warn", "stopped": "warn"}.get(state, "")
    cells = m.join(
        m.tag("div", m.tag("small", name) + m.tag("div", value, class_="big"))
        for name, value in figures(run, status, columns)
    )
    parts = [title, m.bar(share, level, f"{share:.0%} done"), m.tag("div", cells, class_="facts")]
    if status.get("reason"):
        parts.append(
            m.note(
                _reason(run, str(status["reason"])),
                "fail" if state == "failed" else "warn" if state == "interrupted" else "",
            )
        )
    if status.get("refused"):
        parts.append(m.note(m.tag("h4", "It was not resumed") + m.tag("div", str(status["refused"])), "fail"))
    parts.append(m.tag("p", _next(run, state, link), class_="row"))
    return m.page(m.panel(*parts))


def _reason(run: RunDir, text: str) -> str:
    """The reason of an end; the sentinel's name is no word."""
    if text != "control/stop":
        return text
    if not run.checkpoints:
        return "It was asked to stop before it had made a step."
    return "It was asked to stop, finished its step and saved a checkpoint."


def figures(run: RunDir, status: Mapping[str, Any], columns: Mapping[str, Numbers]) -> list[tuple[str, str]]:
    """Names and values."""
    live = status["state"] in ALIVE
    begun, end = status.get("started"), status.get("ended") or status.get("heartbeat")
    taken = end - begun if isinstance(begun, (int, float)) and isinstance(end, (int, float)) else None
    found = [
        ("step", steps(status)),
        ("phase", phase(status)) if live else ("took", m.duration(taken)),
        ("time left", time_left(status)) if live else ("ended", m.ago(status.get("ended"))),
    ]
    known = _finite(columns.get("reward"))
    if len(known):
        found.append(("reward, mean of last 10", m.number(float(known[-10:].mean()))))
    seconds = _finite(columns.get("step_time"))
    if len(seconds):
        found.append(("a step", m.seconds(float(np.median(seconds[-20:])))))
    return found


def _next(run: RunDir, state: str, link: bool) -> Markup:
    """Links to what comes next."""
    links = []
    if link:
        links.append(m.tag("a", "report.html", href=f"/runs/{run.id}/report.html", target="_blank", rel="noopener"))
    if run.adapter.is_dir() or any(run.checkpoints):
        links += [
            m.tag("a", "Chat with it", href=address("chat", run.id)),
            m.tag("a", "Export it", href=address("export", run.id)),
        ]
    links.append(m.tag("a", "Compare", href=address("compare", run.id)))
    return m.join(links, " ")


def alerts(events: Sequence[Event]) -> Markup:
    """The latest alert of each kind, the gravest first; how often it came."""
    found = [event for event in events if event.get("kind") == "alert"]
    if not found:
        return Markup("")
    counts = Counter(str(event.get("name")) for event in found)
    latest = {str(event.get("name")): event for event in found}
    order = {"error": 0, "warning": 1}

    def rank(event: Event) -> tuple[int, int]:
        step = event.get("step")
        return order.get(str(event.get("severity")), 2), -step if isinstance(step, int) else 0

    ranked = sorted(latest.items(), key=lambda pair: rank(pair[1]))
    notes = [_alert(name, event, counts[name]) for name, event in ranked[:MOST_ALERTS]]
    return m.tag("div", m.join(notes), class_="stack-notes")


def _alert(name: str, event: Event, count: int) -> Markup:
    times = f"step {m.number(event.get('step'))}" + (f", {count} times in all" if count > 1 else "")
    title = m.tag("h4", m.join([TITLES.get(name, name.replace("_", " ").capitalize()), " ", m.tag("small", times)]))
    level = LEVELS.get(str(event.get("severity")), "warn")
    return m.note(title + m.tag("div", str(event.get("message") or ""), class_="more"), level)


def expectation(status: Mapping[str, Any], columns: Mapping[str, Numbers], scored: bool) -> str:
    """What a newcomer might worry about at this point, and need not; '' when there is nothing to say. `scored`: held-out
    scores after the first step are there."""
    state, done = status["state"], _finite(columns.get("step"))
    if state in ("queued", "starting") or (state in ALIVE and not (len(done) and done[-1])):
        return (
            "Before the first step: the model is loaded, and the held-out problems are scored once as it is, so that there is "
            "something to compare with. The first step is the slowest."
        )
    if state not in ALIVE:
        return _afterwards(state, columns, scored)
    if done[-1] < FLAT_STEPS:
        spread = _finite(columns.get("groups/zero_spread", columns.get("frac_reward_zero_std")))
        alike = len(spread) > 0 and float(spread[-10:].mean()) >= 0.9
        return f"Flat or jumpy for the first {FLAT_STEPS} steps is normal. {EARLY_ALIKE if alike else EARLY}"
    return "" if scored else UNSCORED


def _afterwards(state: str, columns: Mapping[str, Numbers], scored: bool) -> str:
    if state != "finished":
        return ""
    if not scored:
        return AFTER_UNSCORED
    rewards = _finite(columns.get("reward"))
    if len(rewards) >= 20 and float(rewards[-10:].mean() - rewards[:10].mean()) < float(rewards[-10:].std()) + 1e-9:
        return AFTER_FLAT
    return ""


def _finite(values: Numbers | None) -> Numbers:
    return np.empty(0) if values is None else values[np.isfinite(values)]


def log_tail(run: RunDir) -> str:
    """The end of what the run printed."""
    try:
        size = run.log.stat().st_size
        with open(run.log, "rb") as file:
            file.seek(max(0, size - LOG_BYTES))
            text = file.read(LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return m.empty("No log yet", "What the run prints stands here as it comes.")
    cut = size > LOG_BYTES
    if cut:
        text = text.partition("\n")[2]
    where = m.tag("small", f"the last {human_size(LOG_BYTES)} of {run.log}" if cut else str(run.log))
    return m.page(where, m.tag("pre", redact(text).strip() or "(nothing printed yet)", class_="log", tabindex="0"))


def configuration(run: RunDir) -> tuple[str, str]:
    """(what was changed from the defaults, data and environment; YAML)."""
    command = f"grpo-kit train {run.config} -o run.id=NAME"
    again = m.tag("div", m.join([m.tag("b", "The same again: "), m.tag("code", command)]), class_="note")
    title, environment = m.tag("h3", "Changed from the defaults"), read_tree(run.env)
    environment.pop("inputs", None)
    found = [
        _folded("Data", read_tree(run.data), 24),
        _folded("Machine, packages, effective trainer arguments", environment, 200),
    ]
    text = run.config.read_text(encoding="utf-8", errors="replace") if run.config.is_file() else ""
    return m.page(again, title, _changed(read_tree(run.config)), *found), redact(text[:LONGEST_YAML])


def _changed(tree: Mapping[str, Any]) -> Markup:
    defaults = dict(leaves(RunConfig().model_dump(mode="json")))
    rows = [
        [m.tag("code", key), shown(value), shown(defaults.get(key)) if key in defaults else "not set"]
        for key, value in leaves(tree)
        if key not in ("run.id", "run.root") and (key not in defaults or defaults[key] != value)
    ]
    return m.table(["key", "this run", "default"], rows) if rows else m.note("Nothing: every key has its default.")


def shown(value: Any) -> str:
    """A value of a configuration in one line."""
    text = redact(value if isinstance(value, str) else json.dumps(value, default=str))
    return text if len(text) <= 160 else f"{text[:159]}…"


def _folded(title: str, found: Mapping[str, Any], most: int) -> Markup:
    """The first `most` leaves of a file, below a title that unfolds them."""
    rows = [[m.tag("code", key), shown(value)] for key, value in leaves(found)][:most]
    return m.tag("details", m.tag("summary", title) + m.table(["", ""], rows)) if found else Markup("")


def checkpoint_table(run: RunDir, evaluations: Mapping[str, Mapping[str, Any]]) -> str:
    """Checkpoints with size, score and use."""
    scores = {int(one["step"]): one for one in evaluations.values() if isinstance(one.get("step"), int)}
    best = read_tree(run.path / "best.json").get("step")
    found = run.checkpoints
    usable = whole_checkpoints(found)

    def line(folder: Path, step: str, score: Mapping[str, Any] | None, *marks: Markup) -> list[Any]:
        return [m.tag("code", folder.name), step, _score(score), human_size(_size(folder)), m.join(marks, " ")]

    rows = [line(run.adapter, "result", evaluations.get("after"), m.badge("the run's result", "ok"))]
    rows = rows if run.adapter.is_dir() else []
    for path in reversed(found):
        step = step_of(path)
        marks = [m.badge("best held-out", "ok")] if step == best else []
        if path not in usable:
            marks.append(m.badge("incomplete", "fail"))
        elif path == usable[-1]:
            marks.append(m.badge("resume goes on here", "live"))
        rows.append(line(path, m.number(step), scores.get(step), *marks))
    if not rows:
        return m.empty(
            "No checkpoint yet", "The first comes after run.save_every steps, when you save one now, or at the end."
        )
    return m.page(m.table(["folder", "step", "held-out", "size", ""], rows, numbers={1, 3}))


def _score(scores: Mapping[str, Any] | None) -> str:
    for key in ("greedy_accuracy", "greedy_reward"):
        one = (scores or {}).get(key)
        if isinstance(one, Mapping) and isinstance(one.get("value"), (int, float)):
            return f"{one['value']:.3f} [{m.number(one.get('low'))}, {m.number(one.get('high'))}]"
    return "–"


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total
