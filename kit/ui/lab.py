"""Step 3, the Reward Lab: what the reward says of real rows before anything is trained.

Pasted completions and fresh ones of the base model, part by part, with what was extracted; the known hacks; and the
signal check, which says whether there is anything to learn.
"""

from __future__ import annotations

import functools
import hashlib
import re
from typing import Any

import gradio as gr

from kit.config import RunConfig
from kit.errors import KitError
from kit.ui import markup as m
from kit.ui import results, reward
from kit.ui.children import Job
from kit.ui.draft import Draft
from kit.ui.form import Form, Sent
from kit.ui.site import QUIET, UNSEEN, Site, poll

SIGNAL = "kit.planning.signal"
SEPARATOR = re.compile(r"^\s*-{3,}\s*$", re.MULTILINE)
MOST_COMPLETIONS, LONGEST = 32, 50_000
ROWS_WRITTEN, EACH_WRITTEN = 2, 4
"""Rows and completions each of "Let it write"."""
MOST_PROMPTS, MOST_TRIES = 256, 32
"""Prompts and completions each of a signal check."""
READING: dict[str, Any] = {"concurrency_limit": 4} | UNSEEN
NEVER = m.empty(
    "Not checked yet",
    "The signal check samples the model on real rows before you pay for a run: is it sometimes right, do the rewards of a "
    "group differ, is it cut off? It ends in one sentence and, where it can, the one change to make.",
)


def build(form: Form) -> None:
    """The step."""
    reward.build(form)
    place, row = _row(form)
    with gr.Tabs():
        with gr.Tab("Score"):
            asked = _score(form, place)
        with gr.Tab("Let it write"):
            _write(form, place)
        with gr.Tab("Try to cheat"):
            asked.append(_cheat(form, place))
        with gr.Tab("Signal check"):
            _signal(form)
    form.on(functools.partial(gr.on, [button.click for button in asked]), prompt, [place], [row], **READING)


def _row(form: Form) -> tuple[gr.Number, gr.HTML]:
    """The row that is worked on: its number, and where it is shown."""
    with gr.Row(elem_classes="tight low"):
        place = gr.Number(0, label="Training row", precision=0, minimum=0, scale=1, min_width=120, elem_id="lab-row")
        show = gr.Button("Show the row", size="md", scale=1, min_width=150)
        other = gr.Button("Next row", size="md", scale=1, min_width=120)
    shown = gr.HTML(m.page(m.tag("p", "The row is read when you first ask.", class_="dim")))
    other.click(lambda at: whole(at) + 1, [place], [place], queue=False, api_visibility="private")
    for event in (place.change, show.click):
        form.on(event, prompt, [place], [shown], **READING)
    return place, shown


def whole(value: Any, most: int = 10_000_000) -> int:
    """A whole number from 0 on, whatever was sent."""
    usable = isinstance(value, (int, float)) and value == value and abs(value) < 1e15
    return min(most, max(0, int(value))) if usable else 0


def prompt(sent: Sent, at: Any) -> str:
    """One training row."""
    try:
        found = _ask(sent, "rows", start=whole(at), count=1)
    except KitError as problem:
        return m.error(problem)
    if not found["rows"]:
        return m.error(f"There is no training row {whole(at)}.")
    return results.show_row(found["rows"][0])


def _ask(sent: Sent, question: str, **more: Any) -> Any:
    return sent.form.site.benches.ask(question, sent.config(), **more)


def _score(form: Form, place: gr.Number) -> list[gr.Button]:
    """Returns the buttons that read the row."""
    box = gr.Textbox(
        label="Completions",
        info="As the model would write them; a line of --- stands between two. They are scored as one group.",
        lines=7,
        max_lines=20,
        elem_id="completions",
        placeholder="<think>2 + 3 = 5</think><answer>5</answer>\n---\nIt is 6.",
    )
    with gr.Row(elem_classes="tight"):
        score = gr.Button("Score them", variant="primary", size="md", min_width=130)
        examples = gr.Button("Fill in examples for this row", size="md", min_width=200)
    out = gr.HTML(
        m.empty("Nothing scored yet", "Paste completions, or fill in examples, and see each part of the reward decide.")
    )
    form.on(score.click, scored, [place, box], [out], concurrency_limit=4)
    form.on(examples.click, filled, [place], [box, out], concurrency_limit=4)
    return [score, examples]


def completions(text: Any) -> list[str]:
    """The pasted texts. Raises `KitError` for none, or for more than is taken."""
    given = text if isinstance(text, str) else ""
    parts = [part.strip("\n") for part in SEPARATOR.split(given)]
    if not given.strip():
        raise KitError("There is nothing to score: write a completion, or fill in examples.")
    if len(parts) > MOST_COMPLETIONS or len(given) > LONGEST:
        raise KitError(
            f"At most {MOST_COMPLETIONS} completions and {LONGEST:,} letters at once; these are {len(parts)}, {len(given):,}."
        )
    return parts


def scored(sent: Sent, at: Any, text: Any) -> str:
    """The pasted completions, part by part."""
    try:
        return m.page(results.show_group(_ask(sent, "score", row=whole(at), completions=completions(text))))
    except KitError as problem:
        return m.error(problem)


def filled(sent: Sent, at: Any) -> list[Any]:
    """[a right and a wrong answer in the reward's style, a right one without it, and one that was cut; what they score]."""
    try:
        text = "\n---\n".join(_ask(sent, "examples", row=whole(at)))
    except KitError as problem:
        return [gr.skip(), m.error(problem)]
    return [text, scored(sent, at, text)]


def _write(form: Form, place: gr.Number) -> None:
    gr.HTML(m.page(m.tag("p", "The model as it is now answers this row and the ones after it, sampled as in training.",
                         class_="dim")))  # fmt: skip
    _job(
        form,
        "Write and score",
        [place],
        lambda config, at: {"rows": [whole(at) + number for number in range(ROWS_WRITTEN)], "k": EACH_WRITTEN},
        lambda result: (results.show_groups(result), []),
        m.empty("Nothing written yet", "Fresh completions show what the reward will meet in the first step."),
    )


def _cheat(form: Form, place: gr.Number) -> gr.Button:
    """Returns the button that reads the row."""
    gr.HTML(m.page(m.tag("p", "Known ways to earn a reward without solving anything, tried on this row: training finds each that "
                         "works. None may reach what an honest right answer earns.", class_="dim")))  # fmt: skip
    with gr.Row(elem_classes="tight"):
        run = gr.Button("Try all of them", variant="primary", size="md")
        many = gr.Button("Audit on my rows", size="md", elem_id="audit")
    out = gr.HTML(
        m.empty("Not tried yet", "Some thirty hacks take a second; an audit of several rows takes up to a minute.")
    )
    form.on(many.click, audited, [], [out], concurrency_limit=4)
    form.on(run.click, cheated, [place], [out], concurrency_limit=4)
    return run


def cheated(sent: Sent, at: Any) -> str:
    """The known hacks, scored."""
    try:
        return results.show_hacks(_ask(sent, "hacks", row=whole(at)))
    except KitError as problem:
        return m.error(problem)


def audited(sent: Sent) -> str:
    """Echoes, constants, hedges, near misses, other rows' answers and slow ones, on rows drawn at random."""
    try:
        return results.show_audit(_ask(sent, "audit"))
    except KitError as problem:
        return m.error(problem)


def _signal(form: Form) -> None:
    prompts = gr.Slider(4, MOST_PROMPTS, 16, step=4, label="Prompts", info="More make the intervals narrower.")
    _job(
        form,
        SIGNAL_CHECK,
        [prompts],
        lambda config, count: {
            "prompts": min(MOST_PROMPTS, max(2, whole(count))),
            "k": min(MOST_TRIES, max(2, config.generation.num_generations)),
        },
        lambda result: (results.show_signal(result), results.actions_of(result)),
        NEVER,
        tells_verdict=True,
    )


def _job(
    form: Form, title: str, inputs: list[Any], ask: Any, show: Any, nothing: str, *, tells_verdict: bool = False
) -> None:
    """A button that starts a child, its progress and result, and a button for the settings that it suggests to change."""
    site = form.site
    with gr.Row(elem_classes="tight"):
        start = gr.Button(title, variant="primary", size="md")
        end = gr.Button("Stop", variant="stop", size="md", visible=False)
    out = gr.HTML(nothing)
    apply = gr.Button("Make this change", variant="secondary", size="md", visible=False)
    key, seen, change = gr.State(""), gr.State(""), gr.State([])

    def begin(sent: Sent, *given: Any) -> list[Any]:
        try:
            config = sent.config()
            more = ask(config, *given)
            name = f"{job_prefix(title, config)}{sorted(more.items())}"
            site.jobs.start(name, SIGNAL, {"config": config.model_dump(mode="json"), **more})
        except KitError as problem:
            return ["", "", m.error(problem), gr.Button(visible=False), gr.Button(visible=False), []]
        return [name, *tick(name, "")]

    def again(draft: Any) -> list[Any]:
        """After a reload: the check of this configuration, where there was one."""
        try:
            job = site.jobs.latest(job_prefix(title, Draft.read(draft).config(site.settings)))
        except KitError:
            job = None
        return [gr.skip()] * 6 if job is None else [job.key, *tick(job.key, "")]

    def tick(name: Any, before: Any) -> list[Any]:
        job = site.jobs.get(name)
        if job is None or job.stamp == before:
            return [gr.skip()] * 5
        html, changes = progress(job, show)
        suggest = gr.Button(visible=bool(changes), value=results.in_words(changes))
        return [job.stamp, html, gr.Button(visible=job.state == "running"), suggest, changes]

    outputs = [seen, out, end, apply, change]
    form.on(start.click, begin, inputs, [key, *outputs], queue=False)
    form.blocks.load(again, [form.kept], [key, *outputs], **QUIET)
    poll(tick, [key, seen], outputs)
    if tells_verdict:  # the signal check, whose verdict stands beside all steps
        seen.change(lambda draft: learned(site, draft), [form.draft], [form.learns], **QUIET)
    end.click(lambda name: site.jobs.stop(name), [key], [], queue=False, api_visibility="private")
    form.replaces(apply.click, made, [change])


SIGNAL_CHECK = "Will it learn?"


def learned(site: Site, value: Any) -> str:
    """What the signal check of this very configuration says, or that there is none yet."""
    try:
        config = Draft.read(value).config(site.settings)
    except KitError:
        return ""
    job = site.jobs.latest(job_prefix(SIGNAL_CHECK, config))
    if job is None or job.state == "stopped":
        return m.page(m.note("Whether it learns is not checked: 2 Reward, Signal check.", ""))
    if job.state == "running":
        return m.page(m.note(job.line or "The signal check is running …", "live"))
    if job.state == "failed":
        return m.page(m.note("The signal check failed; it says why in 2 Reward.", "fail"))
    return m.page(results.show_verdict(job.result))


def made(sent: Sent, given: Any) -> tuple[Draft, str]:
    """The draft after what a check suggests."""
    actions = [one for one in given if isinstance(one, str)][:8] if isinstance(given, list) else []
    done = m.page(m.note(f"{results.in_words(actions)}: done. Check again to see what it does.", "ok"))
    return sent.draft().apply(actions), done


def job_prefix(title: str, config: RunConfig) -> str:
    """The same question about the same configuration has the same key in every browser."""
    return f"{title}:{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]}:"


def progress(job: Job, show: Any) -> tuple[str, list[str]]:
    """(what a job looks like now, overrides that it suggests)."""
    if job.state == "running":
        line = job.line or "Starting: Python and torch are loaded first …"
        return m.page(m.panel(m.tag("b", "Working"), m.tag("p", m.tag("code", line), class_="dim"))), []
    if job.state == "done":
        html, changes = show(job.result)
        return html, changes
    if job.state == "stopped":
        return m.page(m.note("Stopped.")), []
    return m.error(job.error), []
