"""Generated Python programs, judged by running their tests in a sandbox."""

from rewards.components.code.graders import CodeFunction, CodeStdio, ProgramOptions, require_sandbox
from rewards.parameters import with_options
from rewards.preset import Preset

_USUAL = """
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, floor, gcd, inf, isqrt, lcm, sqrt
from typing import *
"""


@with_options(ProgramOptions)
def code_stdio(
    *,
    seconds: float = 5.0,
    time_factor: float = 1.0,
    budget_seconds: float = 120.0,
    tolerance: float | None = None,
    options: ProgramOptions,
) -> Preset:
    """Programs of Python that read stdin and print, as in contests, in the last fenced block after `</think>`.

    Formula: accuracy = 1 when every test passes, else 0; with `scoring="share"`, passed / tests. A test passes when the
    program ends with exit code 0 and printed the expected lines: as many, each equal but for white space at its end; with
    `tolerance`, words are compared, numbers with a decimal point or exponent within it, whole numbers exactly.
    Range: [0, 1].
    Checker: accuracy.
    Columns: `reference` (or `tests`, `test_cases`, `input_output`, `verification_info`): a list of {input, output}, or
    {inputs: [...], outputs: [...]}, or either as JSON; `time_limit` in seconds and `memory_limit` in MiB where a row has
    them.
    Source: tests by input and output of APPS (2105.09938), CodeContests (2203.07814) and TACO (2312.14852), unit tests as a
    reward of CodeRL (2207.01780). Differs from graders that compare lines with `zip`, where a prefix of the expected output
    passes.
    Hacks: printing a prefix of the expected output (line counts must agree); `sys.exit(0)` before printing (only output
    counts); reading the tests or the grader (expected outputs never enter the sandbox, nothing else is there to read);
    changing builtins (comparison is in another process); tests that expect nothing (a row of such tests is an error);
    constants that match many tests (use "all"; "share" pays for them); learning the tests by heart over many epochs
    (hold rows out, or draw with `max_tests`).

    Args:
        seconds: wall clock for each test, where the row has no `time_limit`.
        time_factor: factor on `time_limit`, for limits that were set for compiled languages.
        budget_seconds: wall clock for all tests of a completion; tests that it leaves no time for have failed.
        tolerance: numbers may differ by tolerance × max(1, |expected|); None compares text.
        options: see `ProgramOptions`.

    >>> from rewards import build_samples, load
    >>> tests = [{"input": "2", "output": "4"}, {"input": "5", "output": "10"}]
    >>> completions = ["```python\\nprint(int(input()) * 2)\\n```", "```python\\nprint(4)\\n```", "print(4)"]
    >>> evaluation = load("code-stdio").score(build_samples(["Double it."] * 3, completions, reference=[tests] * 3))
    >>> evaluation.totals, evaluation.statuses["accuracy"]
    ([1.0, 0.0, 0.0], ['ok', 'wrong', 'format'])
    """
    require_sandbox(options.allow_unsafe)
    component = CodeStdio(
        seconds=seconds,
        time_factor=time_factor,
        budget_seconds=budget_seconds,
        tolerance=tolerance,
        **vars(options),
    )
    return Preset([(component, 1.0)], checker="accuracy")


@with_options(ProgramOptions)
def code_function(
    *,
    seconds: float = 5.0,
    tolerance: float = 0.0,
    prelude: str | None = None,
    options: ProgramOptions,
) -> Preset:
    """Functions of Python called with given arguments, defined in the last fenced block after `</think>`.

    Formula: accuracy = 1 when every call returns the expected value, else 0; with `scoring="share"`, passed / calls.
    Range: [0, 1].
    Checker: accuracy.
    Columns: `reference` (or `tests`, `test_list`, `test`, `test_cases`, `input_output`, `verification_info`):
    {function, calls: [{args, kwargs, expected}]}, or {fn_name, inputs, outputs}, or assertions as in MBPP and HumanEval;
    `entry_point` with the function's name where the tests do not say it; `test_setup_code`, put in front.
    Source: assertions of MBPP (2108.07732) and HumanEval (2107.03374), calls of APPS (2105.09938).
    Hacks: `sys.exit(0)` (a call without an answer has failed); an object that equals everything, or a subclass of int
    (only plain values come out, compared outside); changed builtins or a forged result line (it still has to hold the
    right value); reading the expected values (they never enter the sandbox). Tests whose expected values cannot be read
    off, such as loops, helpers or `pytest.raises`, are an error of the row.

    Args:
        seconds: wall clock for all calls of a completion.
        tolerance: floats may differ by tolerance × max(1, |expected|).
        prelude: Python run in front of every program. None stands for the imports that such problems take for granted
            (`from typing import *`, math, re, collections, itertools, functools, heapq, bisect, ...).
        options: see `ProgramOptions`.

    >>> from rewards import build_samples, load
    >>> completions = ["```python\\ndef double(n):\\n    return 2 * n\\n```", "```python\\nimport sys; sys.exit(0)\\n```"]
    >>> tests = ["assert double(2) == 4", "assert double(5) == 10"]
    >>> evaluation = load("code-function").score(build_samples(["Double it."] * 2, completions, test_list=[tests] * 2))
    >>> evaluation.totals
    [1.0, 0.0]
    """
    require_sandbox(options.allow_unsafe)
    component = CodeFunction(
        seconds=seconds,
        tolerance=tolerance,
        prelude=_USUAL if prelude is None else prelude,
        **vars(options),
    )
    return Preset([(component, 1.0)], checker="accuracy")
