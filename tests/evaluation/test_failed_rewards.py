"""Rewards that fail in evaluation are seen in the result and in the table; checkers get what trainers hand over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import rewards
from kit.config import EvaluationConfig, GenerationConfig
from kit.evaluation.heldout import HeldOut

ROW = {"prompt": [{"role": "user", "content": "1 + 1 ="}], "reference": "2"}


def heldout(function: Any) -> HeldOut:
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "2", apply_chat_template=lambda *_, **__: "1 + 1 =")
    preset = rewards.from_functions([(function, 1.0)])
    return HeldOut([ROW], preset, tokenizer, EvaluationConfig(k=1), GenerationConfig())


def score(function: Any) -> dict[str, Any]:
    import torch

    problems = heldout(function)
    problems._complete = lambda *_: [([5], False)]  # type: ignore[method-assign]
    return problems.score(torch.nn.Linear(1, 1))


def test_the_first_reason_stands_in_the_result_where_a_reward_failed() -> None:
    def broken(completions: Any) -> list[float]:
        raise ZeroDivisionError("oh")

    result = score(broken)
    assert result["reward_failure_share"] == 1.0
    assert result["reward_failure"].endswith("error: ZeroDivisionError: oh")
    assert "reward_failure" not in score(lambda completions: [1.0])


def test_a_checker_that_logs_is_a_checker_all_the_same() -> None:
    def logging_checker(completions: Any, log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("seen", [len(completions)])
        log_metric("seen", 1.0)
        return [1.0 for _ in completions]

    result = heldout(logging_checker)._accuracy([([5], False)], [([5], False)])[0]
    assert result["greedy_accuracy"]["value"] == result["pass@1"]["value"] == 1.0
