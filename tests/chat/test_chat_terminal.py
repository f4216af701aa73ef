"""`grpo-kit chat` in a terminal: its output, and the course of a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command_line
import pytest

from kit.config import load_config
from kit.errors import ConfigError
from kit.runs.store import RunStore

REWARD = {"total": 1.2, "components": {"accuracy": {"value": 1.0, "weight": 1.0, "status": "ok"},
                                       "format": {"value": None, "weight": 0.2, "status": "timeout"}}}  # fmt: skip


class FakeSession:
    """Answer each question with `ANSWER`, and record it."""

    alive = True

    def __init__(self) -> None:
        self.ready = {"model": "embedded", "step": 3, "note": "these are the weights of its last complete checkpoint"}
        self.asked: list[dict[str, Any]] = []

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, prompt: str | None, **how: Any) -> Iterator[dict[str, Any]]:
        self.asked.append({"prompt": prompt, **how})
        if how["heldout"] == 0:
            raise ConfigError("There is no held-out prompt 0.")
        for side in how["sides"]:
            yield {"event": "began", "side": side}
            yield {"event": "token", "side": side, "text": "4"}
            yield {"event": "token", "side": side, "text": "2"}
            yield {"event": "answer", "side": side, "tokens": 2, "finish": "stop", "reward": REWARD}
        yield {"event": "done", "prompt": "12+30=?", "reference": "42"}

    def answer(self, prompt: str | None, **how: Any) -> dict[str, Any]:
        return {"prompt": prompt, "base": {"text": "42"}}

    def heldout(self, search: str | None) -> dict[str, Any]:
        return {"rows": [{"number": 7, "prompt": "1 + 1", "reference": "2"}], "total": 1}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    run = RunStore(tmp_path / "runs").create("it")
    run.write_text("config.yaml", load_config("quickstart").to_yaml())
    run.write_status("finished", step=3)
    fake = FakeSession()
    monkeypatch.setattr("kit.chat.client.open_chat", lambda *_: fake)
    monkeypatch.chdir(tmp_path)
    return fake


def chat(*arguments: str, lines: str = "", code: int = 0) -> str:
    return command_line.run("chat", "it", *arguments, code=code, lines=lines)


def test_one_question_shows_both_answers_with_their_rewards(session: FakeSession) -> None:
    output = chat("--prompt", "12+30=?", "--seed", "5", "--temperature", "0")
    assert "[base] 42" in output
    assert "[tuned] 42" in output
    assert "2 tokens | reward 1.20 | accuracy 1.00 | format - (timeout)" in output
    assert "reference 42" in output
    assert "note: these are the weights" in output
    (request,) = session.asked
    assert (request["seed"], request["temperature"], request["sides"]) == (5, 0.0, ["base", "tuned"])
    assert "top_p" not in request  # the run's value is used


def test_json_is_all_that_is_printed_when_asked_for(session: FakeSession) -> None:
    assert json.loads(chat("--prompt", "x", "--json"))["base"]["text"] == "42"


def test_a_conversation(session: FakeSession) -> None:
    output = chat("--only", "tuned", "--reference", "9", lines="/heldout 7\n/heldout\nhow?\n/dance\n/quit\n")
    assert "There is no command '/dance'" in output
    assert "error: There is no held-out prompt 0." in output
    assert [(each["prompt"], each["heldout"], each["reference"]) for each in session.asked] == [
        (None, 7, None), (None, 0, None), ("how?", None, "9"),
    ]  # fmt: skip
