"""kit.train end to end: runs of a tiny model, in this process where possible."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from patience import wait_for

import kit
from kit.config import load_config
from kit.runs.store import RunDir

TIMES = ("time", "seconds/", "latency", "per_second", "memory/")
FEW = ["run.threads=1", "evaluation.prompts=6", "evaluation.k=2", "optimisation.batch_size=16"]
VARIED = "\n    return [len(set(str(text))) / 40 for text in completions]"  # rewards differ within every group


def numbers(folder: RunDir) -> list[dict[str, Any]]:
    """Return the metrics of all steps without times and memory."""
    return [
        {key: value for key, value in line.items() if not any(word in key for word in TIMES)}
        for line in folder.metrics()
    ]


def write_function(code: str, name: str = "mine.py") -> None:
    Path(name).write_text(f"import os, signal, time, pathlib\nimport torch\ncalls = []\n\n{code}\n")


def varied(attempt: Any, *overrides: str) -> Any:
    """Train with a reward that differs between completions, so that the weights change."""
    write_function(f"def score(prompts, completions, **columns):{VARIED}", "varied.py")
    result = attempt('reward.functions=[{"path": "varied.py:score"}]', *overrides)
    assert result.code == 0, result.message
    return result


# --- quickstart in new processes --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> kit.Run:
    """`kit.train("quickstart")` in a new process, with a secret in its environment that must not be written."""
    root = tmp_path_factory.mktemp("quickstart")
    with pytest.MonkeyPatch.context() as patch, terminal_into(root / "shown.txt"):
        patch.setenv("HF_TOKEN", "hf_planted_secret")
        patch.setenv("OMP_NUM_THREADS", "1")
        return kit.train(
            "quickstart", steps=3, seed=3, objective="dr_grpo", run_id="first", overrides=[*FEW, f"run.root={root}"]
        )


@contextlib.contextmanager
def terminal_into(path: Path) -> Iterator[None]:
    """Redirect stdout and stderr of this process and its children to a file."""
    copies = [os.dup(number) for number in (1, 2)]
    with path.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for number, copy in zip((1, 2), copies, strict=True):
                os.dup2(copy, number)
                os.close(copy)


@pytest.mark.slow
def test_the_terminal_shows_our_lines_and_nothing_else(quickstart: kit.Run) -> None:
    shown = (quickstart.path.parent / "shown.txt").read_text()
    lines = shown.splitlines()
    assert lines[0] == "grpo-kit: run 'first'"
    assert lines[1] == "2000 training and 200 held-out problems from reasoning-gym:chain_sum"
    assert lines[2].startswith("embedded: ")
    for word in ("{'", "Warning", "warning", "Loading weights", "it/s", "\r", "\x1b", "Failed"):
        assert word not in shown
    for word in ("Held-out score, before", "Training  3/3", "eta 0:00", "greedy accuracy", "curves", "grpo-kit chat"):
        assert word in shown


@pytest.mark.slow
def test_quickstart_keeps_every_completion_with_its_rewards(quickstart: kit.Run) -> None:
    rows = quickstart.completions()
    assert len(rows) == 3 * 16
    assert rows[0].keys() >= {
        "step", "prompt", "reference", "completion", "tokens", "finish_reason", "advantage",
        "reward/accuracy", "reward/accuracy/status", "reward/format", "reward/format/status",
    }  # fmt: skip
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
    assert {row["reward/format/status"] for row in rows} <= {"ok", "format"}
    for row in rows:
        assert 1 <= row["tokens"] <= 64
        assert (row["finish_reason"] == "length") <= (row["tokens"] == 64)
        assert "State the final answer" in row["prompt"]
    for start in range(0, len(rows), 8):  # a group of one prompt; dr_grpo's advantages are r - mean(r)
        group = rows[start : start + 8]
        assert len({row["prompt"] for row in group}) == 1
        assert abs(sum(row["advantage"] for row in group)) < 1e-5


@pytest.mark.slow
def test_quickstart_scores_before_and_after(quickstart: kit.Run) -> None:
    scores = quickstart.evaluations()
    assert list(scores) == ["before", "after"]
    for score in scores.values():
        assert score["problems"] == 6
        for name in ("greedy_accuracy", "pass@1", "pass@2", "greedy_reward"):
            assert score[name]["low"] <= score[name]["value"] <= score[name]["high"]
        assert score["samples"][0].keys() == {"prompt", "reference", "completion", "reward"}


@pytest.mark.slow
def test_quickstart_records_what_it_stood_on_and_no_secret(quickstart: kit.Run) -> None:
    env = json.loads((quickstart.path / "env.json").read_text())
    assert env["seeds"] == {"run": 3, "trainer": 3, "data_order": 3, "engine": 3}
    assert env["packages"].keys() >= {"torch", "trl", "transformers", "peft"}
    assert env["trainer_arguments"]["per_device_train_batch_size"] == 16
    assert env["threads"] == 1
    for path in quickstart.path.rglob("*"):
        if path.is_file():
            assert b"hf_planted_secret" not in path.read_bytes(), path


@pytest.mark.slow
def test_quickstart_writes_its_configuration_out_in_full(quickstart: kit.Run) -> None:
    tree = yaml.safe_load((quickstart.path / "config.yaml").read_text())
    config = load_config(quickstart.path / "config.yaml")
    assert config.model_dump(mode="json") == tree
    assert tree["objective"]["recipe"] == "dr_grpo"
    assert tree["objective"]["advantage"]["name"] == "group_mean"
    assert tree["objective"]["clip"] == {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.2}
    assert tree["objective"]["weights"] == []
    assert tree["objective"]["regularizers"] == []
    assert tree["run"]["seed"] == 3
    data = json.loads((quickstart.path / "data.json").read_text())
    assert data["source"] == "reasoning-gym:chain_sum"
    assert data["rows"]["train"] == 2000
    assert len(data["sha256"]) == 64


@pytest.mark.slow
def test_a_run_is_scored_again_from_what_it_left(quickstart: kit.Run, tmp_path: Path) -> None:
    with terminal_into(tmp_path / "shown.txt"):
        again = quickstart.evaluate()
    after = quickstart.evaluations()["after"]
    assert (tmp_path / "shown.txt").read_text() == ""
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in after.items() if k != "seconds"}
    assert "Reward on training prompts" in quickstart.plot()


def grpo_kit(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kit.cli", *arguments, *(part for key in FEW for part in ("-o", key))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.survival
def test_ctrl_c_stops_with_a_checkpoint_and_exit_code_130_and_a_kill_is_told_by_who_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs are in one test, so that they start at the same time."""
    monkeypatch.chdir(tmp_path)
    plain = ["-o", "evaluation.before=false", "-o", "evaluation.after=false", "-o", "optimisation.steps=5000"]
    stopped = grpo_kit("train", "quickstart", "-o", "run.id=stopped", *plain)
    killed = grpo_kit("train", "quickstart", "-o", "run.id=killed", *plain)
    try:
        ended, two = RunDir(Path("runs/stopped")), RunDir(Path("runs/killed"))
        wait_for(lambda: ended.metrics() and two.metrics(), 200.0)
        os.kill(two.status()["pid"], signal.SIGKILL)
        stopped.send_signal(signal.SIGINT)
        shown, errors = stopped.communicate(timeout=60)
        assert (stopped.returncode, errors) == (130, "")
        status = ended.status()
        assert (status["state"], status["exit"], status["reason"]) == ("stopped", 130, "SIGINT")
        assert [path.name for path in ended.checkpoints] == [f"checkpoint-{status['step']}"]
        assert "Stopping after the current step, which is saved first" in shown
        assert f"Stopped by SIGINT; the checkpoint is {ended.checkpoints[0]}" in shown
        _, errors = killed.communicate(timeout=60)
        assert killed.returncode == 1
        assert "signal 9" in errors
        assert (two.status()["state"], two.status()["exit"]) == ("failed", 137)
    finally:
        for process in (stopped, killed):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


# --- the same numbers -------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_numbers_and_another_one_others(attempt: Any) -> None:
    first, again, other = (
        varied(attempt, f"run.id=run-{name}", f"run.seed={seed}") for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert numbers(first.folder) == numbers(again.folder)
    assert numbers(first.folder) != numbers(other.folder)
    weights = [(run.folder.adapter / "adapter_model.safetensors").read_bytes() for run in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_evaluation_in_between_changes_nothing_but_is_filed(attempt: Any) -> None:
    common = ["optimisation.steps=4", "evaluation.prompts=3"]
    without = varied(attempt, "run.id=without", *common)
    with_it = varied(
        attempt, "run.id=with", "evaluation.every=2", "evaluation.before=true", "evaluation.after=true", *common
    )
    assert numbers(without.folder) == numbers(with_it.folder)
    run = kit.Run("with", with_it.folder.path.parent)
    assert list(run.evaluations()) == ["before", "step-00002", "after"]
    assert not kit.Run("without", with_it.folder.path.parent).evaluations()
    filed = [(event["kind"], event["step"]) for event in run.events() if event["kind"] in ("evaluation", "checkpoint")]
    assert filed == [("evaluation", 2), ("checkpoint", 2), ("checkpoint", 4)]  # 2 has the best score: saved


# --- custom hooks and functions ---------------------------------------------------------------------------------------


def test_a_clip_hook_from_a_file_trains_and_changes_the_numbers(attempt: Any) -> None:
    write_function("def half(batch, share: float = 0.5):\n    return -share * batch.advantages * batch.ratio\n")
    plain = varied(attempt, "run.id=plain", "optimisation.max_grad_norm=0")
    hooked = varied(attempt, "run.id=hooked", "optimisation.max_grad_norm=0", "objective.clip=mine.py:half")
    first, two = plain.folder.metrics()[0], hooked.folder.metrics()[0]
    assert two["grad_norm"] == pytest.approx(first["grad_norm"] / 2, rel=1e-4)  # half the surrogate and gradient
    assert load_config(hooked.folder.config).objective.clip == {"name": "mine.py:half", "share": 0.5}
    warning = "With optimisation.iterations: 1 every ratio is 1"
    assert (warning in plain.shown, warning in hooked.shown) == (False, True)


def test_all_weights_train_without_lora_and_with_a_reference(attempt: Any) -> None:
    result = varied(
        attempt, "model.lora=null", "objective.regularizers=[{name: kl, coef: 0.1}]", "evaluation.after=true"
    )
    assert (result.folder.adapter / "model.safetensors").is_file()
    lines = result.folder.metrics()
    divergence = [line[key] for line in lines for key in line if key.startswith("kl")]
    assert divergence[0] == pytest.approx(0, abs=1e-6)  # the policy equals the reference before the first step
    assert divergence[-1] > 0


# --- stopping ---------------------------------------------------------------------------------------------------------

STOP = """
def score(prompts, completions, **columns):
    calls.append(1)
    if len(calls) == 3:  # the first call is the trial, the second is step 1
        {act}
    return [len(set(str(text))) / 40 for text in completions]
"""
SENTINEL = "pathlib.Path('runs/it/control').mkdir(exist_ok=True); pathlib.Path('runs/it/control/stop').touch()"


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGINT)", "SIGINT"),
        ("[os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)]", "SIGTERM"),  # one of them forwarded by the parent
        ("[os.kill(os.getpid(), each) for each in (signal.SIGINT, signal.SIGTERM)]", "SIGINT"),  # Jupyter restarts
        (SENTINEL, "control/stop"),
    ],
    ids=["Ctrl-C", "SIGTERM", "restart", "control/stop"],
)
def test_a_wish_to_stop_ends_the_run_after_its_step_with_a_checkpoint(act: str, reason: str, attempt: Any) -> None:
    write_function(STOP.format(act=act))
    result = attempt('reward.functions=[{"path": "mine.py:score"}]', "optimisation.steps=50", "evaluation.after=true")
    assert (result.code, result.message) == (130, "")
    status = result.folder.status()
    assert (status["state"], status["reason"], status["exit"], status["step"]) == ("stopped", reason, 130, 2)
    assert [path.name for path in result.folder.checkpoints] == ["checkpoint-2"]
    assert (result.folder.adapter / "adapter_model.safetensors").is_file()
    assert len(result.folder.metrics()) == 2
    assert not list(result.folder.eval.glob("*"))
    assert f"Stopped by {reason}" in result.shown


def test_a_second_ctrl_c_stops_at_once(attempt: Any) -> None:
    write_function(STOP.format(act="[os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]"))
    result = attempt('reward.functions=[{"path": "mine.py:score"}]', "optimisation.steps=50")
    assert result.code == 130
    status = result.folder.status()
    assert (status["state"], status["exit"]) == ("stopped", 130)
    assert not result.folder.checkpoints
    assert not result.folder.adapter.exists()


def test_ctrl_c_while_the_held_out_score_is_taken_keeps_what_was_learned(
    attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kit.evaluation.heldout import HeldOut

    score = HeldOut.score

    def interrupted(self: HeldOut, model: Any, progress: Any = None, **keywords: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return score(self, model, progress, **keywords)

    monkeypatch.setattr(HeldOut, "score", interrupted)
    result = attempt("evaluation.every=2", "optimisation.steps=50")
    assert result.code == 130
    assert result.folder.status()["state"] == "stopped"
    assert [path.name for path in result.folder.checkpoints] == ["checkpoint-2"]
    assert (result.folder.adapter / "adapter_model.safetensors").is_file()
    assert not list(result.folder.eval.glob("*"))


def test_a_checkpoint_is_saved_when_asked_for(attempt: Any) -> None:
    act = "pathlib.Path('runs/it/control').mkdir(exist_ok=True); pathlib.Path('runs/it/control/save').touch()"
    write_function(STOP.format(act=act))
    result = attempt('reward.functions=[{"path": "mine.py:score"}]', "optimisation.steps=4")
    assert result.code == 0
    assert [path.name for path in result.folder.checkpoints] == ["checkpoint-2", "checkpoint-4"]
    assert not (result.folder.control / "save").exists()
