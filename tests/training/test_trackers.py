"""kit.runner.trackers: a tracker mirrors a run, and one that raises is let go while the run goes on."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kit.config import load_config
from kit.runner import trackers
from kit.runner.trackers import TensorBoard, Trackers, estimates, numbers
from kit.runs.store import RunDir, RunStore

Calls = list[dict[str, Any]]


class Fake(ModuleType):
    """A stand-in for wandb: notes what it is called with, and raises `error` at the call `where`."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: Calls = []
        self.where, self.error = "", BaseException()

    def note(self, call: str, **what: Any) -> None:
        self.calls.append({"call": call, **what})
        print("chatter on standard output")
        if self.where == call:
            raise self.error

    def init(self, *, project: str, name: str, id: str | None, resume: str | None, config: Any, dir: str) -> Any:
        self.note("init", project=project, name=name, id=id, resume=resume, config=config)
        return SimpleNamespace(
            id=id or "made-by-the-tracker",
            define_metric=lambda *names, **how: None,
            log=lambda values: self.note("log", values=values),
            finish=lambda: self.note("finish"),
        )

    def of(self, call: str) -> Calls:
        return [each for each in self.calls if each["call"] == call]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunStore(tmp_path / "runs").create("one")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Stands in wandb's place."""
    module = Fake()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def config(*overrides: str) -> Any:
    return load_config("quickstart", ["run.report_to=[wandb]", *overrides])


def mirrored(run: RunDir, steps: range, told: list[str] | None = None) -> None:
    """Makes `steps` as the trainer does, with trackers."""
    with Trackers(run, config(), (told if told is not None else []).append) as mirrors:
        make(run, mirrors, steps)


def make(run: RunDir, mirrors: Trackers, steps: range) -> None:
    for step in steps:
        logs = {"reward": step / 10, "kl": float("nan")}
        run.append_metrics({"step": step, "time": 1.0, **logs})
        mirrors.on_log(None, SimpleNamespace(global_step=step), None, logs)
    mirrors.on_log(None, SimpleNamespace(global_step=9), None, {"train_runtime": 1.0})  # the trainer's closing summary


def alerts(run: RunDir) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["kind"] == "alert"]


def test_what_the_run_writes_is_mirrored_step_by_step(
    run: RunDir, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_json("eval/before.json", {"step": 0, "pass@1": {"value": 0.5, "low": 0.4, "high": 0.6}})
    mirrored(run, range(1, 4))
    assert [call["call"] for call in fake.calls] == ["init", "log", "log", "log", "log", "finish"]
    assert (fake.calls[0]["project"], fake.calls[0]["name"]) == ("grpo-kit", "one")
    assert fake.calls[1]["values"] == {
        "heldout/pass@1": 0.5, "heldout/pass@1_low": 0.4, "heldout/pass@1_high": 0.6, "step": 0,
    }  # fmt: skip
    assert [call["values"] for call in fake.of("log")[1:]] == [{"reward": n / 10, "step": n} for n in (1, 2, 3)]
    assert alerts(run) == []
    assert "chatter" in (run.path / "trackers" / "wandb.log").read_text()


@pytest.mark.parametrize("error", [RuntimeError("401 for hf_abcdefghijklmnopqrstuvwx"), SystemExit("goodbye")])
@pytest.mark.parametrize("where", ["init", "log"])
def test_a_tracker_that_raises_is_let_go_with_one_warning(
    run: RunDir, fake: Fake, where: str, error: BaseException
) -> None:
    fake.where, fake.error = where, error
    told: list[str] = []
    mirrored(run, range(1, 4), told)
    assert len(run.metrics()) == 3
    (alert,) = alerts(run)
    assert (alert["name"], alert["severity"]) == ("tracker wandb", "warning")
    assert ("RuntimeError: 401 for [hidden]" if isinstance(error, RuntimeError) else "SystemExit: goodbye") in alert[
        "message"
    ]
    assert told == [f"Warning: {alert['message']}"]


def test_ctrl_c_within_a_tracker_is_the_runs(run: RunDir, fake: Fake) -> None:
    fake.where, fake.error = "log", KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        mirrored(run, range(1, 3))


def test_a_resumed_run_goes_on_in_the_same_tracker_run_and_repeats_no_step(run: RunDir, fake: Fake) -> None:
    mirrored(run, range(1, 4))
    run.append_metrics({"step": 4, "reward": 0.4})  # killed before it was sent
    mirrored(run, range(3, 6))  # from a checkpoint before that step
    first, second = fake.of("init")
    assert (first["id"], first["resume"]) == (None, None)
    assert (second["id"], second["resume"]) == ("made-by-the-tracker", "allow")
    assert [call["values"]["step"] for call in fake.of("log")] == [1, 2, 3, 4, 5]


def test_scores_are_sent_once_and_those_at_the_end_as_well(run: RunDir, fake: Fake) -> None:
    with Trackers(run, config()) as mirrors:
        make(run, mirrors, range(1, 3))
        run.write_json("eval/step-00002.json", {"step": 2, "truncated_share": 0.5})
        run.write_json("eval/again.json", {"step": 2, "truncated_share": 0.75})  # made by hand
        make(run, mirrors, range(3, 4))
        run.write_json("eval/after.json", {"truncated_share": 0.25})
    mirrored(run, range(3, 4))
    scores = [call["values"] for call in fake.of("log") if "heldout/truncated_share" in call["values"]]
    assert [(score["step"], score["heldout/truncated_share"]) for score in scores] == [(2, 0.5), (3, 0.25)]


def test_secrets_of_the_configuration_are_not_sent(run: RunDir, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "value-of-the-variable")
    secret = "reward.params={api_key: plain-word, header: value-of-the-variable}"
    with Trackers(run, config(secret, "data.system_prompt=hf_" + "a" * 30)):
        pass
    (sent,) = (call["config"] for call in fake.of("init"))
    assert sent["reward"]["params"] == {"api_key": "[hidden]", "header": "[hidden]"}
    assert sent["data"]["system_prompt"] == "[hidden]"
    assert sent["generation"]["max_completion_tokens"] == 64


def test_numbers_and_scores_are_what_a_tracker_can_draw() -> None:
    assert numbers({"step": 1, "time": 2.0, "a": 1, "b": None, "c": "text", "d": True, "e": float("inf")}) == {"a": 1.0}
    assert estimates({"greedy_reward": {"value": None, "low": 0, "high": 1}, "truncated_share": 0.25, "k": 4}) == {
        "heldout/truncated_share": 0.25
    }


BLOCK = """
    import os, sys
    log = open(os.environ["CONNECTIONS"], "a")
    def watch(event, args):
        if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
            address = args[1] if event != "socket.getaddrinfo" else args[0]
            host = address[0] if isinstance(address, tuple) else address
            if str(host) not in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
                log.write(f"{event} {args}\\n"); log.flush()
                raise OSError("no network here")
    sys.addaudithook(watch)
"""


# A run by a script can be forked from a process that has imported everything. What it starts itself is blocked by the path.
OFFLINE = """
import os, runpy
os.environ["PYTHONPATH"] = FOLDER
exec(open(FOLDER + "/sitecustomize.py").read(), {})
runpy.run_module("kit.train", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def train(tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDir]:
    """Trains `tree` in a process without a network, attempts noted; trackio's files in a folder of the test."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(BLOCK))
    (tmp_path / "offline.py").write_text(OFFLINE.replace("FOLDER", repr(str(folder))))
    monkeypatch.setenv("CONNECTIONS", str(tmp_path / "connections.txt"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str, **ways: bool) -> RunDir:
        config, request = load_config(tree, overrides), tmp_path / "request.json"
        request.write_text(json.dumps({"config": config.model_dump(mode="json"), **ways}))
        done = subprocess.run([sys.executable, "offline.py", str(request)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "* " not in done.stdout, "what a tracker prints is not the run's"
        return RunStore(config.run.root).open(str(config.run.id))

    return run


def trackio_rows(folder: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """(run, step, values) of everything that trackio stored, read from its database without trackio."""
    with sqlite3.connect(folder / "trackio" / "grpo-kit.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step, id").fetchall()
    return [(name, step, json.loads(values)) for name, step, values in rows]


@pytest.mark.survival
def test_trackio_holds_what_the_run_wrote_without_a_network_and_goes_on_after_a_resume(
    train: Callable[..., RunDir], tmp_path: Path
) -> None:
    pytest.importorskip("trackio")
    how = ("run.report_to=[trackio]", "evaluation.before=true", "run.id=mirrored", "optimisation.schedule=constant")
    train(*how, "optimisation.steps=2", "run.save_every=2")
    folder = train(*how, "optimisation.steps=3", resume=True)

    assert not (tmp_path / "connections.txt").read_text()
    assert alerts(folder) == []
    stored = trackio_rows(tmp_path)
    assert {name for name, _, _ in stored} == {"mirrored"}
    (_, first_step, scores), *rest = stored
    assert first_step == 0
    before = json.loads((folder.eval / "before.json").read_text())
    assert scores["heldout/greedy_reward"] == before["greedy_reward"]["value"]
    lines = [(step, values) for _, step, values in rest if "reward" in values]
    written = folder.metrics()
    assert [step for step, _ in lines] == [line["step"] for line in written] == [1, 2, 3]
    for (_, values), line in zip(lines, written, strict=True):
        assert values == numbers(line)
    with sqlite3.connect(tmp_path / "trackio" / "grpo-kit.db") as database:
        assert len(database.execute("SELECT DISTINCT run_id FROM metrics").fetchall()) == 1


def test_tensorboard_files_lie_in_the_run(run: RunDir) -> None:
    pytest.importorskip("tensorboardX")
    with Trackers(run, load_config("quickstart", ["run.report_to=[tensorboard]"])) as mirrors:
        make(run, mirrors, range(1, 2))
    (file,) = (run.path / "tensorboard").glob("events.*")
    assert b"reward" in file.read_bytes()
    assert alerts(run) == []


class Refusing(TensorBoard):
    """A tracker whose service refuses the second step."""

    def log(self, step: int, values: dict[str, float]) -> None:
        if step == 2:
            raise RuntimeError("401")


def test_a_run_with_a_failing_tracker_ends_as_if_there_were_none(
    attempt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboardX")
    plain = attempt("run.id=plain")
    monkeypatch.setitem(trackers.CLIENTS, "tensorboard", Refusing)
    done = attempt("run.report_to=[tensorboard]", "run.id=tracked", draw=True)
    assert (done.code, done.folder.status()["state"]) == (0, "finished")
    assert "The tracker tensorboard failed" in done.shown
    assert [line["loss"] for line in done.folder.metrics()] == [line["loss"] for line in plain.folder.metrics()]
    assert "The tracker tensorboard failed" in (done.folder.path / "report.html").read_text()
