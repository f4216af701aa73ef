"""Chat: base and tuned side by side, the same prompt and seed, words as they come, the run's reward of each answer.

From the bottom up: the models that are kept loaded, how answers look, the screen.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gradio as gr
import psutil
from markupsafe import Markup

from kit.config import RunConfig, load_config
from kit.errors import ConfigError, KitError, RunError
from kit.runs.files import human_size
from kit.runs.lock import gpus
from kit.runs.store import ALIVE, RunDir
from kit.ui import markup as m
from kit.ui.export import checkpoint_of, weights
from kit.ui.home import Reading
from kit.ui.site import QUIET, RUN_FROM_ADDRESS, UNSEEN, Site, is_id, number_of, run_box, stamp, to_address, whole_of

if TYPE_CHECKING:
    from kit.chat.client import ChatSession

MOST_SESSIONS = 2
IDLE_SECONDS = 600.0
PROCESS_BYTES = 800 * 1024**2
"""Bytes that Python and torch need beside the weights."""
ROOM_LEFT = 1.25
"""A model is loaded only if so many times its size is free."""
BYTES_A_WEIGHT = {"float32": 4, "float16": 2, "bfloat16": 2, "auto": 2}


class Pool:
    """Sessions by run and weights."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, tuple[str, ChatSession]] = OrderedDict()

    def session(self, run: RunDir, checkpoint: str | None) -> ChatSession:
        """A session on these weights as they are now, loaded or not; other weights of the same run take its place.

        Raises `KitError`.
        """
        from kit.chat.client import open_chat

        checkpoint, key = resolved(run, checkpoint)
        with self._lock:
            known = self._sessions.get(run.id)
            if known is not None and known[0] == key:
                self._sessions.move_to_end(run.id)
                if known[1].alive:
                    return known[1]
        self.check_memory(run)
        with self._lock:
            known = self._sessions.get(run.id)
            if known is not None and known[0] == key:  # ended when it was idle, or another browser was faster
                return known[1]
            fresh = open_chat(run, checkpoint, idle=IDLE_SECONDS)
            old = [self._sessions.pop(run.id)] if known is not None else []
            while len(self._sessions) >= MOST_SESSIONS:
                old.append(self._sessions.popitem(last=False)[1])
            self._sessions[run.id] = (key, fresh)
        for _, session in old:
            session.close()
        return fresh

    def loaded(self, run_id: str) -> ChatSession | None:
        """The run's session while its process lives."""
        with self._lock:
            known = self._sessions.get(run_id)
        return known[1] if known is not None and known[1].alive else None

    def close_idle(self) -> None:
        """Ends the sessions that nobody waits for an answer of; the next question loads the model again."""
        with self._lock:
            sessions = [session for _, session in self._sessions.values()]
        for session in sessions:
            if session.alive and not session.answering:
                session.close()

    def check_memory(self, run: RunDir) -> None:
        """Raises `RunError` where a run is training and the model would not fit beside it."""
        live = [other.id for other, status in self.site.store.statuses() if status["state"] in ALIVE]
        if not live:
            return
        config = load_config(run.config)
        try:
            plan = self.site.benches.ask("plan", config, name=run.id, given=[])
            weights = int(plan["model"]["parameters"])
        except (KitError, KeyError, TypeError):
            raise RunError(
                f"'{live[0]}' is training, and how much memory this model takes cannot be told; wait until it has ended."
            ) from None
        self._check_room(live[0], needed_bytes(config, weights))

    def _check_room(self, live: str, needed: int) -> None:
        free = {"memory": psutil.virtual_memory().available}
        cards = Reading().gpus()
        own = next((int(name) for name in gpus() if name.isdigit() and int(name) < len(cards)), 0)
        if cards and all(figure.isdigit() for figure in cards[own][2:4]):
            free["GPU memory"] = (int(cards[own][3]) - int(cards[own][2])) * 1024**2
        for name, room in free.items():
            if room < needed:
                raise RunError(
                    f"'{live}' is training, and there would not be room for this model beside it: about "
                    f"{human_size(needed)} are needed and {human_size(room)} of {name} are free. Stop the run or wait."
                )


def resolved(run: RunDir, checkpoint: str | None) -> tuple[str | None, str]:
    """The checkpoint that is meant now, and a text that changes with its files: `best`, `last` and a result that was
    written anew are other weights under the same name. Raises `RunError`."""
    from kit.evaluation.results import checkpoint_now, weights_of

    named = checkpoint_now(run, checkpoint)
    step, folder = weights_of(run, named)
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise RunError(f"{folder} cannot be read: {error.strerror or error}. Choose other weights.") from None
    return None if named is None else str(step), stamp([folder, *files], str(folder))


def needed_bytes(config: RunConfig, weights: int) -> int:
    """Bytes that both sides take while they answer: one model and its adapter, or two where every weight was trained."""
    size: float = BYTES_A_WEIGHT[config.model.dtype] if gpus() or config.model.dtype != "auto" else 4
    if config.model.lora is None:
        size = 2 * 4
    elif config.model.load_in_4bit:
        size = 0.6
    return int(ROOM_LEFT * (weights * size + PROCESS_BYTES))


LONGEST_SHOWN = 20_000
NAMES = {"base": "Base, as it was", "tuned": "Tuned, after this run"}


def _no_runs() -> str:
    return m.empty(
        "No trained model yet", m.join([m.tag("a", "Train one", href="/new"), " first; then both can be asked here."])
    )


def _not_loaded(has_weights: bool) -> str:
    """Before the model is loaded."""
    if not has_weights:
        return m.empty("This run has no weights yet", "They come with its first checkpoint, or at its end.")
    return m.page(m.note("The model is loaded by the first question, and given back after ten minutes without one."))


def _loaded(about: Mapping[str, Any], total: int | None, shown: int, search: str) -> str:
    """What is loaded."""
    words = f"Loaded: {about.get('model')} with the weights of step {about.get('step')}, on {about.get('device')}."
    if total is not None:
        words += (
            f" {total:,} held-out prompts"
            + (f" with '{search}'" if search else "")
            + (f", the first {shown} in the list." if shown < total else ".")
        )
    note = m.note(str(about["note"]), "warn") if about.get("note") else Markup("")
    return m.page(m.note(words, "ok"), note)


def _waiting(text: str) -> str:
    return m.page(m.panel(m.tag("p", text, class_="dim")))


def answer_pair(
    sides: Sequence[str],
    answers: Mapping[str, Mapping[str, Any]],
    done: Mapping[str, Any] | None,
    how: Mapping[str, Any],
) -> str:
    """The prompt once it is known, and the answers side by side."""
    parts = []
    if done is not None:
        reference = done.get("reference")
        known = (
            m.tag("div", m.tag("small", "reference ") + m.tag("code", str(reference)[:400]))
            if reference is not None
            else Markup("")
        )
        parts.append(
            m.panel(
                m.tag("div", str(done.get("prompt"))[:LONGEST_SHOWN], class_="prompt"),
                known,
                m.tag("small", _made_with(how)),
            )
        )
        parts.append(_verdict(answers))
    parts.append(_columns(sides, answers, how.get("step")))
    return m.page(m.tag("div", m.join(parts), class_="stack-notes"))


def _made_with(how: Mapping[str, Any]) -> str:
    """Seed, temperature, limit and step; what is not known is left out."""
    heat = how.get("temperature")
    parts = [
        f"seed {how['seed']} on both sides",
        *([f"temperature {heat:g}" + (" (greedy)" if heat == 0 else "")] if isinstance(heat, (int, float)) else []),
        *([f"at most {how['max_tokens']:,} tokens"] if isinstance(how.get("max_tokens"), int) else []),
        *([f"weights of step {how['step']}"] if how.get("step") is not None else []),
    ]
    return ", ".join(parts)


def _verdict(answers: Mapping[str, Mapping[str, Any]]) -> Markup:
    """Which answer has the higher reward."""
    totals = {side: (one.get("reward") or {}).get("total") for side, one in answers.items()}
    base, tuned = totals.get("base"), totals.get("tuned")
    if not isinstance(base, (int, float)) or not isinstance(tuned, (int, float)):
        return Markup("")
    if abs(base - tuned) < 1e-9:
        return m.note(
            "The reward makes no difference between the two answers. One prompt says little; the held-out score says more."
        )
    better, gap = ("tuned", tuned - base) if tuned > base else ("base", base - tuned)
    return m.note(
        f"The reward likes the {better} answer better, by {gap:.2f}. One prompt says little; the held-out score says more.",
        "ok" if better == "tuned" else "warn",
    )


def _columns(sides: Sequence[str], answers: Mapping[str, Mapping[str, Any]], step: Any = None) -> Markup:
    """One panel a side; `step` is that of the tuned weights."""
    cards = (_answer(side, answers.get(side), step) for side in sides)
    return m.tag("div", m.join(cards), class_="pair", aria_live="polite")


def _answer(side: str, one: Mapping[str, Any] | None, step: Any) -> Markup:
    name = NAMES[side] + (f", step {step}" if side == "tuned" and step is not None else "")
    if one is None:
        return m.panel(m.tag("b", name), m.tag("p", "waits for its turn …", class_="dim"))
    text = str(one.get("text") or "")[:LONGEST_SHOWN]
    badge = m.badge("writing", "live") if one.get("writing") else _ended(one)
    head = m.tag("div", m.tag("b", name) + badge, class_="spread")
    return m.panel(
        head,
        _reward(one.get("reward")),
        m.tag("div", text or ("…" if one.get("writing") else "(empty)"), class_="said", tabindex="0"),
        _facts(one),
    )


def _ended(one: Mapping[str, Any]) -> Markup:
    words = {"stop": ("complete", "ok"), "length": ("cut at the limit", "fail"), "cancelled": ("stopped", "warn"),
             "tool_calls": ("last call not answered", "fail")}  # fmt: skip
    return m.badge(*words.get(str(one.get("finish")), ("ended", "")))


def _facts(one: Mapping[str, Any]) -> Markup:
    if one.get("writing") or one.get("tokens") is None:
        return Markup("")
    return m.tag("small", f"{m.number(one.get('tokens'))} tokens in {m.seconds(float(one.get('seconds') or 0))}")


def _reward(found: Any) -> Markup:
    """The total and a chip a component; nothing where no reference is known."""
    if not isinstance(found, Mapping):
        return Markup("")
    chips = [
        m.tag(
            "span",
            m.join(
                [
                    name,
                    " ",
                    m.tag("b", m.number(part.get("value"), 2)),
                    " ",
                    m.tag("small", str(part.get("status")).replace("_", " ")),
                ]
            ),
            class_=f"chip {part.get('status')}",
        )
        for name, part in (found.get("components") or {}).items()
    ]
    total = m.tag("span", m.number(found.get("total"), 2), class_="big")
    return m.tag("div", total + m.tag("small", "reward") + m.join(chips), class_="row")


LONGEST_PROMPT, LONGEST_REFERENCE = 20_000, 4_000
MOST_TOKENS = 4096
PICKED = 60
"""Held-out prompts in the picker at once."""
EVERY_SECONDS = 0.15
"""Between two pictures of an answer that is being written."""
BOTH, BASE, TUNED = "base and tuned", "base only", "tuned only"
SIDES = {BOTH: ("base", "tuned"), BASE: ("base",), TUNED: ("tuned",)}


def _with_stop_button(answers: Callable[..., Iterator[str]]) -> Callable[..., Iterator[list[Any]]]:
    """Yields [the answers, growing; the button that stops them, while they come]. Gradio reads the wrapped parameters."""

    @functools.wraps(answers)
    def shown(*boxes: Any) -> Iterator[list[Any]]:
        for text in answers(*boxes):
            yield [text, gr.Button(visible=True)]
        yield [gr.skip(), gr.Button(visible=False)]

    return shown


class Screen:
    """The event handlers of the screen. Every value comes from a browser and is validated."""

    def __init__(self, site: Site) -> None:
        self.site, self.pool = site, Pool(site)
        site.idle.append(self.pool.close_idle)

    def load(self, run_id: Any, which: Any, search: Any) -> Iterator[list[Any]]:
        """Loads the model, and fills the picker: [status, picker]."""
        yield [
            m.page(
                m.panel(
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
        yield [_loaded(about, rows["total"], len(choices), wanted), gr.Dropdown(choices=choices, value=None)]

    @_with_stop_button
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
    ) -> Iterator[str]:
        answers: dict[str, dict[str, Any]] = {}
        try:
            run = self.site.run(run_id)
            question = asked(prompt, picked, reference)
            how = sampling(seed, heat, most)
            sides = SIDES.get(side if isinstance(side, str) else BOTH, SIDES[BOTH])
            session = self.pool.session(run, checkpoint_of(which))
            if not session.alive:
                yield _waiting("Loading the model first …")
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
                    yield answer_pair(sides, answers, done, used(session.ready, how))
        except KitError as problem:
            ended = {name: one | {"writing": False} for name, one in answers.items() if one.get("text")}
            yield m.page(_columns(tuple(ended), ended)) + m.error(problem) if ended else m.error(problem)

    def stop(self, run_id: Any, request: gr.Request | None = None) -> None:
        """Ends the answer that this browser is given; those of others, who share the model, go on."""
        if is_id(run_id) and (session := self.pool.loaded(run_id)) is not None:
            session.cancel(_browser(request))

    def status(self, run_id: Any) -> Any:
        """What is loaded, after a question that may have loaded other weights."""
        session = self.pool.loaded(run_id) if is_id(run_id) else None
        return gr.skip() if session is None else _loaded(session.ready, None, 0, "")

    def choices(self, run_id: Any) -> list[Any]:
        """[weights, status, picker]"""
        try:
            run = self.site.run(run_id)
            found = weights(run)
        except KitError as problem:
            text = _no_runs() if not run_id else m.error(problem)
            return [gr.Dropdown(choices=[], value=None), text, gr.Dropdown(choices=[], value=None)]
        session = self.pool.loaded(run.id)
        text = _not_loaded(bool(found)) if session is None else _loaded(session.ready, None, 0, "")
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
        "concurrency_limit": 4,
        "trigger_mode": "once",
    } | UNSEEN
    blocks.load(lambda wanted: _choices(site, wanted), [named], [chosen], js=RUN_FROM_ADDRESS, **QUIET).then(
        screen.choices, [chosen], [which, status, picked], **QUIET
    )
    chosen.input(screen.choices, [chosen], [which, status, picked], **QUIET)
    chosen.input(None, [chosen], [], js=to_address("chat"))
    load.click(screen.load, [chosen, which, search], [status, picked], **slow)
    search.submit(screen.load, [chosen, which, search], [status, picked], **slow)
    picked.input(lambda: "", [], [prompt], **QUIET)
    for event in (ask.click, prompt.submit):
        event(screen.ask, inputs, [shown, stop], **slow).then(screen.status, [chosen], [status], **QUIET)
    stop.click(screen.stop, [chosen], [], queue=False, api_visibility="private")


def _choices(site: Site, wanted: Any) -> Any:
    """Runs with weights."""
    try:
        found = [run.id for run in site.runs() if run.adapter.is_dir() or run.checkpoints]
    except RunError:
        found = []
    return gr.Dropdown(choices=found, value=wanted if is_id(wanted) else next(iter(found), None))
