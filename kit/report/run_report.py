"""The report of a run, one self-contained HTML file, and its card, the output of a notebook's cell.

Each section is a function from the `Record` to plain data, and a macro of templates/report.html that renders it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kit.config import non_defaults
from kit.evaluation.results import interval
from kit.objective.recipes import KEYS, changed_parts, recipe, recipe_names
from kit.report.charts import intervals, number, svg
from kit.report.page import page, piece
from kit.report.panels import LEARNING, MACHINE, columns_of, panels
from kit.report.record import Record, Tree, read, words
from kit.report.scores import Difference, difference, ends, estimates, sentence, signed
from kit.runs.files import clock, shorten, write_atomic
from kit.runs.metrics import is_number, placed, points
from kit.runs.secrets import redact, redacted
from kit.runs.store import ALIVE, RunDir, seconds_worked

NAME = "report.html"
LAST = 10
"""Number of last steps over which the final reward is averaged."""
MOST_ALERTS = 4
MOST_OF_A_KIND = 12
"""Maximum number of listed events of one kind; others are counted."""
MOST_SAMPLES = 8
ROUTINE = ("checkpoint", "evaluation", "memory", "packing")
"""Kinds of events that are not listed, because charts and scores show them."""
STATES = {
    "queued": ("info", "waits for a GPU"),
    "starting": ("info", "is starting"),
    "running": ("info", "is running; this report shows its state when the report was written"),
    "stopping": ("info", "is stopping; this report shows its state when the report was written"),
    "finished": ("good", "is finished"),
    "stopped": ("warning", "was stopped before its end"),
    "failed": ("error", "failed"),
    "interrupted": ("error", "was interrupted: its process ended without a message"),
}
CHARTS = ("Reward on training prompts", "Held-out problems solved", "Completion length", "Entropy")
"""The panels of a card."""
TRAINING = "Training"
_PROGRESS = re.compile(r"(?P<title>\S.*?)  (?P<done>\d+)/(?P<total>\d+)  (?P<note>.*)")
section = partial(piece, "report.html")


def write_report(
    run: RunDir, path: str | Path | None = None, *, completions: bool = True, ending: Mapping[str, Any] | None = None
) -> Path:
    """Writes the report of a run in any state to `path`, by default `report.html` in its directory.

    Without `completions` it contains no rows of the data. `ending`: the final status fields, if they are not written yet. The
    report lists missing or damaged files. Raises `RunError` if the file cannot be written.
    """
    target = run.path / NAME if path is None else Path(path)
    record = read(run)
    if ending is not None:
        record.status.update(ending)
    write_atomic(target, render(record, completions=completions))
    return target


def render(record: Record, *, completions: bool = True) -> str:
    """The report as HTML without secrets, with `~` for the home folder, and with samples if `completions`."""
    parts: dict[str, Callable[[Record], Markup]] = {
        "Summary": summary,
        "Held-out scores": scores,
        "Curves": lambda of: section("curves", curves(of, LEARNING)),
        "Machine": lambda of: section("curves", curves(of, MACHINE)),
        **({"Samples": samples} if completions else {}),
        "Events": events,
        "Configuration": configuration,
        "Data and environment": provenance,
    }
    sections = [(title, _part(make, record)) for title, make in parts.items()]
    text, home = page(record.id, sections, subtitle=subtitle(record)), str(Path.home())
    return redact(text.replace(home, "~") if len(home) > 1 else text)


def _part(make: Callable[[Record], Markup], record: Record) -> Markup:
    """A section of the report, or a notice with the reason if it raises an error."""
    try:
        return make(record)
    except Exception as error:  # show the other sections
        words = f"This section cannot be shown: {type(error).__name__}: {error}"
        return piece("parts.html", "notice", words, "error")


def subtitle(record: Record) -> str:
    """Model, data, reward and objective in one line."""
    functions = record.value("reward.functions") or []
    own = [str(each.get("path")) for each in functions if isinstance(each, dict)]
    hooks = re.findall(r'"name": "([^"]+:[^"]+)"', json.dumps(record.value("objective"), default=str))  # import paths
    facts = {
        "model": record.value("model.name"),
        "data": record.data.get("source") or record.value("data.source"),
        "reward": " + ".join([*filter(None, [record.value("reward.preset")]), *own]),
        "objective": " with ".join(filter(None, [record.value("objective.recipe"), *hooks])),
    }
    return " · ".join(f"{name} {value}" for name, value in facts.items() if value)


def summary(record: Record) -> Markup:
    """The state with its reason, unreadable files, alerts, and tiles with the main figures."""
    status = record.status
    kind, words = STATES.get(str(status.get("state")), ("warning", f"is '{status.get('state')}'"))
    step, total, reason = status.get("step"), status.get("total_steps"), status.get("reason")
    if step is None:
        words += ", before its first step"
    else:
        words += f" after {number(step, 9)} of {number(total, 9)} steps" if is_number(total) else f" after {step} steps"
    end = f"This run {words}." + (f" Reason: {reason.rstrip('.')}." if reason else "")
    names = ("groups/zero_spread", "frac_reward_zero_std")
    equal = [value for name in names for _, value in points(record.metrics, name)]
    if equal and min(equal) == 1.0 and record.value("teacher.model") is None:
        end += " No group had different rewards, so the run learned nothing from them."
    return section("summary", kind, end, record.faults, alerts(record), figures(record), record.env.get("model_origin"))


def alerts(record: Record) -> list[tuple[str, str]]:
    """(severity, text) of the first alert of each name. The section Events lists all."""
    raised = [e for e in record.events if e.get("kind") == "alert" and e.get("severity") in ("warning", "error")]
    first = {alert.get("name"): alert for alert in reversed(raised)}
    return [
        (alert["severity"], f"Step {alert.get('step', '?')}: {str(alert.get('message') or name).rstrip('.')}.")
        for name, alert in list(reversed(first.items()))[:MOST_ALERTS]
    ]


def figures(record: Record) -> list[tuple[str, str]]:
    """Labels and values of the tiles."""
    status = record.status
    tiles = [("State", str(status.get("state")))]
    step, total = status.get("step"), status.get("total_steps")
    if is_number(step):
        tiles.append(("Optimiser steps", f"{number(step, 9)} / {number(total, 9)}" if total else number(step, 9)))
    if (seconds := seconds_worked(status)) > 0:
        tiles.append(("Wall-clock time", clock(seconds)))
    rewards = [value for _, value in points(record.metrics, "reward")]
    if rewards:
        last = rewards[-LAST:]
        tiles.append((f"Reward: first, mean of last {len(last)}", f"{rewards[0]:.3f} → {sum(last) / len(last):.3f}"))
    evaluations = [score for _, score in placed(record.evaluations)]
    for key, name in {"greedy_accuracy": "Held-out accuracy", "greedy_reward": "Held-out reward"}.items():
        values = [estimate["value"] for score in evaluations if isinstance(estimate := score.get(key), dict)
                  and is_number(estimate.get("value"))]  # fmt: skip
        if values:
            both = len(values) > 1
            shown = f"{values[0]:.3f} → {values[-1]:.3f}" if both else f"{values[0]:.3f}"
            tiles.append((f"{name}: first, last" if both else name, shown))
            break
    tokens = points(record.metrics, "num_tokens")
    if tokens:
        tiles.append(("Tokens seen", number(tokens[-1][1], 9)))
    if device := record.env.get("gpu") or (record.env.get("backend") or {}).get("device"):
        tiles.append(("Device", str(device)))
    if is_number(record.value("run.seed")):
        tiles.append(("Seed", str(record.value("run.seed"))))
    return tiles


def scores(record: Record) -> Markup:
    """Scores before and after, their difference, and whether it is significant."""
    before, after, result = ends(record.evaluations)
    old, new = before or {}, after or {}
    body, known = [], dict[str, Difference]()
    for key in dict.fromkeys(key for side in (old, new) for key in estimates(side)):
        change = difference(key, old, new) if before and after else None
        cells = ["–", "–"] if change is None else [signed(change.value, change.low, change.high), change.verdict]
        body.append([key.replace("_", " "), interval(old.get(key)), interval(new.get(key)), *cells])
        if change is not None:
            known[key] = change
    for key, label in {
        "completion_tokens_mean": "completion tokens",
        "truncated_share": "cut at the length limit",
        "reward_failure_share": "rewards that failed",
    }.items():
        values = [side.get(key) for side in (old, new)]
        if key != "reward_failure_share" or any(values):
            form = "{:.1f}" if key == "completion_tokens_mean" else "{:.1%}"
            body.append([label, *("–" if value is None else form.format(value) for value in values), "", ""])
    drawn = [(key.replace("_", " "), d.value, d.low, d.high) for key, d in known.items()]
    chart = intervals(drawn, "Difference: after minus before", reference=0.0) if drawn else None
    verdict = None
    for key, change in list(known.items())[:1]:
        kind = {"better": "good", "worse": "error", "not distinguishable": "warning"}[change.verdict]
        text = sentence(key, old, new, change)
        if not change.paired:
            text += " The two evaluations are on different problems, so the interval is wider."
        if change.chance is not None:
            chance = "below 0.0001" if change.chance < 1e-4 else f"{change.chance:.2g}"
            text += f" Without a real change, the probability of this result or a stronger one is {chance} (exact McNemar test)."
        verdict = text, kind
    shown = before or new
    k, checker = shown.get("k"), shown.get("checker")
    how = f"{shown.get('problems', '?')} held-out problems; greedy: one completion each without sampling"
    how += f"; samples: {k} each at temperature {shown.get('temperature', '?')}" if k else ""
    how += f". Answers are checked by {checker}." if checker else "."
    if any(change.paired for change in known.values()):
        how += " Differences are paired by problem (bootstrap over problems)."
    return section("scores", result, verdict, body if before or after else [], chart, how)


def curves(record: Record, topic: str) -> list[Markup]:
    """All panels of a topic with values, as SVG."""
    drawn, marked = panels(columns_of(record.metrics), record.evaluations), marks(record)
    return [svg(panel, marks=marked) for panel in drawn if panel.topic == topic]


def samples(record: Record) -> Markup:
    """The first held-out problems with answers before and after."""
    before, after, result = ends(record.evaluations)
    sides: dict[str, dict[tuple[str, str | None], Mapping[str, Any]]] = {"before": {}, result: {}}
    for name, evaluation in (("before", before), (result, after)):
        for sample in (evaluation or {}).get("samples") or []:
            reference = None if sample.get("reference") is None else str(sample["reference"])
            sides[name][str(sample.get("prompt")), reference] = {
                key: sample.get(key) for key in ("completion", "reward")
            }
    prompts = list(dict.fromkeys(key for side in sides.values() for key in side))[:MOST_SAMPLES]
    problems = [
        (prompt, reference, [(name, side.get((prompt, reference))) for name, side in sides.items() if side])
        for prompt, reference in prompts
    ]
    return section("samples", problems)


def events(record: Record) -> Markup:
    """Alerts and events by time without routine ones; the first few of each kind, and the number of others."""
    start, counts = record.status.get("started"), defaultdict[str, int](int)
    rows = []
    for event in record.events:
        kind = f"{event.get('kind')} {event.get('name', '')}".strip()
        if event.get("kind") in ROUTINE:
            continue
        counts[kind] += 1
        if counts[kind] <= MOST_OF_A_KIND:
            when = event.get("time")
            since = clock(max(0.0, when - start)) if is_number(when) and is_number(start) else "–"
            rows.append([since, number(event.get("step"), 9), words(event)])
    more = {kind: count - MOST_OF_A_KIND for kind, count in counts.items() if count > MOST_OF_A_KIND}
    return section("events", rows + [["", "", f"{count} more of '{kind}'"] for kind, count in more.items()])


def marks(record: Record) -> list[tuple[float, str]]:
    """(step, text) of the vertical lines in the charts."""
    kinds = ("resumed", "early_stop", "out_of_memory")
    chosen = [event for event in record.events if event.get("kind") in kinds and is_number(event.get("step"))]
    return [(float(event["step"]), words(event)) for event in chosen[:MOST_OF_A_KIND]]


def configuration(record: Record) -> Markup:
    """The section of the configuration: keys that differ from their defaults, and all keys in a fold.

    Of the objective's parts, which every run writes out, it lists those that differ from the recipe.
    """

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    config = redacted(record.config)
    changed = [
        [key, shorten(text(value), 400), text(default)]
        for key, value, default in non_defaults(config)
        if not (key.startswith("objective.") and key.split(".")[1] in KEYS[1:])
    ]
    objective = config.get("objective") or {}
    if objective.get("recipe") in recipe_names():
        parts = recipe(objective["recipe"])
        changed += [
            [f"objective.{key}", text(part), text(parts[key])] for key, part in changed_parts(objective).items()
        ]
    return section("configuration", changed, _yaml(config) if config else "")


def provenance(record: Record) -> Markup:
    """The content of data.json and env.json in folds, and the commands that repeat the run."""
    commit = (record.env.get("git") or {}).get("commit")
    own = [name for name in record.env.get("inputs") or {} if name.endswith((".py", ".jinja"))]
    commands = [f"git checkout {commit}"] * bool(commit) + [f"# in the folder of {', '.join(own)}"] * bool(own)
    commands.append(f"grpo-kit train config.yaml -o run.id={record.id[:58].rstrip('-')}-again")
    files = {name: _yaml(redacted(tree)) for name, tree in (("Data", record.data), ("Environment", record.env)) if tree}
    return section("provenance", files, "\n".join(commands))


def _yaml(tree: Tree) -> str:
    import yaml

    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)
    return text


@dataclass(frozen=True)
class Progress:
    """Progress of a long task: `done` of `total`, with a note."""

    title: str
    done: int
    total: int
    note: str = ""


def heard(line: str) -> Progress | None:
    """The progress in a line of output such as `Training  6/60  0:08  eta 1:09  reward 0.872`; None for other lines."""
    match = _PROGRESS.fullmatch(line.rstrip())
    return Progress(match["title"], int(match["done"]), int(match["total"]), match["note"]) if match else None


def card(run: RunDir, lines: Sequence[str] = (), *, over: bool = False) -> str:
    """The card of a run in any state, also before it has a directory; `lines` is its output.

    `over`: the run has ended, possibly without a directory.
    """
    if not run.path.is_dir():
        parts = [] if over else [section("progress", _latest(lines))]
        return around(run.id, [*parts, section("printed", lines, over)])
    record = read(run)
    state = str(record.status.get("state"))
    alive = state in ALIVE
    parts = [_alive(record, lines) if alive else summary(record)]
    by_title = {panel.title: panel for panel in panels(columns_of(record.metrics), record.evaluations)}
    drawn = [svg(by_title[title], marks=marks(record)) for title in CHARTS if title in by_title]
    parts += [piece("parts.html", "grid", drawn)] if drawn else []
    parts += [scores(record)] if record.evaluations and not alive else []
    return around(run.id, [*parts, section("printed", lines, state in ("failed", "interrupted"))])


def around(title: str, parts: Sequence[Markup]) -> str:
    """Parts with a title and a scoped style, without secrets."""
    return redact(section("card", title, Markup("\n").join(parts)))


def _alive(record: Record, lines: Sequence[str]) -> Markup:
    latest = _latest(lines)
    step, total, eta = (record.status.get(key) for key in ("step", "total_steps", "eta_seconds"))
    if record.status.get("state") == "queued":
        return piece("parts.html", "notice", f"The run {record.status.get('reason') or 'waits'}.")
    if is_number(step) and is_number(total) and (latest is None or latest.title == TRAINING):
        left = [f"about {clock(eta)} left"] if is_number(eta) and step < total else []
        rewards = [line["reward"] for line in record.metrics[-1:] if is_number(line.get("reward"))]
        note = " · ".join([*left, *(f"reward {reward:.3f}" for reward in rewards)])
        latest = Progress(TRAINING, int(step), int(total), note)
    return section("progress", latest) + section("alerts", alerts(record))


def _latest(lines: Sequence[str]) -> Progress | None:
    return next((progress for line in reversed(lines) if (progress := heard(line))), None)
