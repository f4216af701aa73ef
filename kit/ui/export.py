"""Export: formats, progress of the child process, results of the verification, files, and the report."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import gradio as gr
from markupsafe import Markup

from kit.errors import ConfigError, KitError, RunError
from kit.export.request import FORMATS, QUANTIZATIONS, exports
from kit.runs.files import human_size
from kit.runs.store import RunDir, complete_checkpoints, step_of
from kit.ui import markup as m
from kit.ui.site import NO_RUNS, QUIET, RUN_FROM_ADDRESS, Site, has_weights, job_state, poll, run_box, stamp, to_address

MOST_FILES = 60


def results(run_id: str, exported: Mapping[str, Mapping[str, Any]]) -> str:
    """Show every export of the run, the latest first."""
    if not exported:
        return m.empty(
            "Nothing exported yet",
            "Choose a format above. Each export is compared with the trained model before you can download it.",
        )
    ordered = sorted(exported.items(), key=lambda pair: -float(pair[1].get("time") or 0))
    return m.page(m.tag("div", m.join(_result(run_id, name, export) for name, export in ordered), class_="stack-notes"))


def _result(run_id: str, name: str, export: Mapping[str, Any]) -> Markup:
    verification = export.get("verification")
    if not isinstance(verification, Mapping):
        level, word = "warn", "not verified"
    else:
        level, word = ("ok", "verified") if verification.get("verified") else ("fail", "differs from the trained model")
    head = m.tag("div", m.join([m.tag("b", name), m.badge(word, level)]), class_="spread")
    facts = m.join(
        [
            f"step {m.number(export.get('step'))}",
            human_size(export.get("bytes") or 0),
            f"stored as {export.get('stored')}",
            m.when(export.get("time")),
        ],
        ", ",
    )
    parts = [head, m.tag("p", facts, class_="dim")]
    if isinstance(verification, Mapping):
        parts.append(_verification(verification))
    parts += [m.note(str(text)) for text in export.get("notes") or []]
    if level != "fail":
        parts.append(_files(run_id, name, export))
    return m.tag("div", m.join(parts), class_=f"verdict {level}")


def _verification(verification: Mapping[str, Any]) -> Markup:
    """Show the measured differences beside their limits, and the faults."""
    faults = m.join(m.note(str(fault), "fail") for fault in verification.get("faults") or [])
    comparison, limits = verification.get("comparison") or {}, verification.get("limits") or {}
    rows = [
        [label, _number(comparison.get(key)), words.format(_number(limits.get(limit)))]
        for label, key, limit, words in FIGURES
    ]
    rows = [row for row in rows if row[1] != "–"]
    if "prompts" in comparison:
        rows.insert(0, ["held-out prompts", _number(comparison["prompts"]), ""])
    if not rows:
        return faults
    title = m.tag("p", "Compared with the trained model:")
    return faults + title + m.table(["", "measured", "limit"], rows, numbers={1, 2})


FIGURES = (
    ("tokens on which both agree", "token_agreement", "agreement", "at least {}"),
    ("mean difference of log-probability (nats)", "logp_difference_mean", "mean", "at most {}"),
    ("largest difference", "logp_difference_max", "largest", "at most {}"),
)
"""Label, key of the comparison, key of its limit, text of the limit."""


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else "–"


def _files(run_id: str, name: str, export: Mapping[str, Any]) -> Markup:
    files = [file for file in export.get("files") or [] if isinstance(file, Mapping)]
    folder = str(export.get("path") or "")
    place = f"/runs/{quote(run_id)}/export/{quote(name)}"
    rows = [
        [
            m.tag("a", str(file.get("name")), href=f"{place}/{quote(str(file.get('name')))}", download=""),
            human_size(file.get("bytes") or 0),
            m.tag("code", str(file.get("sha256"))[:16], title=str(file.get("sha256"))),
        ]
        for file in files[:MOST_FILES]
    ]
    return m.tag(
        "details",
        m.tag("summary", f"{len(files)} files in {folder}")
        + m.table(["file", "size", "sha256"], rows, numbers={1})
        + m.tag("p", "README.md says how to load it.", class_="dim"),
        open="",
    )


JOB = "kit.export.job"
RESULT, BEST, LAST = "the run's result", "best checkpoint", "last checkpoint"
STEP = re.compile(r"step (\d{1,12})")
QUANTISED = ("gguf", "ollama")
MOST_EXPORTS = 200
WAITING = "Starting: Python and torch are loaded first …"


def weights(run: RunDir) -> list[str]:
    """Return the names of the weights that can be exported, the result first."""
    steps = complete_checkpoints(run.checkpoints)
    names = [RESULT] if run.adapter.is_dir() else []
    names += [BEST] if (run.path / "best.json").is_file() else []
    names += [LAST] if steps else []
    return names + [f"step {step_of(path)}" for path in reversed(steps)]


def checkpoint_of(value: Any) -> str | None:
    """Return the checkpoint of a name from `weights`. Raises `ConfigError` for any other text."""
    if value in (RESULT, None, ""):
        return None
    if value in (BEST, LAST):
        return "best" if value == BEST else "last"
    match = STEP.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError("Choose which weights to export from the list.")
    return match[1]


def export_options(kind: Any, which: Any, quantization: Any) -> dict[str, Any]:
    """Check the export that a browser requests. It can name no folder, program or base model. Raises `ConfigError`."""
    if kind not in FORMATS:
        raise ConfigError(f"There is no such format. Known: {', '.join(FORMATS)}.")
    if kind in QUANTISED and quantization not in QUANTIZATIONS:
        raise ConfigError(f"There is no such quantisation. Known: {', '.join(QUANTIZATIONS)}.")
    return {
        "format": kind,
        "checkpoint": checkpoint_of(which),
        "force": True,  # an earlier export of this format is replaced
        "quantization": quantization if kind in QUANTISED else "q4_k_m",
    }


class Screen:
    """The event handlers of the screen. `look` returns [stamp, notice, progress, results, stop button, inputs]."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def key(self, run: RunDir, kind: Any) -> str:
        return f"{JOB}:{run.path.resolve()}:{kind}"

    def look(self, run_id: Any, kind: Any, last_stamp: Any) -> list[Any]:
        before = last_stamp if isinstance(last_stamp, dict) else {}
        try:
            if not run_id and self.site.statuses():
                return [gr.skip()] * 6
            run = self.site.run(run_id)
        except KitError as problem:
            now = {"problem": str(problem)}
            text = NO_RUNS if not run_id else m.error(problem)
            hidden = [gr.Button(visible=False), gr.Column(visible=False)]
            return [gr.skip()] * 6 if before == now else [now, text, "", "", *hidden]
        job = self.site.jobs.get(self.key(run, kind))
        folder = run.path / "export"
        state = (run.id, kind, run.status()["state"], job.stamp if job else "")
        now = {"now": stamp([folder, run.adapter, *sorted(folder.glob("*.json"))[:MOST_EXPORTS]], state)}
        if before == now:
            return [gr.skip()] * 6
        names = weights(run)
        return [
            now,
            "" if names else m.empty("This run has no weights yet", "They come with its first checkpoint or its end."),
            job_state(job, "Exporting and verifying", WAITING, lambda result: ""),
            results(run.id, exports(run)),
            gr.Button(visible=job is not None and job.state == "running"),
            gr.Column(visible=bool(names)),
        ]

    def choices(self, run_id: Any) -> Any:
        try:
            names = weights(self.site.run(run_id))
        except KitError:
            names = []
        return gr.Dropdown(choices=names, value=names[0] if names else None)

    def report(self, run_id: Any) -> str:
        try:
            return report_links(self.site.run(run_id))
        except KitError:
            return ""  # the notice has the error

    def begin(self, run_id: Any, *choices: Any) -> list[Any]:
        """Start an export. Returns [error or "", an empty stamp, so that the next `look` fills the screen]."""
        from kit.export.gguf import find_tools
        from kit.export.request import ExportRequest

        try:
            run, request = self.site.run(run_id), export_options(*choices)
            if not weights(run):
                raise RunError(f"Run '{run.id}' has no weights yet: they come with its first checkpoint.")
            if request["format"] in QUANTISED:  # the child process would report missing tools much later
                find_tools(request["quantization"])
            self.site.end_sessions()
            self.site.jobs.start(self.key(run, request["format"]), JOB, ExportRequest(**request).for_run(run))
        except KitError as problem:
            return [m.error(problem), {}]
        return ["", {}]

    def stop(self, run_id: Any, kind: Any) -> None:
        with suppress(KitError):
            self.site.jobs.stop(self.key(self.site.run(run_id), kind))


def build(site: Site, blocks: gr.Blocks) -> None:
    """Build the screen."""
    screen = Screen(site)
    named, last_stamp = run_box(), gr.State({})
    with gr.Row(elem_classes="tight"):
        chosen = gr.Dropdown([], label="Run", allow_custom_value=True, scale=3, elem_id="export-run")
        which = gr.Dropdown([], label="Weights", allow_custom_value=True, scale=2, elem_id="export-weights")
    notice = gr.HTML(elem_id="export-notice")
    with gr.Column(visible=False) as asking:
        kind = gr.Radio(
            [(f"{name}: {words}", name) for name, words in FORMATS.items()],
            value="adapter",
            label="Format",
            elem_id="export-format",
        )
        quantization = gr.Dropdown(
            QUANTIZATIONS, value="q4_k_m", label="Quantisation", visible=False, elem_id="export-quantization"
        )
        with gr.Row(elem_classes="tight"):
            start = gr.Button("Export and verify", variant="primary", elem_id="export-start")
            stop = gr.Button("Stop", variant="stop", visible=False, elem_id="export-stop")
    note, progress = gr.HTML(elem_id="export-said"), gr.HTML(elem_id="export-progress")
    results = gr.HTML(elem_id="export-results")
    report = gr.HTML(elem_id="export-report")
    outputs = [last_stamp, notice, progress, results, stop, asking]
    look: dict[str, Any] = {"fn": screen.look, "inputs": [chosen, kind, last_stamp], "outputs": outputs} | QUIET
    first = blocks.load(
        lambda run_id: site.choices(run_id, has_weights), [named], [chosen], js=RUN_FROM_ADDRESS, **QUIET
    )
    for event in (first.then, chosen.input):
        event(screen.choices, [chosen], [which], **QUIET).then(**look).then(screen.report, [chosen], [report], **QUIET)
    chosen.input(None, [chosen], [], js=to_address("export"))
    kind.input(lambda kind: [gr.Dropdown(visible=kind in QUANTISED), ""], [kind], [quantization, note], **QUIET).then(
        **look
    )
    start.click(
        screen.begin, [chosen, kind, which, quantization], [note, last_stamp],
        queue=False, api_visibility="private", trigger_mode="once",
    ).then(**look)  # fmt: skip
    stop.click(screen.stop, [chosen, kind], [], queue=False, api_visibility="private")
    poll(look["fn"], look["inputs"], outputs)


def report_links(run: RunDir) -> str:
    """Show links to the report, and the commands that publish report and export."""
    path = f"/runs/{run.id}/report.html"
    command = f"grpo-kit report {shlex.quote(run.id)} --no-completions -o index.html{run.root_option}"
    push = f"hf upload OWNER/NAME {shlex.quote(str(run.path / 'export' / 'adapter'))}"
    publish = m.join(
        m.tag("p", m.join([m.tag("small", words), m.tag("code", line)]))
        for words, line in (("publish the report: ", command), ("publish an export: ", push))
    )
    if not (run.path / "report.html").is_file():
        return m.page(m.note(f"There is no report.html yet: grpo-kit report {run.id}{run.root_option}"), publish)
    links = [
        m.tag("a", "Open", href=path, target="_blank", rel="noopener", class_="button"),
        m.tag("a", "Download", href=path, download=f"{run.id}.html", class_="button"),
    ]
    return m.page(m.tag("div", m.tag("b", "report.html") + m.join(links), class_="row"), publish)
