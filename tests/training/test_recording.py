"""kit.runner.recording: rows and columns of completions, a stop if rewards keep failing; kit.runner.console: library logs."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.errors import RewardError, RunError
from kit.runner.console import LogCapture
from kit.runner.recording import FailureMonitor, columns, write_completions


def rollout(step: int = 0, **changes: Any) -> Any:
    """A rollout of two completions and two components; the second component does not apply to the second completion."""
    values = {
        "step": step,
        "mode": "train",
        "rows": [{"prompt": [{"role": "user", "content": "1+1?"}], "reference": "2"}, {"prompt": "2+2?"}],
        "completions": [[{"role": "assistant", "content": "2"}], "four"],
        "completion_ids": [[5, 6], [7]],
        "truncated": [False, True],
        "rewards": torch.tensor([[1.0, 0.25], [0.0, math.nan]]),
        "reward_names": ["accuracy", "format"],
        "advantages": torch.tensor([0.5, -0.5]),
        "extra": {"accuracy/status": ["ok", "wrong"], "accuracy/extracted": ["2", None]},
        "prompt_ids": None,
        "tool_mask": None,
    }
    return SimpleNamespace(**values | changes)


def test_the_table_has_a_row_a_completion_and_a_column_a_verdict() -> None:
    assert columns(rollout(step=4)) == {
        "step": [5, 5],
        "prompt": ["1+1?", "2+2?"],
        "reference": ["2", None],
        "completion": ["2", "four"],
        "tokens": [2, 1],
        "finish_reason": ["stop", "length"],
        "advantage": [0.5, -0.5],
        "reward/accuracy": [1.0, 0.0],
        "reward/format": [0.25, None],
        "reward/accuracy/status": ["ok", "wrong"],
        "reward/accuracy/extracted": ["2", None],
    }


def test_each_batch_is_a_file_that_reads_back(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    for step in (0, 1):
        write_completions(tmp_path / "completions", rollout(step))
    names = sorted(path.name for path in (tmp_path / "completions").iterdir())
    assert names == ["step-00001.parquet", "step-00002.parquet"]
    rows = pq.read_table(tmp_path / "completions" / names[1]).to_pylist()
    assert [row["reward/format"] for row in rows] == [0.25, None]


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "completions").touch()
    with pytest.raises(RunError, match="completions"):
        write_completions(tmp_path / "completions", rollout())


class Rewards:
    """A stand-in for the reward functions of a run, with these shares of failures in successive batches."""

    def __init__(self, *shares: float) -> None:
        self.shares = list(shares)

    @property
    def last_evaluation(self) -> Any:
        return SimpleNamespace(
            failure_share=self.shares.pop(0),
            statuses={"fine": ["ok", "ok"], "mine": ["ok", "error"]},
            infos={"fine": [{}, {}], "mine": [{}, {"reason": "ValueError: planted."}]},
        )


def batches_until_stopped(*shares: float, limit: float = 0.2, batches: int = 99) -> int | None:
    watch = FailureMonitor(Rewards(*shares), limit, lambda text: None, batches)  # type: ignore[arg-type]
    for number in range(1, len(shares) + 1):
        try:
            watch(rollout())
        except RewardError:
            return number
    return None


@pytest.mark.parametrize(
    ("shares", "batches", "stopped"),
    [
        ([0.3] * 9, 99, 5),
        ([0.2] * 9, 99, None),  # equal to the limit is not above it
        ([0.1, 0.3, 0.3, 0.3, 0.3, 0.3], 99, 6),
        ([1.0] * 3, 3, 3),  # three bad batches in a row
    ],
)
def test_a_run_is_stopped_after_five_bad_batches_in_a_row(shares: list[float], batches: int, stopped: int) -> None:
    assert batches_until_stopped(*shares, batches=batches) == stopped


def test_what_torch_logs_goes_to_the_file_and_its_own_handlers_come_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("torch.utils.anything")
    before = logging.getLogger("torch").handlers, logging.getLogger("torch").propagate
    assert before[0], "torch prints by a handler of its own; if it no longer does, _libraries_quiet need not touch it"
    logs = LogCapture()
    with logs.collecting():
        logger.warning("early")
        with logs.written_to(tmp_path / "log.txt"):
            logger.warning("late, of torch %s", torch.__version__)
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")
    assert [line.split(": ")[1][:4] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["earl", "late"]
    assert (logging.getLogger("torch").handlers, logging.getLogger("torch").propagate) == before
