"""The part of Export about the report: notes on a run, the report to pass on, and what publishing would send where."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from kit.errors import ConfigError, KitError, RunError
from kit.runs.store import LONGEST_NOTES, RunDir
from kit.ui import markup as m
from kit.ui.site import QUIET, UNSEEN, Site

PLACES = {
    "A folder for any static host": "to",
    "A Hugging Face Space (a page)": "space",
    "A dataset repository": "dataset",
}
LONGEST_NAME = 200
JOB = "kit.export.share"
"""What pushes, in a process of its own: it takes a while, and imports torch."""
COPY = """
element.addEventListener('click', async e => {
  const button = e.target.closest('[data-copy]');
  if (!button) return;
  const text = button.dataset.copy.startsWith('/') ? location.origin + button.dataset.copy : button.dataset.copy;
  try { await navigator.clipboard.writeText(text); }
  catch {  // a page that is not at localhost and without https has no clipboard
    const box = document.createElement('textarea');
    box.value = text; document.body.appendChild(box); box.select(); document.execCommand('copy'); box.remove();
  }
  const before = button.textContent;
  button.textContent = 'Copied';
  setTimeout(() => { button.textContent = before; }, 1500);
});
"""


class Share:
    """The tab. `look` fills [notes, [run, notes as they were read], links, what would be published, what was said]."""

    inputs: list[Any]
    outputs: list[Any]

    def __init__(self, site: Site) -> None:
        self.site = site

    def look(self, run_id: Any, place: Any, name: Any, public: Any, completions: Any, seen: Any) -> list[Any]:
        """Of the run that is chosen. The box cannot be written in before it is filled, and what somebody has written and not
        saved stays while the file is as it was when they began."""
        try:
            run = self.site.run(run_id)
            notes = run.read_notes()
        except KitError as problem:
            return [gr.Textbox("", interactive=False), ["", ""], m.error(problem), "", ""]
        now = [run.id, notes]
        filled = [gr.skip()] * 2 if now == seen else [gr.Textbox(notes, interactive=True), now]
        said = gr.skip() if isinstance(seen, list) and seen[:1] == now[:1] else ""
        return [*filled, links(run), self.preview(run_id, place, name, public, completions), said]

    def save(self, run_id: Any, text: Any, seen: Any) -> list[Any]:
        """[notes as they are now, what was said]."""
        try:
            run = self.site.run(run_id)
            if not isinstance(text, str):
                raise ConfigError("The notes are no text.")
            before = seen[1] if isinstance(seen, list) and len(seen) == 2 and seen[0] == run.id else ""
            run.write_notes(text, seen=before if isinstance(before, str) else "")
            return [
                [run.id, run.read_notes()],
                m.page(m.note("Saved. They stand in report.html when it is written the next time.", "ok")),
            ]
        except KitError as problem:
            return [gr.skip(), m.error(problem)]

    def preview(self, run_id: Any, place: Any, name: Any, public: Any, completions: Any) -> str:
        """What would leave this machine, and the command that sends it."""
        from kit.export.share import publication

        try:
            run = self.site.run(run_id)
            told = publication(run, completions=completions is True).told
        except KitError as problem:
            return m.error(problem)
        where = PLACES.get(place, "to") if isinstance(place, str) else "to"
        target = name.strip()[:LONGEST_NAME] if isinstance(name, str) else ""
        words = ["grpo-kit", "share", run.id, f"--{where}", target or ("FOLDER" if where == "to" else "OWNER/NAME")]
        words += ["--completions"] if completions is True else []
        words += ["--public"] if public is True and where != "to" else []
        command = shlex.join(words) + run.root_option
        listed = m.tag("ul", m.join(m.tag("li", line) for line in told))
        copy = m.tag("button", "Copy", type="button", class_="badge live", data_copy=command)
        token = (
            ""
            if where == "to"
            else m.tag(
                "small", "It needs a token that may write, in HF_TOKEN (for the button: of this server); it is never "
                "shown or written. A new repository is private unless it is for everybody to see."
            )
        )  # fmt: skip
        line = m.tag("div", m.tag("code", command) + copy, class_="row")
        return m.page(
            m.panel(
                m.tag("b", "What will be published"), listed, m.tag("b", "The same on the command line"), line, token
            )
        )

    def publish(self, run_id: Any, place: Any, name: Any, public: Any, completions: Any) -> Iterator[str]:
        """Writes the folder, or pushes; what is being done, then where it is. The button is the word that it may leave."""
        from kit.export.request import check_push
        from kit.export.share import publication

        try:
            run = self.site.run(run_id)
            where = PLACES.get(place) if isinstance(place, str) else None
            target = name.strip()[:LONGEST_NAME] if isinstance(name, str) else ""
            if where is None or not target:
                raise ConfigError(
                    "Say first where to: a folder below the one that the page was started in, or OWNER/NAME."
                )
            if where == "to":
                folder = self.folder(target)
                publication(run, completions=completions is True).write(folder)
                yield m.page(m.note(f"Written: {folder / 'index.html'}", "ok"))
                return
            check_push(target)
            request = {"run_dir": str(run.path.resolve()), "repo": target, "kind": where,
                       "completions": completions is True, "public": public is True}  # fmt: skip
            job = self.site.jobs.start(f"{JOB}:{where}:{target}", JOB, request)
            while job.state == "running":
                yield m.page(m.note(job.line or "Pushing …", "live"))
                time.sleep(0.5)
            if job.state != "done":
                raise RunError(job.error or "It was stopped; nothing more is sent.")
            url = str(job.result["url"])
            yield m.page(
                m.note(m.join(["Published: ", m.tag("a", url, href=url, target="_blank", rel="noopener")]), "ok")
            )
        except KitError as problem:
            yield m.error(problem)

    def folder(self, name: str) -> Path:
        """The folder of a name that a browser sent. Raises `ConfigError` unless it lies below the one of the server."""
        base = self.site.settings.folder.resolve()
        try:
            path = (base / name).resolve()
        except (OSError, ValueError, RuntimeError):
            path = base
        hidden = any(part.startswith(".") for part in path.parts[len(base.parts) :])
        if (
            path == base
            or name.startswith("~")
            or not path.is_relative_to(base)
            or hidden
            or path.is_relative_to(self.site.store.root.resolve())
        ):
            raise ConfigError(
                f"'{name[:100]}' is no folder that the page writes to; expected a new one below {base}, not hidden and not among "
                "the runs. The command line writes anywhere."
            )
        return path


def links(run: RunDir) -> str:
    """The report: open, download, copy its address."""
    path = f"/runs/{run.id}/report.html"
    if not (run.path / "report.html").is_file():
        return m.page(m.note("There is no report.html yet; the screen Run writes it."))
    parts = [
        m.tag("a", "Open", href=path, target="_blank", rel="noopener", class_="badge live"),
        m.tag("a", "Download", href=path, download=f"{run.id}.html", class_="badge live"),
        m.tag("button", "Copy link", type="button", class_="badge live", data_copy=path),
    ]
    about = (
        "One file without scripts that loads nothing: it can be mailed, archived or put on any host. The link works where this "
        "page does."
    )
    return m.page(m.tag("div", m.tag("b", "report.html") + m.join(parts), class_="row"), m.tag("small", about))


def build(site: Site, chosen: gr.Dropdown) -> Share:
    """The tab's parts; `look` with `inputs` fills `outputs`."""
    share = Share(site)
    seen = gr.State(["", ""])
    notes = gr.Textbox(
        label="Notes on this run",
        lines=5,
        max_lines=24,
        max_length=LONGEST_NOTES,
        interactive=False,
        placeholder="What was tried, what came of it, what to try next. Kept in the run's folder as notes.md.",
        elem_id="share-notes",
    )
    with gr.Row(elem_classes="tight"):
        save = gr.Button("Save notes", variant="primary", size="md", scale=0, min_width=130, elem_id="share-save")
    said = gr.HTML(elem_id="share-said")
    report = gr.HTML(js_on_load=COPY, elem_id="share-report")
    with gr.Row(elem_classes="tight low"):
        place = gr.Dropdown(
            list(PLACES), value=next(iter(PLACES)), label="Publish to", scale=3, min_width=220, elem_id="share-place"
        )
        name = gr.Textbox(
            label="Folder, or OWNER/NAME", max_length=LONGEST_NAME, scale=3, min_width=180, elem_id="share-name"
        )
    with gr.Row(elem_classes="tight"):
        completions = gr.Checkbox(
            label="With sampled completions (they hold rows of the data)",
            scale=3,
            min_width=220,
            elem_id="share-completions",
        )
        public = gr.Checkbox(label="Public (a repository only)", scale=2, min_width=160, elem_id="share-public")
    preview = gr.HTML(js_on_load=COPY, elem_id="share-preview")
    publish = gr.Button("Publish it now", variant="primary", size="md", elem_id="share-publish")
    published = gr.HTML(elem_id="share-published")
    wish = [chosen, place, name, public, completions]
    share.inputs, share.outputs = [*wish, seen], [notes, seen, report, preview, said]
    save.click(share.save, [chosen, notes, seen], [seen, said], **QUIET)
    publish.click(
        share.publish, wish, [published], trigger_mode="once", concurrency_limit=2, **UNSEEN,
    )  # fmt: skip
    for one in (place, completions, public):
        one.input(share.preview, wish, [preview], **QUIET)
    name.blur(share.preview, wish, [preview], **QUIET)
    name.submit(share.preview, wish, [preview], **QUIET)
    return share
