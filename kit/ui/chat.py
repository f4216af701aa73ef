"""Chat: the answers of the model before and after training to the same prompt with the same seed, each with its reward."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import gradio as gr
from markupsafe import Markup

from kit.chat.client import SIDES, ChatSession, check_sampling, open_chat
from kit.errors import ConfigError, KitError, RunError
from kit.runs.store import RunDir
from kit.ui import markup as m
from kit.ui.completions import read
from kit.ui.export import checkpoint_of, weights
from kit.ui.site import NO_RUNS, QUIET, RUN_FROM_ADDRESS, UNSEEN, Site, has_weights, is_id, run_box, stamp, to_address

IDLE_SECONDS, WATCH_SECONDS = 600.0, 3.0


class Loaded:
    """The page's only chat session: its process holds a model, and the machine may have room for one."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._lock = threading.Lock()
        self._key = ""
        self._session: ChatSession | None = None

    def session(self, run: RunDir, checkpoint: str | None) -> ChatSession:
        """Return the session on these weights, loaded or not. A session on other weights ends.

        Raises `KitError`, also while a run trains: the chat could take memory that the run needs.
        """
        checkpoint, key = resolved(run, checkpoint)
        with self._lock:
            if live := self.site.live():
                self.close(answering=True)
                raise RunError(
                    f"'{live[0]}' is training and needs this machine's memory. Stop it, or wait until it has ended."
                )
            if self._session is None or self._key != key:
                if self._session is not None and self._session.answering:
                    raise RunError("Another model is answering, perhaps in another tab. Ask again when it has ended.")
                self.close()
                self._key, self._session = key, open_chat(run, checkpoint, idle=IDLE_SECONDS)
                threading.Thread(target=self._watch, args=(self._session,), name="chat watch", daemon=True).start()
            return self._session

    def _watch(self, session: ChatSession) -> None:
        """End the process when a run starts outside of the page, because the run measures the free memory."""
        while self._session is session:
            with suppress(KitError):
                if session.alive and self.site.live():
                    session.close()
            time.sleep(WATCH_SECONDS)

    def of(self, run_id: str) -> ChatSession | None:
        """Return the session if it is of this run and its process lives."""
        session = self._session
        return session if session is not None and session.alive and session.run.id == run_id else None

    def close(self, *, answering: bool = False) -> None:
        """End the process, with `answering` also during an answer. The next question loads the model again."""
        if self._session is not None and self._session.alive and (answering or not self._session.answering):
            self._session.close()


def resolved(run: RunDir, checkpoint: str | None) -> tuple[str | None, str]:
    """Return the selected checkpoint, and a text that changes with its files. Raises `RunError`.

    The weights called `best`, `last` or the result change while a run continues.
    """
    from kit.evaluation.results import checkpoint_now, weights_of

    named = checkpoint_now(run, checkpoint)
    step, folder = weights_of(run, named)
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise RunError(f"{folder} cannot be read: {error.strerror or error}. Choose other weights.") from None
    return None if named is None else str(step), stamp([folder, *files], str(folder))


NAMES = {"base": "Before training", "tuned": "After training"}
LONGEST_SHOWN = 20_000
LONGEST_PROMPT, LONGEST_REFERENCE = 20_000, 4_000
PICKED = 60
"""Held-out prompts in the picker."""
MOST_MESSAGES = 40
"""Messages of each side on the screen."""
EVERY_SECONDS = 0.15
"""Seconds between two updates of an answer that is being generated."""
ENDS = {"stop": ("complete", "ok"), "length": ("cut at the limit", "fail"), "cancelled": ("stopped", "warn"),
        "tool_calls": ("last call not answered", "fail")}  # fmt: skip


def summary(answers: Mapping[str, Mapping[str, Any]], reference: Any, about: Mapping[str, Any]) -> str:
    """Show the rewards of both answers, how they ended, and the weights.

    `about` is the `ready` message of the process that loaded the model.
    """
    lines = [m.tag("div", m.tag("b", NAMES[side]) + _facts(answer), class_="row") for side, answer in answers.items()]
    model = f"{about.get('model')}, weights of step {about.get('step')}, on {about.get('device')}"
    note = m.note(str(about["note"]), "warn") if about.get("note") else Markup("")
    return m.page(m.panel(*lines, m.reference(reference), m.tag("small", model)), _verdict(answers), note)


def _facts(answer: Mapping[str, Any]) -> Markup:
    """Show the reward of an answer (if it has a reference), its components, its end and its length."""
    parts = []
    if isinstance(reward := answer.get("reward"), Mapping):
        parts += [m.tag("span", m.number(reward.get("total"), 2), class_="big"), m.tag("small", "reward")]
        components = (reward.get("components") or {}).items()
        parts += [m.chip(name, part.get("value"), str(part.get("status"))) for name, part in components]
    parts.append(m.badge(*ENDS.get(str(answer.get("finish")), ("ended", ""))))
    parts.append(
        m.tag("small", f"{m.number(answer.get('tokens'))} tokens in {m.seconds(float(answer.get('seconds') or 0))}")
    )
    return m.join(parts)


def _verdict(answers: Mapping[str, Mapping[str, Any]]) -> Markup:
    """Say which answer has the higher reward."""
    totals = {side: (answer.get("reward") or {}).get("total") for side, answer in answers.items()}
    base, tuned = totals.get("base"), totals.get("tuned")
    if not isinstance(base, (int, float)) or not isinstance(tuned, (int, float)):
        return Markup("")
    caution = "One prompt says little; the held-out score says more."
    if abs(base - tuned) < 1e-9:
        return m.note(f"Both answers earn the same reward. {caution}")
    better, level = ("after", "ok") if tuned > base else ("before", "warn")
    return m.note(f"The answer {better} training earns {abs(tuned - base):.2f} more. {caution}", level)


class Screen:
    """The event handlers of the screen. Every value comes from a browser and is validated."""

    def __init__(self, site: Site) -> None:
        self.site, self.loaded = site, Loaded(site)
        site.sessions.append(self.loaded.close)

    def ask(
        self,
        run_id: Any,
        which: Any,
        prompt: Any,
        picked: Any,
        reference: Any,
        seed: Any,
        heat: Any,
        most: Any,
        history: Any,
        request: gr.Request | None = None,
    ) -> Iterator[list[Any]]:
        """Ask both models. Yields [messages before, messages after, summary, stop button, history] as the answers grow."""
        before: list[Any] = history if isinstance(history, list) and len(history) == len(SIDES) else [[] for _ in SIDES]
        texts = dict.fromkeys(SIDES, "")
        hidden = gr.Button(visible=False)
        try:
            run = self.site.run(run_id)
            question = question_of(prompt, picked, reference)
            how = check_sampling({"seed": seed or 0, "temperature": heat, "max_tokens": most})
            session = self.loaded.session(run, checkpoint_of(which))
            words = question.get("prompt") or f"Held-out prompt {question['heldout']}"
            note = "" if session.alive else m.page(m.note("Loading the model in a process of its own …", "live"))
            yield [*_chats(before, words, texts), note, gr.Button(visible=True), gr.skip()]
            answers: dict[str, Mapping[str, Any]] = {}
            last = 0.0
            for event in session.ask(owner=_browser(request), **question, **how):
                side = str(event.get("side"))
                if event["event"] == "token":
                    texts[side] += event["text"]
                elif event["event"] == "answer":
                    texts[side], answers[side] = str(event.get("text") or "(empty)"), event
                elif event["event"] == "done":
                    chats = _chats(before, str(event.get("prompt")), texts)
                    yield [*chats, summary(answers, event.get("reference"), session.ready), hidden, chats]
                    return
                if event["event"] != "token" or time.monotonic() - last > EVERY_SECONDS:
                    last = time.monotonic()
                    yield [*_chats(before, words, texts), "", gr.skip(), gr.skip()]
        except KitError as problem:
            yield [gr.skip(), gr.skip(), m.error(problem), hidden, gr.skip()]

    def stop(self, run_id: Any, request: gr.Request | None = None) -> None:
        """End the answers to this browser. Those to other browsers, which share the model, continue."""
        if is_id(run_id) and (session := self.loaded.of(run_id)) is not None:
            session.cancel(_browser(request))

    def choices(self, run_id: Any) -> list[Any]:
        """Return the contents of the screen for a run that was chosen.

        [weights, status, held-out prompts, messages before, messages after, summary, history, inputs]
        """
        names: list[str] = []
        picker = gr.Dropdown(choices=[], value=None, visible=False)
        text = m.page(
            m.note("Your first question loads the model. It is unloaded after ten minutes without a question.")
        )
        try:
            run = self.site.run(run_id)
            names, picker = weights(run), held_out(run)
            if not names:
                text = m.empty("This run has no weights yet", "They come with its first checkpoint or its end.")
        except KitError as problem:
            text = NO_RUNS if not run_id else m.error(problem)
        return [gr.Dropdown(choices=names, value=names[0] if names else None), text, picker,
                [], [], "", [[], []], gr.Column(visible=bool(names))]  # fmt: skip


def held_out(run: RunDir) -> gr.Dropdown:
    """Return the list of the first held-out prompts, hidden if the run has none. Raises `RunError`."""
    rows = read(run.heldout)[:PICKED] if run.heldout.is_file() else []
    choices = [(f"{number}: {_line(row.get('prompt'))}", str(number)) for number, row in enumerate(rows, 1)]
    return gr.Dropdown(choices=choices, value=None, visible=bool(choices))


def _chats(before: Sequence[list[Any]], question: str, texts: Mapping[str, str]) -> list[list[dict[str, str]]]:
    """Return the messages of each side: `before`, the question, and the answer so far."""
    return [
        [
            *messages,
            {"role": "user", "content": question[:LONGEST_SHOWN]},
            {"role": "assistant", "content": texts[side][:LONGEST_SHOWN] or "…"},
        ][-MOST_MESSAGES:]
        for side, messages in zip(SIDES, before, strict=True)
    ]


def question_of(prompt: Any, picked: Any, reference: Any) -> dict[str, Any]:
    """Return a written prompt with an optional reference, or the number of a held-out one. Raises `ConfigError`."""
    text = prompt.strip() if isinstance(prompt, str) else ""
    if not text:
        if isinstance(picked, str) and picked.isascii() and picked.isdigit() and len(picked) < 10:
            return {"heldout": int(picked)}
        raise ConfigError("Write a prompt, or pick a held-out one.")
    if len(text) > LONGEST_PROMPT:
        raise ConfigError(f"The prompt has {len(text):,} characters; at most {LONGEST_PROMPT:,} are allowed.")
    answer = reference.strip() if isinstance(reference, str) else ""
    if len(answer) > LONGEST_REFERENCE:
        raise ConfigError(f"The reference has {len(answer):,} characters; at most {LONGEST_REFERENCE:,} are allowed.")
    return {"prompt": text, "reference": answer or None}


def _browser(request: gr.Request | None) -> str:
    """Return Gradio's name of the browser's session."""
    return str(getattr(request, "session_hash", None) or "nobody")


def _line(prompt: Any) -> str:
    """Return the last line of a prompt, or of its last message."""
    text = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return (lines[-1] if lines else "")[:90]


def build(site: Site, blocks: gr.Blocks) -> None:
    """Build the screen."""
    screen = Screen(site)
    named, history = run_box(), gr.State([[], []])
    with gr.Row(elem_classes="tight low"):
        chosen = gr.Dropdown([], label="Run", allow_custom_value=True, scale=3, elem_id="chat-run")
        which = gr.Dropdown([], label="Weights", allow_custom_value=True, scale=2, elem_id="chat-weights")
    status = gr.HTML(elem_id="chat-status")
    with gr.Column(visible=False) as asking:
        with gr.Row():
            # No Markdown, so that tags such as <think> are visible.
            chats = [
                gr.Chatbot(
                    [],
                    label=name,
                    height=360,
                    render_markdown=False,
                    buttons=["copy"],
                    elem_id=f"chat-{side}",
                    min_width=280,
                )
                for side, name in NAMES.items()
            ]
        about = gr.HTML(elem_id="chat-answers")
        prompt = gr.Textbox(
            label="Prompt", lines=2, max_lines=12, max_length=LONGEST_PROMPT, elem_id="chat-prompt",
            placeholder="Each prompt is asked on its own, after the run's system prompt. Shift+Enter asks.",
        )  # fmt: skip
        with gr.Row(elem_classes="tight low"):
            picked = gr.Dropdown(
                [], label="Or a held-out prompt", info="Never trained on, right answer known.",
                allow_custom_value=True, scale=4, min_width=240, elem_id="chat-picked",
            )  # fmt: skip
            ask = gr.Button("Ask both", variant="primary", size="md", scale=0, min_width=150, elem_id="chat-ask")
            stop = gr.Button("Stop", size="md", scale=0, min_width=100, visible=False, elem_id="chat-stop")
        with gr.Accordion("Right answer, seed, temperature, length", open=False), gr.Row():
            reference = gr.Textbox(
                label="Right answer", info="For the reward of your own prompt.", max_length=LONGEST_REFERENCE
            )
            seed = gr.Textbox("0", label="Seed", info="The same for both.", max_length=40, elem_id="chat-seed")
            heat = gr.Textbox(
                "0", label="Temperature", info="0: greedy, as in the held-out score.", placeholder="as in training",
                max_length=40, elem_id="chat-heat",
            )  # fmt: skip
            most = gr.Textbox(
                label="Longest answer (tokens)", placeholder="as in training",
                max_length=40, elem_id="chat-most",
            )  # fmt: skip
    inputs = [chosen, which, prompt, picked, reference, seed, heat, most, history]
    slow: dict[str, Any] = {"concurrency_limit": 4, "trigger_mode": "once"} | UNSEEN
    fresh = [which, status, picked, *chats, about, history, asking]
    first = blocks.load(
        lambda run_id: site.choices(run_id, has_weights), [named], [chosen], js=RUN_FROM_ADDRESS, **QUIET
    )
    for event in (first.then, chosen.input):
        event(screen.choices, [chosen], fresh, **QUIET)
    chosen.input(None, [chosen], [], js=to_address("chat"))
    picked.input(None, [], [prompt], js="() => ''")
    for event in (ask.click, prompt.submit):
        event(screen.ask, inputs, [*chats, about, stop, history], **slow)
        # A written prompt unselects the held-out one.
        event(lambda text: None if text.strip() else gr.skip(), [prompt], [picked], **QUIET)
    stop.click(screen.stop, [chosen], [], queue=False, api_visibility="private")
