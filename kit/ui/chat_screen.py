"""Chat: base and tuned side by side, the same prompt and seed, words as they come, the run's reward of each answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import gradio as gr

from kit.errors import ConfigError, KitError, RunError
from kit.ui import chat_view as view
from kit.ui import markup as m
from kit.ui.chat_pool import Pool
from kit.ui.export_screen import checkpoint_of, weights
from kit.ui.site import RUN_FROM_ADDRESS, Site, is_id, run_box

LONGEST_PROMPT, LONGEST_REFERENCE = 20_000, 4_000
MOST_TOKENS = 4096
PICKED = 60
"""Held-out prompts in the picker at once."""
EVERY_SECONDS = 0.15
"""Between two pictures of an answer that is being written."""
BOTH, BASE, TUNED = "base and tuned", "base only", "tuned only"
SIDES = {BOTH: ("base", "tuned"), BASE: ("base",), TUNED: ("tuned",)}


class Screen:
    """The screen's work. Every value comes from a browser and is looked at."""

    def __init__(self, site: Site) -> None:
        self.site, self.pool = site, Pool(site)

    def load(self, run_id: Any, which: Any, search: Any) -> Iterator[list[Any]]:
        """Loads the model, and fills the picker: [status, picker]."""
        yield [
            m.page(
                m.card(
                    m.tag("b", "Loading"),
                    m.tag("p", "Base and adapter are read in a process of their own …", class_="dim"),
                )
            ),
            gr.skip(),
        ]
        try:
            run = self.site.run(run_id)
            session = self.pool.session(run, checkpoint_of(which))
            about = session.start()
            wanted = search.strip()[:200] if isinstance(search, str) else ""
            rows = session.heldout(1, PICKED, wanted or None)
        except KitError as problem:
            yield [m.error(problem), gr.skip()]
            return
        choices = [(f"{row['number']}: {_line(row['prompt'])}", str(row["number"])) for row in rows["rows"]]
        yield [view.ready(about, rows["total"], len(choices), wanted), gr.Dropdown(choices=choices, value=None)]

    def ask(
        self,
        run_id: Any,
        which: Any,
        prompt: Any,
        picked: Any,
        reference: Any,
        side: Any,
        seed: Any,
        heat: Any,
        most: Any,
    ) -> Iterator[str]:
        """The answers, growing."""
        answers: dict[str, dict[str, Any]] = {}
        try:
            run = self.site.run(run_id)
            question = asked(prompt, picked, reference)
            how = sampling(seed, heat, most)
            sides = SIDES.get(side if isinstance(side, str) else BOTH, SIDES[BOTH])
            session = self.pool.session(run, checkpoint_of(which))
            if not session.alive:
                yield view.waiting("Loading the model first …")
            last, done = 0.0, None
            for event in session.ask(sides=sides, **question, **how):
                kind, name = event["event"], str(event.get("side"))
                if kind == "began":
                    answers[name] = {"text": "", "writing": True}
                elif kind == "token":
                    answers[name]["text"] += event["text"]
                elif kind == "answer":
                    answers[name] = dict(event)
                elif kind == "done":
                    done = event
                if kind != "token" or time.monotonic() - last > EVERY_SECONDS:
                    last = time.monotonic()
                    yield view.pair(sides, answers, done, how)
        except KitError as problem:
            yield m.page(view.columns(tuple(answers), answers)) + m.error(problem) if answers else m.error(problem)

    def stop(self, run_id: Any) -> None:
        """Ends the answer under way."""
        if is_id(run_id) and (session := self.pool.loaded(run_id)) is not None:
            session.cancel()

    def choices(self, run_id: Any) -> list[Any]:
        """[weights, status, picker]"""
        try:
            run = self.site.run(run_id)
            found = weights(run)
        except KitError as problem:
            text = view.no_runs() if not run_id else m.error(problem)
            return [gr.Dropdown(choices=[], value=None), text, gr.Dropdown(choices=[], value=None)]
        session = self.pool.loaded(run.id)
        text = view.idle(bool(found)) if session is None else view.ready(session.ready, None, 0, "")
        return [
            gr.Dropdown(choices=found, value=found[0] if found else None),
            text,
            gr.Dropdown(choices=[], value=None),
        ]


def asked(prompt: Any, picked: Any, reference: Any) -> dict[str, Any]:
    """A held-out prompt by its number, or one's own with an optional reference. Raises `ConfigError`."""
    text = prompt.strip() if isinstance(prompt, str) else ""
    if not text:
        if isinstance(picked, str) and picked.isascii() and picked.isdigit() and len(picked) < 10:
            return {"heldout": int(picked)}
        raise ConfigError("Write a prompt, or pick a held-out one (load the model to see them).")
    if len(text) > LONGEST_PROMPT:
        raise ConfigError(f"The prompt has {len(text):,} letters; at most {LONGEST_PROMPT:,} are taken.")
    known = reference.strip() if isinstance(reference, str) else ""
    if len(known) > LONGEST_REFERENCE:
        raise ConfigError(f"The reference has {len(known):,} letters; at most {LONGEST_REFERENCE:,} are taken.")
    return {"prompt": text, "reference": known or None}


def sampling(seed: Any, heat: Any, most: Any) -> dict[str, Any]:
    """Seed, temperature and longest answer, within bounds; None is as in the run."""
    found: dict[str, Any] = {"seed": int(seed) if isinstance(seed, (int, float)) and 0 <= seed < 2**31 else 0}
    if isinstance(heat, (int, float)) and 0 <= heat <= 10:
        found["temperature"] = float(heat)
    if isinstance(most, (int, float)) and 1 <= most <= MOST_TOKENS:
        found["max_tokens"] = int(most)
    return found


def _line(text: Any) -> str:
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return (lines[-1] if lines else "")[:90]


def build(site: Site, blocks: gr.Blocks) -> None:
    """The screen."""
    screen = Screen(site)
    named = run_box()
    quiet: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    with gr.Row(elem_classes="tight"):
        chosen = gr.Dropdown([], label="Run", allow_custom_value=True, scale=3, elem_id="chat-run")
        which = gr.Dropdown([], label="Weights", allow_custom_value=True, scale=2, elem_id="chat-weights")
        load = gr.Button("Load the model", variant="secondary", scale=1, min_width=140, elem_id="chat-load")
    status = gr.HTML(elem_id="chat-status")
    with gr.Row(elem_classes="tight"):
        picked = gr.Dropdown(
            [],
            label="Held-out prompt",
            info="never trained on; its reference is known",
            allow_custom_value=True,
            scale=4,
            min_width=240,
            elem_id="chat-picked",
        )
        search = gr.Textbox(
            label="Search held-out prompts", scale=2, min_width=160, max_length=200, elem_id="chat-search"
        )
    prompt = gr.Textbox(
        label="Or your own prompt",
        lines=2,
        max_lines=12,
        max_length=LONGEST_PROMPT,
        placeholder="The run's system prompt goes before it. Shift+Enter asks.",
        elem_id="chat-prompt",
    )
    with gr.Accordion("Reference, seed, temperature, length", open=False):
        with gr.Row():
            reference = gr.Textbox(
                label="Right answer", info="for the reward of a prompt of your own", max_length=LONGEST_REFERENCE
            )
            side = gr.Dropdown(list(SIDES), value=BOTH, label="Who answers")
        with gr.Row():
            seed = gr.Number(0, label="Seed", info="the same for both", precision=0)
            heat = gr.Number(None, label="Temperature", info="0: greedy; empty: as in training")
            most = gr.Number(None, label="Longest answer (tokens)", info="empty: as in training", precision=0)
    with gr.Row(elem_classes="tight"):
        ask = gr.Button("Ask both", variant="primary", elem_id="chat-ask")
        stop = gr.Button("Stop", elem_id="chat-stop")
    shown = gr.HTML(elem_id="chat-answers")
    inputs = [chosen, which, prompt, picked, reference, side, seed, heat, most]
    slow: dict[str, Any] = {
        "show_progress": "hidden",
        "api_visibility": "private",
        "concurrency_limit": 4,
        "trigger_mode": "once",
    }
    blocks.load(lambda wanted: _choices(site, wanted), [named], [chosen], js=RUN_FROM_ADDRESS, **quiet).then(
        screen.choices, [chosen], [which, status, picked], **quiet
    )
    chosen.input(screen.choices, [chosen], [which, status, picked], **quiet)
    load.click(screen.load, [chosen, which, search], [status, picked], **slow)
    search.submit(screen.load, [chosen, which, search], [status, picked], **slow)
    picked.input(lambda: "", [], [prompt], **quiet)
    for event in (ask.click, prompt.submit):
        event(screen.ask, inputs, [shown], **slow)
    stop.click(screen.stop, [chosen], [], queue=False, api_visibility="private")


def _choices(site: Site, wanted: Any) -> Any:
    """Runs with weights."""
    try:
        found = [run.id for run in site.store.list() if run.adapter.is_dir() or run.checkpoints]
    except RunError:
        found = []
    return gr.Dropdown(choices=found, value=wanted if is_id(wanted) else next(iter(found), None))
