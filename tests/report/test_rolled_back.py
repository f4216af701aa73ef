"""kit.report, kit.runs.metrics: after a rollback the result is that of the weights that were kept, not of the last step."""

from __future__ import annotations

from collections.abc import Callable

from kit.report.record import read
from kit.report.run_report import figures
from kit.report.scores import ends
from kit.runs.metrics import placed, result_of
from kit.runs.store import RunDir

from .conftest import score


def test_the_result_is_after_and_else_the_latest_step() -> None:
    found = {"before": {"n": 0}, "step-00010": {"step": 10}, "step-00030": {"step": 30}, "again": {"step": 99}}
    assert result_of(found) == "step-00030"
    assert result_of(found | {"after": {"step": 10}}) == "after"
    assert result_of(found | {"after": {}}) == "step-00030", "an unreadable one counts for nothing"
    assert result_of({"before": {"n": 0}}) is None


def test_a_report_shows_the_scores_of_the_weights_that_were_kept(make_run: Callable[..., RunDir]) -> None:
    run = make_run(steps=30)
    for step in (10, 20, 30):
        run.write_json(f"eval/step-{step:05d}.json", score([step == 10] * 16 + [False] * 4, step))
    run.write_json("eval/after.json", score([True] * 16 + [False] * 4, 10))
    record = read(run)
    first, last, name = ends(record.evaluations)
    assert (first["step"], last["step"], last["greedy_accuracy"]["value"], name) == (0, 10, 0.8, "after")
    assert ("Held-out accuracy: first, last", "0.100 → 0.800") in figures(record)
    assert [step for step, _ in placed(record.evaluations)] == [0, 10, 10, 20, 30]
    (run.eval / "after.json").unlink()
    record = read(run)
    assert ends(record.evaluations)[2] == "after step 30"
