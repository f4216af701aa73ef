"""New run: Model, Data, Reward Lab, Settings, Plan and Start, and beside them what it amounts to."""

from __future__ import annotations

from typing import Any

import gradio as gr
from markupsafe import Markup

from kit.config import RunConfig, preset_names
from kit.errors import KitError
from kit.ui import lab, steps
from kit.ui import markup as m
from kit.ui.draft import FIRST, Draft, from_yaml
from kit.ui.form import Form, Sent
from kit.ui.site import QUIET, Site

STEPS = {
    "1 Model": steps.model_step,
    "2 Data": steps.data_step,
    "3 Reward Lab": lab.build,
    "4 Settings": steps.settings_step,
    "5 Plan & start": steps.plan_step,
}


def build(site: Site, blocks: gr.Blocks) -> None:
    """The screen."""
    form = Form(site, blocks)
    with gr.Row(elem_classes="tight low"):
        form.preset = gr.Dropdown(preset_names(), value=FIRST, label="Start from", scale=3, elem_id="preset")
        over = gr.Button("Start over", size="md", scale=1, min_width=110)
    with gr.Row(elem_classes="tight middle"):
        form.aside = gr.HTML(elem_id="aside")
        form.back = gr.Button("Bring them back", size="md", visible=False, scale=0, min_width=150, elem_id="aside-back")
    with gr.Row(equal_height=False):
        with gr.Column(scale=7, min_width=320):
            form.said, faults = gr.HTML(), gr.HTML()
            with gr.Tabs() as form.tabs:
                for number, (title, step) in enumerate(STEPS.items()):
                    with gr.Tab(title, id=number):
                        step(form)
                        if number + 1 < len(STEPS):
                            _next(form.tabs, number + 1)
        with gr.Column(scale=4, min_width=300, elem_classes="side"):
            state, command, yaml = _side(form)
    blocks.load(None, [], [form.tabs], js=STEP_FROM_ADDRESS)
    form.replaces(form.preset.input, _from_preset, [form.preset])
    form.replaces(over.click, lambda sent: (Draft().instead_of(sent.valid()), ""))
    form.replaces(form.back.click, _bring_back)
    form.wire(lambda sent: written(sent), [form.said, faults, state, command, yaml])
    blocks.load(site.benches.warm, [], [], **QUIET)


STEP_FROM_ADDRESS = """() => {
  const step = Number(new URLSearchParams(window.location.search).get('step'));
  return {...(step >= 1 && step <= STEPS ? {selected: step - 1} : {}), __type__: 'update'};
}""".replace("STEPS", str(len(STEPS)))
"""JavaScript for `/new?step=2`."""


def _next(tabs: gr.Tabs, number: int) -> None:
    button = gr.Button(f"Next: {list(STEPS)[number][2:]}  →", variant="primary", size="md")
    button.click(None, [], [tabs], js=f"() => ({{selected: {number}, __type__: 'update'}})")


def _from_preset(sent: Sent, name: Any) -> tuple[Draft, str]:
    """A preset as it is: changes of another would not fit it, and are kept aside."""
    return Draft.read({"preset": name}).instead_of(sent.valid()), ""


def _bring_back(sent: Sent) -> tuple[Draft | None, str]:
    """What was put aside takes the place of the draft, which is put aside if it has changes."""
    old = sent.valid()
    return (old.aside.instead_of(old) if old.aside else None), ""


SCROLLED = """() => {
  const waiting = setInterval(() => {
    const lines = document.querySelector('#yaml .cm-scroller');
    if (lines) { clearInterval(waiting); lines.setAttribute('tabindex', '0'); }
  }, 50);
}"""
"""The editor's lines can be scrolled by keyboard: Gradio's component lets nothing that scrolls have the focus."""


def _side(form: Form) -> tuple[gr.HTML, gr.Textbox, gr.Code]:
    """Beside every step: whether it can be run, its memory, the exact command, the YAML. Gives what `written` fills."""
    memory = gr.HTML(m.page(m.panel(m.tag("b", "Memory and time"), m.tag("p", "Counting …", class_="dim"))))
    state = gr.HTML()
    command = gr.Textbox(
        label="Command that does the same", lines=2, max_lines=8, interactive=False, buttons=["copy"], elem_id="command"
    )
    with gr.Accordion("YAML", open=False, elem_id="yaml-fold") as fold:
        gr.HTML(m.page(m.tag("small", "Live, every default written out. Paste or edit here, then take it over.")))
        yaml = gr.Code(language="yaml", lines=12, max_lines=28, interactive=True, elem_id="yaml", label="run.yaml")
        take = gr.Button("Take over this YAML", size="sm")
    fold.expand(None, js=SCROLLED)
    form.replaces(take.click, _from_text, [yaml])
    form.follows(lambda draft: measured(form.site, draft), memory, concurrency_limit=4)
    return state, command, yaml


def _from_text(sent: Sent, text: Any) -> tuple[Draft, str]:
    return from_yaml(str(text), sent.form.site.settings).instead_of(sent.valid()), ""


def written(sent: Sent) -> list[Any]:
    """[what the last click said, what is wrong with boxes, what is wrong with all or that nothing is, command, YAML, the
    draft's text or None]."""
    settings = sent.form.site.settings
    try:
        draft, faults = sent.edited()
    except KitError as problem:
        return ["", "", m.error(problem), "", "", None]
    said = "" if faults or draft != sent.before() else gr.skip()
    wrong = "".join(map(m.error, faults))
    command = draft.command(settings)
    try:
        config = draft.config(settings)
    except KitError as problem:
        return [said, wrong, m.error(problem), command, gr.skip(), draft.as_text()]
    changes = len(draft.changes)
    text = f"{draft.preset}, {changes} change{'s' * (changes != 1)}. The schema accepts it."
    return [said, wrong, m.page(m.note(text, "ok")), command, config.to_yaml(), draft.as_text()]


def measured(site: Site, value: Any) -> str:
    """The memory bar."""
    try:
        draft = Draft.read(value)
        config = draft.config(site.settings)
        found = site.benches.plan(config, draft.preset, draft.overrides())
    except KitError as problem:
        return m.page(m.panel(m.tag("b", "Memory and time"), m.tag("p", _short(problem), class_="dim")))
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
    return m.panel(head, scale, line, time)
