"""kit.runner.trackers: transformers' callbacks get a run's metrics and scores, and one that raises is dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

from kit.config import load_config
from kit.runner.trackers import Trackers
from kit.runs.store import RunDir, RunStore

STATE: Any = SimpleNamespace(global_step=3)


class Fake(TrainerCallback):  # type: ignore[misc]
    """A stand-in for transformers' callback of wandb: records its events, and raises `error` at the event `where`."""

    where, error = "", BaseException()
    events: list[tuple[str, Any]]

    def __init__(self) -> None:
        type(self).events = []
        self.note("made")

    def note(self, event: str, logs: Any = None) -> None:
        self.events.append((event, logs))
        if event == self.where:
            raise self.error

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.note("begin")

    def on_log(self, *_: Any, logs: Any, **__: Any) -> None:
        self.note("log", logs)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.note("end")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    kind = type("Wandb", (Fake,), {})
    monkeypatch.setattr("transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK", {"wandb": kind})
    return kind


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunStore(tmp_path / "runs").create("mine")


def train(run: RunDir, messages: list[str]) -> None:
    with Trackers(run, load_config("quickstart", ["run.report_to=[wandb]"]), messages.append) as trackers:
        run.write_json("eval/before.json", {"step": 0, "pass@1": {"value": 0.5, "low": 0.4, "high": 0.6}})
        trackers.on_train_begin(None, STATE, None)
        trackers.on_log(None, STATE, None, {"reward": 0.1})
        trackers.on_log(None, STATE, None, {"train_runtime": 1.0})
        run.write_json("eval/after.json", {"step": 3, "pass@1": {"value": 0.75}})


def test_metrics_and_scores_are_passed_on_once(run: RunDir, fake: type[Fake]) -> None:
    messages: list[str] = []
    train(run, messages)
    assert fake.events == [
        ("made", None),
        ("begin", None),
        ("log", {"eval_pass_at_1": 0.5}),
        ("log", {"reward": 0.1}),
        ("log", {"eval_pass_at_1": 0.75}),
        ("end", None),
    ]
    assert messages == []


@pytest.mark.parametrize("where", ["made", "begin", "log", "end"])
@pytest.mark.parametrize("error", [RuntimeError("401 for hf_abcdefghijklmnopqrstuvwx"), SystemExit("goodbye")])
def test_a_tracker_that_raises_is_dropped_with_one_warning(
    run: RunDir, fake: type[Fake], where: str, error: BaseException
) -> None:
    fake.where, fake.error = where, error
    messages: list[str] = []
    train(run, messages)
    (alert,) = [event for event in run.events() if event["kind"] == "alert"]
    assert (alert["name"], alert["severity"]) == ("tracker wandb", "warning")
    assert ("401 for [hidden]" if isinstance(error, RuntimeError) else "SystemExit: goodbye") in alert["message"]
    assert messages == [f"Warning: {alert['message']}"]


def test_tensorboards_own_callback_writes_the_metrics_of_a_run(
    attempt: Callable[..., Any],
) -> None:
    outcome = attempt("run.report_to=[tensorboard]", "optimisation.steps=1")
    assert outcome.code == 0, outcome.message
    (file,) = (outcome.folder.path / "tensorboard").glob("events.out.tfevents.*")
    assert b"train/reward" in file.read_bytes()
