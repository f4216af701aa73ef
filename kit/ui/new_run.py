"""New run: Model, Data, Reward Lab, Settings, Plan and Start, and beside them what it amounts to.

The draft (a preset and what was changed in it) lives in the browser; every screen part follows from it by one event.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from kit.config import preset_names
from kit.errors import KitError
from kit.ui import edits, side, step_data, step_lab, step_model, step_plan, step_settings
from kit.ui.draft import FIRST, Draft
from kit.ui.form import Fields, Key
from kit.ui.live import said
from kit.ui.site import Site

STEPS = ("1 Model", "2 Data", "3 Reward Lab", "4 Settings", "5 Plan & start")


class Screen:
    """What the steps share: the draft, the fields, the tabs."""

    def __init__(self, site: Site, blocks: gr.Blocks) -> None:
        self.site, self.blocks, self.fields = site, blocks, Fields()
        # The secret only has to be the same after a restart of the server; what is kept is no secret.
        self.draft = gr.BrowserState(Draft().as_dict(), storage_key="grpo-kit-draft", secret="grpo-kit")
        self.problem: gr.HTML
        self.tabs: gr.Tabs

    def read(self, value: Any) -> Draft:
        """The draft that a browser sent, with what was typed just before. Raises `KitError`."""
        return edits.latest(value)


def build(site: Site, blocks: gr.Blocks) -> None:
    """The screen."""
    screen = Screen(site, blocks)
    with gr.Row(elem_classes="tight low"):
        preset = gr.Dropdown(preset_names(), value=FIRST, label="Start from", scale=3, elem_id="preset")
        over = gr.Button("Start over", size="md", scale=1, min_width=110)
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
    last = gr.State(None)
    shown = [last, *screen.fields.components, preset]

    def edit(key: Key, place: int) -> Any:
        return lambda draft, value: edits.edited(draft, key, place, value)

    screen.fields.wire(edit, edits.recorded, [screen.draft], [screen.draft, screen.problem])
    preset.input(
        _from_preset,
        [preset, screen.draft],
        [screen.draft],
        queue=False,
        api_visibility="private",
        show_progress="hidden",
    )
    over.click(
        lambda: [edits.whole(Draft()), ""],
        [],
        [screen.draft, screen.problem],
        queue=False,
        api_visibility="private",
    )
    blocks.load(site.benches.warm, [], [], queue=False, api_visibility="private", show_progress="hidden")
    quiet: dict[str, Any] = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}
    screen.draft.change(
        lambda draft, before: _shown(screen, draft, before, edits.places(draft)), [screen.draft, last], shown, **quiet
    )
    blocks.load(lambda draft: _shown(screen, draft), [screen.draft], shown, **quiet)


def _next(screen: Screen, number: int) -> None:
    button = gr.Button(f"Next: {STEPS[number + 1][2:]}  →", variant="primary", size="md")
    button.click(None, [], [screen.tabs], js=f"() => ({{selected: {number + 1}, __type__: 'update'}})")


def _from_preset(name: Any, draft: Any) -> Any:
    """A preset as it is: changes of another would not fit it."""
    return said(lambda: edits.whole(Draft.read({"preset": name})), lambda text: gr.skip())


def _shown(screen: Screen, draft: Any, before: Any = None, edited: list[int] | None = None) -> list[Any]:
    """[what is shown now, *what each component shows]: all of it of a draft that took the place of another.

    After an edit only what differs from `before`, and not the components that the edits came from: whoever tabs on is
    typing in the next one already.
    """
    try:
        found = screen.read(draft)
    except KitError:
        return [gr.skip()] * (len(screen.fields.components) + 2)
    now = [*screen.fields.values(found), found.preset]
    if edited is None:
        return [now, *now]
    known = before if isinstance(before, list) and len(before) == len(now) else [None] * len(now)
    kept = set(edited)
    return [now, *(gr.skip() if at in kept or one == known[at] else one for at, one in enumerate(now))]
