"""Texts of the Run, Compare, Chat and Export screens, and when they appear."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from made_runs import batch, make

from kit.errors import RunError
from kit.runs.store import RunDir
from kit.ui import chat, export, run_texts
from kit.ui import run as run_page
from kit.ui.outcome import progress
from kit.ui.run import View
from kit.ui.settings import Settings
from kit.ui.site import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    make(tmp_path / "runs")
    return Site(Settings(root=tmp_path / "runs", folder=tmp_path))


def test_alerts_are_shown_once_by_severity() -> None:
    events = [
        {"kind": "alert", "step": 3, "name": "kl_spike", "severity": "warning", "message": "early"},
        {"kind": "alert", "step": 9, "name": "kl_spike", "severity": "warning", "message": "late"},
        {"kind": "alert", "step": 5, "name": "reward_hacking", "severity": "error", "message": "grave"},
        {"kind": "checkpoint", "step": 5},
        {"kind": "alert", "step": None, "name": None, "severity": 7, "message": None},
    ]
    shown, holding = run_texts.alerts(events, {})
    text = str(shown)
    assert holding == 3
    assert text.index("grave") < text.index("late")
    assert "early" not in text
    assert "2 times in all" in text
    assert run_texts.alerts([{"kind": "checkpoint"}], {}) == ("", 0)


def test_an_alert_lapses_when_its_condition_is_over() -> None:
    events = [{"kind": "alert", "step": 10, "name": "truncated", "severity": "warning", "message": "33% were cut"}]
    cut = np.array([0.5] * 12)
    text, holding = run_texts.alerts(events, {"completions/clipped_ratio": cut})
    assert "33% were cut" in text
    assert holding == 1
    text, holding = run_texts.alerts(events, {"completions/clipped_ratio": np.append(cut, [0.0] * 12)})
    assert "33% were cut" not in text
    assert "No longer true: completions are cut off (step 10)" in text
    assert holding == 0


def test_stop_ends_the_answer_of_this_browser_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        alive, ready, ended, owners = True, dict[str, Any](), list[object](), list[object]()

        def ask(self, owner: object = None, **_: object) -> Iterator[dict[str, Any]]:
            self.owners.append(owner)
            yield {"event": "done", "prompt": "?", "reference": None}

        def cancel(self, owner: object = None) -> None:
            self.ended.append(owner)

    screen, session = chat.Screen(site), Session()
    run = site.store.list()[0]
    monkeypatch.setattr(screen.loaded, "session", lambda *_: session)
    monkeypatch.setattr(screen.loaded, "of", lambda *_: session)
    pages: list[Any] = [SimpleNamespace(session_hash=name) for name in ("one", "two")]
    for page in pages:
        list(screen.ask(run.id, None, "?", None, None, None, None, None, None, page))
    screen.stop(run.id, pages[1])
    assert (session.owners, session.ended) == (["one", "two"], ["two"])


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("running", ["like", "stop", "now"]),
        ("stopping", ["like", "now"]),
        ("stopped", ["like", "resume", "delete"]),
        ("interrupted", ["like", "resume", "delete"]),
        ("finished", ["like", "delete"]),
    ],
)
def test_a_state_has_its_buttons(state: str, shown: list[str]) -> None:
    parts = run_page.buttons({"state": state})
    assert [name for name, part in zip(run_page.BUTTONS, parts, strict=True) if part.visible] == shown
    assert not any(part.visible for part in run_page.buttons(None))


def test_a_run_without_a_checkpoint_is_started_again_and_the_page_says_so(site: Site) -> None:
    run = site.store.create("early", step=0, total_steps=3)
    label = View.parts.index("timer") + 2 + run_page.BUTTONS.index("resume")
    run.write_status("starting", pid=2**22 + 1)
    parts = View(site).look("early", "charts", {})
    assert parts[label].visible
    assert parts[label].value == "Start again"
    assert "interrupted" in parts[1]
    assert "the process ended without a message while the run was starting" in parts[1]
    run.write_status("stopped", reason="control/stop")
    assert "Stopped by you; nothing was saved." in View(site).look("early", "charts", {})[1]
    run.write_json("checkpoint-3/trainer_state.json", {})
    parts = View(site).look("early", "charts", {})
    assert parts[label].value == "Resume"
    assert "Stopped by you; saved at step 3." in parts[1]
    run.write_status("stopped", reason="SIGTERM: it did not stop at its sentinel")
    assert "Stopped at once (SIGTERM); saved at step 3." in View(site).look("early", "charts", {})[1]
    reason = "The process crashed with exit code 1."
    run.write_status("failed", reason=reason)
    run.log.write_text(
        f"Traceback:\nInvalidVersion: N/A\n2026-11-27 05:07:20 supervisor: the run is failed: {reason}\n"
    )
    assert f"{reason}\nInvalidVersion: N/A</div>" in View(site).look("early", "charts", {})[1]


def test_what_the_browser_has_is_not_sent_again(site: Site) -> None:
    view = View(site)
    first = view.look("one", "charts", {})
    assert isinstance(first[1], str)
    again = view.look("one", "charts", first[0])
    assert all(isinstance(part, dict) for part in again), "every output must be gr.skip()"
    batch(site.run("one").completions, 21, ["1 + 1 ="])
    site.run("one").append_metrics({"step": 21, "reward": 0.9})
    third = view.look("one", "charts", first[0])
    assert isinstance(third[1], str)
    assert "to 0.9 at 21" in third[View.parts.index("charts") + 1]
    other = view.look("one", "log", third[0])
    assert "a line of the log" in other[View.parts.index("log") + 1]
    assert isinstance(other[View.parts.index("charts") + 1], dict), "only the open tab receives charts"


def test_checkpoints_are_whole_or_said_to_be_not(site: Site) -> None:
    run = site.run("one")
    checkpoint(run, 10)
    (checkpoint(run, 20) / "manifest.json").write_text('{"weights": 5}')
    text = run_texts.checkpoint_table(run, {})
    assert text.index("checkpoint-20") < text.index("incomplete") < text.index("checkpoint-10")
    assert text.index("checkpoint-10") < text.index("Resume continues from here")


def test_a_long_log_is_shown_from_its_end(site: Site) -> None:
    run = site.run("one")
    run.log.write_text("".join(f"line {number}\n" for number in range(20_000)))
    text = run_texts.log_tail(run)
    assert "line 19999" in text
    assert "line 100\n" not in text
    assert len(text) < 40 * 1024


def test_an_export_that_is_not_what_was_trained_has_no_download() -> None:
    result = {"format": "adapter", "path": "/x", "bytes": 5, "time": 1.0, "step": 3, "stored": "float32",
              "files": [{"name": "w.safetensors", "bytes": 5, "sha256": "ab" * 32}], "notes": [],
              "verification": {"verified": False, "faults": ["layer 3 is missing"], "limits": {}, "comparison": {}}}  # fmt: skip
    text = export.results("one", {"adapter": result})
    assert "differs from the trained model" in text
    assert "layer 3 is missing" in text
    assert "download" not in text
    comparison = {"limits": {"agreement": 0.9}, "comparison": {"token_agreement": 1.0}}
    result["verification"] = {"verified": True, "faults": [], **comparison}
    good = export.results("one", {"adapter": result})
    assert 'href="/runs/one/export/adapter/w.safetensors"' in good
    assert "at least 0.9" in good


@pytest.mark.parametrize("kind", ["gguf", "ollama"])
def test_a_missing_tool_is_named_before_a_child_is_begun(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    site.run("one").adapter.mkdir()
    screen = export.Screen(site)
    note, _ = screen.begin("one", kind, "the run's result", "q8_0")
    assert "convert_hf_to_gguf.py" in note
    assert "git clone" in note
    assert site.jobs.get(screen.key(site.run("one"), kind)) is None


def test_answers_grow_and_stay_when_the_next_is_asked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        alive, ready = True, dict[str, Any]()

        def ask(self, **_: object) -> Iterator[dict[str, Any]]:
            for side in chat.SIDES:
                yield {"event": "began", "side": side}
                yield {"event": "token", "side": side, "text": "4"}
                facts = {"finish": "stop", "tokens": 1, "seconds": 0.1}
                yield {"event": "answer", "side": side, "text": f"{side} 4", **facts}
            yield {"event": "done", "prompt": "2 + 2 =", "reference": None}

    screen = chat.Screen(site)
    monkeypatch.setattr(screen.loaded, "session", lambda *_: Session())
    question = ("one", None, "2 + 2 =", None, None, None, None, None)
    *_, last = screen.ask(*question, [[], []])
    assert [messages[-1]["content"] for messages in last[:2]] == ["base 4", "tuned 4"]
    *_, last = screen.ask(*question, last[-1])
    assert [message["role"] for message in last[0]] == ["user", "assistant"] * 2
    assert not last[3].visible


def test_a_model_is_not_loaded_while_a_run_trains(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = chat.Loaded(site)
    monkeypatch.setattr(RunDir, "status", lambda self: {"state": "running"})
    monkeypatch.setattr(chat, "resolved", lambda *_: (None, ""))
    pool._session = session = Mock(alive=True, answering=True)
    with pytest.raises(RunError, match="'one' is training"):  # a loaded model answers no further questions
        pool.session(site.run("one"), None)
    monkeypatch.setattr(chat.time, "sleep", lambda _: setattr(pool, "_session", None))
    pool._watch(session)  # the run was started in a terminal
    assert session.close.call_count == 2


def test_a_run_that_waits_is_not_the_one_that_trains(site: Site) -> None:
    site.run("one").write_status("running")
    site.store.create("two").write_status("queued", reason="waits for run 'one'")
    assert site.live() == ["one", "two"]
    text = progress(site.run("two").status() | {"forecast": {"steps": 9.0}})
    assert "waits for run" in text
    assert "0% done" in text
    assert "running for" not in text


def checkpoint(run: RunDir, step: int) -> Path:
    folder = run.path / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "trainer_state.json").write_text("{}")
    (folder / "weights").write_bytes(b"1234")
    (folder / "manifest.json").write_text('{"weights": 4}')
    return folder


def test_newer_weights_of_the_same_name_are_other_weights(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    class Fake:
        alive, answering = True, False

        def close(self) -> None:
            opened.append("closed")

    def open_chat(run: Any, which: Any, idle: float) -> Fake:
        opened.append(which)
        return Fake()

    monkeypatch.setattr(chat, "open_chat", open_chat)
    run, pool = site.run("one"), chat.Loaded(site)
    checkpoint(run, 10)
    first = pool.session(run, "last")
    assert pool.session(run, "last") is first
    assert pool.session(run, "10") is first, "the same folder"
    checkpoint(run, 20)
    assert pool.session(run, "last") is not first
    assert opened == ["10", "closed", "20"]
    run.write_json("best.json", {"step": 10})
    pool.session(run, "best")
    assert opened[3:] == ["closed", "10"]
    run.write_json("adapter/adapter_config.json", {})
    (run.adapter / "weights").write_bytes(b"1")
    result = pool.session(run, None)
    assert pool.session(run, None) is result
    (run.adapter / "weights").write_bytes(b"22")  # the run was resumed and has ended again
    assert pool.session(run, None) is not result
    assert opened[5:] == ["closed", None, "closed", None]
    monkeypatch.setattr(Fake, "answering", True)
    with pytest.raises(RunError, match="answering, perhaps in another tab"):
        pool.session(run, "last")
    monkeypatch.setattr(RunDir, "status", lambda self: {"state": "running"})
    assert chat.resolved(run, None)[0] == "20", "a live run has the weights of its last checkpoint"


def test_chat_says_what_it_cannot_find(site: Site) -> None:
    screen = chat.Screen(site)
    updates = list(screen.ask("one", "step 7", "2 + 2 =", None, "", "0", "", "", None))
    assert "no checkpoint" in updates[-1][2]
    assert updates[-1][3].visible is False
