"""New run: Model, Data, Reward Lab, Settings, Plan and Start, and beside them what it amounts to.

The draft (a preset and what was changed in it) lives in the browser; every screen part follows from it by one event.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from kit.config import preset_names
from kit.errors import KitError
from kit.ui import edits, side, step_data, step_lab, step_model, step_plan, step_settings
from kit.ui import markup as m
from kit.ui.draft import FIRST, Draft
from kit.ui.form import Key
from kit.ui.live import said
from kit.ui.screen import Screen
from kit.ui.site import Site

STEPS = ("1 Model", "2 Data", "3 Reward Lab", "4 Settings", "5 Plan & start")


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
                for number, (title, step) in enumerate(
                    zip(STEPS, (step_model, step_data, step_lab, step_settings, step_plan), strict=True)
                ):
                    with gr.Tab(title, id=number):
                        step.build(screen)
                        if number + 1 < len(STEPS):
                            _next(screen, number)
        with gr.Column(scale=4, min_width=300, elem_classes="side"):
            side.build(screen)
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
