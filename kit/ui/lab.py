"""The Reward Lab of New run: tries the reward on real rows before training.

It scores pasted completions component by component, tries the known attacks, and runs the signal check, which samples the
model and decides whether there is a learning signal.
"""

from __future__ import annotations

import functools
import hashlib
import re
from contextlib import suppress
from typing import Any

import gradio as gr

from kit.config import RunConfig
from kit.errors import KitError
from kit.ui import markup as m
from kit.ui import results, reward
from kit.ui.children import Job
from kit.ui.draft import Draft
from kit.ui.form import Form, Sent
from kit.ui.site import QUIET, SIGNAL, UNSEEN, Site, whole

SEPARATOR = re.compile(r"^\s*-{3,}\s*$", re.MULTILINE)
MOST_COMPLETIONS, LONGEST = 32, 50_000
MOST_PROMPTS = 256
"""The most prompts of a signal check."""
PROMPTS_BY_ITSELF = 8
"""Prompts of a signal check that starts by itself."""
READING: dict[str, Any] = {"concurrency_limit": 4} | UNSEEN
NEVER = m.empty(
    "Not checked yet",
    "The signal check samples the model on your rows: is it sometimes right, do the rewards of a group differ, are "
    "completions cut off? It ends in a verdict and, if one helps, a change to make.",
)


def build(form: Form) -> None:
    """Build the step."""
    reward.build(form)
    place, row = _row(form)
    with gr.Tabs():
        with gr.Tab("Score"):
            readers = _score(form, place)
        with gr.Tab("Try attacks"):
            readers.append(_attacks(form, place))
        with gr.Tab("Signal check"):
            _signal(form)
    form.on(functools.partial(gr.on, [button.click for button in readers]), prompt, [place], [row], **READING)


def _row(form: Form) -> tuple[gr.Number, gr.HTML]:
    """Build the number of the training row that the lab uses, and the place that shows the row."""
    with gr.Row(elem_classes="tight low"):
        place = gr.Number(0, label="Training row", precision=0, minimum=0, scale=1, min_width=120, elem_id="lab-row")
        other = gr.Button("Next row", size="md", scale=1, min_width=120)
    shown = gr.HTML(m.page(m.tag("p", "Press a button below to read the row.", class_="dim")))
    other.click(lambda at: whole(at) + 1, [place], [place], queue=False, api_visibility="private")
    form.results.append(shown)
    form.on(place.change, prompt, [place], [shown], **READING)
    return place, shown


def prompt(sent: Sent, at: Any) -> str:
    """Show one training row."""
    answer = _ask(sent, "rows", start=whole(at), count=1)
    if not answer["rows"]:
        return m.error(f"There is no training row {whole(at)}.")
    return results.show_row(answer["rows"][0])


def _ask(sent: Sent, question: str, **more: Any) -> Any:
    return sent.form.site.benches.ask(question, sent.config(), **more)


def _score(form: Form, place: gr.Number) -> list[gr.Button]:
    """Build the tab Score. Returns the buttons that read the row."""
    box = gr.Textbox(
        label="Completions",
        info="As the model would write them, separated by lines of ---. They are scored as one group.",
        lines=7,
        max_lines=20,
        elem_id="completions",
        placeholder="One completion\n---\nAnother completion",
    )
    with gr.Row(elem_classes="tight"):
        score = gr.Button("Score them", variant="primary", size="md", min_width=130)
        examples = gr.Button("Fill in examples for this row", size="md", min_width=200)
    words = "Paste completions, or fill in examples, to see the score of each component of the reward."
    out = gr.HTML(m.empty("Nothing scored yet", words), elem_id="lab-scores")
    form.results.append(out)
    form.on(score.click, scored, [place, box], [out], concurrency_limit=4)
    form.on(examples.click, filled, [place], [box, out], concurrency_limit=4)
    return [score, examples]


def completions(text: Any) -> list[str]:
    """Split the pasted text into completions. Raises `KitError` for none, or for too many or too long ones."""
    pasted = text if isinstance(text, str) else ""
    parts = [part.strip("\n") for part in SEPARATOR.split(pasted)]
    if not pasted.strip():
        raise KitError("There is nothing to score: write a completion, or fill in examples.")
    if len(parts) > MOST_COMPLETIONS or len(pasted) > LONGEST:
        raise KitError(
            f"These are {len(parts)} completions of {len(pasted):,} characters in all. At most {MOST_COMPLETIONS} completions "
            f"and {LONGEST:,} characters are scored at once."
        )
    return parts


def scored(sent: Sent, at: Any, text: Any) -> str:
    """Score the pasted completions, component by component."""
    try:
        return m.page(results.show_group(_ask(sent, "score", row=whole(at), completions=completions(text))))
    except KitError as problem:
        return m.error(problem)


def filled(sent: Sent, at: Any) -> list[Any]:
    """Return [four example completions, their scores].

    The examples are a right and a wrong answer in the reward's format, a right one without it, and one that is cut off.
    """
    text = "\n---\n".join(_ask(sent, "examples", row=whole(at)))
    return [text, scored(sent, at, text)]


def _attacks(form: Form, place: gr.Number) -> gr.Button:
    """Build the tab Try attacks. Returns the button that reads the row."""
    words = (
        "Known attacks: ways to earn the reward without solving the task. None should score as high as a right answer."
    )
    gr.HTML(m.page(m.tag("p", words, class_="dim")))
    with gr.Row(elem_classes="tight"):
        run = gr.Button("Try all of them", variant="primary", size="md")
        many = gr.Button("Audit on my rows", size="md", elem_id="audit")
    out = gr.HTML(
        m.empty("Not tried yet", "About thirty attacks take a second; an audit of several rows takes up to a minute.")
    )
    form.results.append(out)
    form.on(many.click, audited, [], [out], concurrency_limit=4)
    form.on(run.click, attacked, [place], [out], concurrency_limit=4)
    return run


def attacked(sent: Sent, at: Any) -> str:
    """Score the known attacks on a row."""
    return results.show_attacks(_ask(sent, "attacks", row=whole(at)))


def audited(sent: Sent) -> str:
    """Audit the reward on random rows: echoes, constants, hedges, near misses, answers of other rows, slow answers."""
    return m.page(results.audit_table(_ask(sent, "audit")))


def _signal(form: Form) -> None:
    """Build the tab of the signal check, and its verdict in the side column.

    A small check starts by itself if the data, the reward or the model differ from the preset's, the reward scores a row, the
    plan succeeds, no run trains, and the draft is the same in two polls. An edit that changes the question ends it. The timer
    polls while a check is expected or a run trains.
    """
    site = form.site
    with gr.Row(elem_classes="tight low"):
        prompts = gr.Slider(4, MOST_PROMPTS, 16, step=4, label="Prompts", info="More make the intervals narrower.")
        start = gr.Button("Check", variant="primary", size="md", scale=0, min_width=120)
        end = gr.Button("Stop", variant="stop", size="md", scale=0, min_width=100, visible=False)
    out = gr.HTML(NEVER)
    last_stamp, change = gr.State(""), gr.State([])
    outputs = [last_stamp, form.learns, form.suggested, change, out, end, form.training, form.timer]
    configured = functools.lru_cache(maxsize=32)(lambda text: Draft.read(text).config(site.settings))

    def begin(sent: Sent, count: Any) -> list[Any]:
        try:
            start_check(site, sent.config(), min(MOST_PROMPTS, max(2, whole(count))))
        except KitError as problem:
            return [m.error(problem), "", gr.skip()]
        return [gr.skip(), "", gr.Timer(active=True)]

    def tick(draft: Any, before: str, scored: Any, planned: Any) -> list[Any]:
        try:
            config = configured(draft)
        except KitError:  # `show_draft` reports the error; the verdict belongs to the previous draft
            return [f"{before.partition('|')[0]}|", *learned(None), gr.skip(), gr.Timer(active=False)]
        prefix = check_prefix(config)
        job, training = site.jobs.latest(prefix), ", ".join(site.live())
        # A preset is known to learn; with other data, reward or model it may not.
        changed = any(key.startswith(("data", "reward", "model.name")) for key in Draft.read(draft).changes)
        expected = job.state == "running" if job else changed
        now = f"{prefix}|{job.stamp if job else ''}|{training}"
        if now != before:
            if not before.startswith(prefix) and "|" in before:
                site.jobs.stop(before.partition("|")[0])
            return [now, *learned(job), training, gr.Timer(active=expected or bool(training))]
        if job is None and expected and not training and draft == scored == planned:
            with suppress(KitError):  # too many checks run already
                start_check(site, config, PROMPTS_BY_ITSELF)
        return [gr.skip()] * len(outputs)

    form.on(start.click, begin, [prompts], [out, last_stamp, form.timer], queue=False)
    inputs = [last_stamp, form.scored, form.planned]
    form.follows(tick, *outputs, inputs=inputs, queue=False)
    form.timer.tick(tick, [form.draft, *inputs], outputs, **QUIET)
    end.click(
        lambda now: site.jobs.stop(now.partition("|")[0]), [last_stamp], [], queue=False, api_visibility="private"
    )
    form.replaces(form.suggested.click, apply_actions, [change])


def check_prefix(config: RunConfig) -> str:
    """Return the key of a signal check without its number of prompts: it depends on the keys that the check reads."""
    question = config.model_dump_json(include={"model", "data", "reward", "generation"})
    return f"{SIGNAL}:{hashlib.sha256(question.encode()).hexdigest()[:16]}:"


def start_check(site: Site, config: RunConfig, prompts: int) -> None:
    """Start the signal check and the audit in a child process. Raises `KitError`."""
    request = {"config": config.model_dump(mode="json"), "prompts": prompts, "audit": True}
    site.end_sessions()
    site.jobs.start(f"{check_prefix(config)}{prompts}", SIGNAL, request)


def learned(job: Job | None) -> list[Any]:
    """Return [verdict, button of the suggested change, that change, details, Stop button] of a signal check."""
    card, details, changes = "", NEVER, list[str]()
    if job is None or job.state == "stopped":
        card = m.page(m.note("Not checked yet whether it will learn. See 2 Reward, Signal check."))
    elif job.state == "running":
        line = job.line or "Starting: Python and torch are loaded first …"
        card = m.page(m.note(f"Trying the model and the reward on a few rows: {line}", "live"))
        details = m.page(m.panel(m.tag("b", "Working"), m.tag("p", m.tag("code", line), class_="dim")))
    elif job.state == "failed":
        card, details = (
            m.page(m.note("The signal check failed. See 2 Reward, Signal check for the reason.", "fail")),
            m.error(job.error),
        )
    else:
        card, details = m.page(results.show_card(job.result)), results.show_signal(job.result)
        changes = results.actions_of(job.result)
    suggest = gr.Button(visible=bool(changes), value=results.in_words(changes))
    return [card, suggest, changes, details, gr.Button(visible=job is not None and job.state == "running")]


def apply_actions(sent: Sent, suggested: Any) -> tuple[Draft, str]:
    """Apply the settings that a check or a plan suggests. Returns the draft and a note."""
    actions = [action for action in suggested if isinstance(action, str)][:8] if isinstance(suggested, list) else []
    return sent.draft().apply(actions), m.page(m.note(f"{results.in_words(actions)}: done.", "ok"))
