"""Step 3, the Reward Lab: what the reward says of real rows before anything is trained.

Pasted completions and fresh ones of the base model, part by part, with what was extracted; the known hacks; and the
signal check, which says whether there is anything to learn.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import gradio as gr
from markupsafe import Markup

import rewards
from kit.config import RunConfig
from kit.errors import KitError
from kit.runs.files import one_line
from kit.ui import markup as m
from kit.ui.children import Job
from kit.ui.draft import Draft
from kit.ui.form import Form, Sent
from kit.ui.site import QUIET, poll
from rewards.hacks import STYLES

SIGNAL = "kit.planning.signal"
SEPARATOR = re.compile(r"^\s*-{3,}\s*$", re.MULTILINE)
MOST_COMPLETIONS, LONGEST = 32, 50_000
MOST_ROWS, MOST_EACH = 8, 16
READING: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": 4}
LEVELS = {"will learn": "ok"} | dict.fromkeys(("too easy", "sample more", "borderline", "slow reward"), "warn")
"""How a verdict of the signal check is coloured; any other is a failure."""
SHOWN_HACKS = 10
MOST_PROMPTS, MOST_TRIES = 256, 32
"""What the sliders of the signal check go up to."""
SAMPLES = {"--prompts": ("{} prompts", "prompts", MOST_PROMPTS), "--k": ("{} completions each", "k", MOST_TRIES)}
"""Options of doctor that stand for a slider of the page: words, name in the result, the most."""
COMMANDS = {
    "; try it with: grpo-kit reward test": "; try it in the tab Score",
    "grpo-kit reward list": "see the list at the top of this step",
}
"""What a verdict says of the command line, and where that stands on the page."""
RATES = {
    "pass@1": "right at the first try (pass@1)",
    "spread_share": "groups whose rewards differ: what GRPO learns from",
    "zero_spread_share": "groups without a lesson",
    "truncated_share": "cut at the token limit",
    "format_share": "not in the asked format",
    "failure_share": "reward failed",
}
NEVER = m.empty(
    "Not checked yet",
    "The signal check samples the model on real rows before you pay for a run: is it sometimes right, do the rewards of a "
    "group differ, is it cut off? It ends in one sentence and, where it can, the one change to make.",
)


def build(form: Form) -> None:
    """The step."""
    with gr.Row():
        form.add("reward.preset", label="Reward", info="")
        form.add("reward.params", label="Its parameters", info="YAML, e.g. {format_weight: 0.1}")
    about = gr.HTML()
    form.follows(described, about, queue=False)
    place, row = _row(form)
    with gr.Tabs():
        with gr.Tab("Score"):
            asked = _score(form, place)
        with gr.Tab("Let it write"):
            _write(form, place)
        with gr.Tab("Try to cheat"):
            asked.append(_cheat(form, place))
        with gr.Tab("Signal check"):
            _signal(form)
    form.on(functools.partial(gr.on, [button.click for button in asked]), prompt, [place], [row], **READING)


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


def _row(form: Form) -> tuple[gr.Number, gr.HTML]:
    """The row that is worked on: its number, and where it is shown."""
    with gr.Row(elem_classes="tight low"):
        place = gr.Number(0, label="Training row", precision=0, minimum=0, scale=1, min_width=120, elem_id="lab-row")
        show = gr.Button("Show the row", size="md", scale=1, min_width=150)
        other = gr.Button("Next row", size="md", scale=1, min_width=120)
    shown = gr.HTML(m.page(m.tag("p", "The row is read when you first ask.", class_="dim")))
    other.click(lambda at: whole(at) + 1, [place], [place], queue=False, api_visibility="private")
    for event in (place.change, show.click):
        form.on(event, prompt, [place], [shown], **READING)
    return place, shown


def whole(value: Any, most: int = 10_000_000) -> int:
    """A whole number from 0 on, whatever was sent."""
    usable = isinstance(value, (int, float)) and value == value and abs(value) < 1e15
    return min(most, max(0, int(value))) if usable else 0


def prompt(sent: Sent, at: Any) -> str:
    """One training row."""
    try:
        found = _ask(sent, "rows", start=whole(at), count=1)
    except KitError as problem:
        return m.error(problem)
    if not found["rows"]:
        return m.error(f"There is no training row {whole(at)}.")
    return show_row(found["rows"][0])


def _ask(sent: Sent, question: str, **more: Any) -> Any:
    return sent.form.site.benches.ask(question, sent.config(), **more)


def _score(form: Form, place: gr.Number) -> list[gr.Button]:
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
    form.on(score.click, scored, [place, box], [out], concurrency_limit=4)
    form.on(examples.click, filled, [place], [box, out], concurrency_limit=4)
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


def scored(sent: Sent, at: Any, text: Any) -> str:
    """The pasted completions, part by part."""
    try:
        return show_group(_ask(sent, "score", row=whole(at), completions=completions(text)))
    except KitError as problem:
        return m.error(problem)


def filled(sent: Sent, at: Any) -> list[Any]:
    """[a right and a wrong answer in the reward's style, a right one without it, and one that was cut; what they score]."""
    try:
        text = "\n---\n".join(_ask(sent, "examples", row=whole(at)))
    except KitError as problem:
        return [gr.skip(), m.error(problem)]
    return [text, scored(sent, at, text)]


def _write(form: Form, place: gr.Number) -> None:
    gr.HTML(m.page(m.tag("p", "The model as it is now answers this row and the ones after it, sampled as in training.",
                         class_="dim")))  # fmt: skip
    with gr.Row():
        rows = gr.Slider(1, MOST_ROWS, 2, step=1, label="Rows")
        each = gr.Slider(2, MOST_EACH, 4, step=1, label="Completions each")
    _job(
        form,
        "Write and score",
        [place, rows, each],
        lambda at, n, k: {
            "rows": list(range(whole(at), whole(at) + min(MOST_ROWS, max(1, whole(n))))),
            "k": min(MOST_EACH, max(2, whole(k))),
        },
        lambda result: (show_groups(result), []),
        m.empty("Nothing written yet", "Fresh completions show what the reward will meet in the first step."),
    )


def _cheat(form: Form, place: gr.Number) -> gr.Button:
    """Returns the button that reads the row."""
    gr.HTML(m.page(m.tag("p", "Known ways to earn a reward without solving anything, tried on this row: training finds each that "
                         "works. None may reach what an honest right answer earns.", class_="dim")))  # fmt: skip
    with gr.Row():
        right = gr.Textbox(label="Right answer", info="Empty: the row's reference.")
        wrong = gr.Textbox(label="Wrong answer", info="Empty: one is made up.")
        style = gr.Dropdown(
            ["", *sorted(STYLES)],
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
    form.on(many.click, audited, [style], [out], concurrency_limit=4)
    form.on(run.click, cheated, [place, right, wrong, style], [out], concurrency_limit=4)
    return run


def cheated(sent: Sent, at: Any, *given: Any) -> str:
    """The known hacks, scored."""
    texts = zip(("right", "wrong", "style"), given, strict=True)
    named: dict[str, Any] = {name: text for name, text in texts if isinstance(text, str) and len(text) < 2000}
    try:
        return show_hacks(_ask(sent, "hacks", row=whole(at), **named))
    except KitError as problem:
        return m.error(problem)


def audited(sent: Sent, style: Any) -> str:
    """Echoes, constants, hedges, near misses, other rows' answers and slow ones, on rows drawn at random."""
    try:
        return show_audit(_ask(sent, "audit", style=style if isinstance(style, str) else ""))
    except KitError as problem:
        return m.error(problem)


def _signal(form: Form) -> None:
    with gr.Row():
        prompts = gr.Slider(4, MOST_PROMPTS, 16, step=4, label="Prompts", info="More make the intervals narrower.")
        each = gr.Slider(
            2, MOST_TRIES, 8, step=1, label="Completions each", info="The group size of training tells most."
        )
    _job(
        form,
        "Will it learn?",
        [prompts, each],
        lambda n, k: {"prompts": min(MOST_PROMPTS, max(2, whole(n))), "k": min(MOST_TRIES, max(2, whole(k)))},
        lambda result: (show_signal(result), actions_of(result)),
        NEVER,
        {"--prompts": prompts, "--k": each},
    )


def _job(
    form: Form,
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
    site = form.site
    with gr.Row(elem_classes="tight"):
        start = gr.Button(title, variant="primary", size="md")
        end = gr.Button("Stop", variant="stop", size="md", visible=False)
    out = gr.HTML(nothing)
    apply = gr.Button("Make this change", variant="secondary", size="md", visible=False)
    key, seen, change = gr.State(""), gr.State(""), gr.State([])

    def begin(sent: Sent, *given: Any) -> list[Any]:
        try:
            config = sent.config()
            more = ask(*given)
            name = f"{job_prefix(title, config)}{sorted(more.items())}"
            site.jobs.start(name, SIGNAL, {"config": config.model_dump(mode="json"), **more})
        except KitError as problem:
            return ["", "", m.error(problem), gr.Button(visible=False), gr.Button(visible=False), []]
        return [name, *tick(name, "")]

    def again(draft: Any) -> list[Any]:
        """After a reload: the check of this configuration, where there was one."""
        try:
            job = site.jobs.latest(job_prefix(title, Draft.read(draft).config(site.settings)))
        except KitError:
            job = None
        return [gr.skip()] * 6 if job is None else [job.key, *tick(job.key, "")]

    def tick(name: Any, before: Any) -> list[Any]:
        job = site.jobs.get(name)
        if job is None or job.stamp == before:
            return [gr.skip()] * 5
        html, changes = progress(job, show)
        suggest = gr.Button(visible=bool(changes), value=in_words(changes))
        return [job.stamp, html, gr.Button(visible=job.state == "running"), suggest, changes]

    outputs = [seen, out, end, apply, change]
    form.on(start.click, begin, inputs, [key, *outputs], queue=False)
    form.blocks.load(again, [form.draft], [key, *outputs], **QUIET)
    poll(tick, [key, seen], outputs)
    end.click(lambda name: site.jobs.stop(name), [key], [], queue=False, api_visibility="private")
    named = dict(sliders or {})
    form.replaces(apply.click, lambda sent, given: made(sent, given, list(named)), [change], list(named.values()))


def made(sent: Sent, given: Any, sliders: list[str]) -> tuple[Any, ...]:
    """(the draft or None, what was done, *values of the sliders) after what a check suggests."""
    actions = [one for one in given if isinstance(one, str)][:8] if isinstance(given, list) else []
    numbers = numbers_of(actions)
    overrides = [one for one in actions if not one.startswith("--")]
    done = m.page(m.note(f"{in_words(actions)}: done. Check again to see what it does.", "ok"))
    draft = sent.draft().apply(overrides) if overrides else None
    return draft, done, *(numbers.get(name, gr.skip()) for name in sliders)


def job_prefix(title: str, config: RunConfig) -> str:
    """The same question about the same configuration has the same key in every browser."""
    return f"{title}:{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]}:"


def progress(job: Job, show: Any) -> tuple[str, list[str]]:
    """(what a job looks like now, overrides that it suggests)."""
    if job.state == "running":
        line = job.line or "Starting: Python and torch are loaded first …"
        return m.page(m.panel(m.tag("b", "Working"), m.tag("p", m.tag("code", line), class_="dim"))), []
    if job.state == "done":
        html, changes = show(job.result)
        return html, changes
    if job.state == "stopped":
        return m.page(m.note("Stopped.")), []
    return m.error(job.error), []


# --- how results look --------------------------------------------------------------------------------------------------


def show_row(found: dict[str, Any]) -> str:
    """A training row."""
    reference = m.tag("p", m.tag("small", "reference ") + m.tag("code", found.get("reference") or "none"))
    return m.page(
        m.panel(
            m.tag("small", f"training row {found['place']}"), m.tag("div", found["prompt"], class_="said"), reference
        )
    )


def show_group(found: dict[str, Any], title: str = "") -> str:
    """Completions of one row."""
    return m.page(_group(found, title))


def show_groups(found: list[dict[str, Any]]) -> str:
    """Completions of several rows, each a group."""
    alike = sum(not _spread(one) for one in found)
    words = f"{len(found) - alike} of {len(found)} groups have rewards that differ, so that there is something to learn from."
    head = m.note(words, "ok" if alike == 0 else "warn" if alike < len(found) else "fail")
    return m.page(head, *(_group(one, f"Row {one['row']}: {one['prompt'][:140]}") for one in found))


def _spread(found: dict[str, Any]) -> bool:
    known = [item["total"] for item in found["items"] if item["total"] is not None]
    return bool(known) and max(known) - min(known) > 1e-9


def _group(found: dict[str, Any], title: str) -> Markup:
    weights = ", ".join(f"{name} × {weight:g}" for name, weight in found["weights"].items())
    if len(found["items"]) < 2:
        verdict = Markup("")
    elif _spread(found):
        verdict = m.badge("rewards differ: this group teaches", "ok")
    else:
        verdict = m.badge("all alike: no lesson in this group", "warn")
    reference = m.tag("span", m.tag("small", "reference ") + m.tag("code", (found["reference"] or "none")[:200]))
    head = m.tag("div", m.tag("b", title or "One group") + verdict, class_="spread")
    body = m.join(
        _completion(item, advantage, found["checker"])
        for item, advantage in zip(found["items"], found["advantages"], strict=True)
    )
    line = m.tag("div", reference + m.tag("small", f"total = {weights}"), class_="row")
    return m.tag("div", m.panel(head, line, body), style="margin-top:8px")


def _completion(item: dict[str, Any], advantage: float | None, checker: str | None) -> Markup:
    right = m.badge("correct", "ok") if item["correct"] else m.badge("not correct", "warn") if checker else Markup("")
    cut = m.badge("cut at the limit", "fail") if item.get("cut") else Markup("")
    size = m.tag("small", f"{item['tokens']} tokens") if "tokens" in item else Markup("")
    pull = Markup("")
    if advantage is not None:
        arrow = "▲" if advantage > 0.005 else "▼" if advantage < -0.005 else "•"
        words = "made likelier" if advantage > 0.005 else "made less likely" if advantage < -0.005 else "left as it is"
        pull = m.tag("span", f"{arrow} advantage {round(advantage, 2) + 0.0:+.2f}: {words}", class_="badge")
    total = m.tag("span", m.number(item["total"], 2), class_="big")
    top = m.tag("div", total + right + cut + pull + size, class_="row")
    chips = m.tag("div", m.join(_chip(part) for part in item["parts"]), class_="row", style="margin:6px 0")
    found = m.join(
        m.tag("div", m.tag("small", f"{part['name']} read: ") + m.tag("code", part["extracted"]))
        for part in item["parts"]
        if part.get("extracted")
    )
    reasons = m.join(
        m.tag("div", m.tag("small", f"{part['name']}: {part['reason']}"))
        for part in item["parts"]
        if part.get("reason")
    )
    text = m.tag("div", item["text"] or "(empty)", class_="said")
    return m.tag(
        "div",
        top + chips + text + found + reasons,
        style="padding:10px 0;border-top:1px solid var(--border-color-primary);margin-top:10px",
    )


def _chip(part: dict[str, Any]) -> Markup:
    value, status = m.tag("b", m.number(part["value"], 2)), m.tag("small", part["status"].replace("_", " "))
    words = m.join([part["name"], value, status], " ")
    return m.tag("span", words, class_=f"chip {part['status']}", title=f"{1000 * (part['seconds'] or 0):.1f} ms")


def show_hacks(found: dict[str, Any]) -> str:
    """The list of hacks, those that work first."""
    honest = [case["total"] for case in found["cases"] if case["kind"] == "good" and case["total"] is not None]
    bar = min(honest, default=None)
    tried = [case for case in found["cases"] if case["kind"] == "hack"]
    works = [case for case in tried if bar is not None and case["total"] is not None and case["total"] >= bar - 1e-9]
    if found["problems"]:
        verdict = m.note("\n".join(found["problems"][:8]), "fail")
    elif bar is None:
        verdict = m.note("There is no right answer to compare with; write one above.", "warn")
    else:
        verdict = m.note(f"None of {len(tried)} hacks reaches the honest answer's {bar:.2f}.", "ok")
    notes = m.join(m.note(note, "warn") for note in found["notes"])
    order = sorted(
        found["cases"], key=lambda case: ({"good": 0, "bad": 1}.get(case["kind"], 2), -(case["total"] or 0.0))
    )
    rows = [_case(case, case in works) for case in order]
    head, first = ["", "what", "reward", "completion", "why"], SHOWN_HACKS + len(works)
    rest = m.tag(
        "details",
        m.tag("summary", f"{len(rows) - first} more that earn no more") + m.table(head, rows[first:], numbers={2}),
    )
    fold = rest if len(rows) > first else Markup("")
    context = m.tag(
        "p", f"right: {found['right'][:80]} · wrong: {found['wrong'][:80]} · style: {found['style']}", class_="dim"
    )
    return m.page(verdict, notes, context, m.table(head, rows[:first], numbers={2}), fold)


def show_audit(found: dict[str, Any]) -> str:
    """How often each attack is paid over some rows, and what it was."""
    results = found["results"]
    if found["passed"]:
        verdict = m.note(f"No attack is paid on any of {results[0]['rows']} rows.", "ok")
    else:
        verdict = m.note("\n".join(found["problems"]), "fail")
    honest = ("right", "spellings")
    rows = [
        [
            m.badge(
                *(("honest", "ok") if one["attack"] in honest else ("paid", "fail") if one["paid"] else ("attack", ""))
            ),
            one["attack"],
            f"{one['paid']} of {one['rows']}",
            m.number(one["seconds"], 2),
            _said(" · ".join(f"{example['how']} for {example['reference']}" for example in one["examples"][:2]))
            if one["examples"]
            else "",
        ]
        for one in results
    ]
    return m.page(
        verdict, m.table(["", "what", "rows paid", "longest, s", "paid (of honest ones: not paid)"], rows, numbers={3})
    )


def _case(case: dict[str, Any], works: bool) -> list[Any]:
    kind = {"good": ("honest", "ok"), "bad": ("wrong", "warn")}.get(
        case["kind"], ("works", "fail") if works else ("hack", "")
    )
    name = {"good": "right answer", "bad": "wrong answer"}.get(case["kind"], case["name"])
    return [m.badge(*kind), name, m.number(case["total"], 2), _said(case["completion"]), case["why"]]


def _said(text: str | None) -> Markup:
    if text is None or not text.strip():
        return m.tag("small", "no completion at all" if text is None else "(empty)")
    return m.tag("code", one_line(text, 110))


def show_signal(found: dict[str, Any]) -> str:
    """The verdict, the rates with their intervals, and the time."""
    verdict = found["verdict"]
    level = LEVELS.get(verdict["verdict"], "fail")
    text = change_of(found)
    change = m.tag("p", m.tag("b", "What to do: ") + text) if text else Markup("")
    words = m.tag("div", verdict["verdict"].capitalize(), class_="big") + m.tag("p", f"{verdict['because']}.")
    head = m.tag("div", words + change, class_=f"verdict {level}")
    names = {**RATES, f"pass@{found['k']}": f"right in one of {found['k']} tries (pass@{found['k']})"}
    rows = [
        [
            names[name],
            interval(found[name]),
            f"{found[name]['value']:.0%} [{found[name]['low']:.0%}, {found[name]['high']:.0%}]",
        ]
        for name in (*RATES, f"pass@{found['k']}")
        if found.get(name) and name in names
    ]
    seconds = found["seconds"]
    facts = [
        ("reward", m.number((found.get("reward") or {}).get("value"))),
        ("completion", f"{found['completion_tokens_mean']:.0f} tokens"),
        ("reward latency", "{p50:.1f} ms, slowest {p95:.1f}".format(**found["reward_latency_ms"])),
        (
            "a step",
            f"{m.seconds(seconds['step'])} (completions {m.seconds(seconds['rollout'])} and rewards "
            f"{m.seconds(seconds.get('reward', 0.0))}, measured; update {m.seconds(seconds['update'])}, estimated)",
        ),
        ("whole run", f"{m.duration(3600 * found['hours'])}, by these"),
    ]
    chips = m.join(m.tag("span", m.join([name, " ", m.tag("b", value)]), class_="chip") for name, value in facts)
    note = m.note(found["note"]) if found.get("note") else Markup("")
    failure = m.note(f"A reward failed: {found['failure']}", "fail") if found.get("failure") else Markup("")
    title = f"{found['prompts']} prompts × {found['k']} completions"
    return m.page(
        head, failure, m.table([title, "", "95 % interval"], rows, numbers={2}), m.tag("div", chips, class_="row"), note
    )


def interval(estimate: dict[str, float]) -> Markup:
    """A share from 0 to 1 as a mark, its interval as a band."""
    low, value, high = (min(1.0, max(0.0, estimate[end])) for end in ("low", "value", "high"))
    band = m.tag("i", "", style=f"left:{100 * low:.1f}%;width:{max(1.0, 100 * (high - low)):.1f}%")
    mark = m.tag("b", "", style=f"left:{100 * value:.1f}%")
    return m.tag(
        "div", band + mark, class_="ci", role="img", aria_label=f"{value:.0%}, between {low:.0%} and {high:.0%}"
    )


def actions_of(found: dict[str, Any]) -> list[str]:
    """What a button can do of the change that the check suggests: `key=value` of the draft, `--prompts 64` of a slider."""
    change = found["verdict"]["change"] or ""
    wanted = [f"{option} {at}" for option, at in re.findall(r"(--prompts|--k) (\d+)", change)]
    numbers = numbers_of(wanted)
    sampled = [f"{name} {value}" for name, value in numbers.items() if value > found[SAMPLES[name][1]]]
    return re.findall(r"-o (\S+=\S+)", change) + sampled


def numbers_of(actions: list[str]) -> dict[str, int]:
    """Values for sliders, by option, at most what the slider takes; prompts go in fours."""
    found = {}
    for action in actions:
        name, _, value = action.partition(" ")
        if name in SAMPLES and re.fullmatch(r"[0-9]{1,9}", value):
            number = -(-int(value) // 4) * 4 if name == "--prompts" else int(value)
            found[name] = min(SAMPLES[name][2], number)
    return found


def in_words(actions: list[str]) -> str:
    """Actions as a button says them: `Sample 64 prompts`, `Set generation.num_generations to 16`."""
    numbers = numbers_of(actions)
    samples = [SAMPLES[name][0].format(number) for name, number in numbers.items()]
    settings = [" to ".join(action.split("=", 1)) for action in actions if not action.startswith("--")]
    parts = [f"{verb} {' and '.join(given)}" for verb, given in (("Sample", samples), ("Set", settings)) if given]
    text = "; ".join(parts)
    return text if len(text) <= 140 else f"{text[:139]}…"


def change_of(found: dict[str, Any]) -> str:
    """The change that the check suggests in words of the page, which has no options of a command line."""
    change = str(found["verdict"]["change"] or "")
    if not re.match(r"-o |--prompts|--k", change):
        for command, words in COMMANDS.items():
            change = change.replace(command, words)
        return change
    words = in_words(actions_of(found))
    if asked := re.fullmatch(r"(--prompts|--k) (\d+)", change):
        option, number = asked[1], int(asked[2])
        if number > SAMPLES[option][2]:
            more = f"The page samples at most {SAMPLES[option][0].format(SAMPLES[option][2])}; "
            more += f"{number} would decide: grpo-kit doctor CONFIG {change}, with the overrides of the command beside."
            return f"{words}. {more}" if words else more
    return f"{words}: the button below does it." if words else change
