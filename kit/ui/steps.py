"""The steps of New run: 1 model, 2 data, 4 settings, 5 plan and start. Step 3, the Reward Lab, is lab.py."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
from markupsafe import Markup

from kit.config import EMBEDDED, RunConfig, load_config, preset_names
from kit.data.sources import READERS
from kit.errors import ConfigError, KitError, RunError
from kit.runs.files import one_line
from kit.runs.store import ALIVE
from kit.ui import markup as m
from kit.ui import objective, uploads
from kit.ui.draft import Draft
from kit.ui.form import Form, Sent
from kit.ui.site import QUIET, Site, address

MOST_FOUND, DEEPEST = 40, 3
SKIPPED = {"runs", "node_modules", "__pycache__"}


def model_step(form: Form) -> None:
    """The step."""
    gr.HTML(m.page(m.tag("p", "What is trained. The embedded model needs no GPU and no download; a hub id is fetched at the "
                         "start of the run; a folder in Hugging Face layout is found below the folder that the page was "
                         "started in.")))  # fmt: skip
    form.add("model.name", label="Model", choices=model_choices(form), allow_custom_value=True, filterable=True)
    with gr.Row():
        form.add("model.load_in_4bit", label="4-bit weights (QLoRA)")
        form.add("model.lora", label="Train adapters (LoRA), not all weights")
        form.add("model.lora.rank", label="LoRA rank")
    fit = gr.HTML()
    with gr.Accordion("Code that comes with the model", open=False):
        gr.HTML(m.page(m.note("Some models bring Python code that runs with your rights. Read the .py files of the repository "
                              "first. Then write its name here; it is asked for each repository.", "warn")))  # fmt: skip
        with gr.Row():
            name = gr.Textbox(label="Repository whose code may run", placeholder="organisation/model", scale=3)
            confirm = gr.Button("I have read it", scale=1)

    form.follows(lambda draft: where_it_fits(form.site, draft), fit)
    form.replaces(confirm.click, lambda sent, repository: (trust(sent.draft(), repository), ""), [name])


def trust(draft: Draft, repository: Any) -> Draft:
    """The draft with the code of its model allowed. Raises `ConfigError` unless the repository is named as it is."""
    model = draft.tree()["model"]["name"]
    if not isinstance(repository, str) or repository.strip() != model or model == EMBEDDED:
        raise ConfigError(f"The model is '{model}'; write exactly that to let its code run.")
    return replace(draft.change("model.trust_remote_code", True), trusted=model)


def model_choices(form: Form) -> list[str]:
    """The embedded model, model folders nearby, and what the presets name."""
    named = [load_config(name).model.name for name in preset_names()]
    return list(dict.fromkeys([EMBEDDED, *folders(form.site.settings.folder), *named]))


def folders(base: Path) -> list[str]:
    """Folders with a config.json below `base`, relative to it; hidden ones, runs and deep ones are passed over."""
    found: list[str] = []
    level = [base]
    for _ in range(DEEPEST):
        below: list[Path] = []
        for folder in level:
            try:
                inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
            except OSError:
                continue
            below += [path for path in inside if path.name not in SKIPPED and not path.name.startswith(".")]
        found += [str(path.relative_to(base)) for path in below if (path / "config.json").is_file()]
        level = below[:200]
    return found[:MOST_FOUND]


def where_it_fits(site: Site, value: Any) -> str:
    """Whether it fits this machine, and the estimated time of a step."""
    try:
        draft = Draft.read(value)
        config = draft.config(site.settings)
        found = site.benches.plan(config, draft.preset, draft.overrides())
    except KitError as problem:
        return m.error(problem)
    here = m.badge("fits this machine", "ok") if found["fits"] else m.badge("does not fit this machine", "fail")
    head = m.tag(
        "div",
        m.tag("h3", f"{config.model.name}: {found['model']['parameters'] / 1e6:,.1f} M weights") + here,
        class_="spread",
    )
    step = m.seconds(found["seconds_per_step"]["step"])
    return m.page(m.panel(head, m.tag("p", f"About {step} a step, estimated.")))


TASKS = ("chain_sum", "basic_arithmetic", "countdown", "gcd", "leg_counting", "spell_backward", "letter_counting")
"""Some of reasoning-gym's; any other can be written."""
A_PAGE = 5
SENT = "(file, ...rest) => [file ? {place: file.path, name: file.orig_name} : null, ...rest]"
"""JavaScript for an event whose first input is a place to drop files."""


def drop_area(**shown: Any) -> gr.File:
    """A place to drop a file. The server gets `{place, name}` by `SENT`, checked by `uploads.take`, and never Gradio's own file
    value, for which Gradio copies or downloads whatever a forged request names."""
    area = gr.File(**shown)
    area.data_model = None  # not in a class of its own: Gradio would write a stub of it beside this file
    area.api_info = lambda: {"type": "object"}
    area.preprocess = lambda payload: payload
    return area


def data_step(form: Form) -> None:
    """The step."""
    with gr.Row():
        drop = drop_area(
            label=f"Your data: CSV, JSONL, JSON, Excel or Parquet, at most {uploads.LARGEST // 1024**2} MiB",
            file_types=list(READERS),
            height=120,
            elem_id="drop-data",
            min_width=280,
        )
        source = form.add("data.source", label="Source", choices=data_choices(form), allow_custom_value=True)
    table = gr.HTML()
    with gr.Row():
        roles = [
            form.add(f"data.{role}_column", label=label, info=info, choices=[BY_NAME], allow_custom_value=True)
            for role, label, info in ROLES
        ]
    with gr.Row(elem_classes="tight low"):
        further = gr.Dropdown(
            [],
            label="A further column",
            info="All others reach the reward under their own names.",
            allow_custom_value=True,
            min_width=160,
            elem_id="further-column",
        )
        name = gr.Textbox(
            label="The reward calls it", info="Empty: its own name.", min_width=160, elem_id="further-name"
        )
        call = gr.Button("Rename it", size="md", min_width=110)
    form.replaces(call.click, _renamed, [further, name])
    form.follows(lambda draft: mapped(form.site, draft), table, *roles, further, concurrency_limit=4)
    form.add("data.system_prompt", label="System prompt", lines=2)
    with gr.Row():
        form.add("data.limit", label="Rows at most")
        form.add("data.heldout", label="Held-out rows")
        form.add("data.max_prompt_tokens", label="Longest prompt (tokens)")
    with gr.Accordion("For a generated task (reasoning-gym)", open=False):
        form.add("data.task_params", label="Task parameters")
    start = gr.State(0)
    with gr.Row(elem_classes="tight"):
        look = gr.Button("Show rows", variant="primary", size="md", min_width=110)
        back = gr.Button("← Earlier", size="md", min_width=110)
        more = gr.Button("Later →", size="md", min_width=110)
        count = gr.Button("As the model sees it", size="md", min_width=160)
    rows = gr.HTML(NOT_LOOKED_AT)
    lengths = gr.HTML()
    filled = [drop, source, rows, lengths]
    form.replaces(drop.upload, _uploaded, [drop], filled, queue=True, concurrency_limit=4, js=SENT)
    for button, further in ((look, None), (back, -A_PAGE), (more, A_PAGE)):
        form.on(button.click, functools.partial(preview, further=further), [start], [rows, start], concurrency_limit=4)
    form.on(count.click, tokens, [], [lengths], concurrency_limit=4)


def data_choices(form: Form) -> list[str]:
    """What was dropped, data files nearby and some tasks."""
    return [
        *uploads.kept(form.site.settings.root),
        *files(form.site.settings.folder),
        *(f"reasoning-gym:{task}" for task in TASKS),
    ]


def files(base: Path) -> list[str]:
    """Data files in `base` and in its folders, relative to it."""
    found: list[str] = []
    try:
        nearby = [
            base,
            *(path for path in sorted(base.iterdir()) if path.is_dir() and not path.name.startswith((".", "runs"))),
        ]
        for folder in nearby[:50]:
            found += [str(path.relative_to(base)) for path in sorted(folder.iterdir()) if path.suffix in NEARBY]
    except OSError:
        pass
    return found[:40]


NEARBY = tuple(suffix for suffix in READERS if suffix != ".json")
"""Data files by their names; a .json beside them is more often something else."""
BY_NAME = ("(found by its name)", "")
ROLES = (
    ("prompt", "Prompt", "What the model is asked: a text, or a list of messages."),
    ("reference", "Reference", "The right answer, which only the reward sees. There may be none."),
)
"""Role, what it is called, what it means."""
NOT_LOOKED_AT = m.empty("Not looked at yet", "Show rows reads the source and says what is used, left out and held out.")


def _uploaded(sent: Sent, file: Any) -> tuple[Any, ...]:
    """The file at its place, as the source; what the columns of the one before were called fits it no more."""
    source = uploads.take(sent.form.site.settings.root, file)
    draft = sent.valid().change("data.source", source)
    empty: dict[str, Any] = {"prompt_column": None, "reference_column": None, "rename": {}, "task_params": {}}
    for key, value in empty.items():
        draft = draft.change(f"data.{key}", value)
    return draft, "", None, gr.Dropdown(choices=data_choices(sent.form)), NOT_LOOKED_AT, ""


def _renamed(sent: Sent, column: Any, name: Any) -> tuple[Draft, str]:
    """A further column under the name that the reward has for it."""
    if not isinstance(column, str) or not column:
        raise ConfigError("Choose a further column first.")
    draft = sent.draft()
    given = {theirs: ours for theirs, ours in draft.tree()["data"]["rename"].items() if theirs != column}
    if isinstance(name, str) and name.strip() and name.strip() != column:
        given[column] = name.strip()[:100]
    return draft.change("data.rename", given), ""


def mapped(site: Site, value: Any) -> list[Any]:
    """[columns and what each is taken for, choices of prompt, of reference, of further columns]: of a file."""
    try:
        config = Draft.read(value).config(site.settings)
        if not (site.settings.folder / config.data.source).is_file():
            return ["", *_unknown()]  # of a task or a hub id nothing is known before it is read
        found = site.benches.ask("columns", config)
    except KitError as problem:
        return [m.error(problem), *_unknown()]
    names = [column["name"] for column in found["columns"]]
    taken = {column["use"]: column["name"] for column in found["columns"]}
    used = {taken.get(role) for role in ("prompt", "reference")}
    choices = [
        gr.Dropdown(choices=[(f"by its name: {taken[role]}" if by_name else BY_NAME[0], ""), *names])
        for role, by_name in (
            ("prompt", "prompt" in taken and config.data.prompt_column is None),
            ("reference", "reference" in taken and config.data.reference_column is None),
        )
    ]
    others = [name for name in names if name not in used]
    return [m.page(column_table(found)), *choices, gr.Dropdown(choices=others)]


def _unknown() -> list[Any]:
    """The lists of columns where none are known."""
    return [gr.Dropdown(choices=[BY_NAME]), gr.Dropdown(choices=[BY_NAME]), gr.Dropdown(choices=[])]


def column_table(found: dict[str, Any]) -> Markup:
    """The columns of a file, a line each."""
    rows = [
        [
            m.tag("code", column["name"]),
            m.badge(column["use"], "ok" if column["use"] in ("prompt", "reference") else ""),
            ", ".join(column["kinds"]) or "empty",
            m.join(m.tag("div", one_line(text, 70)) for text in column["values"]),
            f"{column['missing']} of {found['looked']}" if column["missing"] else "",
        ]
        for column in found["columns"]
    ]
    notes = m.join(m.note(text, "warn") for text in found["notes"])
    if found["faulty"]:
        words = "\n".join([f"{found['faulty']} of {found['total']} rows cannot be read:", *found["faults"]])
        notes += m.note(words, "warn")
    if found["problem"]:
        notes += m.note(found["problem"], "fail")
    head = m.tag(
        "div", m.tag("h3", found["source"]) + m.tag("span", f"{found['total']:,} rows", class_="dim"), class_="spread"
    )
    return m.panel(head, m.table(["column", "taken for", "holds", "for example", "empty"], rows), notes)


def preview(sent: Sent, at: Any, further: int | None = None) -> list[Any]:
    """[rows as HTML, place of the first], so many further than the place that is shown; from the first without."""
    start = 0 if further is None else max(0, (at if isinstance(at, int) else 0) + further)
    try:
        found = sent.form.site.benches.ask("rows", sent.config(), start=start, count=A_PAGE)
    except KitError as problem:
        return [m.error(problem), 0]
    if not found["rows"]:
        return [gr.skip(), gr.skip()]
    return [m.page(_summary(found), *(_row(row, found["info"]) for row in found["rows"])), found["start"]]


def _summary(found: dict[str, Any]) -> Markup:
    info = found["info"]
    counts = m.join(
        m.tag("span", m.tag("b", f"{count:,}") + " " + name.replace("_", " "), class_="chip")
        for name, count in info["rows"].items()
        if count
    )
    mapping = ", ".join(
        f"{ours} ← {theirs}" for ours, theirs in (info.get("mapping") or {}).items() if isinstance(theirs, str)
    )
    notes = m.join(m.note(text, "warn") for text in [*info["notes"], *map(_fault, info.get("bad_rows") or [])])
    letters = ", ".join(f"{name} {value:,}" for name, value in found["letters"].items())
    return m.panel(
        m.tag("div", m.tag("h3", info["source"]) + m.tag("div", counts, class_="row"), class_="spread"),
        m.tag("p", f"columns: {', '.join(info['columns'])}" + (f"; {mapping}" if mapping else ""), class_="dim"),
        m.tag("p", f"prompt length in letters: {letters}", class_="dim num"),
        notes,
    )


def _fault(fault: Any) -> str:
    if not isinstance(fault, dict):
        return str(fault)
    return " ".join(f"{name} {value}" for name, value in fault.items() if value)


def _row(row: dict[str, Any], info: dict[str, Any]) -> Markup:
    columns = [(name, text) for name, text in row.items() if name not in ("place", "prompt", "reference") and text]
    rest = m.join(m.tag("p", m.tag("small", name) + m.tag("div", text, class_="said")) for name, text in columns)
    fold = (
        m.tag("details", m.tag("summary", f"{len(columns)} further columns", class_="dim") + rest)
        if columns
        else Markup("")
    )
    return m.tag(
        "div",
        m.panel(
            m.tag("small", f"training row {row['place']}"),
            m.tag("div", row["prompt"], class_="said"),
            m.tag("p", m.tag("small", "reference ") + m.tag("code", row.get("reference") or "none")),
            fold,
        ),
        style="margin-top:8px",
    )


def tokens(sent: Sent) -> str:
    """Lengths as the model's tokenizer counts them."""
    try:
        found = sent.form.site.benches.ask("lengths", sent.config())
    except KitError as problem:
        return m.error(problem)
    highest = max(count for _, _, count in found["histogram"])
    bars = m.join(
        m.tag("i", "", style=f"flex:1;background:var(--live);height:{max(2, round(60 * count / highest)) if count else 0}px",
              title=f"{low} to {high - 1} tokens: {count}")
        for low, high, count in found["histogram"]
    )  # fmt: skip
    words = ", ".join(f"{name} {value}" for name, value in found["tokens"].items())
    over = f"{found['over']} of {found['counted']} are over the limit of {found['limit']} and are left out."
    level = "warn" if found["over"] else "ok"
    picture = m.tag(
        "div", bars, style="display:flex;gap:2px;align-items:flex-end;height:60px", role="img", aria_label=words
    )
    seen = [
        m.panel(
            m.tag("small", f"training row {row['place']}, {row['tokens']} tokens, with the chat template"),
            m.tag("div", row["text"], class_="said"),
            m.tag("p", m.tag("small", "reference ") + m.tag("code", row["reference"] or "none")),
        )
        for row in found["seen"]
    ]
    return m.page(
        m.panel(m.tag("h3", "Prompt length in tokens"), picture, m.tag("p", words, class_="num"), m.note(over, level)),
        left_out(found),
        *seen,
    )


def left_out(found: dict[str, Any]) -> Markup:
    """How many rows are not trained on, and why, with the first of each kind."""
    info = found["info"]
    counts = info["rows"]
    bad = "; ".join(map(_fault, (info["bad_rows"] or [])[:3]))
    long = "; ".join(f"row {one['place']} has {one['tokens']}: {one_line(one['text'], 60)}" for one in found["long"])
    rows = [
        ["held out", counts["heldout"], "for evaluation, chosen by a hash of the prompt"],
        ["held-out repeats", counts["heldout_duplicates"], "their prompt is a held-out one, which is not trained on"],
        ["cannot be used", counts["skipped"], bad],
        ["too long", found["over"], f"more than {found['limit']} tokens. {long}"],
        ["without a reference", counts["without_reference"], "they stay in; a reward that compares cannot score them"],
    ]
    shown = [[m.tag("span", row[0], class_="nowrap"), *row[1:]] for row in rows if row[1]]
    table = m.table(["", "rows", "why"], shown, numbers={1})
    return m.panel(m.tag("h3", f"What is left out of {counts['read']:,} rows"), table)


IMPORTANT = (
    {
        "objective.recipe": "Algorithm",
        "optimisation.steps": "Training steps",
        "optimisation.learning_rate": "Learning rate",
    },
    {
        "generation.num_generations": "Completions of each prompt",
        "optimisation.batch_size": "Completions in a step",
        "generation.max_completion_tokens": "Longest completion, in tokens",
    },
    {
        "evaluation.every": "Evaluate every so many steps",
        "run.seed": "Seed",
        "run.save_every": "Checkpoint every so many steps",
    },
)
"""Keys and what they are called."""
FILTER = """(text) => {
  const words = text.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const one of document.querySelectorAll('#every-key [id^="key-"]')) {
    const said = (one.id + ' ' + one.textContent).toLowerCase();
    one.dataset.out = words.every(word => said.includes(word)) ? '' : 'yes';
    one.style.display = one.dataset.out ? 'none' : '';
  }
  for (const box of document.querySelectorAll('#every-key .key-section')) {
    const keys = [...box.querySelectorAll('[id^="key-"]')];
    box.style.display = keys.length && keys.every(one => one.dataset.out) ? 'none' : '';
  }
}"""


def settings_step(form: Form) -> None:
    """The step."""
    how = gr.Radio(["The keys that matter most", "Every key"], value="The keys that matter most", label="Settings")
    with gr.Column(visible=True) as few:
        for names in IMPORTANT:
            with gr.Row():
                for name, words in names.items():
                    form.add(name, label=f"{words} ({breakable(name)})", elem_id=f"first-{name.replace('.', '-')}")
        objective.BeforeARun(form)
    with gr.Column(visible=False, elem_id="every-key") as all_keys:
        search = gr.Textbox(label="Find a key", placeholder="kl, checkpoint, seed …", elem_id="find-key")
        for name, field in RunConfig.model_fields.items():
            with gr.Accordion(name, open=True, elem_classes="key-section"):
                words = (field.annotation.__doc__ or "") if field.annotation is not None else ""
                gr.HTML(m.page(m.tag("small", words.strip().partition("\n")[0])))
                _section(form, name)
    how.change(
        lambda choice: [gr.Column(visible=choice != "Every key"), gr.Column(visible=choice == "Every key")],
        [how],
        [few, all_keys],
        **QUIET,
    )
    search.input(None, [search], [], js=FILTER)


def breakable(name: str) -> str:
    """A dotted key that a narrow label breaks after its dots, at zero-width spaces, and not within a word."""
    return name.replace(".", ".\u200b")


def _section(form: Form, section: str) -> None:
    """All keys of a section, two beside each other."""
    with gr.Row(elem_classes="key-rows"):
        for key in form.keys.values():
            if key.section == section:
                form.add(key.name)


MOST_LIVE = 8
"""Live runs below one root that the page starts, at most: the others wait for a GPU anyway."""
GO = "(place) => { if (place) window.location.href = place; }"
_STARTING = threading.Lock()


def plan_step(form: Form) -> None:
    """The step."""
    check = gr.Button("Check and plan", variant="secondary", size="md")
    found = gr.HTML(
        m.empty("Not planned yet", "Everything that can be checked without running: keys, rows, reward, memory, time.")
    )
    fixes = gr.State([])
    apply = gr.Button("Make these changes", visible=False)
    with gr.Row():
        form.add("run.id", label="Name of the run", elem_id="run-name", placeholder="made from preset and time")
        start = gr.Button("Start", variant="primary", size="lg", elem_id="start")
    note = gr.HTML()
    place = gr.Textbox(visible="hidden", elem_classes="hidden-box")
    outputs = [found, fixes, apply]
    form.on(check.click, lambda sent: planned(form.site, sent.draft), [], outputs, concurrency_limit=2)
    form.replaces(apply.click, _mended, [fixes], outputs, queue=True, concurrency_limit=2)
    form.on(start.click, launch, [], [note, place], concurrency_limit=2, trigger_mode="once")
    place.change(None, [place], [], js=GO)


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)][:20] if isinstance(value, list) else []


def _mended(sent: Sent, given: Any) -> tuple[Any, ...]:
    draft = sent.draft().apply(_texts(given))
    return draft, "", *planned(sent.form.site, lambda: draft)


def planned(site: Site, read: Callable[[], Draft]) -> list[Any]:
    """[findings, overrides that make it fit, their button]."""
    hidden = gr.Button(visible=False)
    try:
        draft = read()
        config = draft.config(site.settings)
        plan = site.benches.plan(config, draft.preset, draft.overrides())
    except KitError as problem:
        return [m.error(problem), [], hidden]
    try:
        notes = site.benches.ask("validate", config, seconds=180.0)
        verdict = m.note("Everything checked; it can be started.", "ok") + _list(notes)
    except KitError as problem:
        verdict = m.note(str(problem), "fail")
    changes = plan["fixes"] or []
    button = gr.Button(visible=bool(changes), value=f"Make {len(changes)} change{'s' * (len(changes) != 1)} that fit")
    return [m.page(verdict, _memory(plan), _fixes(plan)), [one["override"] for one in changes], button]


def _list(notes: list[str]) -> Markup:
    items = m.join(m.tag("li", note) for note in notes)
    return m.tag("ul", items, style="margin:8px 0 8px 18px;list-style:disc")


def _memory(plan: dict[str, Any]) -> Markup:
    memory = plan["memory"]
    rows: list[list[Any]] = [["always", term, m.gib(size)] for term, size in memory["always"].items()]
    for phase, terms in memory["phases"].items():
        name = m.tag("b", f"{phase} (highest)") if phase == memory["phase"] else phase
        rows += [[name, term, m.gib(size)] for term, size in terms.items() if size > 1024**2]
    table = m.table(["when", "what", "size"], rows, numbers={2})
    head = f"Peak {m.gib(memory['peak_bytes'])} of {m.gib(plan['room_bytes'])}: {'fits' if plan['fits'] else 'does not fit'}"
    notes = m.join(m.tag("p", note, class_="dim") for note in plan["notes"])
    return m.panel(m.tag("details", m.tag("summary", head) + table + notes))


def _fixes(plan: dict[str, Any]) -> Markup:
    if plan["fits"]:
        return Markup("")
    if not plan["fixes"]:
        return m.note(
            "No change of this configuration makes it fit: choose a smaller model or a larger machine.", "fail"
        )
    rows = [[m.tag("code", one["override"]), one["harm"]] for one in plan["fixes"]]
    return m.panel(m.tag("h3", "What makes it fit, the least harm first"), m.table(["change", "what it costs"], rows))


def launch(sent: Sent) -> list[str]:
    """[what happened, where to go]: starts a run in a process of its own, which outlives this server."""
    return begun(sent.form.site, sent.draft)


def begun(site: Site, read: Callable[[], Draft]) -> list[str]:
    """The same for any draft."""
    from kit.api.launch import start

    try:
        draft = read()
        config = draft.config(site.settings)
        site.benches.ask("validate", config, seconds=180.0)
        with _STARTING:  # two browsers, or two clicks: one after the other, so that the limit holds
            live = [run.id for run, status in site.store.statuses() if status["state"] in ALIVE]
            if len(live) >= MOST_LIVE:
                raise RunError(f"{len(live)} runs are live already: {', '.join(live[:4])}, ... Stop one first.")
            if config.run.id is not None and (site.settings.root / config.run.id).exists():
                raise RunError(
                    f"There is a run '{config.run.id}' already. Give another name, or none: then it is made from preset and time."
                )
            if config.run.id is None:
                config.run.id = site.store.new_id(draft.preset)
            run = start(config)
    except KitError as problem:
        return [m.error(problem), ""]
    return [m.page(m.note(f"{run.id} has started.", "ok")), address("run", run.id)]
