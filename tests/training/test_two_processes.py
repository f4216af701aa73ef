"""Two processes with gloo on the CPU train one policy: equal weights, and the gradient of one process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .rollouts import assert_gradients_close

pytestmark = [pytest.mark.survival, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both processes; the first also has `alone`, the gradient of a single process."""
    folder = tmp_path_factory.mktemp("two")
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).with_name("two_processes.py")), str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    results[0]["alone"] = torch.load(folder / "alone.pt", weights_only=False)
    return results


def test_both_processes_end_with_the_same_weights_and_controllers(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert (first["backend"], first["wrapped"]) == ("gloo", "DistributedDataParallel")
    assert first["completions"] != second["completions"]
    for part in ("start", "adapter", "head"):
        assert first[part].keys() == second[part].keys()
        assert all(torch.equal(value, second[part][name]) for name, value in first[part].items()), part
    assert all(not torch.equal(value, first["start"][name]) for name, value in first["adapter"].items())
    assert all(value.any() for value in first["head"].values())
    assert first["state"] == second["state"]
    assert first["state"]["regularizers.0.coef"]["coef"] != 0.1


def test_what_the_first_process_logs_is_finite_and_of_both(ranks: list[dict[str, Any]]) -> None:
    logs = [log for log in ranks[0]["log"] if "loss" in log]
    assert [log["step"] for log in logs] == [1, 2, 3, 4]
    assert all(math.isfinite(value) for log in logs for value in log.values())
    assert {"objective/kl", "value/loss", "value/explained_variance", "ratio/p50", "coef/kl"} <= logs[0].keys()
    assert [log["ratio/abs_log"] > 1e-5 for log in logs] == [False, True, False, True]
    assert len({log["coef/kl"] for log in logs}) == 4
    lengths = [len(ids) for rank in ranks for ids in rank["completions"][0]]
    assert logs[0]["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))


def test_the_gradient_is_that_of_one_process_with_the_completions_of_both(ranks: list[dict[str, Any]]) -> None:
    tokens = [sum(int(batch["completion_mask"].sum()) for batch in rank["batches"]) for rank in ranks]
    assert tokens[0] != tokens[1]  # so a mean over the tokens of each process would differ
    assert_gradients_close(ranks[0]["gradients"], ranks[0]["alone"])
    assert_gradients_close(ranks[1]["gradients"], ranks[0]["alone"])


# --- savings, with fewer completions to score in one process -----------------------------------------------------------


def test_skipping_on_one_process_only_gives_the_same_steps(ranks: list[dict[str, Any]]) -> None:
    assert all(state == "on" for state in ranks[0]["on"]["report"].values())
    assert sum(ranks[0]["on"]["scored"]) <= 1  # one row was scored to find which weights a pass reaches
    assert sum(ranks[0]["off"]["scored"]) == sum(ranks[1]["on"]["scored"]) == 4 * 2 * 4
    for name, value in ranks[0]["off"]["adapter"].items():
        assert torch.equal(ranks[0]["on"]["adapter"][name], ranks[1]["on"]["adapter"][name])
        torch.testing.assert_close(ranks[0]["on"]["adapter"][name], value, rtol=0, atol=5e-6, msg=name)
    pairs = zip(ranks[0]["on"]["log"], ranks[0]["off"]["log"], strict=True)
    for got, want in pairs:
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-6)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)


def test_a_wrapped_model_is_called_as_often_by_each(ranks: list[dict[str, Any]]) -> None:
    """Each forward pass in DistributedDataParallel waits for the other process, so both make the same number.

    Their limits of a pack differ: 4096 tokens and 1.
    """
    way = "packed"
    assert [rank[way]["way"] for rank in ranks] == [way, way]
    assert [rank["plain"]["way"] for rank in ranks] == ["plain", "plain"]
    assert "on" not in (ranks[0][way]["report"][name] for name in ("token_budget", "skip_flat_groups"))
    for name, value in ranks[0]["plain"]["adapter"].items():
        assert torch.equal(ranks[0][way]["adapter"][name], ranks[1][way]["adapter"][name])
        torch.testing.assert_close(ranks[0][way]["adapter"][name], value, rtol=0, atol=5e-6, msg=name)
