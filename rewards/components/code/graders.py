"""Grade generated programs by tests in the sandbox, several completions at a time."""

import functools
import json
import math
import random
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rewards.components.code.blocks import code_block
from rewards.components.code.calls import parse_calls
from rewards.components.code.harness import decode, encode
from rewards.components.code.stdio import parse_stdio_tests, same_output
from rewards.errors import PresetError
from rewards.isolation.cache import component_key, recall, remember
from rewards.parallel import slow_last
from rewards.protocol import Context, ItemComponent, Sample, Score, failure_reason
from rewards.sandbox import Job, Result, SandboxError, interpreter, isolates, run_job

SCORING = ("all", "share")
_HARNESS = Path(__file__).with_name("harness.py")
_TEST_COLUMNS = ("tests", "test_list", "test", "test_cases", "input_output", "verification_info")
_NAME_COLUMNS = ("entry_point", "function", "fn_name")
_SETUP_COLUMN = "test_setup_code"
_LIMIT_COLUMNS = ("time_limit", "memory_limit")
_MIN_MEMORY_MB = 128  # with less, Python does not start on every system
_REPORTED = 200
_OF_ITERABLES = [(name,) for name in ("list", "tuple", "set", "frozenset", "sorted", "sum")]
# Fields that do not affect the verdict.
_NOT_CONTENT = frozenset({"workers", "allow_unsafe", "batch_seconds"})

T = TypeVar("T")


def require_sandbox(allow_unsafe: bool) -> None:
    """Raise PresetError if the system cannot isolate generated programs and `allow_unsafe` is not set."""
    try:
        isolates(allow_unsafe)
    except SandboxError as failure:
        raise PresetError(f"{failure}") from failure


@dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """Options of presets that run programs.

    Args:
        scoring: "all" (1 if all tests pass) or "share" (the share of passed tests).
        memory_mb: address space in MiB, for rows without a limit.
        max_tests: the most tests to run, drawn at random, the same ones for a group; None runs all.
        workers: completions that are graded concurrently; None uses the number of CPUs.
        batch_seconds: time limit of a batch; slow programs run last, and are `infra` (no score) if no time is left.
        python: path of an interpreter whose packages programs may use, such as that of a virtual environment (numpy needs
            about 1,000 MiB); each verdict contains its version. None uses the system's interpreter, without packages.
        allow_unsafe: run programs with resource limits only, if the system has no sandbox.
    """

    scoring: str = "all"
    memory_mb: int = 512
    max_tests: int | None = None
    workers: int | None = None
    batch_seconds: float | None = 600.0
    python: str | None = None
    allow_unsafe: bool = False


@dataclass(frozen=True, kw_only=True)
class _CodeComponent(ProgramOptions, ItemComponent):
    """Base of both graders: extracts the program from the completion and the tests from the row, and caches verdicts.

    With `scoring` "all" the value is 1 if all tests pass, else 0; with "share" it is passed / tests. The status is `ok` only if
    all tests pass. `seconds` and `memory_mb` limit one run, `budget_seconds` all runs of one completion; tests without time
    left fail. In a batch with `batch_seconds`, each completion first gets an eighth of the time for a run, and slow ones run
    again after all others. Verdicts are cached by program, tests and version of the interpreter. A verdict that a time limit
    affected is not cached, because a busy machine can slow a right program down.
    """

    name: str = "accuracy"
    seconds: float = 5.0
    budget_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.scoring not in SCORING:
            raise PresetError(f"scoring is {self.scoring!r}. Use one of: {', '.join(SCORING)}.")
        if not 0 < self.seconds <= 600 or self.budget_seconds <= 0:
            raise PresetError(f"seconds is {self.seconds}. Pass more than 0 and at most 600.")
        if self.memory_mb < _MIN_MEMORY_MB:
            raise PresetError(f"memory_mb is {self.memory_mb}. Pass at least {_MIN_MEMORY_MB}, which Python needs.")
        if self.max_tests is not None and self.max_tests < 1:
            raise PresetError(f"max_tests is {self.max_tests}. Pass at least 1, or None for all.")
        if self.python is not None:
            try:
                interpreter(self.python)
            except SandboxError as failure:
                raise PresetError(f"{failure}") from failure

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        keys = [self._key(sample, ctx) or f"only:{position}" for position, sample in enumerate(samples)]
        cached = recall(keys)
        todo = {key: sample for key, sample in zip(keys, samples, strict=True) if key not in cached}
        end = math.inf if self.batch_seconds is None else time.monotonic() + self.batch_seconds
        one_pass = self.batch_seconds is None or len(todo) < 2

        def attempt(key: str, share: float) -> Score | None:
            return self._try(todo[key], ctx, functools.partial(self._run, share, end))

        results = slow_last(attempt, list(todo), self.workers, one_pass)
        fresh = {key: score for key, score in zip(todo, results, strict=True) if score is not None}
        remember(
            {
                key: [score.info["passed"], score.info["tests"], score.info.get("reason", "")]
                for key, score in fresh.items()
                if not key.startswith("only:") and "passed" in score.info and not score.info.get("timed_out")
            }
        )
        return [fresh[key] if key in fresh else self._verdict(*cached[key]) for key in keys]

    def _key(self, sample: Sample, ctx: Context) -> str | None:
        """Return the cache key, which covers everything that the verdict depends on; None if that is not plain data."""
        program = sample.once(code_block).value
        columns = (*_TEST_COLUMNS, *_NAME_COLUMNS, *_LIMIT_COLUMNS, _SETUP_COLUMN)
        tests = [sample.columns.get(column) for column in columns]
        drawn = None if self.max_tests is None else (ctx.seed, ctx.step, sample.group_id)
        if program is None:
            return None
        return component_key(self, _NOT_CONTENT, drawn, self._python_version, program, tests, sample.reference)

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        return self.score([sample], ctx)[0]

    def _try(self, sample: Sample, ctx: Context, run: Callable[[Job], Result]) -> Score | None:
        """Return the score with its time; None if the program did not end in the share of its time."""
        start, program = time.perf_counter(), sample.once(code_block)
        columns = (sample.columns[column] for column in _TEST_COLUMNS if sample.columns.get(column) is not None)
        tests = next(columns, sample.reference)
        try:
            if program.value is None:
                score = Score(None, "format", {"reason": program.reason})
            elif tests is None:
                raise _BadRow(f"no tests: give a column `reference`, or one of {', '.join(_TEST_COLUMNS)}")
            else:
                score = self._judge(program.value, tests, sample, ctx, run)
        except _Slow:
            return None
        except _NoTime:
            score = Score(None, "infra", {"reason": f"other programs used the batch's {self.batch_seconds or 0:g} s"})
        except SandboxError as failure:
            score = Score(None, "infra", {"reason": f"{failure}"[:_REPORTED]})
        except _BadRow as failure:
            score = Score(None, "error", {"reason": f"tests of this row cannot be used: {failure}"[:300]})
        except Exception as failure:
            score = Score(None, "error", {"reason": failure_reason(failure)})
        return replace(score, seconds=time.perf_counter() - start)

    @abstractmethod
    def _judge(self, program: str, tests: Any, sample: Sample, ctx: Context, run: Callable[[Job], Result]) -> Score:
        """Score a program by the tests of its row."""

    @property
    def _python_version(self) -> str | None:
        return None if self.python is None else interpreter(self.python).version

    def _drawn(self, tests: list[T], sample: Sample, ctx: Context) -> list[T]:
        if self.max_tests is None or len(tests) <= self.max_tests:
            return tests
        draw = random.Random(f"{ctx.seed} {ctx.step} {sample.group_id}")
        return [tests[position] for position in sorted(draw.sample(range(len(tests)), self.max_tests))]

    def _run(self, share: float, end: float, job: Job) -> Result:
        """Run a job for a share of its time, at most until `end` (monotonic seconds).

        If the sandbox does not start, it is started a second time.
        """
        left = end - time.monotonic()
        if left <= 0:
            raise _NoTime
        job = replace(job, seconds=min(job.seconds * share, left))
        isolated = isolates(self.allow_unsafe)
        result = run_job(isolated, job)
        if result.status == "infra":
            result = run_job(isolated, job)
        if result.status == "infra":
            raise SandboxError(result.reason)
        if result.status == "timeout" and share < 1.0:
            raise _Slow
        if result.status == "timeout" and job.seconds >= left:
            raise _NoTime
        return result

    def _verdict(self, passed: int, total: int, reason: str, timed_out: bool = False) -> Score:
        info: dict[str, Any] = {"passed": passed, "tests": total}
        if self.python is not None:
            info["python"] = self._python_version
        if passed == total:
            return Score(self.high, "ok", info)
        info |= {"reason": reason[:_REPORTED]} | ({"timed_out": True} if timed_out else {})
        value = self.low + (self.high - self.low) * passed / total if self.scoring == "share" else None
        return Score(value, "wrong", info)


@dataclass(frozen=True, kw_only=True)
class CodeStdio(_CodeComponent):
    """Share of passed tests of a program that reads stdin and prints.

    Each test is a separate run. It passes if the program ends with exit code 0 and prints the expected lines.

    `tolerance` accepts close numbers, see `same_output`. The columns `time_limit` (seconds, times `time_factor`) and
    `memory_limit` (MiB) replace `seconds` and `memory_mb` in rows that have them.
    """

    tolerance: float | None = None
    time_factor: float = 1.0

    def _judge(self, program: str, tests: Any, sample: Sample, ctx: Context, run: Callable[[Job], Result]) -> Score:
        pairs = self._drawn(_usable(parse_stdio_tests, tests), sample, ctx)
        # Limits of the row apply if they are positive numbers.
        limits = [sample.columns.get(column) for column in _LIMIT_COLUMNS]
        numbers = [isinstance(n, int | float) and not isinstance(n, bool) and 0 < n < 1e6 and float(n) for n in limits]
        seconds = min(600.0, numbers[0] * self.time_factor) if numbers[0] else self.seconds
        memory_mb = max(_MIN_MEMORY_MB, int(min(numbers[1], 65536))) if numbers[1] else self.memory_mb
        end = time.monotonic() + self.budget_seconds
        passed, reason, timed_out = 0, "", False
        for number, test in enumerate(pairs, 1):
            left = end - time.monotonic()
            if left <= 0:
                reason, timed_out = reason or f"test {number}: no time left of {self.budget_seconds:g} s", True
                break
            job = Job(
                program=program,
                stdin=test.input,
                seconds=min(seconds, left),
                memory_mb=memory_mb,
                output_bytes=max(1 << 16, 2 * len(test.output.encode("utf-8", "replace"))),
                python=self.python,
            )
            result = run(job)
            timed_out = timed_out or result.status == "timeout"
            if result.status == "ok" and same_output(test.output, result.stdout, self.tolerance):
                passed += 1
                continue
            problem = "other output" if result.status == "ok" else _ending(result)
            reason = reason or f"test {number}: {problem}"
            if self.scoring == "all":
                break
        return self._verdict(passed, len(pairs), reason, timed_out)


@dataclass(frozen=True, kw_only=True)
class CodeFunction(_CodeComponent):
    """Share of calls of a function that return the expected value.

    One run makes all calls. Arguments and returned values pass as JSON.

    A value that is not plain (an object with its own `__eq__`, a subclass of int) is wrong. Any iterable is accepted if the
    test converts the value to a list, set or sum. `tolerance` accepts floats within tolerance × max(1, |expected|).
    `prelude` is code that runs before the program, for example imports.
    """

    tolerance: float = 0.0
    prelude: str = ""

    def _judge(self, program: str, tests: Any, sample: Sample, ctx: Context, run: Callable[[Job], Result]) -> Score:
        name = next((sample.columns[column] for column in _NAME_COLUMNS if sample.columns.get(column)), None)
        setup = sample.columns.get(_SETUP_COLUMN)
        preamble = "\n".join(part for part in (self.prelude, setup) if isinstance(part, str) and part)
        function, calls = _usable(functools.partial(parse_calls, function=name), tests)
        calls = self._drawn(calls, sample, ctx)
        rows = _usable(
            lambda calls: [
                [encode(call.args), encode(dict(call.kwargs)), call.wrappers[:1] in _OF_ITERABLES] for call in calls
            ],
            calls,
        )
        job = Job(
            program=_HARNESS.read_text(encoding="utf-8"),
            stdin=json.dumps({"function": function, "calls": rows, "before": preamble, "source": program}),
            seconds=min(self.seconds, self.budget_seconds),
            memory_mb=self.memory_mb,
            python=self.python,
        )
        result = run(job)
        answers = _answers(result.stdout, len(calls))
        accepted = [
            call.accepts(answer[0], self.tolerance) for call, answer in zip(calls, answers, strict=False) if answer
        ]
        passed = sum(accepted) if len(answers) <= len(calls) else 0
        failures = [line for line in result.stdout.split("\n") if '"raised"' in line or '"missing"' in line]
        problem = (failures or ["other value"])[0]
        if len(answers) < len(calls):
            problem = f"{len(answers)} of {len(calls)} calls answered: {_ending(result)}"
        elif len(answers) > len(calls):
            problem = "more answers than calls"
        return self._verdict(passed, len(calls), problem, result.status == "timeout")


class _Slow(Exception):
    """Raised if a run does not end within the share of its time."""


class _NoTime(Exception):
    """Raised if the time of the batch ends before a run has had its complete time."""


class _BadRow(ValueError):
    """Raised if the tests of a row cannot be used."""


def _usable(parse: Any, tests: Any) -> Any:
    try:
        return parse(tests)
    except Exception as failure:
        raise _BadRow(f"{failure}" if type(failure) is ValueError else failure_reason(failure)) from failure


def _answers(stdout: str, calls: int) -> list[tuple[Any] | None]:
    """Return for each line its value in a tuple, or None for an exception and for a line that is not an answer."""
    answers: list[tuple[Any] | None] = []
    for line in filter(None, stdout.split("\n")[: calls + 2]):
        try:
            answers.append((decode(json.loads(line)["value"]),))
        except (ValueError, KeyError, TypeError, RecursionError):
            answers.append(None)
    return answers


def _ending(result: Result) -> str:
    last = result.stderr.strip().rpartition("\n")[2]
    return f"{result.reason or 'ended early'}{': ' + last if last else ''}"[:_REPORTED]
