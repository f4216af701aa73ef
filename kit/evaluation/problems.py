"""The scores of single problems in an evaluation's result, in the order of its problems. One reading for all who pair them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.evaluation.statistics import pass_at_k

RECORDED = {"greedy_accuracy": "greedy_correct", "greedy_reward": "greedy_reward"}


def problem_scores(result: Mapping[str, Any], key: str) -> list[float | None] | None:
    """The score `key` of every problem, None for one whose reward failed; None without such a column.

    `key` is greedy_accuracy, greedy_reward, maj@K or pass@N with N up to the K samples of a problem.
    """
    table, k = result.get("per_problem") or {}, int(result.get("k") or 0)
    if key.startswith("pass@"):
        drawn, n = table.get("sampled_correct"), int(key.removeprefix("pass@"))
        return None if drawn is None or n > k else [pass_at_k(k, count, n) for count in drawn]
    values = table.get("majority_correct" if key == f"maj@{k}" else RECORDED.get(key))
    return None if values is None else [None if value is None else float(value) for value in values]
