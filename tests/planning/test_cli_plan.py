"""kit.cli.plan: `grpo-kit doctor` and `grpo-kit plan` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kit.cli.app import app
from kit.planning import machine
from kit.planning.machine import Check

RUNNER = CliRunner()


@pytest.fixture
def config_file(tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    return "run.yaml"


def test_doctor_exits_with_1_when_something_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "check_machine", lambda *_: [Check("disk", "fail", "full", "Free some space.")])
    done = RUNNER.invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.output) == {
        "machine": {
            "failed": True,
            "checks": [{"name": "disk", "level": "fail", "result": "full", "fix": "Free some space."}],
        }
    }


def test_doctor_with_a_configuration_adds_the_signal_check(config_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}
    rate = {"value": 0.5, "low": 0.4, "high": 0.6}
    result = {
        "verdict": {"verdict": "too hard", "because": "pass@1 is 0%", "change": "Take easier problems"},
        "prompts": 6, "k": 4, "pass@1": rate, "spread_share": rate,
        "seconds": {"rollout": 1.0, "reward": 1.0}, "samples": [],
    }  # fmt: skip

    def fake(config: Any, **keywords: Any) -> dict[str, Any]:
        options.update(keywords)
        return result

    monkeypatch.setattr("kit.planning.signal.check", fake)
    monkeypatch.setattr(machine, "check_machine", lambda *_: [Check("disk", "ok", "much")])
    done = RUNNER.invoke(app, ["doctor", config_file, "--prompts", "6"])
    assert done.exit_code == 0, done.output
    assert options == {"prompts": 6, "progress": True}
    assert "Verdict: too hard: pass@1 is 0%." in done.output
    assert "Change: Take easier problems" in done.output
    assert json.loads(RUNNER.invoke(app, ["doctor", config_file, "--json"]).output)["signal"] == result


def test_plan_prints_terms_and_verdict(config_file: str) -> None:
    done = RUNNER.invoke(app, ["plan", config_file])
    assert done.exit_code == 0, done.output
    for text in ("weights", "activations", "key-value cache", "fits.", "Estimated from FLOPs"):
        assert text in done.output


def test_plan_exits_with_1_and_names_no_time_if_a_run_does_not_fit_or_start(config_file: str) -> None:
    no_start = RUNNER.invoke(app, ["plan", config_file, "-o", "model.backend=unsloth", "-o", "model.dtype=auto"])
    assert no_start.exit_code == 1
    assert "does not start here." in no_start.output
    assert "add --gpu NAME" in no_start.output
    large = ["-o", "evaluation.batch_size=100000", "-o", "evaluation.prompts=100000", "-o", "evaluation.after=true"]
    too_large = RUNNER.invoke(app, ["plan", config_file, "--gpu", "8gb", *large])
    assert too_large.exit_code == 1, too_large.output
    assert "does not fit." in too_large.output
    assert "It fits with:" in too_large.output
    for done in (no_start, too_large):
        assert "per step" not in done.output


def test_plan_as_json_with_a_probe_says_what_was_measured(config_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"peak_bytes": 123, "seconds": [3.0, 2.0], "steps": 2}
    order = list[str]()  # a plan creates a CUDA context, which the probe would count
    monkeypatch.setattr("kit.planning.probe.probe", lambda config, progress: order.append("probe") or measured)
    monkeypatch.setattr("kit.models.memory.room_of", lambda *_, **__: order.append("plan") or 2**34)
    # The plan says that the run does not start, but the probe ran it.
    done = RUNNER.invoke(app, ["plan", config_file, "--json", "--probe", "-o", "model.backend=unsloth"])
    assert done.exit_code == 0
    assert order[0] == "probe"
    assert "plan" in order
    planned = json.loads(done.output)
    assert planned["probe"] == measured
    assert planned["time_is"] == "measured"
    assert planned["seconds_per_step"]["measured"] == 2.0
    assert planned["run_seconds"]["steps"] == pytest.approx(2 * 2.0)
    assert planned["hours"] == pytest.approx(sum(planned["run_seconds"].values()) / 3600)


def test_a_reward_is_tested_as_a_run_has_it(config_file: str) -> None:
    own = ["-o", "reward.preset=gsm8k-hash", "-o", "reward.params={format_weight: 0.5}"]
    done = RUNNER.invoke(app, ["reward", "test", config_file, *own])
    assert done.exit_code == 0, done.output
    assert "1.5" in done.output  # 1 + 0.5
    assert "No attack and no wrong answer scores as high as a right one" in done.output
    done = RUNNER.invoke(app, ["reward", "audit", "missing.yaml", "--data", "rows.jsonl"])
    assert done.exit_code == 2
    assert "missing.yaml" in done.output
