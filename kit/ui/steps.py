"""The steps Data and Training of New run, and the start of a run. The step Reward is lab.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gradio as gr
from markupsafe import Markup

from kit.config import EMBEDDED, load_config, preset_names
from kit.data.sources import READERS
from kit.errors import ConfigError, KitError, RunError
from kit.objective.recipes import recipe_names
from kit.runs.files import one_line
from kit.ui import markup as m
from kit.ui import uploads
from kit.ui.draft import Draft
from kit.ui.form import Form, Sent
from kit.ui.site import Site, address

MOST_FOUND, DEEPEST = 40, 3
SKIPPED = {"runs", "node_modules", "__pycache__"}


def model_choices(form: Form) -> list[str]:
    """Return the embedded model, model folders, downloaded models, and the models of the presets."""
    named = [load_config(name).model.name for name in preset_names()]
    settings = form.site.settings
    further = [str(base / folder) for base in settings.folders for folder in folders(base)]
    return list(dict.fromkeys([EMBEDDED, *folders(settings.folder), *further, *downloaded(), *named]))


def downloaded() -> list[str]:
    """Return the models in this machine's hub cache, which need no network, as OWNER/NAME."""
    from huggingface_hub.constants import HF_HUB_CACHE

    configs = sorted(Path(HF_HUB_CACHE).glob("models--*/snapshots/*/config.json"))
    names = dict.fromkeys(path.parts[-4].removeprefix("models--").replace("--", "/") for path in configs)
    return list(names)[:MOST_FOUND]


def folders(base: Path) -> list[str]:
    """Return folders with a config.json below `base`, relative to it. Hidden folders, runs and deep folders are skipped."""
    models: list[str] = []
    level = [base]
    for _ in range(DEEPEST):
        below: list[Path] = []
        for folder in level:
            try:
                inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
            except OSError:
                continue
            below += [path for path in inside if path.name not in SKIPPED and not path.name.startswith(".")]
        models += [str(path.relative_to(base)) for path in below if (path / "config.json").is_file()]
        level = below[:200]
    return models[:MOST_FOUND]


TASKS = ("chain_sum", "basic_arithmetic", "countdown", "gcd", "leg_counting", "spell_backward", "letter_counting")
"""Some tasks of reasoning-gym; others can be typed."""
SENT = "(file, ...rest) => [file ? {place: file.path, name: file.orig_name} : null, ...rest]"
"""JavaScript for an event whose first input is a `drop_area`."""


def drop_area(**shown: Any) -> gr.File:
    """Return an area to drop a file on.

    `SENT` sends `{place, name}`, which `uploads.take` checks. Gradio's own file value is never used: for a forged one, Gradio
    copies or downloads whatever it names.
    """
    area = gr.File(**shown)
    area.data_model = None  # no subclass: Gradio would write a stub file for it next to this file
    area.api_info = lambda: {"type": "object"}
    area.preprocess = lambda payload: payload
    return area


def data_step(form: Form) -> None:
    """Build the step Data."""
    with gr.Row():
        drop = drop_area(
            label=f"Your data: CSV, JSONL, JSON or Parquet, at most {uploads.LARGEST // 1024**2} MiB",
            file_types=list(READERS),
            height=120,
            elem_id="drop-data",
            min_width=280,
        )
        source = form.add(
            "data.source",
            "Source",
            "A file, a hub id or a task.",
            kind="text",
            choices=data_choices(form),
            allow_custom_value=True,
        )
    table = gr.HTML()
    with gr.Row():
        roles = [
            form.add(f"data.{role}_column", label, info, kind="text", choices=[BY_NAME], allow_custom_value=True)
            for role, label, info in ROLES
        ]
    form.add("data.system_prompt", "System prompt", "Sent before every prompt. Empty: none.", kind="text", lines=2)
    form.follows(lambda draft: mapped(form.site, draft), table, *roles, concurrency_limit=4)
    with gr.Accordion("Limits, other column names, tasks", open=False):
        with gr.Row():
            form.add("data.limit", "Rows at most", "Empty: all.")
            form.add("data.heldout", "Held-out rows", "Set apart to measure with.")
            form.add("data.max_prompt_tokens", "Longest prompt", "In tokens; longer ones are left out.")
            form.add("data.skip_bad_rows", "Leave out bad rows", kind="switch")
        with gr.Row():
            form.add("data.rename", "Other columns", "Column: the name that the reward has for it.")
            form.add("data.task_params", "Task parameters", "For reasoning-gym.")
    count = gr.Button("Show rows as the model sees them", size="md", min_width=160)
    rows = gr.HTML()
    form.results.append(rows)
    form.replaces(drop.upload, _uploaded, [drop], [drop, source, rows], queue=True, concurrency_limit=4, js=SENT)
    guess = lambda sent: (*guessed(sent.form.site, sent.draft()), "")  # noqa: E731
    form.replaces(source.input, guess, [], [rows], queue=True, concurrency_limit=4)
    form.on(count.click, tokens, [], [rows], concurrency_limit=4)


def data_choices(form: Form) -> list[str]:
    """Return uploaded files, data files in the page's folders, and some tasks."""
    return [
        *uploads.kept(form.site.settings.root),
        *files(form.site.settings.folder),
        *(str(base / file) for base in form.site.settings.folders for file in files(base)),
        *(f"reasoning-gym:{task}" for task in TASKS),
    ]


def files(base: Path) -> list[str]:
    """Return data files in `base` and in its folders, relative to it."""
    names: list[str] = []
    try:
        below = [path for path in sorted(base.iterdir()) if path.is_dir() and not path.name.startswith((".", "runs"))]
        for folder in [base, *below][:50]:
            names += [str(path.relative_to(base)) for path in sorted(folder.iterdir()) if path.suffix in NEARBY]
    except OSError:
        pass
    return names[:40]


NEARBY = tuple(suffix for suffix in READERS if suffix != ".json")
"""Suffixes of data files in lists. A .json file is usually something else."""
BY_NAME = ("automatic", "")
ROLES = (
    ("prompt", "Prompt", "What the model is asked: a text, or a list of messages."),
    ("reference", "Reference", "The right answer, which only the reward sees. There may be none."),
)
"""Role of a column, its label, its meaning."""


def _uploaded(sent: Sent, file: Any) -> tuple[Any, ...]:
    """Store an uploaded file and use it as the source, with the settings that its rows suggest."""
    source = uploads.take(sent.form.site.settings.root, file)
    draft, message = guessed(sent.form.site, sent.valid().change("data.source", source))
    return draft, message, None, gr.Dropdown(choices=data_choices(sent.form)), ""


def guessed(site: Site, draft: Draft) -> tuple[Draft, str]:
    """Set columns, reward and system prompt as the rows of the draft's file suggest. Returns the draft and the reasons."""
    source = str(draft.tree()["data"]["source"])
    if not (site.settings.folder / source).is_file():
        return draft, ""
    empty: dict[str, Any] = {"prompt_column": None, "reference_column": None, "rename": {}, "task_params": {}}
    for key, value in empty.items():
        draft = draft.change(f"data.{key}", value)
    try:
        draft.config(site.settings)  # guarded before anything is read
        guess = site.benches.ask("guess", load_config({"data": {"source": source}}))
    except KitError:
        return draft, ""  # `mapped` reports the error
    draft = draft.change("data.prompt_column", guess["prompt"]).change("data.reference_column", guess["reference"])
    parts = [f"prompt '{guess['prompt']}'"] + ([f"right answers '{guess['reference']}'"] if guess["reference"] else [])
    if guess["reward"] is not None:
        draft = draft.change("reward.preset", guess["reward"]).change("reward.params", dict(guess["params"]))
        draft = draft.change("data.system_prompt", guess["system_prompt"])
        parts.append(f"reward {guess['reward']}")
    words = f"Guessed from the rows: {', '.join(parts)}; {guess['why']}. Correct it below if it is wrong."
    return draft, m.page(m.note(words, "live"))


def mapped(site: Site, value: Any) -> list[Any]:
    """Return [table of a file's columns and their roles, list of prompt columns, list of reference columns]."""
    try:
        config = Draft.read(value).config(site.settings)
    except KitError:
        return ["", *_unknown()]  # `show_draft` reports the error
    try:
        if not (site.settings.folder / config.data.source).is_file():
            return ["", *_unknown()]  # the columns of a task or a hub id are unknown before it is read
        table = site.benches.ask("columns", config)
    except KitError as problem:
        return [m.error(problem), *_unknown()]
    names = [column["name"] for column in table["columns"]]
    by_role = {column["use"]: column["name"] for column in table["columns"]}
    choices = [
        gr.Dropdown(choices=[(f"by its name: {by_role[role]}" if by_name else BY_NAME[0], ""), *names])
        for role, by_name in (
            ("prompt", "prompt" in by_role and config.data.prompt_column is None),
            ("reference", "reference" in by_role and config.data.reference_column is None),
        )
    ]
    return [m.page(column_table(table)), *choices]


def _unknown() -> list[Any]:
    """Return the lists of columns if none are known."""
    return [gr.Dropdown(choices=[BY_NAME]), gr.Dropdown(choices=[BY_NAME])]


def column_table(table: dict[str, Any]) -> Markup:
    """Show the columns of a file, one per line."""
    rows = [
        [
            m.tag("code", column["name"], class_="nowrap"),
            m.badge(column["use"], "ok" if column["use"] in ("prompt", "reference") else ""),
            ", ".join(column["kinds"]) or "empty",
            m.join(m.tag("div", one_line(text, 70)) for text in column["values"]),
            f"{column['missing']} of {table['sampled']}" if column["missing"] else "",
        ]
        for column in table["columns"]
    ]
    notes = m.join(m.note(text, "warn") for text in table["notes"])
    if table["faulty"]:
        words = "\n".join([f"{table['faulty']} of {table['total']} rows cannot be read:", *table["faults"]])
        notes += m.note(words, "warn")
    if table["problem"]:
        notes += m.note(table["problem"], "fail")
    head = m.tag(
        "div", m.tag("h3", table["source"]) + m.tag("span", f"{table['total']:,} rows", class_="dim"), class_="spread"
    )
    return m.panel(head, m.table(["column", "used as", "type", "for example", "empty"], rows), notes)


def tokens(sent: Sent) -> str:
    """Show prompts with the chat template, and their lengths in tokens of the model."""
    lengths = sent.form.site.benches.ask("lengths", sent.config())
    words = ", ".join(f"{name} {value}" for name, value in lengths["tokens"].items())
    over = f"{lengths['over']} of {lengths['counted']} are over the limit of {lengths['limit']} and are left out."
    level = "warn" if lengths["over"] else "ok"
    prompts = [
        m.panel(
            m.tag("small", f"training row {row['place']}, {row['tokens']} tokens, with the chat template"),
            m.tag("div", row["text"], class_="said"),
            m.reference(row["reference"] or "none"),
        )
        for row in lengths["seen"]
    ]
    return m.page(
        m.panel(m.tag("h3", "Prompt length in tokens"), m.tag("p", words, class_="num"), m.note(over, level)),
        left_out(lengths),
        *prompts,
    )


def left_out(lengths: dict[str, Any]) -> Markup:
    """Show how many rows are left out of training, and why, with examples."""
    info = lengths["info"]
    counts = info["rows"]
    faults = (info["bad_rows"] or [])[:3]
    bad = "; ".join(" ".join(f"{name} {value}" for name, value in fault.items() if value) for fault in faults)
    long = "; ".join(f"row {row['place']} has {row['tokens']}: {one_line(row['text'], 60)}" for row in lengths["long"])
    rows = [
        ["held out", counts["heldout"], "for evaluation, chosen by a hash of the prompt"],
        ["held-out repeats", counts["heldout_duplicates"], "their prompt is also a held-out one"],
        ["cannot be used", counts["skipped"], bad],
        ["too long", lengths["over"], f"more than {lengths['limit']} tokens. {long}"],
        ["without a reference", counts["without_reference"], "a reward that compares cannot score them"],
    ]
    shown = [[m.tag("span", row[0], class_="nowrap"), *row[1:]] for row in rows if row[1]]
    table = m.table(["", "rows", "why"], shown, numbers={1})
    return m.panel(m.tag("h3", f"What is left out of {counts['read']:,} rows"), table)


IMPORTANT = (
    {
        "objective.recipe": ("Algorithm", ""),
        "optimisation.steps": ("Training steps", ""),
        "optimisation.learning_rate": ("Learning rate", "auto: chosen by the model's size."),
    },
    {
        "generation.num_generations": ("Group size", "Completions of each prompt."),
        "optimisation.batch_size": ("Batch size", "Completions in a step."),
        "generation.max_completion_tokens": ("Longest completion", "In tokens."),
    },
    {
        "evaluation.every": ("Evaluate every N steps", "0: only before and after."),
        "run.seed": ("Seed", ""),
        "run.save_every": ("Checkpoint every N steps", ""),
    },
)
"""Keys with their labels and hints."""
LABELS = {name: label for names in IMPORTANT for name, (label, _) in names.items()}


def train_step(form: Form) -> None:
    """Build the step Training: the model and the most important keys. All keys are in the YAML."""
    form.add("model.name", "Model", "The embedded one, a folder, or a hub id.", kind="text", choices=model_choices(form),
             allow_custom_value=True, filterable=True)  # fmt: skip
    with gr.Row():
        form.add("model.load_in_4bit", "4-bit weights (QLoRA)", kind="switch")
        form.add("model.lora", "Train an adapter (LoRA)", "Off: all weights are trained.", kind="section")
        form.add("model.lora.rank", "Size of the adapter", "16 suits most runs.", placeholder="16")
    for names in IMPORTANT:
        with gr.Row():
            for name, (label, info) in names.items():
                listed: dict[str, Any] = {"kind": "choice", "choices": list(recipe_names())} if "recipe" in name else {}
                form.add(name, label, info, elem_id=f"first-{name.replace('.', '-')}", **listed)


def start_run(site: Site, read: Callable[[], Draft]) -> list[str]:
    """Start a run in a process of its own, which outlives this server. Returns [note, address of the run]."""
    from kit.api import start

    try:
        draft = read()
        config = draft.config(site.settings)
        if config.run.id is not None and (site.settings.root / config.run.id).exists():
            raise RunError(
                f"There is a run '{config.run.id}' already. Choose another name, or none for a name from preset and time."
            )
        if problem := site.benches.ask("check", config, seconds=180.0)["problem"]:
            raise ConfigError(f"The reward cannot score the first row. {problem}")
        site.end_sessions(answering=True)  # the checks read the free memory
        site.benches.ask("validate", config, seconds=180.0)
        forecast: dict[str, float] = {}
        with suppress(KitError):  # the run starts without a forecast, too
            forecast = site.benches.ask("plan", config, seconds=180.0)["run_seconds"]
        if config.run.id is None:
            config.run.id = site.store.new_id(draft.preset)
        site.make_room()
        run = start(config)
        site.run(run.id).change_status(lambda _: {"forecast": forecast}, durable=False)
    except KitError as problem:
        return [m.error(problem), ""]
    return [m.page(m.note(f"{run.id} has started.", "ok")), address("run", run.id)]
