"""Functions of `rewards.compat` that run generated programs."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rewards._compat.shared import Completions, within
from rewards.errors import RewardsError
from rewards.evaluation import run_component
from rewards.protocol import Context, Score
from rewards.samples import build_samples

__all__ = ["binary_code_reward", "code_reward"]

_PYTHON = frozenset({"python", "python3", "py"})


@within(0.0, 1.0)
def code_reward(
    completions: Completions,
    num_parallel: int = 2,
    provider_type: str = "local",
    enforce_same_language: bool = False,
    **kwargs: Any,
) -> list[float | None]:
    r"""The share of the row's tests that the last fenced Python program passes (open-r1).

    Column `verification_info`: {"language": "python", "test_cases": [{"input", "output"}, ...]}, as open-r1's data has
    it, or any tests that the preset `code-stdio` takes; `language` may be left out. `num_parallel` programs run at once.

    Different from open-r1: programs run in `rewards.sandbox` on this machine, whatever `provider_type` says; all lines
    must agree, where a prefix of the expected output, or nothing, passed; only Python is run, rows of another language
    are None; where no sandbox can be had the value is None and not 0.0.

    Raises:
        RewardsError: no `verification_info`, or several languages with `enforce_same_language`.

    >>> tests = {"language": "python", "test_cases": [{"input": "2", "output": "4"}, {"input": "5", "output": "10"}]}
    >>> programs = ["print(int(input()) * 2)", "print(4)", "print()"]
    >>> code_reward([f"```python\n{program}\n```" for program in programs], verification_info=[tests] * 3)
    [1.0, 0.5, 0.0]
    """
    scores = _scores("share", completions, num_parallel, enforce_same_language, kwargs.get("verification_info"))
    return [None if score.status in ("error", "infra") else score.value for score in scores]


@within(0.0, 1.0)
def binary_code_reward(
    completions: Completions,
    num_parallel: int = 2,
    provider_type: str = "local",
    enforce_same_language: bool = False,
    **kwargs: Any,
) -> list[float | None]:
    r"""1.0 where the last fenced Python program passes all of the row's tests, else 0.0 (open-r1).

    Different from open-r1: as for `code_reward`; and all means all, where more than 99 % were enough.

    >>> tests = [{"input": "2", "output": "4"}, {"input": "5", "output": "10"}]
    >>> binary_code_reward(["```python\nprint(4)\n```"], verification_info=[tests])
    [0.0]
    """
    scores = _scores("all", completions, num_parallel, enforce_same_language, kwargs.get("verification_info"))
    return [None if score.status in ("error", "infra") else score.value for score in scores]


def _scores(scoring: str, completions: Completions, parallel: int, same_language: bool, tests: Any) -> list[Score]:
    from rewards.components.code.graders import CodeStdio

    if not isinstance(tests, Sequence) or isinstance(tests, str) or len(tests) != len(completions):
        raise RewardsError("code rewards need the column verification_info: tests for each completion.")
    languages = [_language(row) for row in tests]
    if same_language and len(set(languages)) > 1:
        raise RewardsError(f"Rows are of several languages: {', '.join(sorted(set(languages)))}. Keep them apart.")
    samples = build_samples([""] * len(completions), completions, verification_info=tests)
    known = [sample for sample, language in zip(samples, languages, strict=True) if language in _PYTHON]
    scored = iter(run_component(CodeStdio(scoring=scoring, workers=max(1, parallel)), known, Context()))
    return [next(scored) if language in _PYTHON else Score(None, "infra") for language in languages]


def _language(row: Any) -> str:
    if isinstance(row, str) and row.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(row)
    named = row.get("language") if isinstance(row, Mapping) else None
    return str(named).lower() if named else "python"
