"""The process of a chat: streaming, cancelling, error messages, and its end with the parent process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exporting_runs import make_run

from kit.chat.client import ChatSession, open_chat
from kit.errors import ConfigError, RunError
from kit.runs.store import RunDir

pytestmark = pytest.mark.survival


@pytest.fixture(scope="module")
def run(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("chat") / "runs", "talk", model_folder)


@pytest.fixture(scope="module")
def session(run: RunDir) -> Iterator[ChatSession]:
    with open_chat(run) as opened:
        yield opened


def test_both_answer_with_the_same_seed_again_and_again(session: ChatSession) -> None:
    first = session.answer("12+30=?", seed=3)
    assert first["prompt"] == "12+30=?"
    assert {"base", "tuned"} <= first.keys()
    second = session.answer("12+30=?", seed=3)
    for side in ("base", "tuned"):
        assert first[side]["text"] == second[side]["text"]
        assert first[side]["tokens"] > 0
        assert first[side]["reward"] is None  # there is no reference
    assert session.answer("12+30=?", seed=4)["tuned"]["text"] != first["tuned"]["text"]
    assert session.answer("12+30=?", temperature=0)["base"] != session.answer("12+30=?", temperature=0)["tuned"]


def test_tokens_stream_and_add_up_to_the_answer(session: ChatSession) -> None:
    events = list(session.ask("3 + 4 =", sides=["tuned"]))
    assert [event["event"] for event in events if event["event"] != "token"] == ["began", "answer", "done"]
    text = "".join(event["text"] for event in events if event["event"] == "token")
    assert text == events[-2]["text"] != ""


def test_a_held_out_prompt_has_its_reference_and_reward(session: ChatSession) -> None:
    rows = session.heldout(start=2, count=3)
    assert [row["number"] for row in rows["rows"]] == [2, 3, 4]
    answer = session.answer(heldout=2)
    assert (answer["prompt"], answer["reference"]) == (rows["rows"][0]["prompt"], rows["rows"][0]["reference"])
    assert answer["tuned"]["reward"]["components"]


def test_a_held_out_problem_typed_by_hand_is_that_problem(session: ChatSession) -> None:
    (row,) = session.heldout(start=4, count=1)["rows"]
    answer = session.answer(row["prompt"], sides=["tuned"])
    assert answer["reference"] == row["reference"]
    assert answer["tuned"]["reward"]["total"] is not None


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"prompt": ""}, "is empty"),
        ({"prompt": "x\0"}, "NUL"),
        ({"heldout": 10**6}, "no held-out prompt"),
        ({"prompt": "x", "temperature": -1}, "temperature is '-1'; expected a number from 0 to 100"),
        ({"prompt": "x", "top_p": "much"}, "top_p is 'much'"),
        (
            {"prompt": "x", "temperature": float("nan")},
            "temperature is 'nan'",
        ),
        ({"prompt": "x", "top_p": float("inf")}, "top_p is 'inf'"),
        ({"prompt": [{"role": "user", "content": float("nan")}]}, "cannot be asked"),
        ({"prompt": "x", "warmth": 1}, "no sampling option 'warmth'"),
        ({"prompt": "x", "max_tokens": 5000}, "the model's limit is 1024"),
        ({"prompt": "x" * 5000}, "the model's limit is 1024"),
        ({"prompt": "x", "sides": ["other"]}, "no side 'other'"),
        ({}, "Ask either"),
    ],
)
def test_a_wrong_question_is_refused_and_the_session_goes_on(
    session: ChatSession, how: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        session.answer(**how)
    assert session.answer("1 + 1 =", sides=["tuned"], max_tokens=2)["tuned"]["tokens"] <= 2


def test_a_cancelled_answer_ends_and_keeps_what_it_said(session: ChatSession) -> None:
    events = []
    for event in session.ask("1 + 2 =", sides=["tuned", "base"], max_tokens=900, temperature=50.0):
        events.append(event)
        if event["event"] == "token":
            session.cancel()
    assert events[-1]["event"] == "done"
    assert events[-1]["cancelled"]
    answers = [event for event in events if event["event"] == "answer"]
    assert [answer["finish"] for answer in answers] == ["cancelled"]
    assert 0 < answers[0]["tokens"] < 900


def test_who_stops_listening_cancels(session: ChatSession) -> None:
    for event in session.ask("1 + 2 =", max_tokens=900, temperature=50.0):
        if event["event"] == "token":
            break
    started = time.monotonic()
    session.answer("1 + 1 =", sides=["base"], max_tokens=2)
    assert time.monotonic() - started < 30


def test_a_killed_process_is_told_and_the_next_question_starts_another(run: RunDir) -> None:
    with open_chat(run, idle=2.0) as session:
        events = session.ask("1 + 2 =", max_tokens=900, temperature=50.0)
        next(events)
        killed = session.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(RunError, match="signal 9"):
            list(events)
        session.start()
        pid = session.pid
        assert pid not in (None, killed)
        gone(int(pid or 0), 30)  # the child ends when idle
        end = time.monotonic() + 10
        while session.alive and time.monotonic() < end:  # until the reading thread has noticed
            time.sleep(0.05)
        assert not session.alive


PARENT = """
import sys, threading, time
from kit.chat.client import open_chat
from kit.runs.store import RunStore
session = open_chat(RunStore(sys.argv[1]).open("talk"))
threading.Thread(target=session.start, daemon=True).start()
while session.pid is None:
    time.sleep(0.01)
print(session.pid, flush=True)
time.sleep(60)
"""


def test_the_process_dies_with_the_one_that_started_it(run: RunDir) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(run.path.parent)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    gone(child, 30)


def gone(pid: int, seconds: float) -> None:
    """Wait until a process has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except OSError:
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} still runs after {seconds} s")


def test_a_chat_is_closed_at_once_while_it_loads(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that starts does not wait until a model is loaded."""
    (tmp_path / "loads.py").write_text("import sys; sys.stdin.read()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("kit.chat.client.SERVER", "loads")
    session, messages = open_chat(run), []

    def ask() -> None:
        with pytest.raises(RunError) as refusal:
            session.answer("2 + 2 =")
        messages.append(str(refusal.value))

    asker = threading.Thread(target=ask)
    asker.start()
    while not session.alive:
        time.sleep(0.01)
    assert session.answering
    session.close()
    asker.join(10)
    assert len(messages) == 1
    assert "closed before the answer was complete, e.g. because a run needs its memory" in messages[0]
    assert not session.answering


def test_a_run_without_weights_is_refused_at_once(tmp_path: Path) -> None:
    from kit.config import load_config
    from kit.runs.store import RunStore

    empty = RunStore(tmp_path).create("empty")
    with pytest.raises(RunError, match=r"no config\.yaml"):
        open_chat(empty)
    empty.write_text("config.yaml", load_config("quickstart").to_yaml())
    empty.write_status("failed")
    with pytest.raises(RunError, match="no trained weights"):
        open_chat(empty)
