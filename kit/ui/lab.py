"""Step 3, the Reward Lab: what the reward says of real rows before anything is trained.

Pasted completions and fresh ones of the base model, part by part, with what was extracted; the known hacks; and the
signal check, which says whether there is anything to learn.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gradio as gr

import rewards
from kit.config import RunConfig
from kit.errors import KitError
from kit.ui import lab_view
from kit.ui import markup as m
from kit.ui.children import Job
from kit.ui.draft import Draft
from kit.ui.edits import late
from kit.ui.edits import whole as replacing
from kit.ui.lab_view import MOST_PROMPTS, MOST_TRIES
from kit.ui.site import poll, said

if TYPE_CHECKING:
    from kit.ui.screen import Screen

SIGNAL = "kit.planning.signal"
SEPARATOR = re.compile(r"^\s*-{3,}\s*$", re.MULTILINE)
MOST_COMPLETIONS, LONGEST = 32, 50_000
MOST_ROWS, MOST_EACH = 8, 16
NEVER = m.empty(
    "Not checked yet",
    "The signal check samples the model on real rows before you pay for a run: is it sometimes right, do the rewards of a "
    "group differ, is it cut off? It ends in one sentence and, where it can, the one change to make.",
)


def build(screen: Screen) -> None:
    """The step."""
    with gr.Row():
        screen.fields.add("reward.preset", label="Reward", info="")
        screen.fields.add("reward.params", label="Its parameters", info="YAML, e.g. {format_weight: 0.1}")
    about = gr.HTML()
    for event in (screen.draft.change, screen.blocks.load):
        event(
            lambda draft: described(draft),
            [screen.draft],
            [about],
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
    place, row = _row(screen)
    with gr.Tabs():
        with gr.Tab("Score"):
            asked = _score(screen, place)
        with gr.Tab("Let it write"):
            _write(screen, place)
        with gr.Tab("Try to cheat"):
            asked.append(_cheat(screen, place))
        with gr.Tab("Signal check"):
            _signal(screen)
    gr.on(
        [button.click for button in asked], lambda draft, at: prompt(screen, draft, at), [screen.draft, place], [row],
        js=late(2), api_visibility="private", show_progress="hidden", concurrency_limit=4,
    )  # fmt: skip


def described(value: Any) -> str:
    """What the preset rewards, in its own words."""
    try:
        name = Draft.read(value).tree()["reward"]["preset"]
        text = rewards.describe(name).strip() if name else ""
    except (KitError, rewards.RewardsError) as problem:
        return m.error(problem)
    if not text:
        return ""
    _, _, words = text.partition("\n\n")
    first, _, rest = words.strip().partition("\n")
    title = m.join(
        m.tag("code", part) if at % 2 else part for at, part in enumerate(first.replace("``", "`").split("`"))
    )
    return m.page(m.tag("details", m.tag("summary", m.tag("b", title)) + m.tag("pre", rest.strip(), class_="said")))


def _row(screen: Screen) -> tuple[gr.Number, gr.HTML]:
    """The row that is worked on: its number, and where it is shown."""
    with gr.Row(elem_classes="tight low"):
        place = gr.Number(0, label="Training row", precision=0, minimum=0, scale=1, min_width=120, elem_id="lab-row")
        show = gr.Button("Show the row", size="md", scale=1, min_width=150)
        other = gr.Button("Next row", size="md", scale=1, min_width=120)
    shown = gr.HTML(m.page(m.tag("p", "The row is read when you first ask.", class_="dim")))
    listen: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": 4}
    place.change(lambda draft, at: prompt(screen, draft, at), [screen.draft, place], [shown], **listen)
    other.click(lambda at: whole(at) + 1, [place], [place], queue=False, api_visibility="private")
    show.click(lambda draft, at: prompt(screen, draft, at), [screen.draft, place], [shown], js=late(2), **listen)
    return place, shown


def whole(value: Any, most: int = 10_000_000) -> int:
    """A whole number from 0 on, whatever was sent."""
    return (
        min(most, max(0, int(value))) if isinstance(value, (int, float)) and value == value and abs(value) < 1e15 else 0
    )


def prompt(screen: Screen, value: Any, at: Any) -> str:
    """One training row."""
    try:
        found = screen.site.benches.ask("rows", _config(screen, value), start=whole(at), count=1)
    except KitError as problem:
        return m.error(problem)
    if not found["rows"]:
        return m.error(f"There is no training row {whole(at)}.")
    return lab_view.row(found["rows"][0])


def _config(screen: Screen, value: Any) -> RunConfig:
    return screen.read(value).config(screen.site.settings)


def _score(screen: Screen, place: gr.Number) -> list[gr.Button]:
    """Returns the buttons that read the row."""
    box = gr.Textbox(
        label="Completions",
        info="As the model would write them; a line of --- stands between two. They are scored as one group.",
        lines=7,
        max_lines=20,
        elem_id="completions",
        placeholder="<think>2 + 3 = 5</think><answer>5</answer>\n---\nIt is 6.",
    )
    with gr.Row(elem_classes="tight"):
        score = gr.Button("Score them", variant="primary", size="md", min_width=130)
        examples = gr.Button("Fill in examples for this row", size="md", min_width=200)
    out = gr.HTML(
        m.empty("Nothing scored yet", "Paste completions, or fill in examples, and see each part of the reward decide.")
    )
    listen: dict[str, Any] = {"api_visibility": "private", "concurrency_limit": 4}
    inputs = [screen.draft, place, box]

    def marked(draft: Any, at: Any, text: Any) -> str:
        return scored(screen, draft, at, text)

    score.click(marked, inputs, [out], js=late(3), **listen)
    examples.click(
        lambda draft, at: filled(screen, draft, at), [screen.draft, place], [box, out], js=late(2), **listen
    ).then(marked, inputs, [out], js=late(3), **listen)
    return [score, examples]


def completions(text: Any) -> list[str]:
    """The pasted texts. Raises `KitError` for none, or for more than is taken."""
    given = text if isinstance(text, str) else ""
    parts = [part.strip("\n") for part in SEPARATOR.split(given)]
    if not given.strip():
        raise KitError("There is nothing to score: write a completion, or fill in examples.")
    if len(parts) > MOST_COMPLETIONS or len(given) > LONGEST:
        raise KitError(
            f"At most {MOST_COMPLETIONS} completions and {LONGEST:,} letters at once; these are {len(parts)}, {len(given):,}."
        )
    return parts


def scored(screen: Screen, value: Any, at: Any, text: Any) -> str:
    """The pasted completions, part by part."""
    try:
        found = screen.site.benches.ask("score", _config(screen, value), row=whole(at), completions=completions(text))
    except KitError as problem:
        return m.error(problem)
    return lab_view.group(found)


def filled(screen: Screen, value: Any, at: Any) -> list[Any]:
    """A right and a wrong answer in the reward's style, a right one without it, and one that was cut."""
    try:
        texts = screen.site.benches.ask("examples", _config(screen, value), row=whole(at))
    except KitError as problem:
        return [gr.skip(), m.error(problem)]
    return ["\n---\n".join(texts), gr.skip()]


def _write(screen: Screen, place: gr.Number) -> None:
    gr.HTML(m.page(m.tag("p", "The model as it is now answers this row and the ones after it, sampled as in training.",
                         class_="dim")))  # fmt: skip
    with gr.Row():
        rows = gr.Slider(1, MOST_ROWS, 2, step=1, label="Rows")
        each = gr.Slider(2, MOST_EACH, 4, step=1, label="Completions each")
    _job(
        screen,
        SIGNAL,
        "Write and score",
        [place, rows, each],
        lambda at, n, k: {
            "rows": list(range(whole(at), whole(at) + min(MOST_ROWS, max(1, whole(n))))),
            "k": min(MOST_EACH, max(2, whole(k))),
        },
        lambda result: (lab_view.groups(result), []),
        m.empty("Nothing written yet", "Fresh completions show what the reward will meet in the first step."),
    )


def _cheat(screen: Screen, place: gr.Number) -> gr.Button:
    """Returns the button that reads the row."""
    gr.HTML(m.page(m.tag("p", "Known ways to earn a reward without solving anything, tried on this row: training finds each that "
                         "works. None may reach what an honest right answer earns.", class_="dim")))  # fmt: skip
    with gr.Row():
        right = gr.Textbox(label="Right answer", info="Empty: the row's reference.")
        wrong = gr.Textbox(label="Wrong answer", info="Empty: one is made up.")
        style = gr.Dropdown(
            ["", *sorted(rewards_styles())],
            value="",
            label="How answers are written",
            info="Empty: as the reward's own examples.",
        )
    with gr.Row(elem_classes="tight"):
        run = gr.Button("Try all of them", variant="primary", size="md")
        many = gr.Button("Audit several rows", size="md")
    out = gr.HTML(
        m.empty("Not tried yet", "Some thirty hacks take a second; an audit of several rows takes up to a minute.")
    )
    many.click(
        lambda draft, given: audited(screen, draft, given),
        [screen.draft, style],
        [out],
        js=late(2),
        api_visibility="private",
        concurrency_limit=4,
    )
    run.click(
        lambda draft, at, *given: cheated(screen, draft, at, *given),
        [screen.draft, place, right, wrong, style],
        [out],
        js=late(5),
        api_visibility="private",
        concurrency_limit=4,
    )
    return run


def rewards_styles() -> list[str]:
    from rewards.hacks import STYLES

    return list(STYLES)


def cheated(screen: Screen, value: Any, at: Any, *given: Any) -> str:
    """The known hacks, scored."""
    named: dict[str, Any] = {
        name: text
        for name, text in zip(("right", "wrong", "style"), given, strict=True)
        if isinstance(text, str) and len(text) < 2000
    }
    try:
        found = screen.site.benches.ask("hacks", _config(screen, value), row=whole(at), **named)
    except KitError as problem:
        return m.error(problem)
    return lab_view.hacks(found)


def audited(screen: Screen, value: Any, style: Any) -> str:
    """Echoes, constants, hedges, near misses, other rows' answers and slow ones, on rows drawn at random."""
    try:
        found = screen.site.benches.ask("audit", _config(screen, value), style=style if isinstance(style, str) else "")
    except KitError as problem:
        return m.error(problem)
    return lab_view.audited(found)


def _signal(screen: Screen) -> None:
    with gr.Row():
        prompts = gr.Slider(4, MOST_PROMPTS, 16, step=4, label="Prompts", info="More make the intervals narrower.")
        each = gr.Slider(
            2, MOST_TRIES, 8, step=1, label="Completions each", info="The group size of training tells most."
        )
    _job(
        screen,
        SIGNAL,
        "Will it learn?",
        [prompts, each],
        lambda n, k: {"prompts": min(MOST_PROMPTS, max(2, whole(n))), "k": min(MOST_TRIES, max(2, whole(k)))},
        lambda result: (lab_view.signal(result), lab_view.actions_of(result)),
        NEVER,
        {"--prompts": prompts, "--k": each},
    )


def _job(
    screen: Screen,
    module: str,
    title: str,
    inputs: list[Any],
    ask: Any,
    show: Any,
    nothing: str,
    sliders: Mapping[str, gr.Slider] | None = None,
) -> None:
    """A button that starts a child, the place where its progress and result stand, and a button for what it suggests.

    `sliders` are those that a suggestion sets, by the option of the command line that they stand for.
    """
    site = screen.site
    with gr.Row(elem_classes="tight"):
        start = gr.Button(title, variant="primary", size="md")
        end = gr.Button("Stop", variant="stop", size="md", visible=False)
    out = gr.HTML(nothing)
    apply = gr.Button("Make this change", variant="secondary", size="md", visible=False)
    key, seen, change = gr.State(""), gr.State(""), gr.State([])

    def begin(draft: Any, *given: Any) -> list[Any]:
        try:
            config = _config(screen, draft)
            more = ask(*given)
            name = f"{job_prefix(module, config)}{sorted(more.items())}"
            site.jobs.start(name, module, {"config": config.model_dump(mode="json"), **more})
        except KitError as problem:
            return ["", "", m.error(problem), gr.Button(visible=False), gr.Button(visible=False), []]
        return [name, *tick(name, "")]

    def again(draft: Any) -> list[Any]:
        """After a reload: the check of this configuration, where there was one."""
        try:
            job = site.jobs.latest(job_prefix(module, _config(screen, draft)))
        except KitError:
            job = None
        return [gr.skip()] * 6 if job is None else [job.key, *tick(job.key, "")]

    def tick(name: Any, before: Any) -> list[Any]:
        job = site.jobs.get(name)
        if job is None or job.stamp == before:
            return [gr.skip()] * 5
        html, changes = progress(job, show)
        suggest = gr.Button(visible=bool(changes), value=lab_view.in_words(changes))
        return [job.stamp, html, gr.Button(visible=job.state == "running"), suggest, changes]

    outputs = [seen, out, end, apply, change]
    start.click(begin, [screen.draft, *inputs], [key, *outputs], js=late(1 + len(inputs)), queue=False,
                api_visibility="private")  # fmt: skip
    screen.blocks.load(
        again, [screen.draft], [key, *outputs], queue=False, show_progress="hidden", api_visibility="private"
    )
    poll(tick, [key, seen], outputs)
    end.click(lambda name: site.jobs.stop(name), [key], [], queue=False, api_visibility="private")
    named = dict(sliders or {})
    apply.click(
        lambda draft, given: made(screen, draft, given, list(named)),
        [screen.draft, change],
        [screen.draft, screen.problem, *named.values()],
        js=late(2),
        queue=False,
        api_visibility="private",
    )


def made(screen: Screen, value: Any, given: Any, sliders: list[str]) -> list[Any]:
    """[the draft, what was done, *values of the sliders] after what a check suggests."""
    actions = [one for one in given if isinstance(one, str)][:8] if isinstance(given, list) else []
    numbers = lab_view.numbers_of(actions)
    overrides = [one for one in actions if not one.startswith("--")]
    done = m.page(m.note(f"{lab_view.in_words(actions)}: done. Check again to see what it does.", "ok"))
    found: list[Any] = said(
        lambda: [replacing(screen.read(value).apply(overrides), value) if overrides else gr.skip(), done],
        lambda why: [gr.skip(), m.error(why)],
    )
    return [*found, *(numbers.get(name, gr.skip()) for name in sliders)]


def job_prefix(module: str, config: RunConfig) -> str:
    """The same question about the same configuration has the same key in every browser."""
    return f"{module}:{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]}:"


def progress(job: Job, show: Any) -> tuple[str, list[str]]:
    """(what a job looks like now, overrides that it suggests)."""
    if job.state == "running":
        line = job.line or "Starting: Python and torch are loaded first …"
        return m.page(m.card(m.tag("b", "Working"), m.tag("p", m.tag("code", line), class_="dim"))), []
    if job.state == "done":
        html, changes = show(job.result)
        return html, changes
    if job.state == "stopped":
        return m.page(m.note("Stopped.")), []
    return m.error(job.error), []
