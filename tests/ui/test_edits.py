"""What was typed just before a click counts, and nothing is written into a box that somebody is typing in."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from kit.errors import ConfigError
from kit.ui import edits, run
from kit.ui.draft import Draft, Fields, Key, keys
from kit.ui.new_run import _bring_back, _from_preset, _put_aside, _shown
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
    assert boxes[:4] == [gr.skip(), gr.skip(), "123", gr.skip()]
    assert now[:4] == [0, "123", before[2], "123"]
    # A draft that takes the place of another is shown by all, whatever stands in them.
    whole = edits.whole(Draft())
    assert _shown(screen, whole, before, edits.places(whole))[1 : len(before)] == before[1:]


def test_before_the_first_answer_only_what_differs_is_written() -> None:
    """Somebody may be typing by then."""
    fields = Fields()
    for name in ("optimisation.steps", "run.seed"):
        fields.add(name)
    screen: Any = SimpleNamespace(fields=fields, read=edits.latest)
    first = [None, *fields.values(Draft()), "quickstart"]
    assert _shown(screen, Draft().as_dict(), first, None)[1:4] == [gr.skip()] * 3
    assert _shown(screen, Draft().as_dict(), first, [])[1:4] == [gr.skip()] * 3
    kept = Draft().change("run.seed", 7).as_dict() | {"edited": [1]}
    assert _shown(screen, kept, first, [])[1:4] == [gr.skip(), "7", gr.skip()]


def test_an_answer_tells_which_draft_it_belongs_to() -> None:
    value = sent(Draft(), ("run.seed", "4"))
    answer = json.loads(edits.answered(value, KEYS["run.seed"], 1, "4"))
    assert (answer["turn"], answer["draft"]["changes"], answer["problem"]) == (7, {"run.seed": 4}, "")
    again = edits.answered(value, KEYS["run.seed"], 1, "4")
    assert again != edits.answered(value, KEYS["run.seed"], 1, "4")  # the browser hears only of what changes
    wrong = json.loads(edits.answered(Draft().as_dict(), KEYS["run.seed"], 1, "many"))
    assert (wrong["turn"], wrong["draft"]["changes"]) == (0, {})
    assert "expected a whole number" in wrong["problem"]


def test_what_another_preset_takes_the_place_of_is_kept_aside() -> None:
    mine = Draft().change("run.seed", 3).change("optimisation.steps", 9)
    other, problem = _from_preset(mine.as_dict(), "gsm8k")
    assert (other["preset"], other["changes"], problem) == ("gsm8k", {}, "")
    words, button = _put_aside(other)
    assert "2 changes of &#39;quickstart&#39; are put aside" in words
    assert button.visible
    third, _ = _from_preset(other, "countdown")  # nothing was changed in between
    assert edits.aside(third) == mine
    draft, _ = edits.edited(third, KEYS["run.seed"], 0, "5")
    assert edits.aside(draft) == mine
    back, _ = _bring_back(draft)
    assert Draft.read(back) == mine
    assert edits.aside(back) == Draft("countdown", {"run.seed": 5})  # and there and back again
    assert "aside" not in _bring_back(other)[0]


def test_starting_over_keeps_what_was_typed_last_if_it_is_a_value() -> None:
    assert edits.aside(edits.instead(Draft(), sent(Draft(), ("run.seed", "4")))) == Draft(changes={"run.seed": 4})
    mine = Draft().change("run.seed", 3)
    assert edits.aside(edits.instead(Draft(), sent(mine, ("optimisation.steps", "many")))) == mine
    assert edits.aside(edits.instead(Draft(), Draft().as_dict())) is None


@pytest.mark.parametrize("forged", [7, "x", {"preset": "/etc"}, {"changes": {"__class__": 1}}, {"changes": 3}])
def test_what_no_page_puts_aside_is_not_brought_back(forged: Any) -> None:
    value = Draft().as_dict() | {"aside": forged}
    assert _put_aside(value)[0] == ""
    draft, problem = _bring_back(value)
    assert draft == gr.skip()
    assert problem == "" if not isinstance(forged, dict) else "note fail" in problem
    assert "preset" in edits.instead(Draft(), {"preset": ["x"], "aside": forged})  # starting over always goes


def test_start_uses_what_was_typed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kit.api.launch
    from kit.ui import children
    from kit.ui.steps import launch

    monkeypatch.setattr(children.Benches, "ask", lambda self, *given, **named: [])
    monkeypatch.setattr(kit.api.launch, "start", lambda config: SimpleNamespace(id=config.run.id))
    site = Site(Settings(root=tmp_path / "runs", folder=tmp_path))
    note, place = launch(site, sent(Draft(), ("run.id", "typed-last")))
    assert place == "/run?run=typed-last", note
    site.store.create("typed-last")
    note, place = launch(site, sent(Draft(), ("run.id", "typed-last")))
    assert "There is a run &#39;typed-last&#39; already. Give another name" in note
    assert "-o " not in note, "the page has a box for it"
    assert place == ""


def test_resuming_although_needs_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kit.api.launch

    forced: list[bool] = []
    monkeypatch.setattr(kit.api.launch, "resume", lambda run_id, root, *, force, detach: forced.append(force))
    site = Site(Settings(root=tmp_path / "runs", folder=tmp_path))
    site.store.create("plain").write_status("stopped")
    site.store.create("changed").write_status("stopped", refused="data.json: sha256 differs")
    for name in ("plain", "changed"):
        assert f"{name} starts again from the beginning" in run.go_on(site, name, True)
    site.store.open("changed").write_json("checkpoint-3/trainer_state.json", {})
    assert "changed goes on from its last whole checkpoint, checkpoint-3." in run.go_on(site, "changed", "yes")
    assert forced == [False, True, False]


def test_the_confirmation_names_its_run() -> None:
    group, words, asked = run.confirmation("one")
    assert (group.visible, asked) == (True, "one")
    assert "Stop one now?" in words
    assert run.confirmation("../x")[2] == ""
