"""Compare: verdict, scores, curves and settings of several runs, computed by a child process as in `grpo-kit compare`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import gradio as gr

from kit.errors import KitError, RunError
from kit.runs.files import to_json
from kit.runs.store import RunDir
from kit.studies.compare import METHOD, at_a_glance
from kit.ui import markup as m
from kit.ui.site import QUIET, RUN_FROM_ADDRESS, Site, address, job_state, poll, run_box, stamp, to_address

JOB = "kit.studies.compare"
MOST_RUNS = 12
WAITING = "Reading the scores of single problems …"


def result(comparison: Mapping[str, Any]) -> str:
    """Show arms and verdicts, then scores and curves, then the differences in configuration."""
    names = [arm["name"] for arm in comparison["arms"]]
    arms = [
        [name, m.join((m.tag("a", run, href=address("run", run)) for run in arm["runs"]), ", ")]
        for name, arm in zip(names, comparison["arms"], strict=True)
    ]
    rows = [
        [m.tag("code", key), *(str(values[name]) for name in names)]
        for key, values in comparison["config_differences"].items()
    ]
    settings = m.table(["key", *names], rows) if rows else m.note("Nothing but the seed: any difference is luck.")
    notes = m.join(m.tag("p", text) for text in [METHOD, *comparison["notes"]])
    return m.page(
        m.table(["arm", "runs"], arms),
        m.tag("div", at_a_glance(comparison), class_="report"),
        m.tag("h3", "What differs in configuration"),
        settings,
        m.fold("How to read this", notes),
    )


def chosen_runs(site: Site, ids: Any) -> list[RunDir]:
    """Open the runs that a browser sent, each once. Raises `RunError` for an unknown run, fewer than two, or too many."""
    names = [name for name in ids if isinstance(name, str)] if isinstance(ids, list) else []
    if len(names) > MOST_RUNS:
        raise RunError(f"{len(names)} runs are chosen; at most {MOST_RUNS} are compared at once.")
    runs = [site.run(name) for name in dict.fromkeys(names)]
    if len(runs) < 2:
        raise RunError("Choose two runs or more.")
    return runs


class Screen:
    """The event handlers of the screen. `look` returns [stamp, verdict, stop button]."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def look(self, key: Any, stamp: Any) -> list[Any]:
        job = self.site.jobs.get(key)
        if job is None or job.stamp == stamp:
            return [gr.skip()] * 3
        return [job.stamp, job_state(job, "Comparing", WAITING, result), gr.Button(visible=job.state == "running")]

    def judge(self, ids: Any) -> list[Any]:
        """Start the comparison, unless its result is there. Returns [key of the job, error in place of the verdict]."""
        try:
            runs = chosen_runs(self.site, ids)
            request = {"runs": [run.id for run in runs], "root": str(self.site.settings.root)}
            state = stamp([run.eval for run in runs] + [run.metrics_file for run in runs])
            key = f"{JOB}:{hashlib.sha256(to_json([request, state]).encode()).hexdigest()[:16]}"
            job = self.site.jobs.get(key)
            if job is None or job.state != "done":
                self.site.jobs.start(key, JOB, request)
        except KitError as problem:
            return ["", m.error(problem)]
        return [key, gr.skip()]


def build(site: Site, blocks: gr.Blocks) -> None:
    """Build the screen."""
    screen = Screen(site)
    named, key, last_stamp = run_box(), gr.State(""), gr.State("")
    ids = gr.Dropdown(
        [], multiselect=True, label="Runs (first = baseline; runs that differ only in the seed are one arm)",
        allow_custom_value=True, elem_id="compare-runs",
    )  # fmt: skip
    with gr.Row(elem_classes="tight"):
        judge = gr.Button("Compare", variant="primary", elem_id="compare-judge")
        stop = gr.Button("Stop", variant="stop", visible=False)
    verdict = gr.HTML(
        m.empty(
            "Two runs are needed",
            m.join(
                ["Choose them above, or start another on ", m.tag("a", "New run", href="/new"), " with one change."]
            ),
        ),
        elem_id="compare-verdict",
    )
    outputs = [last_stamp, verdict, stop]
    blocks.load(lambda chosen: _choices(site, chosen), [named], [ids], js=RUN_FROM_ADDRESS, **QUIET)
    ids.input(None, [ids], [], js=to_address("compare"))
    judge.click(screen.judge, [ids], [key, verdict], **QUIET).then(screen.look, [key, last_stamp], outputs, **QUIET)
    stop.click(lambda name: site.jobs.stop(name), [key], [], queue=False, api_visibility="private")
    poll(screen.look, [key, last_stamp], outputs)


def _choices(site: Site, chosen: Any) -> Any:
    """Return the list of runs; those in the address, separated by commas, are chosen."""
    try:
        ids = [run.id for run, _ in site.statuses()]
    except RunError:
        ids = []
    names = dict.fromkeys(chosen.split(",") if isinstance(chosen, str) else ())
    return gr.Dropdown(choices=ids, value=[name for name in names if name in ids][:MOST_RUNS], multiselect=True)
