"""New run: data, reward, model and training; beside them one verdict with Start, and the YAML of every setting."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import gradio as gr
from markupsafe import Markup

from kit.config import RunConfig, preset_names
from kit.errors import KitError
from kit.runs.files import duration
from kit.runs.lock import gpus
from kit.ui import lab, steps
from kit.ui import markup as m
from kit.ui.draft import FIRST, Draft, from_yaml
from kit.ui.form import Form, Sent
from kit.ui.results import in_words
from kit.ui.site import POLL_SECONDS, QUIET, UNSEEN, Site, address, run_box

STEPS = {
    "1 Data": steps.data_step,
    "2 Reward": lab.build,
    "3 Training": steps.train_step,
}


def build(site: Site, blocks: gr.Blocks) -> None:
    """The screen."""
    form = Form(site, blocks)
    form.learns = gr.HTML(elem_id="verdict-learns", render=False)
    form.suggested = gr.Button(visible=False, size="sm", render=False, elem_id="verdict-change")
    # Not in a tab: what stands in one that was never opened is not there. It ticks only while something is waited for.
    form.timer = gr.Timer(POLL_SECONDS, active=False)
    form.training = run_box()
    with gr.Row(elem_classes="tight low"):
        form.preset = gr.Dropdown(preset_names(), value=FIRST, label="Start from", scale=3, elem_id="preset")
        over = gr.Button("Start over", size="md", scale=1, min_width=110)
    with gr.Row(elem_classes="tight middle"):
        form.aside = gr.HTML(elem_id="aside")
        form.back = gr.Button("Restore", size="md", visible=False, scale=0, min_width=150, elem_id="aside-back")
    with gr.Row(equal_height=False):
        with gr.Column(scale=7, min_width=320):
            form.said = gr.HTML()
            with gr.Tabs() as form.tabs:
                for number, (title, step) in enumerate(STEPS.items()):
                    with gr.Tab(title, id=number) as each:
                        step(form)
                    each.select(None, [], [], js=STEP_TO_ADDRESS.format(number + 1))
        with gr.Column(scale=4, min_width=300, elem_classes="side"):
            state, command, yaml = _side(form)
    blocks.load(None, [], [form.tabs], js=STEP_FROM_ADDRESS)
    blocks.load(None, [], [], js=OTHER_TAB)
    form.replaces(form.preset.input, _from_preset, [form.preset])
    form.replaces(over.click, lambda sent: (Draft().instead_of(sent.valid()), ""))
    form.replaces(form.back.click, _bring_back)
    form.wire(lambda sent: written(sent), [form.said, state, command, yaml])


STEP_FROM_ADDRESS = """() => {
  const step = Number(new URLSearchParams(window.location.search).get('step'));
  window.stepIsRead = true;
  return {...(step >= 1 && step <= STEPS ? {selected: step - 1} : {}), __type__: 'update'};
}""".replace("STEPS", str(len(STEPS)))
STEP_TO_ADDRESS = "() => window.stepIsRead && history.replaceState(null, '', '/new?step={}')"
"""JavaScript: a reload opens the step that was open. A tab is also selected when the page is built."""


OTHER_TAB = """() => addEventListener('storage', event => {
  if (event.key !== 'grpo-kit-draft' || document.querySelector('#other-tab')) return;
  const words = 'New run is open in another tab, too: the last edit counts.';
  document.querySelector('#verdict').insertAdjacentHTML(
    'afterbegin', `<div class="k" id="other-tab"><div class="note warn">${words}</div></div>`);
})"""
"""JavaScript: two tabs of a browser share the draft, and the one that is edited last replaces the other's."""


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


CHECKING = m.page(m.tag("p", "Checking …", class_="dim"))


def _side(form: Form) -> tuple[gr.HTML, gr.Textbox, gr.Code]:
    """Beside every step: the verdict with Start, the command, the YAML. Gives what `written` fills."""
    site = form.site
    with gr.Column(elem_id="verdict", elem_classes="verdict-card"):
        state = gr.HTML()
        reward, fits = gr.HTML(CHECKING, elem_id="verdict-reward"), gr.HTML(CHECKING, elem_id="verdict-fits")
        fixes = gr.State([])
        apply = gr.Button("Make these changes", visible=False, size="sm")
        now = gr.Button("Plan it now", visible=False, size="sm", elem_id="plan-now")
        form.learns.render()
        form.suggested.render()
        form.add("run.id", "Name of the run", kind="text", elem_id="run-name", placeholder="from preset and time")
        start = gr.Button("Start", variant="primary", size="lg", elem_id="start")
        note = gr.HTML(elem_id="start-said")
        place = gr.Textbox(visible="hidden", elem_classes="hidden-box", label="place")
    command = gr.Textbox(
        label="The same on the command line", lines=1, max_lines=3, interactive=False, buttons=["copy"],
        elem_id="command",
    )  # fmt: skip
    with gr.Accordion("YAML: every setting", open=False, elem_id="yaml-fold") as fold:
        yaml = gr.Code(language="yaml", lines=12, max_lines=28, interactive=True, elem_id="yaml", label="run.yaml")
        take = gr.Button("Apply this YAML", size="sm")
    fold.expand(None, js=SCROLLED)
    form.replaces(take.click, _from_text, [yaml])
    # A verdict is of the draft that it was made for: it goes as soon as something is edited. The answer to a click on Start
    # stays until the next one: the last letter of a name may be checked after the click.
    form.draft.change(lambda: [CHECKING, CHECKING], [], [reward, fits], **QUIET)
    form.follows(lambda draft: scores(site, draft), reward, concurrency_limit=4)
    plan: dict[str, Any] = {"concurrency_limit": 4} | UNSEEN
    planned = [fits, fixes, apply, now]
    form.follows(functools.partial(measured, site), *planned, concurrency_limit=4)
    for event, beside in ((form.training.change, False), (now.click, True)):
        event(lambda: CHECKING, [], [fits], **QUIET)
        event(functools.partial(measured, site, beside=beside), [form.draft], planned, **plan)
    form.replaces(apply.click, lab.made, [fixes])
    starting = m.page(m.note("Checking data, reward and memory, then it starts …", "live"))
    start.click(None, [], [note], js=f"() => {json.dumps(starting)}")
    form.on(start.click, lambda sent: steps.begun(site, sent.draft), [], [note, place], concurrency_limit=2,
            trigger_mode="once", show_progress="hidden", show_progress_on=[])  # fmt: skip
    place.change(None, [place], [], js="(place) => { if (place) window.location.href = place; }")
    return state, command, yaml


def _from_text(sent: Sent, text: Any) -> tuple[Draft, str]:
    return from_yaml(str(text), sent.form.site.settings).instead_of(sent.valid()), ""


def written(sent: Sent) -> list[Any]:
    """[what the last click said, what is wrong or that nothing is, command, YAML, the draft's text or None]."""
    settings = sent.form.site.settings
    try:
        draft = sent.draft()
    except KitError as problem:
        return ["", m.error(problem), "", "", None]
    message = "" if draft != sent.before() else gr.skip()
    command = draft.command(settings)
    try:
        config = draft.config(settings)
    except KitError as problem:
        return [message, m.error(problem), command, gr.skip(), draft.as_text()]
    changes = len(draft.changes)
    text = f"Settings are valid: {draft.preset}" + (f", {changes} change{'s' * (changes != 1)}." if changes else ".")
    return [message, m.page(m.tag("p", text, class_="dim")), command, config.to_yaml(), draft.as_text()]


def scores(site: Site, value: Any) -> str:
    """What the reward says of the first row: whether it scores, tells right from wrong, and can be cheated."""
    try:
        config = Draft.read(value).config(site.settings)
    except KitError:
        return ""  # it is said above
    try:
        check = site.benches.ask("check", config)
    except KitError as problem:
        return m.page(m.note(problem, "fail"))
    if check["problem"]:
        return m.page(m.note(f"The reward cannot score the first row. {check['problem']}", "fail"))
    right, wrong = check["right"], check["wrong"]
    lines = [m.note(f"Scored the first row: right {m.number(right, 2)}, wrong {m.number(wrong, 2)}.", "ok")]
    if right is not None and wrong is not None and right <= wrong:
        lines = [
            m.note(
                f"A right answer earns {right:.2f}, a wrong one {wrong:.2f}: nothing to learn from the answer.", "warn"
            )
        ]
    elif check["paid"]:
        lines.append(
            m.note(f"{check['paid']} of {check['tried']} known cheats pay; see 2 Reward, Try to cheat.", "warn")
        )
    elif check["tried"]:
        lines.append(m.note(f"None of {check['tried']} known cheats pays.", "ok"))
    return m.page(m.tag("div", m.join(lines), class_="stack-notes"))


def measured(site: Site, value: Any, *, beside: bool = False) -> list[Any]:
    """[whether it fits and how long it takes, overrides that make it fit, their button, the button that plans beside a run].

    While a run trains nothing is planned unless `beside` is set: the child that plans would take its time and memory.
    """
    hidden = gr.Button(visible=False)
    try:
        draft = Draft.read(value)
        config = draft.config(site.settings)
        if not beside and (live := site.live()):
            return [m.page(m.note(_who_trains(site, live[0]), "live")), [], hidden, gr.Button(visible=True)]
    except KitError:
        return ["", [], hidden, hidden]
    try:
        plan = site.benches.ask("plan", config)
    except KitError as problem:
        return [m.page(m.note(problem, "fail")), [], hidden, hidden]
    changes = [fix["override"] for fix in plan["fixes"] or []]
    button = gr.Button(visible=bool(changes), value=f"Make {len(changes)} change{'s' * (len(changes) != 1)} that fit")
    return [m.page(memory_card(config, plan)), changes, button, hidden]


def _who_trains(site: Site, run_id: str) -> Markup:
    """Which run trains, until when, and what is waited for."""
    left = site.run(run_id).status().get("eta_seconds")
    until = f" until about {m.when(time.time() + left)}" if isinstance(left, (int, float)) and left > 0 else ""
    start = "waits for the GPU" if gpus() else "shares the cores"
    link = m.tag("a", run_id, href=address("run", run_id))
    return m.join(
        [link, f" trains{until}. Memory and time are planned once it has ended. A run that starts now {start}."]
    )


def memory_card(config: RunConfig, plan: dict[str, Any]) -> Markup:
    """Planned peak against what is free, what would make it fit, and how long it will take."""
    memory = plan["memory"]
    peak, room = memory["peak_bytes"], max(1, plan["room_bytes"])
    level, word = (
        ("fail", "Does not fit") if not plan["fits"] else ("warn", "Tight") if peak > 0.9 * room else ("ok", "Fits")
    )
    fits = m.note(f"{word}: {m.gib(peak)} of {m.gib(room)} free on {plan['place']}.", level)
    seconds_of = plan["run_seconds"]
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in seconds_of.items() if seconds)
    time = m.note(f"Takes about {duration(sum(seconds_of.values()))}: {parts}. A rough estimate.")
    fixes = []
    if plan["fixes"]:
        fixes = [
            m.table(["change", "what it costs"], [[in_words([fix["override"]]), fix["harm"]] for fix in plan["fixes"]])
        ]
    elif not plan["fits"]:
        fixes = [
            m.note("No change of these settings makes it fit: choose a smaller model or a larger machine.", "fail")
        ]
    notes = [m.note(text[0].upper() + text[1:], "warn") for text in plan["notes"]]
    return m.tag("div", m.join([fits, *fixes, time, *notes]), class_="stack-notes")
