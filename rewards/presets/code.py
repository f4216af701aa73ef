"""Presets for generated Python programs, which run their tests in a sandbox."""

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
    """Python programs that read stdin and print, as in contests, in the last fenced block after `</think>`.

    Formula: accuracy = 1 if all tests pass, else 0; with `scoring="share"`, passed / tests. A test passes if the program ends
    with exit code 0 and prints the expected lines: the same number of lines, equal without white space at line ends. With
    `tolerance`, words are compared, decimals within the tolerance and whole numbers exactly.
    Range: [0, 1].
    Checker: accuracy.
    Columns: `reference` (or `tests`, `test_cases`, `input_output`, `verification_info`): a list of {input, output}, or
    {inputs: [...], outputs: [...]}, or either as JSON; optionally `time_limit` in seconds and `memory_limit` in MiB.
    Source: tests of input and output in APPS (2105.09938), CodeContests (2203.07814) and TACO (2312.14852); unit tests as a
    reward in CodeRL (2207.01780). Unlike graders that compare lines with `zip`, it rejects a prefix of the expected output.
    Attacks: a prefix of the expected output (the number of lines must be equal); `sys.exit(0)` before printing (the output
    must be equal); reading the tests or the grader (expected outputs never enter the sandbox); changed builtins (another
    process compares the output); tests that expect no output (such a row is an error); constants that match many tests ("all"
    does not pay them, "share" does); tests learned by heart over many epochs (not detected: use held-out rows, or
    `max_tests`).

    Args:
        seconds: time limit of each test, for rows without `time_limit`.
        time_factor: factor of `time_limit`, for limits that were set for compiled languages.
        budget_seconds: time limit of all tests of a completion; tests without time left fail.
        tolerance: decimals may differ by tolerance × max(1, |expected|); None compares text.
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
        seconds=seconds, time_factor=time_factor, budget_seconds=budget_seconds, tolerance=tolerance, **vars(options)
    )
    return Preset([(component, 1.0)], checker="accuracy")


@with_options(ProgramOptions)
def code_function(
    *, seconds: float = 5.0, tolerance: float = 0.0, prelude: str | None = None, options: ProgramOptions
) -> Preset:
    """Python functions that are called with arguments, defined in the last fenced block after `</think>`.

    Formula: accuracy = 1 if all calls return the expected value, else 0; with `scoring="share"`, passed / calls.
    Range: [0, 1].
    Checker: accuracy.
    Columns: `reference` (or `tests`, `test_list`, `test`, `test_cases`, `input_output`, `verification_info`):
    {function, calls: [{args, kwargs, expected}]}, or {fn_name, inputs, outputs}, or assertions as in MBPP and HumanEval;
    `entry_point` with the function's name if the tests do not contain it; `test_setup_code`, which runs before the program.
    Source: assertions of MBPP (2108.07732) and HumanEval (2107.03374), calls of APPS (2105.09938).
    Attacks: `sys.exit(0)` (a call without a result fails); an object that equals everything, or a subclass of int (only plain
    values leave the sandbox, and another process compares them); changed builtins or a forged result line (the value must
    still be right); reading the expected values (they never enter the sandbox). Tests without literal expected values, such
    as loops, helpers or `pytest.raises`, are an error of the row.

    Args:
        seconds: time limit of all calls of a completion.
        tolerance: floats may differ by tolerance × max(1, |expected|).
        prelude: Python code that runs before every program. None runs the imports that such problems usually presuppose
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
        seconds=seconds, tolerance=tolerance, prelude=_USUAL if prelude is None else prelude, **vars(options)
    )
    return Preset([(component, 1.0)], checker="accuracy")
