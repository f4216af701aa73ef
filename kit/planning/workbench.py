"""A worker that answers questions about a configuration for the page: rows, rewards, attacks, plans.

`python -m kit.planning.workbench` reads one JSON object per line and writes one per line: `{"answer": ...}`,
`{"error": message, "kind": name}` for a user error, or `{"crash": ...}`. The page kills the process if an answer takes too
long, because a reward may hang. Rows stay in memory for later questions.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig, load_config
from kit.errors import DataError, ObjectiveError
from kit.runs.files import to_json
from kit.runs.worker import claim_stdout, is_lost, is_user_error

if TYPE_CHECKING:
    from kit.data import DataSplit

SHOWN_TEXT = 4000
"""Maximum number of characters of a text in an answer."""
Request = Mapping[str, Any]


@functools.lru_cache(maxsize=2)
def _split(section: str, changed: int) -> DataSplit:
    """The rows of a data section (JSON). `changed`: modification time of its file."""
    from kit.config import DataConfig
    from kit.data import load_data

    return load_data(DataConfig.model_validate_json(section))


def split_of(config: RunConfig) -> DataSplit:
    """The rows of a configuration, cached for the most recent ones."""
    path = Path(config.data.source).expanduser()
    changed = path.stat().st_mtime_ns if path.is_file() else 0
    return _split(config.data.model_dump_json(exclude={"max_prompt_tokens"}), changed)


def pick(config: RunConfig, places: Sequence[int]) -> list[dict[str, Any]]:
    """Training rows at `places`. Raises `DataError` if one does not exist."""
    train = split_of(config).train
    for place in places:
        if not 0 <= place < len(train):
            raise DataError(f"There is no training row {place}. Rows have the numbers 0 to {len(train) - 1}.")
    return [train[place] for place in places]


SAMPLED_ROWS, SHOWN_VALUES, MOST_COLUMNS = 200, 3, 100
"""Number of rows for the types of columns, of sample values per column, and of columns."""
KINDS = {str: "text", bool: "true or false", int: "whole number", float: "number", list: "list", dict: "object"}


def columns(config: RunConfig, request: Request) -> dict[str, Any]:
    """The columns of a file: their content, and their roles in the configuration, or the reason why these are unknown."""
    from kit.data.rows import map_columns

    source = config.data.source
    path = Path(source).expanduser()
    if not path.is_file():
        return {"source": source, "columns": [], "total": 0, "problem": ""}
    table = _columns(source, path.stat().st_mtime_ns)
    uses: dict[str, str] = {}
    problem = ""
    try:
        mapping = map_columns([column["name"] for column in table["columns"]], config.data)
    except DataError as error:
        problem = str(error)
    else:
        uses = {column: f"passed to the reward as {name}" for column, name in mapping.extras.items()}
        roles = {"prompt": mapping.prompt, "reference": mapping.reference, "images": mapping.images}
        uses |= {name: role for role, name in roles.items() if name is not None}
    used = [column | {"use": uses.get(column["name"], "left out")} for column in table["columns"]]
    return table | {"columns": used, "problem": problem}


@functools.lru_cache(maxsize=8)
def _columns(source: str, changed: int) -> dict[str, Any]:
    """The part that does not depend on roles. `changed`: modification time of the file."""
    from kit.config import DataConfig
    from kit.data.rows import Fault
    from kit.data.sources import read_source

    read = read_source(DataConfig(source=source))
    sampled: list[Mapping[str, Any]] = []
    faults: list[str] = []
    for record in read.records:
        if isinstance(record, Fault):
            faults.append(str(record))
        elif len(sampled) < SAMPLED_ROWS:
            sampled.append(record.values)
    described = []
    for name in read.columns[:MOST_COLUMNS]:
        values = [value for row in sampled if (value := row.get(name)) is not None]
        kinds = dict.fromkeys(KINDS.get(type(value), type(value).__name__) for value in values)
        first = [plain(value)[:160] for value in values[:SHOWN_VALUES]]
        described.append({"name": name, "kinds": list(kinds), "missing": len(sampled) - len(values), "values": first})
    return {
        "source": source,
        "columns": described,
        "total": read.total,
        "sampled": len(sampled),
        "notes": read.notes,
        "faults": faults[:5],
        "faulty": len(faults),
    }


def rows(config: RunConfig, request: Request) -> dict[str, Any]:
    """`count` training rows, starting at `start`."""
    train = split_of(config).train
    start, count = max(0, int(request.get("start", 0))), min(50, int(request.get("count", 5)))
    places = range(start, min(start + count, len(train)))
    return {
        "rows": [{"place": place, **{name: _short(value) for name, value in train[place].items()}} for place in places]
    }


QUANTILES = {"shortest": 0.0, "median": 0.5, "95 %": 0.95, "longest": 1.0}


def lengths(config: RunConfig, request: Request) -> dict[str, Any]:
    """Prompt lengths in tokens (quantiles), how many exceed data.max_prompt_tokens, and sample prompts.

    Samples are the first training rows after the chat template, with tools and system prompt.
    """
    from kit.generation.prompts import lengths_of, render
    from kit.generation.tools import load_tools
    from kit.planning.plan import tokenizer_of

    split = split_of(config)
    some = split.train.select(range(min(5000, len(split.train))))
    tokenizer, interaction = tokenizer_of(config), load_tools(config.generation)
    by_row, tools = lengths_of(tokenizer, some, interaction), interaction.all_tools()
    counted = sorted(by_row)
    limit = config.data.max_prompt_tokens
    shown = [
        {
            "place": place,
            "text": render(tokenizer, some[place]["prompt"], tools, **config.data.chat_template_kwargs)[:SHOWN_TEXT],
            "tokens": by_row[place],
            "reference": _short(some[place].get("reference")),
        }
        for place in range(min(SHOWN_VALUES, len(some)))
    ]
    long = [place for place, length in enumerate(by_row) if limit is not None and length > limit][:SHOWN_VALUES]
    return {
        "seen": shown,
        "long": [
            {"place": place, "tokens": by_row[place], "text": plain(some[place]["prompt"])[:160]} for place in long
        ],
        "info": {key: split.info.get(key) for key in ("rows", "notes", "bad_rows")},
        "tokens": {name: counted[int(share * (len(counted) - 1))] for name, share in QUANTILES.items()},
        "counted": len(counted),
        "over": sum(length > limit for length in counted) if limit is not None else 0,
        "limit": limit,
    }


def score(config: RunConfig, request: Request) -> dict[str, Any]:
    """Scores `completions` (texts) of the training row `row` as one group, like the first step of training.

    Returns value, status, reason and extracted answer of each component, and the advantage of each completion.
    """
    from kit.evaluation.heldout import scoring_context
    from kit.runner.prepare import build_reward
    from rewards import build_samples

    (row,) = pick(config, [int(request.get("row", 0))])
    preset, texts, prompt = build_reward(config), list(request["completions"]), row["prompt"]
    columns: dict[str, Any] = {name: [value] * len(texts) for name, value in row.items() if name != "prompt"}
    messages = [text if isinstance(prompt, str) else [{"role": "assistant", "content": text}] for text in texts]
    samples = build_samples([prompt] * len(texts), messages, **columns)
    context = scoring_context(config.run.seed)
    verdict = preset.score(samples, context)
    items = [
        {
            "text": text[:SHOWN_TEXT],
            "total": verdict.totals[at],
            "parts": [
                {
                    "name": name,
                    "value": verdict.values[name][at],
                    "status": verdict.statuses[name][at],
                    **{key: _short(verdict.infos[name][at].get(key)) for key in ("reason", "extracted")},
                }
                for name in verdict.weights
            ],
        }
        for at, text in enumerate(texts)
    ]
    return {
        "reference": _short(row.get("reference")),
        "weights": dict(verdict.weights),
        "items": items,
        "advantages": advantages(config, verdict.totals),
    }


def advantages(config: RunConfig, totals: Sequence[float | None]) -> list[float | None]:
    """The advantages of a group by the configured objective; all None if it needs more than the rewards of a group."""
    import torch

    from kit.objective import Objective
    from kit.objective.batch import RewardBatch

    own = config.objective.advantage
    objective = Objective.from_spec({"recipe": config.objective.recipe} | ({} if own is None else {"advantage": own}))
    rewards = torch.tensor([math.nan if total is None else total for total in totals])
    try:
        values = objective.compute_advantages(
            RewardBatch(rewards, torch.zeros(len(totals), dtype=torch.int64))
        ).tolist()
    except ObjectiveError:
        return [None] * len(totals)
    return [None if total is None else value for total, value in zip(totals, values, strict=True)]


def guess(config: RunConfig, request: Request) -> dict[str, Any]:
    """Columns, reward and system prompt guessed from the rows of a file, with the reason."""
    from kit.config import DataConfig
    from kit.data.rows import Fault
    from kit.data.sources import read_source
    from kit.planning.guess import guess as guessed

    read = read_source(DataConfig(source=config.data.source))
    rows = []
    for record in read.records:
        if not isinstance(record, Fault):
            rows.append(record.values)
        if len(rows) >= SAMPLED_ROWS:
            break
    return dict(vars(guessed(read.columns, rows)))


def check(config: RunConfig, request: Request) -> dict[str, Any]:
    """Whether the reward can score the first training row, the rewards of a right and a wrong answer, and successful attacks.

    `problem`: why a component fails on a right answer; None if all score it.
    """
    from rewards.protocol import FAILURES

    (row,) = pick(config, [0])
    items = score(config, {"completions": examples(config, {})})["items"]
    failing = [part for part in items[0]["parts"] if part["status"] in FAILURES]
    problem = "; ".join(f"{item['name']}: {item['reason'] or item['status']}" for item in failing) or None
    result = {"problem": problem, "right": items[0]["total"], "wrong": items[1]["total"], "tried": 0, "paid": 0}
    if problem is not None or not row.get("reference"):
        return result
    cases = attacks(config, {})["cases"]
    honest = min(
        (item["total"] for item in cases if item["kind"] == "good" and item["total"] is not None), default=None
    )
    tried = [item["total"] for item in cases if item["kind"] == "attack" and item["total"] is not None]
    paid = [total for total in tried if honest is not None and total >= honest - 1e-9]
    return result | {"tried": len(tried), "paid": len(paid)}


def weights(config: RunConfig, request: Request) -> dict[str, Any]:
    """The components of the reward: initial weight, range of values (None: unbounded), and which one decides correctness."""
    from kit.runner.prepare import build_reward

    preset = build_reward(config)
    parts = [
        {
            "name": component.name,
            "weight": preset.weights[component.name],
            "low": component.low if math.isfinite(component.low) else None,
            "high": component.high if math.isfinite(component.high) else None,
        }
        for component, _ in preset.components
    ]
    return {"checker": preset.checker, "parts": parts}


def attacks(config: RunConfig, request: Request) -> dict[str, Any]:
    """The known attacks around a training row's right answer, each scored next to a right and a wrong answer."""
    from kit.runner.prepare import build_reward
    from rewards import testing
    from rewards.samples import completion_text

    (row,) = pick(config, [int(request.get("row", 0))])
    preset = build_reward(config)
    right = str(row.get("reference") or "")
    wrong = another(right)
    style = str(request.get("style") or style_of(config))
    report = testing.check(preset, [{**row, "style": style, "right": right, "wrong": wrong}])
    return {
        "passed": report.passed,
        "problems": [text[:500] for text in report.problems],
        "notes": [text[:500] for text in report.notes],
        "right": right[:SHOWN_TEXT],
        "wrong": wrong[:SHOWN_TEXT],
        "style": style,
        "cases": [
            {
                "kind": case.kind,
                "name": case.name[:80],
                "completion": None if case.completion is None else completion_text(case.completion)[:300],
                "total": case.total,
                "why": "; ".join(dict.fromkeys(case.reasons.values()))[:200],
            }
            for case in report.cases
        ],
    }


AUDITED = 12
"""Number of rows of an audit, which takes some seconds."""


def audit(config: RunConfig, request: Request) -> dict[str, Any]:
    """The result of `grpo-kit reward audit` for some random training rows."""
    import random

    from kit.runner.prepare import build_reward
    from rewards.audit import audit as audited

    train = split_of(config).train
    places = random.Random(config.run.seed).sample(range(len(train)), min(AUDITED, len(train)))
    return audited(build_reward(config), pick(config, places)).as_dict()


def examples(config: RunConfig, request: Request) -> list[str]:
    """Example completions: right, wrong, right in another format, truncated."""
    from rewards.attacks import render_answer

    (row,) = pick(config, [int(request.get("row", 0))])
    right, style = str(row.get("reference") or "42"), style_of(config)
    answer_text = render_answer(style, right)
    return [
        answer_text,
        render_answer(style, another(right)),
        f"The answer is {right}.",
        answer_text[: max(1, 2 * len(answer_text) // 3)],
    ]


def style_of(config: RunConfig) -> str:
    """The format of answers for this reward, from the preset's examples."""
    from rewards import testing

    examples = testing.golden(config.reward.preset) if config.reward.preset else []
    return str(next((row["style"] for row in examples if "style" in row), "answer"))


def another(right: str) -> str:
    """A wrong answer of the same kind. Of a text, a near miss may be right for some rewards."""
    from rewards.attacks import near_misses

    return next(iter(near_misses(right)), "") if re.fullmatch(r"-?[\d.,/]+", right) else "something else"


def plan(config: RunConfig, request: Request) -> dict[str, Any]:
    """The result of `grpo-kit plan` for this machine."""
    from kit.planning.plan import plan as make_plan

    return make_plan(config)


def validate(config: RunConfig, request: Request) -> list[str]:
    """The notes of `grpo-kit validate`."""
    from kit.runner import prepare

    return prepare.validate(config)


ASKED = (columns, rows, lengths, score, check, guess, weights, attacks, audit, examples, plan, validate)
QUESTIONS: dict[str, Callable[[RunConfig, Request], Any]] = {question.__name__: question for question in ASKED}


def plain(value: Any) -> str:
    """A text, or messages as `role: text` paragraphs; for a single user message only its text."""
    if isinstance(value, list) and value and isinstance(value[0], Mapping) and "content" in value[0]:
        if len(value) == 1:
            return str(value[0]["content"])
        return "\n".join(f"{message.get('role')}: {message['content']}" for message in value)
    return value if isinstance(value, str) else to_json(value)


def _short(value: Any) -> str | None:
    return None if value is None else plain(value)[:SHOWN_TEXT]


def answer(request: Request) -> dict[str, Any]:
    """The answer to a request, or an error."""
    try:
        question = QUESTIONS[str(request.get("question"))]
        return {"answer": question(load_config(request.get("config") or {}), request)}
    except Exception as error:
        if is_user_error(error):
            return {"error": str(error), "kind": type(error).__name__}
        return {"crash": f"{type(error).__name__}: {error}"[:500], "over": is_lost(error)}


def main() -> None:
    """Serves until the end of the input, or until the GPU has failed.

    Output of rewards goes to stderr, not between the answers.
    """
    replies = claim_stdout()
    for line in sys.stdin:
        reply = answer(json.loads(line))
        text = to_json(reply) + "\n"
        replies.write(text.encode("utf-8", "replace"))  # an attack may contain a lone surrogate
        replies.flush()
        if reply.get("over"):
            return


if __name__ == "__main__":
    main()
