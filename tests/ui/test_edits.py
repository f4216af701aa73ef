"""What was typed just before a click counts, and nothing is written into a box that somebody is typing in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from kit.errors import ConfigError
from kit.ui import edits, run_actions
from kit.ui.draft import Draft
from kit.ui.form import Fields, Key, keys
from kit.ui.new_run import _shown
from kit.ui.settings import Settings
from kit.ui.site import Site

KEYS: dict[str, Key] = {key.name: key for key in keys()}


def sent(draft: Draft, *on_their_way: tuple[str, Any]) -> dict[str, Any]:
    """What a browser sends whose draft does not have the last edits yet."""
    late = [
        {"name": name, "value": value, "serial": at, "place": at} for at, (name, value) in enumerate(on_their_way, 1)
    ]
    return draft.as_dict() | {"turn": 7, "edits": late}


def test_a_draft_is_read_with_what_is_on_its_way() -> None:
    draft = edits.latest(sent(Draft().change("run.seed", 3), ("run.id", "named"), ("optimisation.steps", "9")))
    assert draft.changes == {"run.seed": 3, "run.id": "named", "optimisation.steps": 9}
    with pytest.raises(ConfigError, match="whole number"):
        edits.latest(sent(Draft(), ("optimisation.steps", "many")))


def test_of_two_edits_at_once_both_stay() -> None:
    value = sent(Draft(), ("model.lora.rank", "32"), ("model.load_in_4bit", True))
    draft, problem = edits.edited(value, KEYS["model.load_in_4bit"], 2, True)
    assert draft["changes"] == {"model.lora.rank": 32, "model.load_in_4bit": True}
    assert (draft["turn"], draft["seen"], draft["edited"], problem) == (7, 2, [1, 2], "")


def test_what_is_no_value_is_said_and_keeps_nothing_else_out() -> None:
    value = sent(Draft(), ("optimisation.steps", "many"), ("run.seed", "4"))
    draft, problem = edits.edited(value, KEYS["run.seed"], 2, "4")
    assert draft["changes"] == {"run.seed": 4}
    assert "expected a whole number" in problem
    assert draft["seen"] == 2  # and it is not sent again


def test_a_box_that_was_only_passed_through_is_no_edit() -> None:
    base = Draft().change("model.lora", None)
    draft, problem = edits.edited(base.as_dict(), KEYS["model.lora.rank"], 0, "")
    assert (draft, problem) == (gr.skip(), "")


@pytest.mark.parametrize("forged", ["x", [3], [{"name": "run.root", "value": "/"}], [{"name": ["a"]}], [{}], {"a": 1}])
def test_edits_that_no_page_sends_are_left_out(forged: Any) -> None:
    assert edits.latest(Draft().as_dict() | {"edits": forged}) == Draft()


def test_only_what_differs_is_written_and_not_where_it_was_typed() -> None:
    fields = Fields()
    for name in ("optimisation.steps", "optimisation.learning_rate", "optimisation.steps"):
        fields.add(name)
    screen: Any = SimpleNamespace(fields=fields, read=edits.latest)
    before = _shown(screen, Draft().as_dict())[0]
    draft, _ = edits.edited(Draft().as_dict(), KEYS["optimisation.steps"], 0, "123")
    now, *boxes = _shown(screen, draft, before, edits.places(draft))
    assert boxes == [gr.skip(), gr.skip(), "123", gr.skip()]
    assert now[:3] == ["123", before[1], "123"]
    # A draft that takes the place of another is shown by all, whatever stands in them.
    whole = edits.whole(Draft())
    assert _shown(screen, whole, before, edits.places(whole))[1:] == before


def test_start_uses_what_was_typed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kit.api
    from kit.ui import bench
    from kit.ui.step_plan import launch

    monkeypatch.setattr(bench.Benches, "ask", lambda self, *given, **named: [])
    monkeypatch.setattr(kit.api, "start", lambda config: SimpleNamespace(id=config.run.id))
    site = Site(Settings(root=tmp_path / "runs", folder=tmp_path))
    note, place = launch(site, sent(Draft(), ("run.id", "typed-last")))
    assert place == "/run?run=typed-last", note


def test_resuming_although_needs_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kit.api

    forced: list[bool] = []
    monkeypatch.setattr(kit.api, "resume", lambda run_id, root, *, force, detach: forced.append(force))
    site = Site(Settings(root=tmp_path / "runs", folder=tmp_path))
    site.store.create("plain").write_status("stopped")
    site.store.create("changed").write_status("stopped", refused="data.json: sha256 differs")
    for name in ("plain", "changed"):
        assert "goes on" in run_actions.go_on(site, name, True)
    run_actions.go_on(site, "changed", "yes")
    assert forced == [False, True, False]


def test_the_confirmation_names_its_run() -> None:
    group, words, asked = run_actions.confirmation("one")
    assert (group.visible, asked) == (True, "one")
    assert "Stop one now?" in words
    assert run_actions.confirmation("../x")[2] == ""
