"""Chat: base and tuned side by side, the same prompt and seed, words as they come, the run's reward of each answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import gradio as gr

from kit.errors import ConfigError, KitError, RunError
from kit.ui import chat_view as view
from kit.ui import markup as m
from kit.ui.chat_pool import Pool
from kit.ui.export_screen import checkpoint_of, weights
from kit.ui.numbers import number_of, whole_of
from kit.ui.site import RUN_FROM_ADDRESS, Site, is_id, run_box, to_address

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
        request: gr.Request | None = None,
    ) -> Iterator[list[Any]]:
        """[the answers, growing; the button that stops them, while they come]."""
        for text in self._answers(run_id, which, prompt, picked, reference, side, seed, heat, most, request):
            yield [text, gr.Button(visible=True)]
        yield [gr.skip(), gr.Button(visible=False)]

    def _answers(
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
        request: gr.Request | None,
    ) -> Iterator[str]:
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
            for event in session.ask(sides=sides, owner=_browser(request), **question, **how):
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
                    yield view.pair(sides, answers, done, used(session.ready, how))
        except KitError as problem:
            ended = {name: one | {"writing": False} for name, one in answers.items() if one.get("text")}
            yield m.page(view.columns(tuple(ended), ended)) + m.error(problem) if ended else m.error(problem)

    def stop(self, run_id: Any, request: gr.Request | None = None) -> None:
        """Ends the answer that this browser is given; those of others, who share the model, go on."""
        if is_id(run_id) and (session := self.pool.loaded(run_id)) is not None:
            session.cancel(_browser(request))

    def status(self, run_id: Any) -> Any:
        """What is loaded, after a question that may have loaded other weights."""
        session = self.pool.loaded(run_id) if is_id(run_id) else None
        return gr.skip() if session is None else view.ready(session.ready, None, 0, "")

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
    """Seed, temperature and longest answer; what was left empty is as in the run, the seed 0. Raises `ConfigError`."""
    found: dict[str, Any] = {"seed": whole_of(seed, "Seed", 0, 2**31 - 1) or 0}
    if (temperature := number_of(heat, "Temperature", 0, 10)) is not None:
        found["temperature"] = temperature
    if (tokens := whole_of(most, "Longest answer", 1, MOST_TOKENS)) is not None:
        found["max_tokens"] = tokens
    return found


def used(ready: Mapping[str, Any], how: Mapping[str, Any]) -> dict[str, Any]:
    """What an answer was made with: the run's own settings, those that were asked for, and the step of the weights."""
    own = ready.get("sampling")
    return {**(own if isinstance(own, dict) else {}), **how, "step": ready.get("step")}


def _browser(request: gr.Request | None) -> str:
    """What Gradio calls an open page of a browser."""
    return str(getattr(request, "session_hash", None) or "nobody")


def _line(text: Any) -> str:
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return (lines[-1] if lines else "")[:90]


def build(site: Site, blocks: gr.Blocks) -> None:
    """The screen."""
    screen = Screen(site)
    named = run_box()
    quiet: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    with gr.Row(elem_classes="tight low"):
        chosen = gr.Dropdown([], label="Run", allow_custom_value=True, scale=3, elem_id="chat-run")
        which = gr.Dropdown([], label="Weights", allow_custom_value=True, scale=2, elem_id="chat-weights")
        load = gr.Button("Load the model", variant="secondary", size="md", scale=0, min_width=150, elem_id="chat-load")
    status = gr.HTML(elem_id="chat-status")
    with gr.Row(elem_classes="tight"):
        picked = gr.Dropdown(
            [],
            label="Held-out prompt",
            info="never trained on, reference known; listed once the model is loaded",
            allow_custom_value=True,
            scale=4,
            min_width=240,
            elem_id="chat-picked",
        )
        search = gr.Textbox(
            label="Search them",
            info="part of the prompt, then Enter",
            scale=2,
            min_width=160,
            max_length=200,
            elem_id="chat-search",
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
            seed = gr.Textbox("0", label="Seed", info="the same for both", max_length=40, elem_id="chat-seed")
            heat = gr.Textbox(
                label="Temperature", info="0: greedy", placeholder="as in training", max_length=40, elem_id="chat-heat"
            )
            most = gr.Textbox(
                label="Longest answer (tokens)", info=f"at most {MOST_TOKENS:,}", placeholder="as in training",
                max_length=40, elem_id="chat-most",
            )  # fmt: skip
    with gr.Row(elem_classes="tight"):
        ask = gr.Button("Ask both", variant="primary", elem_id="chat-ask")
        stop = gr.Button("Stop", variant="secondary", visible=False, elem_id="chat-stop")
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
    chosen.input(None, [chosen], [], js=to_address("chat"))
    load.click(screen.load, [chosen, which, search], [status, picked], **slow)
    search.submit(screen.load, [chosen, which, search], [status, picked], **slow)
    picked.input(lambda: "", [], [prompt], **quiet)
    for event in (ask.click, prompt.submit):
        event(screen.ask, inputs, [shown, stop], **slow).then(screen.status, [chosen], [status], **quiet)
    stop.click(screen.stop, [chosen], [], queue=False, api_visibility="private")


def _choices(site: Site, wanted: Any) -> Any:
    """Runs with weights."""
    try:
        found = [run.id for run in site.runs() if run.adapter.is_dir() or run.checkpoints]
    except RunError:
        found = []
    return gr.Dropdown(choices=found, value=wanted if is_id(wanted) else next(iter(found), None))
