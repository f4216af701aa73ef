"""Graded by a language model against a rubric, over an OpenAI-compatible endpoint."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rewards.components.judge_prompt import (
    DEFAULT_RUBRIC,
    RubricItem,
    messages,
    new_fence,
    parse_rubric,
    parse_verdict,
)
from rewards.components.readable import prompt_text, readable, reference_texts
from rewards.errors import PresetError
from rewards.http import Chat, Endpoint, Reply
from rewards.isolation import Cache, LayeredCache, MemoryCache, content_key
from rewards.protocol import Context, Sample, Score, failure_reason

__all__ = ["JudgeRubric", "Question"]


@dataclass(frozen=True)
class Question:
    """Everything a verdict depends on; equal questions are asked once."""

    prompt: str
    answer: str
    reference: str | None
    rubric: tuple[RubricItem, ...]


@dataclass(frozen=True)
class Verdict:
    """Points by item, or the reason why there are none."""

    points: Mapping[str, int] | None
    info: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class JudgeRubric:
    """sum of weight x points / scale over the rubric's items, divided by the sum of weights; in [0, 1].

    `ok` from `threshold` on, else `wrong` with the value as partial credit. Only the final text is shown to the judge,
    fenced as data, up to `max_chars` characters; what is no text to judge is `format` and not asked. No verdict, for
    whatever reason, is `infra` and excluded: never 0. Verdicts are kept in memory, and in `cache` when it names a file.

    Args:
        endpoint: where the judge is.
        model: its name there.
        rubric: what is graded, unless `rubric_column` names a column that holds a rubric of the row's own.
        scale: points for full marks on an item.
        needs_reference: rows without a reference are `not_applicable`.
        json_mode: ask for `response_format: json_object`; off for servers that do not know it.
        reasks: further questions after a verdict that cannot be read, each with a fence of its own.
        max_tokens: limit on the judge's reply.
        max_requests: requests that this process may send to this endpoint and model; None for any number.
        batch_seconds: seconds for a whole batch; what is open then is `infra`.
        extra: further fields of the request body, such as `reasoning_effort`.
    """

    itemwise: ClassVar[bool] = True

    name: str = "judge"
    floor: float = 0.0
    low: float = 0.0
    high: float = 1.0
    version: str = "1"
    endpoint: Endpoint
    model: str
    rubric: tuple[RubricItem, ...] = DEFAULT_RUBRIC
    rubric_column: str | None = None
    scale: int = 10
    threshold: float = 0.7
    needs_reference: bool = False
    json_mode: bool = True
    reasks: int = 1
    max_chars: int = 20_000
    max_tokens: int = 1024
    max_requests: int | None = None
    batch_seconds: float = 600.0
    cache: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (1 <= self.scale <= 100 and 0 < self.threshold <= 1 and self.batch_seconds > 0 and self.reasks >= 0):
            raise PresetError(
                "A judge needs 1 <= scale <= 100, 0 < threshold <= 1, batch_seconds > 0 and reasks >= 0, got "
                f"{self.scale}, {self.threshold}, {self.batch_seconds}, {self.reasks}."
            )

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        asked = [self._question(sample) for sample in samples]
        groups: dict[Question, int] = {}
        for sample, question in zip(samples, asked, strict=True):
            if isinstance(question, Question):
                groups.setdefault(question, sample.group_id)
        verdicts = self._verdicts(groups, ctx)
        return [
            question if isinstance(question, Score) else self._score(question, verdicts[question]) for question in asked
        ]

    def _question(self, sample: Sample) -> Question | Score:
        try:
            reference = reference_texts(sample.reference)
            rubric = self.rubric
            if self.rubric_column is not None:
                given = sample.columns.get(self.rubric_column)
                if given is None:
                    return Score(None, "not_applicable", {"reason": f"no rubric in column {self.rubric_column!r}"})
                rubric = parse_rubric(given)
        except ValueError as failure:
            return Score(None, "error", {"reason": failure_reason(failure)})
        if reference is None and self.needs_reference:
            return Score(None, "not_applicable", {"reason": "no reference"})
        found = readable(sample.whole, min_words=0, prompt=sample.prompt)
        reason = found.reason if found.text is None else _no_answer(found.text, self.max_chars)
        if found.text is None or reason is not None:
            return Score(None, "format", {"reason": reason})
        prompt = prompt_text(sample.prompt).encode("utf-8", "replace").decode()
        return Question(prompt, found.text, None if reference is None else "\nor: ".join(reference), rubric)

    def _score(self, question: Question, verdict: Verdict) -> Score:
        if verdict.points is None:
            return Score(None, "infra", verdict.info)
        total = sum(item.weight for item in question.rubric)
        value = sum(item.weight * verdict.points[item.name] for item in question.rubric) / (self.scale * total)
        return Score(value, "ok" if value >= self.threshold - 1e-9 else "wrong", {**verdict.info, **verdict.points})

    def _verdicts(self, groups: Mapping[Question, int], ctx: Context) -> dict[Question, Verdict]:
        """Verdicts from the caches, then from the judge."""
        keys = {question: self._key(question) for question in groups}
        cache = LayeredCache(_MEMORY, Cache(self.cache) if self.cache is not None else None)
        known = cache.get_many(key for key in keys.values() if key)
        found = {
            q: Verdict(known[key], {"cached": True}) for q, key in keys.items() if key and _fits(known.get(key), q)
        }
        fresh = self._ask_all({q: group for q, group in groups.items() if q not in found}, ctx)
        cache.put_many({key: v.points for q, v in fresh.items() if v.points is not None and (key := keys[q])})
        return found | fresh

    def _key(self, question: Question) -> str | None:
        """What the verdict depends on; neither fences nor seeds, at temperature 0."""
        rubric = [[item.name, item.description] for item in question.rubric]
        extra = json.dumps(dict(self.extra), sort_keys=True, default=repr)
        where = (self.version, self.endpoint.base_url, self.model, self.scale, self.max_tokens, self.json_mode, extra)
        return content_key("judge", *where, rubric, question.prompt, question.answer, question.reference)

    def _ask_all(self, groups: Mapping[Question, int], ctx: Context) -> dict[Question, Verdict]:
        if not groups:
            return {}
        # A thread of its own: the caller may be inside an event loop.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge") as thread:
            return thread.submit(asyncio.run, self._converse(groups, ctx)).result()

    async def _converse(self, groups: Mapping[Question, int], ctx: Context) -> dict[Question, Verdict]:
        async with Chat(self.endpoint, hash((ctx.seed, ctx.step)), self._may_ask) as chat:
            tasks = {q: asyncio.create_task(self._ask(chat, q, (ctx.seed, ctx.step, g))) for q, g in groups.items()}
            _, late = await asyncio.wait(tasks.values(), timeout=self.batch_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            return {question: _outcome(task, self.batch_seconds) for question, task in tasks.items()}

    async def _ask(self, chat: Chat, question: Question, seeds: tuple[int, ...]) -> Verdict:
        data = [question.prompt, question.answer, question.reference or ""]
        sent, problem = 0, ""
        for attempt in range(self.reasks + 1):
            fence = new_fence(data, *seeds, attempt)
            reply: Reply = await chat.ask(self._body(question, fence))
            sent += reply.attempts
            if reply.content is None:
                return Verdict(None, {"reason": reply.problem, "requests": sent})
            try:
                points = parse_verdict(reply.content, question.rubric, self.scale, fence)
            except ValueError as failure:
                problem = f"unreadable verdict: {failure}"[:300]
            else:
                return Verdict(points, {"requests": sent})
        return Verdict(None, {"reason": problem, "requests": sent})

    def _body(self, question: Question, fence: str) -> dict[str, Any]:
        asked = messages(question.rubric, self.scale, fence, question.prompt, question.answer, question.reference)
        body = {"model": self.model, "messages": asked, "temperature": 0, "max_tokens": self.max_tokens}
        if self.json_mode:
            body["response_format"] = {"type": "json_object"}
        return {**body, **self.extra}

    def _may_ask(self) -> bool:
        with _LOCK:
            spent = (self.endpoint.base_url, self.model)
            if self.max_requests is not None and _SPENT[spent] >= self.max_requests:
                return False
            _SPENT[spent] += 1
            return True


def _no_answer(text: str, max_chars: int) -> str | None:
    """What judges have been seen to reward though nothing is said."""
    if len(text) > max_chars:
        return "too_long"
    if not any(character.isalnum() for character in text):
        return "no letters or digits"
    return "announces an answer and gives none" if text.endswith(":") else None


def _fits(points: Any, question: Question) -> bool:
    """Whether a cached value is points for this rubric: the file may hold anything."""
    return isinstance(points, dict) and set(points) == {item.name for item in question.rubric}


def _outcome(task: "asyncio.Task[Verdict]", seconds: float) -> Verdict:
    if task.cancelled():
        return Verdict(None, {"reason": f"the batch took longer than {seconds:g} s"})
    failure = task.exception()
    return Verdict(None, {"reason": failure_reason(failure)}) if failure else task.result()


_MEMORY = MemoryCache()
_SPENT: Counter[tuple[str, str]] = Counter()
_LOCK = threading.Lock()
