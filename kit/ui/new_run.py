"""The New run screen: data, reward and training in tabs, and a side column with the checks, Start and the YAML."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import gradio as gr
from markupsafe import Markup

from kit.config import RunConfig, preset_names
from kit.errors import ConfigError, KitError
from kit.runs.files import duration
from kit.runs.lock import gpus
from kit.runs.store import seconds_worked
from kit.ui import lab, steps
from kit.ui import markup as m
from kit.ui.draft import FIRST, Draft, from_yaml
from kit.ui.form import Form, Sent
from kit.ui.outcome import seconds_left
from kit.ui.results import in_words
from kit.ui.site import POLL_SECONDS, UNSEEN, Site, address, run_box

STEPS = {"1 Data": steps.data_step, "2 Reward": lab.build, "3 Training": steps.train_step}


def build(site: Site, blocks: gr.Blocks) -> None:
    """Build the screen."""
    form = Form(site, blocks)
    form.learns = gr.HTML(elem_id="verdict-learns", render=False)
    form.suggested = gr.Button(visible=False, size="sm", render=False, elem_id="verdict-change")
    # Outside the tabs, whose contents Gradio renders only when they are opened. The timer rests unless a check or run is on.
    form.timer = gr.Timer(POLL_SECONDS, active=False)
    form.training = run_box()
    with gr.Row(elem_classes="tight low"):
        form.preset = gr.Dropdown(preset_names(), value=FIRST, label="Start from", scale=3, elem_id="preset")
        start_over = gr.Button("Start over", size="md", scale=1, min_width=110)
    with gr.Row(elem_classes="tight middle"):
        form.aside = gr.HTML(elem_id="aside")
        form.back = gr.Button("Restore", size="md", visible=False, scale=0, min_width=150, elem_id="aside-back")
    with gr.Row(equal_height=False):
        with gr.Column(scale=7, min_width=320):
            form.message = gr.HTML()
            with gr.Tabs() as form.tabs:
                for number, (title, step) in enumerate(STEPS.items()):
                    with gr.Tab(title, id=number) as tab:
                        step(form)
                    tab.select(None, [], [], js=STEP_TO_ADDRESS.format(number + 1))
        with gr.Column(scale=4, min_width=300, elem_classes="side"):
            state, command, yaml = _side(form)
    blocks.load(None, [], [form.tabs], js=STEP_FROM_ADDRESS)
    blocks.load(None, [], [], js=OTHER_TAB)
    form.replaces(form.preset.input, _from_preset, [form.preset])
    form.replaces(start_over.click, lambda sent: (Draft().instead_of(sent.valid()), ""))
    form.replaces(form.back.click, _bring_back)
    form.wire(lambda sent: show_draft(sent), [form.message, state, command, yaml])


STEP_FROM_ADDRESS = """() => {
  const step = Number(new URLSearchParams(window.location.search).get('step'));
  window.stepIsRead = true;
  return {...(step >= 1 && step <= STEPS ? {selected: step - 1} : {}), __type__: 'update'};
}""".replace("STEPS", str(len(STEPS)))
STEP_TO_ADDRESS = "() => window.stepIsRead && history.replaceState(null, '', '/new?step={}')"
"""JavaScript that writes the open step into the address. Ignored until `STEP_FROM_ADDRESS` has run, as Gradio fires it early."""


OTHER_TAB = """() => addEventListener('storage', event => {
  if (event.key !== 'grpo-kit-draft' || document.querySelector('#other-tab')) return;
  const words = 'New run is open in another tab, too: the last edit counts.';
  document.querySelector('#verdict').insertAdjacentHTML(
    'afterbegin', `<div class="k" id="other-tab"><div class="note warn">${words}</div></div>`);
})"""
"""JavaScript that warns if New run is open in two tabs: they share one draft, and the last edit overwrites the other tab's."""


def _from_preset(sent: Sent, name: Any) -> tuple[Draft, str]:
    """Return the preset without changes. Changes of another preset would not fit, so the old draft is put aside."""
    return Draft.read({"preset": name}).instead_of(sent.valid()), ""


def _bring_back(sent: Sent) -> tuple[Draft | None, str]:
    """Restore the draft that was put aside. The current draft is put aside if it has changes."""
    old = sent.valid()
    return (old.aside.instead_of(old) if old.aside else None), ""


SCROLLED = """() => {
  const waiting = setInterval(() => {
    const lines = document.querySelector('#yaml .cm-scroller');
    if (lines) { clearInterval(waiting); lines.setAttribute('tabindex', '0'); }
  }, 50);
}"""
"""JavaScript that makes the YAML editor scrollable by keyboard: in Gradio's component no scrolling element can have the focus."""


CHECKING = m.page(m.tag("p", "Checking …", class_="dim"))


def _side(form: Form) -> tuple[gr.HTML, gr.Textbox, gr.Code]:
    """Build the side column: checks, Start, command and YAML. Return the three components that `show_draft` fills."""
    site = form.site
    with gr.Column(elem_id="verdict", elem_classes="verdict-card"):
        state = gr.HTML()
        reward, fits = gr.HTML(CHECKING, elem_id="verdict-reward"), gr.HTML(CHECKING, elem_id="verdict-fits")
        fixes = gr.State([])
        apply = gr.Button("Make these changes", visible=False, size="sm")
        plan_now = gr.Button("Plan it now", visible=False, size="sm", elem_id="plan-now")
        form.learns.render()
        form.suggested.render()
        form.add("run.id", "Name of the run", kind="text", elem_id="run-name", placeholder="from preset and time")
        start = gr.Button("Start", variant="primary", size="lg", elem_id="start")
        note = gr.HTML(elem_id="start-said")
        target = gr.Textbox(visible="hidden", elem_classes="hidden-box", label="place")
    command = gr.Textbox(
        label="The same on the command line", lines=1, max_lines=3, interactive=False, buttons=["copy"],
        elem_id="command",
    )  # fmt: skip
    with gr.Accordion("YAML: every setting", open=False, elem_id="yaml-fold") as fold:
        yaml = gr.Code(language="yaml", lines=12, max_lines=28, interactive=True, elem_id="yaml", label="run.yaml")
        apply_yaml = gr.Button("Apply this YAML", size="sm")
    fold.expand(None, js=SCROLLED)
    form.replaces(
        apply_yaml.click,
        lambda sent, text: (from_yaml(str(text), sent.form.site.settings).instead_of(sent.valid()), ""),
        [yaml],
    )
    # An edit clears the results, because they belong to the previous draft. The browser does it: an answer of the server could
    # arrive after the new results.
    form.draft.change(None, [], [reward, fits], js=f"() => {json.dumps([CHECKING] * 2)}")
    form.sent.change(None, [], [note], js="() => ''")
    form.follows(lambda draft: check_reward(site, draft), reward, form.scored, concurrency_limit=4)
    outputs = [fits, fixes, apply, plan_now, form.planned]
    planned = run_box()
    form.follows(
        lambda draft, sent: [*plan_run(site, draft), sent], *outputs, planned, inputs=[form.sent], concurrency_limit=4
    )
    # A plan takes seconds: one of a previous draft is not shown.
    current = f"(planned, sent) => planned === sent ? {{__type__: 'update'}} : {json.dumps(CHECKING)}"
    planned.change(None, [planned, form.sent], [fits], js=current)
    for event, while_training in ((form.training.change, False), (plan_now.click, True)):
        event(None, [], [fits], js=f"() => {json.dumps(CHECKING)}")
        call = functools.partial(plan_run, site, while_training=while_training)
        event(call, [form.draft], outputs, concurrency_limit=4, **UNSEEN)
    form.replaces(apply.click, lab.apply_actions, [fixes])
    starting = m.page(m.note("Checking data, reward and memory, then it starts …", "live"))
    start.click(None, [], [note], js=f"() => {json.dumps(starting)}")
    form.on(start.click, lambda sent: steps.start_run(site, sent.draft), [], [note, target], concurrency_limit=2,
            trigger_mode="once", show_progress="hidden", show_progress_on=[])  # fmt: skip
    target.change(None, [target], [], js="(address) => { if (address) window.location.href = address; }")
    return state, command, yaml


def show_draft(sent: Sent) -> list[Any]:
    """Return [message of the last click, whether the settings are valid, command, YAML, draft as JSON or None]."""
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


def check_reward(site: Site, value: Any) -> list[Any]:
    """Describe the reward on the first row: whether it scores, separates right from wrong, and pays known attacks.

    Returns [the description, the draft if its reward scores the row].
    """
    try:
        config = Draft.read(value).config(site.settings)
    except KitError:
        return ["", None]  # `show_draft` reports the error
    try:
        check = site.benches.ask("check", config)
        if check["problem"]:
            raise ConfigError(f"The reward cannot score the first row. {check['problem']}")
    except KitError as problem:
        return [m.error(problem), None]
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
            m.note(f"{check['paid']} of {check['tried']} known attacks are paid. See 2 Reward, Try attacks.", "warn")
        )
    elif check["tried"]:
        lines.append(m.note(f"None of {check['tried']} known attacks is paid.", "ok"))
    return [m.page(m.tag("div", m.join(lines), class_="stack-notes")), value]


def plan_run(site: Site, value: Any, *, while_training: bool = False) -> list[Any]:
    """Return [memory and time of the run, overrides that make it fit, their button, the "Plan it now" button, the planned draft].

    While another run trains, nothing is planned unless `while_training` is set: planning would slow that run down.
    """
    hidden = gr.Button(visible=False)
    try:
        draft = Draft.read(value)
        config = draft.config(site.settings)
        if not while_training and (live := site.live()):
            return [m.page(m.note(_training_note(site, live[0]), "live")), [], hidden, gr.Button(visible=True), None]
    except KitError:
        return ["", [], hidden, hidden, None]
    site.end_sessions()
    try:
        plan = site.benches.ask("plan", config)
    except KitError as problem:
        return [m.error(problem), [], hidden, hidden, None]
    changes = [fix["override"] for fix in plan["fixes"] or []]
    button = gr.Button(visible=bool(changes), value=f"Make {len(changes)} change{'s' * (len(changes) != 1)} that fit")
    return [m.page(memory_card(config, plan)), changes, button, hidden, value]


def _training_note(site: Site, run_id: str) -> Markup:
    """Name the run that trains, its expected end, and what a new run would do meanwhile."""
    status = site.run(run_id).status()
    left, with_steps = seconds_left(status, status.get("step") or 0, seconds_worked(status))
    until = f" until about {m.when(time.time() + left)}" if with_steps and left > 0 else ""
    start = "waits for the GPU" if gpus() else "shares the cores"
    words = f" trains{until}. Memory and time are planned once it has ended. A run that starts now {start}."
    return m.join([m.tag("a", run_id, href=address("run", run_id)), words])


def memory_card(config: RunConfig, plan: dict[str, Any]) -> Markup:
    """Show the planned peak memory, the free memory, changes that make the run fit, and the expected time."""
    memory = plan["memory"]
    peak, room = memory["peak_bytes"], max(1, plan["room_bytes"])
    level, label = (
        ("fail", "Does not fit") if not plan["fits"] else ("warn", "Tight") if peak > 0.9 * room else ("ok", "Fits")
    )
    fits = m.note(f"{label}: {m.gib(peak)} of {m.gib(room)} free on {plan['place']}.", level)
    lines = []
    if plan["fixes"]:
        changes = [[in_words([fix["override"]]), fix["harm"]] for fix in plan["fixes"]]
        lines.append(m.table(["change", "what it costs"], changes))
    elif plan["starts"] and not plan["fits"]:
        lines.append(
            m.note("None of the changes tried makes it fit: choose a smaller model or a larger machine.", "fail")
        )
    if plan["fits"] and plan["starts"]:
        seconds = plan["run_seconds"]
        parts = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items() if value)
        lines.append(
            m.note(f"Takes about {duration(sum(seconds.values()))}: {parts}. Estimated from FLOPs, often too low.")
        )
    lines += [m.note(text[0].upper() + text[1:], "warn") for text in plan["notes"]]
    return m.tag("div", m.join([fits, *lines]), class_="stack-notes")
