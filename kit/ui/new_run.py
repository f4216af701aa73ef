"""New run: Model, Data, Reward Lab, Settings, Plan and Start, and beside them what it amounts to.

The draft (a preset and what was changed in it) lives in the browser; every screen part follows from it by one event.
"""

from __future__ import annotations

from typing import Any

import gradio as gr
from markupsafe import Markup

from kit.config import RunConfig, preset_names
from kit.errors import KitError
from kit.ui import edits, lab, steps
from kit.ui import markup as m
from kit.ui.draft import FIRST, Draft, Key, from_yaml
from kit.ui.edits import instead, late
from kit.ui.screen import Screen
from kit.ui.site import Site, said


def build_side(screen: Screen) -> None:
    """The column."""
    memory = gr.HTML(m.page(m.card(m.tag("b", "Memory and time"), m.tag("p", "Counting …", class_="dim"))))
    state = gr.HTML()
    command = gr.Textbox(
        label="Command that does the same", lines=2, max_lines=8, interactive=False, buttons=["copy"], elem_id="command"
    )
    with gr.Accordion("YAML", open=False):
        gr.HTML(m.page(m.tag("small", "Live, every default written out. Paste or edit here, then take it over.")))
        yaml = gr.Code(language="yaml", lines=12, max_lines=28, interactive=True, elem_id="yaml", label="run.yaml")
        take = gr.Button("Take over this YAML", size="sm")
    site = screen.site

    def follow(draft: Any) -> list[Any]:
        return written(screen, draft)

    def count(draft: Any) -> str:
        return measured(screen, draft)

    for event in (screen.draft.change, screen.blocks.load):
        event(
            follow,
            [screen.draft],
            [state, command, yaml],
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
        event(
            count,
            [screen.draft],
            [memory],
            show_progress="hidden",
            api_visibility="private",
            trigger_mode="always_last",
            concurrency_limit=4,
        )
    take.click(
        lambda draft, text: said(
            lambda: [instead(from_yaml(str(text), site.settings), draft), ""], lambda why: [gr.skip(), m.error(why)]
        ),
        [screen.draft, yaml],
        [screen.draft, screen.problem],
        js=late(2),
        queue=False,
        api_visibility="private",
    )


def written(screen: Screen, value: Any) -> list[Any]:
    """[what is wrong or that nothing is, command, YAML]."""
    settings = screen.site.settings
    try:
        draft = screen.read(value)
    except KitError as problem:
        return [m.error(problem), "", ""]
    command = draft.command(settings)
    try:
        config = draft.config(settings)
    except KitError as problem:
        return [m.error(problem), command, gr.skip()]
    changes = len(draft.changes)
    text = f"{draft.preset}, {changes} change{'s' * (changes != 1)}. The schema accepts it."
    return [m.page(m.note(text, "ok")), command, config.to_yaml()]


def measured(screen: Screen, value: Any) -> str:
    """The memory bar."""
    try:
        draft = screen.read(value)
        config = draft.config(screen.site.settings)
        found = screen.site.benches.plan(config, draft.preset, draft.overrides())
    except KitError as problem:
        return m.page(m.card(m.tag("b", "Memory and time"), m.tag("p", _short(problem), class_="dim")))
    return m.page(memory_card(config, found))


def _short(problem: KitError) -> str:
    text = str(problem)
    return text if len(text) < 300 else f"{text[:299]}…"


def memory_card(config: RunConfig, found: dict[str, Any]) -> Markup:
    """Planned peak against what is free, and how long it will take."""
    peak, room = found["memory"]["peak_bytes"], max(1, found["room_bytes"])
    share = peak / room
    level, word = (
        ("fail", "does not fit") if not found["fits"] else ("warn", "tight") if share > 0.9 else ("ok", "fits")
    )
    head = m.tag("div", m.tag("b", "Memory and time") + m.badge(word, level), class_="spread")
    scale = m.bar(share, level, f"{share:.0%} of the free memory")
    line = m.tag(
        "p",
        f"{m.gib(peak)} of {m.gib(room)} free on {found['place']}, highest in: {found['memory']['phase']}",
        class_="num",
    )
    step = found["seconds_per_step"]["step"]
    time = m.tag(
        "p",
        f"{found['model']['parameters'] / 1e6:,.1f} M weights. Estimated, not measured: {m.seconds(step)} a step, "
        f"{m.duration(3600 * found['hours'])} for {config.optimisation.steps} steps with completions of full length. "
        "The signal check (step 3) measures how long completions take; where they differ, believe the check.",
        class_="dim",
    )
    return m.card(head, scale, line, time)


STEPS = ("1 Model", "2 Data", "3 Reward Lab", "4 Settings", "5 Plan & start")
BUILDERS = (steps.model_step, steps.data_step, lab.build, steps.settings_step, steps.plan_step)


def build(site: Site, blocks: gr.Blocks) -> None:
    """The screen."""
    screen = Screen(site, blocks)
    with gr.Row(elem_classes="tight low"):
        preset = gr.Dropdown(preset_names(), value=FIRST, label="Start from", scale=3, elem_id="preset")
        over = gr.Button("Start over", size="md", scale=1, min_width=110)
    with gr.Row(elem_classes="tight middle"):
        put_aside = gr.HTML(elem_id="aside")
        back = gr.Button("Bring them back", size="md", visible=False, scale=0, min_width=150, elem_id="aside-back")
    with gr.Row(equal_height=False):
        with gr.Column(scale=7, min_width=320):
            screen.problem = gr.HTML()
            with gr.Tabs() as screen.tabs:
                for number, (title, step) in enumerate(zip(STEPS, BUILDERS, strict=True)):
                    with gr.Tab(title, id=number):
                        step(screen)
                        if number + 1 < len(STEPS):
                            _next(screen, number)
        with gr.Column(scale=4, min_width=300, elem_classes="side"):
            build_side(screen)
    # What the boxes are made with: only what differs is written, as somebody may type before the first answer is there.
    first = [None, *screen.fields.values(Draft()), FIRST]
    last = gr.State(first)
    shown = [last, *screen.fields.components, preset, put_aside, back]
    answer = gr.Textbox(visible="hidden", elem_classes="hidden-box", label="answer")

    def edit(key: Key, place: int) -> Any:
        return lambda draft, value: edits.answered(draft, key, place, value)

    quiet: dict[str, Any] = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}
    screen.fields.wire(edit, edits.recorded, [screen.draft], [answer])
    answer.change(None, [answer, screen.draft, screen.problem], [screen.draft, screen.problem], js=edits.TAKEN)
    replaced = [screen.draft, screen.problem]
    preset.input(_from_preset, [screen.draft, preset], replaced, js=edits.late(2), **quiet)
    over.click(lambda draft: [edits.instead(Draft(), draft), ""], [screen.draft], replaced, js=edits.late(), **quiet)
    back.click(_bring_back, [screen.draft], replaced, js=edits.late(), **quiet)
    blocks.load(site.benches.warm, [], [], **quiet)
    screen.draft.change(
        lambda draft, before: _shown(screen, draft, before, edits.places(draft)), [screen.draft, last], shown, **quiet
    )
    blocks.load(lambda draft: _shown(screen, draft, first, []), [screen.draft], shown, **quiet)


def _next(screen: Screen, number: int) -> None:
    button = gr.Button(f"Next: {STEPS[number + 1][2:]}  →", variant="primary", size="md")
    button.click(None, [], [screen.tabs], js=f"() => ({{selected: {number + 1}, __type__: 'update'}})")


def _from_preset(draft: Any, name: Any) -> list[Any]:
    """A preset as it is: changes of another would not fit it, and are kept aside."""
    return list(
        said(lambda: [edits.instead(Draft.read({"preset": name}), draft), ""], lambda text: [gr.skip(), m.error(text)])
    )


def _bring_back(draft: Any) -> list[Any]:
    """What was put aside takes the place of the draft, which is put aside if it has changes."""

    def work() -> list[Any]:
        found = edits.aside(draft)
        if found is None:
            return [gr.skip(), ""]
        new = edits.instead(found, draft)
        if edits.aside(new) == found:
            del new["aside"]
        return [new, ""]

    return list(said(work, lambda text: [gr.skip(), m.error(text)]))


def _put_aside(draft: Any) -> list[Any]:
    """[what was put aside, the button that brings it back]."""
    try:
        found = edits.aside(draft)
    except KitError:
        found = None
    if found is None:
        return ["", gr.Button(visible=False)]
    number = len(found.changes)
    words = f"Your {number} change{'s' * (number != 1)} of '{found.preset}' {'are' if number != 1 else 'is'} put aside."
    return [
        m.page(m.note(words, "warn")),
        gr.Button(visible=True, value="Bring them back" if number != 1 else "Bring it back"),
    ]


def _shown(screen: Screen, draft: Any, before: Any = None, edited: list[int] | None = None) -> list[Any]:
    """[what is shown now and its turn, *what each component shows, *what was put aside]: all of it of a draft that took the
    place of another, as a box may hold what is no value and no draft has.

    After an edit, or when the page was loaded, only what differs from `before`, and not the components that the edits came
    from: whoever tabs on is typing in the next one already.
    """
    try:
        found = screen.read(draft)
    except KitError:
        return [gr.skip()] * (len(screen.fields.components) + 4)
    now, turn = [*screen.fields.values(found), found.preset], edits.turn(draft)
    known = before if isinstance(before, list) and len(before) == len(now) + 1 else []
    if not known or (edited is None and known[0] not in (None, turn)):
        return [[turn, *now], *now, *_put_aside(draft)]
    kept = set(edited or [])
    written = (gr.skip() if at in kept or one == known[at + 1] else one for at, one in enumerate(now))
    return [[turn, *now], *written, *_put_aside(draft)]
