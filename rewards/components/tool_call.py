"""Compare tool calls with the expected ones."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rewards.components.final_text import column
from rewards.components.json_values import find_json, parse_json, same_json
from rewards.errors import PresetError
from rewards.extract import final_text
from rewards.protocol import Context, ItemComponent, Sample, Score

FORMATS = ("auto", "hermes", "openai", "json")
MAX_CALLS = 64
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Call(NamedTuple):
    """One call; `arguments` are always an object."""

    name: str
    arguments: dict[str, Any]


class Found(NamedTuple):
    """The calls of a completion, none of them being a valid answer, or the reason why they cannot be read."""

    calls: tuple[Call, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class _ToolCalls(ItemComponent):
    """`format`: `hermes` (`<tool_call>` blocks), `openai` (`tool_calls` of messages), `json`, or `auto`: the one used."""

    format: str = "auto"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise PresetError(f"format is {self.format!r}. Use one of: {', '.join(FORMATS)}.")

    def calls(self, sample: Sample) -> Found:
        """All calls of the completion's assistant messages (`openai`), else those in its text behind the thinking."""
        turns = [turn for turn in sample.messages or [] if isinstance(turn, dict) and turn.get("role") == "assistant"]
        lists = [turn["tool_calls"] for turn in turns if isinstance(turn.get("tool_calls"), list)]
        messages = [call for calls in lists for call in calls]
        if not messages or self.format not in ("auto", "openai"):
            return sample.once(_text_calls, self.format)  # read once for all components
        return Found(reason="calls in two formats") if _OPEN in sample.full_text else _found(parse_calls, messages)

    def expected(self, sample: Sample) -> list[Call] | Score:
        """The calls of the row's reference, or the score that says why they cannot be read."""
        try:
            reference = sample.reference
            return parse_calls(column(sample, "tool_calls", "calls") if reference is None else reference)
        except ValueError as failure:
            return Score(None, "error", {"reason": f"{failure}; give calls as JSON text in `reference`"[:300]})


@dataclass(frozen=True, kw_only=True)
class ToolCallFormat(_ToolCalls):
    """1 for calls that can be read, or for text without a call where none is expected; else 0."""

    name: str = "format"

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        parsed = self.calls(sample)
        reason = parsed.reason
        if reason is None and not parsed.calls and not isinstance(expected := self.expected(sample), Score):
            reason = "no call" if expected else None
        return Score(self.high) if reason is None else Score(None, "format", {"reason": reason})


@dataclass(frozen=True, kw_only=True)
class ToolCallAccuracy(_ToolCalls):
    """ToolRL's correctness, in [-3, 3]; `ok` only when every call is right and there is none too many.

    An expected empty list means: answer without a call. Calls that cannot be read are `format`, at the floor.
    """

    name: str = "accuracy"
    floor: float = -3.0
    low: float = -3.0
    high: float = 3.0

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        expected = self.expected(sample)
        if isinstance(expected, Score):
            return expected
        parsed = self.calls(sample)
        if parsed.reason is not None:
            return Score(None, "format", {"reason": parsed.reason})
        info = {"extracted": json.dumps([call.name for call in parsed.calls])[:200]}
        value = toolrl_correctness(expected, parsed.calls)
        return Score(value, "ok" if value == self.high else "wrong", info)


def toolrl_correctness(expected: Sequence[Call], calls: Sequence[Call]) -> float:
    """6 R / S - 3, in [-3, 3], for the best one-to-one matching of calls of the same name (2504.13958, section 3.3).

    R = names + parameter names + parameter values: the Jaccard index of the names; for each expected call the Jaccard
    index of its parameter names with those of its match; for each expected parameter 1 when its value is equal.
    S = 1 + number of expected calls + number of expected parameters. Names are counted with repetition (the paper
    takes sets), so that saying the same call twice costs something.
    """
    from scipy.optimize import linear_sum_assignment

    names, used = Counter(call.name for call in expected), Counter(call.name for call in calls)
    jaccard = (names & used).total() / (names | used).total() if names or used else 1.0
    matched = 0.0
    for name in names:
        expected_arguments = [call.arguments for call in expected if call.name == name]
        offers = [call.arguments for call in calls if call.name == name]
        if offers:
            scores = [[_parameters(want, offer) for offer in offers] for want in expected_arguments]
            rows, columns = linear_sum_assignment(scores, maximize=True)
            matched += sum(scores[row][column] for row, column in zip(rows, columns, strict=True))
    most = 1 + len(expected) + sum(len(call.arguments) for call in expected)
    return 6.0 * (jaccard + matched) / most - 3.0


def parse_calls(calls: Any) -> list[Call]:
    """Calls out of a list of `{"name", "arguments"}` (or OpenAI's `{"function": ...}`), one of them, or JSON text.

    Raises:
        ValueError: anything else.
    """
    if isinstance(calls, str) and _OPEN in calls:
        return _hermes(calls)
    if isinstance(calls, str):
        parsed = parse_json(calls)
        if parsed.reason is not None:
            raise ValueError(f"calls are {parsed.reason}")
        calls = parsed.value
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list | tuple):
        raise ValueError(f"calls are no list of objects but {type(calls).__name__}")
    return [_call(call) for call in calls]


def _call(call: Any) -> Call:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"].strip():
        raise ValueError("a call has no name")
    arguments: Any = next((call[key] for key in ("arguments", "parameters") if call.get(key) is not None), {})
    if isinstance(arguments, str):
        parsed = parse_json(arguments) if arguments.strip() else None
        if parsed is not None and parsed.reason is not None:
            raise ValueError(f"arguments of {call['name'][:50]!r} are {parsed.reason}")
        arguments = parsed.value if parsed is not None else {}
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments of {call['name'][:50]!r} are no object")
    return Call(call["name"].strip(), arguments)


def _text_calls(text: str, format: str) -> Found:
    final = final_text(text)
    if final.value is None:
        return Found(reason=final.reason)
    if format == "hermes" or (format == "auto" and (_OPEN in final.value or _CLOSE in final.value)):
        return _found(_hermes, final.value)
    if format == "openai":
        return Found()
    looks_like_json = final.value[0] in "{[" or "```json" in final.value or '"name"' in final.value
    if format == "auto" and not looks_like_json:
        return Found()
    json_value = find_json(text)
    if json_value.reason is not None:
        return Found() if json_value.reason == "missing" and not looks_like_json else Found(reason=json_value.reason)
    return _found(parse_calls, json_value.value)


def _found(read: Callable[[Any], Sequence[Call]], source: Any) -> Found:
    try:
        calls = tuple(read(source))
    except ValueError as failure:
        return Found(reason=str(failure)[:200])
    return Found(reason="too many calls") if len(calls) > MAX_CALLS else Found(calls)


def _hermes(text: str) -> list[Call]:
    """Calls of the `<tool_call>` blocks, none within another; each holds one call, a list of calls, or one call a line.

    Raises:
        ValueError: anything else.
    """
    calls: list[Call] = []
    position = 0
    while len(calls) <= MAX_CALLS:
        opened, closed = text.find(_OPEN, position), text.find(_CLOSE, position)
        if opened < 0 and closed < 0:
            break
        if opened < 0 or closed < opened:
            raise ValueError(f"unterminated {_OPEN}" if closed < 0 else f"{_CLOSE} without {_OPEN}")
        block = text[opened + len(_OPEN) : closed]
        if _OPEN in block:
            raise ValueError(f"{_OPEN} within {_OPEN}")
        position = closed + len(_CLOSE)
        block_value = parse_json(block.strip())
        lines = [line for line in block.splitlines() if line.strip()]
        if block_value.reason is None:
            calls += parse_calls(block_value.value)
        elif 2 <= len(lines) <= MAX_CALLS:
            calls += [call for line in lines for call in parse_calls(line)]
        else:
            raise ValueError(f"a {_OPEN} block is {block_value.reason}" if len(lines) < 2 else "too many calls")
    return calls


def _parameters(expected: dict[str, Any], arguments: dict[str, Any]) -> float:
    """Jaccard index of the parameter names (1 when neither has any), plus 1 for each equal value."""
    names = (
        len(expected.keys() & arguments.keys()) / len(expected.keys() | arguments.keys())
        if expected or arguments
        else 1.0
    )
    return names + sum(same_json(value, arguments[key]) for key, value in expected.items() if key in arguments)
