"""A run that is killed at any moment and resumed is equal to the uninterrupted run of its seed, to the bit.

Compared are metrics, events, completions, held-out scores, weights, optimiser, random numbers and controllers
(`forked_runs.trace`). Tests of many moments copy one run at each of them while all its threads stand still, which gives the files
that a SIGKILL leaves; others kill it. `KIT_KILL_POINTS=all` tries every change of a file in the run directory.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_runs import Forks, Tree, different, trace
from tiny_qwen import tiny_run

from kit.cli.runs import ending
from kit.runs.stopping import stop
from kit.runs.store import RunDir, RunStore

pytestmark = [pytest.mark.survival, pytest.mark.slow, pytest.mark.timeout(900)]

KILL_POINTS = os.environ.get("KIT_KILL_POINTS", "4")
STEERED = {"name": "kl", "coef": "adaptive_kl(target=0.001, horizon=40, start=0.1)"}
PLANTED = {
    "in the optimiser's file": {"half": "optimizer.pt", "nth": 3},
    "in the completions that steps are left for": {"half": "rollout.pt", "nth": 1},
    "with the checkpoint written, not yet in place": {"call": "kit.trainer.checkpoint_writer:publish", "nth": 3},
    "with the checkpoint just in place, and the old one too": {
        "call": "kit.trainer.checkpoint_writer:publish", "nth": 3, "when": "after",
    },
    "with the old checkpoint put aside, not yet removed": {
        "call": "kit.trainer.checkpoint_writer:_put_aside", "nth": 4, "when": "after",
    },
    "in a metrics line": {"line": '{"step": 5'},
    "between the optimiser's step and its metrics line": {
        "call": "torch.optim:AdamW.step", "nth": 4, "when": "after",
    },
    "in a held-out evaluation": {"call": "kit.evaluation.heldout:HeldOut._complete", "nth": 4},
    "in the evaluation before training": {"call": "kit.evaluation.heldout:HeldOut._complete", "nth": 2},
    "with completions written whose step is not made": {
        "call": "kit.runner.recording:write_parquet", "nth": 3, "when": "after",
    },
    "after the last step, before the score after it": {"call": "kit.runner.evaluation:Evaluator.conclude", "nth": 1},
}  # fmt: skip

EARLY = {
    "with the data still to be read": {"call": "kit.data:load_data", "nth": 1},
    "with the model being prepared": {"call": "kit.models.loading:find_model", "nth": 1},
    "with the claim half written": {"call": "os:replace", "nth": 1},
    "with its directory just claimed": {"call": "kit.runs.store:RunDir.change_status", "nth": 1, "when": "after"},
    "with nothing cut yet": {"call": "kit.runner.resume:truncate_to_checkpoint", "nth": 1},
    "with all cut that is to be written again": {"call": "kit.runner.resume:clear_staging", "nth": 1, "when": "after"},
    "with config.yaml just written": {"call": "kit.runs.store:RunDir.write_text", "nth": 1, "when": "after"},
    "with data.json just written": {"call": "kit.runs.store:RunDir.write_json", "nth": 1, "when": "after"},
    "with the weights just loaded": {"call": "kit.runner.build:load_model", "nth": 1, "when": "after"},
    "with env.json half written": {"call": "kit.runs.store:to_json", "nth": 3},
    "with env.json just written": {"call": "kit.runs.store:RunDir.write_json", "nth": 2, "when": "after"},
    "with the trainer just built": {"call": "kit.runner.build:build", "nth": 1, "when": "after"},
    "in the score before training": {"call": "kit.evaluation.heldout:HeldOut._complete", "nth": 2},
    "with the score before training written": {"call": "kit.runner.resume:train_on", "nth": 1},
    "with the first completions written": {"call": "kit.runner.recording:write_parquet", "nth": 1, "when": "after"},
    "in the first step": {"call": "torch.optim:AdamW.step", "nth": 1},
    "in the first metrics line": {"line": '{"step": 1'},
    "with two steps made, and the first checkpoint not in place": {"call": "kit.trainer.checkpoint_writer:publish", "nth": 1},
}  # fmt: skip
"""Moments before the first checkpoint is in place, in their order in time."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def forks(base: Path) -> Iterator[Forks]:
    with Forks(base) as server:
        yield server


@pytest.fixture(scope="module")
def steady(base: Path, model_folder: Path) -> Tree:
    """Configuration of a run with many sources of state.

    Several epochs, steps on old completions, accumulation, dropout, a controller, a learning-rate schedule, evaluations, and one
    checkpoint at a time.
    """
    return tiny_run(
        model_folder,
        base / "runs",
        model={"lora": {"rank": 4, "alpha": 8, "dropout": 0.1}},
        data={"limit": 10, "heldout": 5},
        objective={"recipe": "grpo", "regularizers": [STEERED]},
        optimisation={
            "steps": 7,
            "micro_batch_size": 4,
            "iterations": 2,
            "learning_rate": 5e-3,
            "schedule": "cosine",
            "warmup_steps": 2,
        },
        evaluation={"before": True, "after": True, "every": 3},
        run={"id": "x", "save_every": 2, "keep_checkpoints": 1},
    )


Named = Callable[..., Tree]


@pytest.fixture
def tree(steady: Tree, base: Path, request: pytest.FixtureRequest) -> Iterator[Named]:
    """Return a function that copies the configuration under another id, with changes by section."""
    made: list[Path] = []

    def named(name: str, **changes: Tree) -> Tree:
        copied = copy.deepcopy(steady)
        for section, values in changes.items():
            copied[section] |= values
        copied["run"]["id"] = name
        made.append(folder(copied))
        return copied

    yield named
    for path in made:
        shutil.rmtree(path, ignore_errors=True)


def folder(tree: Tree) -> Path:
    return Path(tree["run"]["root"]) / str(tree["run"]["id"])


def whole(forks: Forks, tree: Tree, copies: dict[str, Tree] | None = None) -> tuple[Tree, int]:
    """Run without interruption; return the trace and the number of file changes. `copies`: moments at which to copy the run."""
    result = forks.run(tree, copies=copies)
    assert result["code"] == 0, result
    return trace(folder(tree)), result["operations"]


@pytest.fixture(scope="module")
def uninterrupted(forks: Forks, steady: Tree) -> tuple[Tree, int]:
    """Trace and file changes of the uninterrupted run, which is copied at the moments of `PLANTED`."""
    return whole(forks, steady, PLANTED)


def left(forks: Forks, moment: str, tree: Tree) -> Tree:
    """Return the configuration of the copy of the run at this moment, with the files that a kill would have left."""
    return tree | {"run": tree["run"] | {"root": str(forks.copy(moment))}}


def resumed(forks: Forks, tree: Tree, **ways: bool) -> str:
    """Resume the run until it finishes; return its output."""
    result = forks.run(tree, resume=True, **ways)
    assert result["code"] == 0, (result["error"], result["shown"][-2000:], forks.log.read_text()[-2000:])
    return str(result["shown"])


@pytest.mark.parametrize("moment", PLANTED)
def test_killed(moment: str, forks: Forks, steady: Tree, uninterrupted: tuple[Tree, int]) -> None:
    mine = left(forks, moment, steady)
    assert "Resuming" in resumed(forks, mine)
    assert different(uninterrupted[0], trace(folder(mine))) == {}


def test_killed_before_a_change_of_any_file(forks: Forks, tree: Named, uninterrupted: tuple[Tree, int]) -> None:
    expected, changes = uninterrupted
    points = list(range(1, changes + 1))  # counted in the directory, which is created under another name and renamed
    if KILL_POINTS != "all":
        points = sorted(random.Random(6).sample(points, int(KILL_POINTS)))
    wrong: dict[str, Any] = {}
    again = tree("again")
    assert different(expected, whole(forks, again, {f"at {point}": {"operation": point} for point in points})[0]) == {}
    for point in points:
        mine = left(forks, f"at {point}", again)
        result = forks.run(mine, resume=True)
        if result["code"] == 0:
            wrong |= {f"{point}: {key}": value for key, value in different(expected, trace(folder(mine))).items()}
        elif not (point >= changes - 6 and "is finished" in str(result["error"])):  # killed after it reported its end
            wrong[f"{point}"] = result
        shutil.rmtree(folder(mine))
    assert wrong == {}


def check_truth_of_an_early_end(run: RunDir) -> None:
    """Check the reports of `ps`, `logs`, `stop` and the page on a run that was killed before its first checkpoint."""
    assert [(stored.id, status["state"]) for stored, status in RunStore(run.path.parent).statuses()] == [
        (run.id, "interrupted")
    ]
    steps = run.status()["step"]
    assert steps <= len(run.metrics()) + 1  # a killed run may lack the line of its last step
    assert f"is interrupted at step {steps}/7: the process ended without a message" in ending(run)
    assert f"Start it again from the beginning with: grpo-kit resume {run.id}" in ending(run)
    assert stop(run)["state"] == "interrupted"
    assert "starts again from the beginning" in run.where_resumed()


def test_killed_at_every_moment_before_its_first_checkpoint(
    forks: Forks, tree: Named, uninterrupted: tuple[Tree, int], base: Path
) -> None:
    """Each attempt starts from the files that the previous one left."""
    mine = tree("early")
    mine["run"]["root"] = str(base / "early-runs")  # a root without other runs
    made = {"call": "kit.runs.store:RunStore.create", "nth": 1, "when": "after"}
    assert forks.run(mine, kill=made, made=True)["signal"] == signal.SIGKILL
    check_truth_of_an_early_end(RunDir(folder(mine)))
    moments = random.Random(8).sample(sorted(EARLY), len(EARLY))
    for moment in moments:
        result = forks.run(mine, resume=True, kill=EARLY[moment])
        assert result["signal"] == signal.SIGKILL, (moment, result)
        check_truth_of_an_early_end(RunDir(folder(mine)))
    assert "starts again from the beginning, with its id and seed 0" in resumed(forks, mine)
    assert different(uninterrupted[0], trace(folder(mine))) == {}
    events = [event for event in RunDir(folder(mine)).events() if event["kind"] == "resumed"]
    assert {(event["step"], event["checkpoint"], event["forced"]) for event in events} == {(0, None, False)}
    assert not any(event["changes"] for event in events)


@pytest.mark.parametrize(
    "moment", ["with the model being prepared", "with the score before training written", *list(EARLY)[-1:]]
)
def test_killed_early_and_resumed_at_once(
    moment: str, forks: Forks, tree: Named, uninterrupted: tuple[Tree, int]
) -> None:
    mine = tree("early")
    assert forks.run(mine, kill=EARLY[moment], made=True)["signal"] == signal.SIGKILL
    shown = resumed(forks, mine)
    why = "its 2 steps had no checkpoint" if moment == list(EARLY)[-1] else "nothing had been trained"
    assert f"Resuming: {why}, so the run starts again from the beginning" in shown
    assert different(uninterrupted[0], trace(folder(mine))) == {}


def test_killed_by_the_clock_and_killed_again_while_resuming(
    forks: Forks, tree: Named, uninterrupted: tuple[Tree, int]
) -> None:
    mine, lot = tree("often"), random.Random(7)
    forks.run(mine, kill={"call": "kit.trainer.checkpoint_writer:publish", "nth": 2})
    for _ in range(2):
        forks.run(mine, resume=True, kill={"seconds": lot.uniform(0.1, 0.9)})
    forks.run(mine, resume=True, kill={"call": "kit.runner.resume:clear_staging", "nth": 1, "when": "after"})
    forks.run(mine, resume=True, kill={"half": "scheduler.pt", "nth": 1})
    result = forks.run(mine, resume=True)
    assert result["code"] == 0 or "is finished" in result["error"], result  # a fast machine may have finished it
    assert different(uninterrupted[0], trace(folder(mine))) == {}


@pytest.mark.parametrize("moment", [4, 5])
def test_a_stop_and_a_resume_change_nothing(
    moment: int, forks: Forks, tree: Named, uninterrupted: tuple[Tree, int]
) -> None:
    """Stop after the second of two steps on the same completions (4), and between two such steps (5)."""
    mine = tree("stopped")
    ctrl_c = {"call": "torch.optim:AdamW.step", "nth": moment, "signal": int(signal.SIGINT)}
    assert "Stopping" in forks.run(mine, kill=ctrl_c)["shown"]
    status = json.loads((folder(mine) / "status.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", moment)
    assert f"checkpoint-{moment}" in resumed(forks, mine)
    expected, actual = uninterrupted[0], trace(folder(mine))
    actual["events.jsonl"] = [e for e in actual["events.jsonl"] if (e["kind"], e["step"]) in _kinds(expected)]
    assert different(expected, actual) == {}


def _kinds(trace: Tree) -> set[tuple[str, int]]:
    return {(event["kind"], event["step"]) for event in trace["events.jsonl"]}


VARIANTS: dict[str, dict[str, Tree]] = {
    "a value head": {"objective": {"recipe": "ppo", "regularizers": [STEERED]}},
    "the full divergence": {
        "objective": {"recipe": "grpo", "regularizers": [{"name": "kl", "estimator": "full", "coef": 0.1}]},
    },
    "all weights, and a reference apart": {"model": {"lora": None}, "optimisation": {"learning_rate": 1e-3}},
    "an early end": {"evaluation": {"patience": 1}, "optimisation": {"learning_rate": 1e-12}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_with(variant: str, forks: Forks, tree: Named) -> None:
    other = tree("whole", **VARIANTS[variant])
    point = (
        {"call": "kit.runner.evaluation:Evaluator.conclude", "nth": 1}
        if variant == "an early end"
        else PLANTED["in a metrics line"]
    )
    expected, _ = whole(forks, other, {variant: point})
    mine = left(forks, variant, other)
    resumed(forks, mine)
    assert different(expected, trace(folder(mine))) == {}
    if variant == "an early end":
        assert expected["status"]["step"] == 3, "the run must end early"


def test_a_finished_run_is_made_longer_as_if_it_had_been_longer_from_the_start(forks: Forks, tree: Named) -> None:
    level = {"optimisation": {"schedule": "constant"}, "evaluation": {"every": 2}}
    longer, short = tree("longer", **level), tree("short", **level)
    expected, _ = whole(forks, longer)
    result = forks.run(short, "optimisation.steps=4")
    assert result["code"] == 0, result
    assert "there is nothing to resume" in forks.run(short, "optimisation.steps=4", resume=True)["error"]
    assert json.loads((folder(short) / "status.json").read_text())["state"] == "finished"
    assert "checkpoint-4" in resumed(forks, short)
    actual = trace(folder(short))
    expected["events.jsonl"] = [e for e in expected["events.jsonl"] if (e["kind"], e["step"]) != ("evaluation", 4)]
    for each in (expected, actual):
        del each["checkpoint-2/trainer_state.json"]  # contains the total number of steps
    assert different(expected, actual) == {}


def test_a_longer_run_keeps_its_last_checkpoint_where_one_is_kept(forks: Forks, tree: Named) -> None:
    mine = tree("one", optimisation={"schedule": "constant"}, evaluation={"every": 0}, run={"keep_checkpoints": 1})
    forks.run(mine, "optimisation.steps=4")
    resumed(forks, mine)
    assert [path.name for path in folder(mine).glob("checkpoint-*")] == ["checkpoint-7"]


def test_what_has_changed_is_refused_with_its_reason_or_forced_and_noted(forks: Forks, tree: Named) -> None:
    mine = tree("changed")
    forks.run(mine, kill={"line": '{"step": 5'})
    env = json.loads((folder(mine) / "env.json").read_text())
    env["packages"]["torch"] = "1.0"
    (folder(mine) / "env.json").write_text(json.dumps(env))
    before = {name: (folder(mine) / name).read_bytes() for name in ("status.json", "metrics.jsonl", "config.yaml")}
    other = mine | {"data": mine["data"] | {"seed": 5}, "run": mine["run"] | {"save_every": 3}}
    refused = forks.run(other, resume=True)
    assert refused["code"] == 2
    for words in ("torch: 1.0 at the start", "data.seed: 0", "the rows of", "--force"):
        assert words in refused["error"]
    assert "save_every" not in refused["error"]
    assert before == {name: (folder(mine) / name).read_bytes() for name in before}, "a refusal must change nothing"
    resumed(forks, other, force=True)
    event = next(e for e in map(json.loads, (folder(mine) / "events.jsonl").open()) if e["kind"] == "resumed")
    assert (event["step"], event["checkpoint"], event["forced"]) == (4, "checkpoint-4", True)
    assert len(event["changes"]) == 3
    steps = [json.loads(line)["step"] for line in (folder(mine) / "metrics.jsonl").open()]
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    env = json.loads((folder(mine) / "env.json").read_text())
    assert (env["earlier"][0]["packages"]["torch"], env["earlier"][0]["until_step"]) == ("1.0", 4)
