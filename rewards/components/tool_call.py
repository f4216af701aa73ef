"""Compare tool calls with expected calls."""

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
    """One call; `arguments` is a JSON object."""

    name: str
    arguments: dict[str, Any]


class Parsed(NamedTuple):
    """The calls of a completion, which may be none, or the reason why they cannot be parsed."""

    calls: tuple[Call, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class _ToolCalls(ItemComponent):
    """Base class. `format` is `hermes` (`<tool_call>` blocks), `openai` (`tool_calls` of messages), `json` or `auto`."""

    format: str = "auto"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise PresetError(f"format is {self.format!r}. Use one of: {', '.join(FORMATS)}.")

    def calls(self, sample: Sample) -> Parsed:
        """Return all calls of the completion's assistant messages (`openai`), else those in its text after the thinking."""
        turns = [turn for turn in sample.messages or [] if isinstance(turn, dict) and turn.get("role") == "assistant"]
        lists = [turn["tool_calls"] for turn in turns if isinstance(turn.get("tool_calls"), list)]
        messages = [call for calls in lists for call in calls]
        if not messages or self.format not in ("auto", "openai"):
            return sample.once(_text_calls, self.format)  # parsed once for all components
        return Parsed(reason="calls in two formats") if _OPEN in sample.full_text else _read(parse_calls, messages)

    def expected(self, sample: Sample) -> list[Call] | Score:
        """Return the calls of the row's reference, or an `error` score with the reason why they cannot be parsed."""
        try:
            reference = sample.reference
            return parse_calls(column(sample, "tool_calls", "calls") if reference is None else reference)
        except ValueError as failure:
            return Score(None, "error", {"reason": f"{failure}; give calls as JSON text in `reference`"[:300]})


@dataclass(frozen=True, kw_only=True)
class ToolCallFormat(_ToolCalls):
    """1 for calls that can be parsed, or for text without a call if no call is expected; else 0."""

    name: str = "format"

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        parsed = self.calls(sample)
        reason = parsed.reason
        if reason is None and not parsed.calls and not isinstance(expected := self.expected(sample), Score):
            reason = "no call" if expected else None
        return Score(self.high) if reason is None else Score(None, "format", {"reason": reason})


@dataclass(frozen=True, kw_only=True)
class ToolCallAccuracy(_ToolCalls):
    """ToolRL's correctness, in [-3, 3]; `ok` only if the calls are exactly the expected ones.

    An empty list of expected calls requires an answer without a call. Calls that cannot be parsed are `format`.
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
    """Return 6 R / S - 3, in [-3, 3], for the best one-to-one matching of calls with equal names (2504.13958, section 3.3).

    R = names + parameter names + parameter values: the Jaccard index of the names; for each expected call the Jaccard
    index of its parameter names and those of its match; for each expected parameter 1 if its value is equal.
    S = 1 + number of expected calls + number of expected parameters. Names are counted with repetition (the paper
    uses sets), so that a repeated call lowers the value.
    """
    from scipy.optimize import linear_sum_assignment

    names, called = Counter(call.name for call in expected), Counter(call.name for call in calls)
    jaccard = (names & called).total() / (names | called).total() if names or called else 1.0
    matched = 0.0
    for name in names:
        expected_arguments = [call.arguments for call in expected if call.name == name]
        offers = [call.arguments for call in calls if call.name == name]
        if offers:
            scores = [[_parameters(arguments, offer) for offer in offers] for arguments in expected_arguments]
            rows, columns = linear_sum_assignment(scores, maximize=True)
            matched += sum(scores[row][column] for row, column in zip(rows, columns, strict=True))
    most = 1 + len(expected) + sum(len(call.arguments) for call in expected)
    return 6.0 * (jaccard + matched) / most - 3.0


def parse_calls(calls: Any) -> list[Call]:
    """Return the calls of a list of `{"name", "arguments"}` (or OpenAI's `{"function": ...}`), of one of these, or of JSON text.

    Raises:
        ValueError: `calls` has another form.
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
        raise ValueError(f"calls are {type(calls).__name__}, not a list of objects")
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
        raise ValueError(f"arguments of {call['name'][:50]!r} are not an object")
    return Call(call["name"].strip(), arguments)


def _text_calls(text: str, format: str) -> Parsed:
    final = final_text(text)
    if final.value is None:
        return Parsed(reason=final.reason)
    if format == "hermes" or (format == "auto" and (_OPEN in final.value or _CLOSE in final.value)):
        return _read(_hermes, final.value)
    if format == "openai":
        return Parsed()
    looks_like_json = final.value[0] in "{[" or "```json" in final.value or '"name"' in final.value
    if format == "auto" and not looks_like_json:
        return Parsed()
    result = find_json(text)
    if result.reason is not None:
        return Parsed() if result.reason == "missing" and not looks_like_json else Parsed(reason=result.reason)
    return _read(parse_calls, result.value)


def _read(read: Callable[[Any], Sequence[Call]], source: Any) -> Parsed:
    try:
        calls = tuple(read(source))
    except ValueError as failure:
        return Parsed(reason=str(failure)[:200])
    return Parsed(reason="too many calls") if len(calls) > MAX_CALLS else Parsed(calls)


def _hermes(text: str) -> list[Call]:
    """Return the calls of `<tool_call>` blocks; a block contains one call, a list of calls, or one call per line.

    Raises:
        ValueError: a block is nested, not closed, or has another content.
    """
    calls: list[Call] = []
    position = 0
    while len(calls) <= MAX_CALLS:
        start, end = text.find(_OPEN, position), text.find(_CLOSE, position)
        if start < 0 and end < 0:
            break
        if start < 0 or end < start:
            raise ValueError(f"unterminated {_OPEN}" if end < 0 else f"{_CLOSE} without {_OPEN}")
        block = text[start + len(_OPEN) : end]
        if _OPEN in block:
            raise ValueError(f"{_OPEN} within {_OPEN}")
        position = end + len(_CLOSE)
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
    """Return the Jaccard index of the parameter names (1 if there are none), plus 1 for each equal value."""
    names = (
        len(expected.keys() & arguments.keys()) / len(expected.keys() | arguments.keys())
        if expected or arguments
        else 1.0
    )
    return names + sum(same_json(value, arguments[key]) for key, value in expected.items() if key in arguments)
