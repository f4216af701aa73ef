"""A click uses the current values of the boxes, and the page does not write into a box that somebody is typing in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from kit.config import load_config
from kit.errors import ConfigError
from kit.ui import run
from kit.ui.draft import Draft
from kit.ui.form import Form, Sent, stored_or_new
from kit.ui.new_run import _bring_back, _from_preset, plan_run, show_draft
from kit.ui.settings import Settings
from kit.ui.site import Site

KINDS: dict[str, Any] = {
    "model.lora": "section", "model.lora.rank": "yaml", "model.load_in_4bit": "switch", "optimisation.steps": "yaml",
    "run.seed": "yaml", "run.id": "text",
}  # fmt: skip
NAMES = tuple(KINDS)


@pytest.fixture
def form(tmp_path: Path) -> Form:
    """A form of a few boxes."""
    site = Site(Settings(root=tmp_path / "runs", folder=tmp_path))
    with gr.Blocks() as blocks:
        made = Form(site, blocks)
        for name, kind in KINDS.items():
            made.add(name, name, kind=kind)
    return made


UNCHANGED = Draft()


def sent(form: Form, draft: Draft = UNCHANGED, **typed: Any) -> Sent:
    """The values that a browser sends for boxes filled from `draft`, with `typed` values by the last part of a key."""
    boxes = form.values(draft)
    for name, value in typed.items():
        boxes[next(at for at, key in enumerate(NAMES) if key.endswith(name))] = value
    return Sent(form, draft.as_text(), boxes)


def boxes(form: Form, filled: list[Any]) -> dict[str, Any]:
    """The boxes that are filled, with their values."""
    return {name: value for name, value in zip(NAMES, filled[4:], strict=True) if value != gr.skip()}


def test_what_differs_from_what_was_filled_in_was_changed(form: Form) -> None:
    draft = Draft().change("run.seed", 3)
    assert sent(form, draft).draft() == draft
    typed = sent(form, draft, id="named", steps="9", rank="32", load_in_4bit=True)
    changes = {
        "run.seed": 3,
        "model.lora.rank": 32,
        "model.load_in_4bit": True,
        "optimisation.steps": 9,
        "run.id": "named",
    }
    assert typed.draft().changes == changes
    assert sent(form, draft, seed=None).draft() == draft, "the browser did not send this box"


@pytest.mark.parametrize("value", ["many", "", "[&a 1, *a]"])
def test_an_invalid_value_is_reported_and_stays_in_its_box(form: Form, value: str) -> None:
    note, state, command, _, draft = show_draft(sent(form, steps=value, seed="4"))
    assert "optimisation.steps: Input should be a valid integer" in state
    assert note == ""
    assert "optimisation.steps=" in command
    assert Draft.read(draft).changes == {"run.seed": 4, "optimisation.steps": value or None}


def test_a_section_that_is_switched_off_takes_its_keys_with_it(form: Form) -> None:
    off = sent(form, lora=False, rank="8")
    assert off.draft().changes == {"model.lora": None}
    base = off.draft()
    assert sent(form, base).draft() == base
    on = sent(form, base, lora=True, rank="8").draft()
    assert on.tree()["model"]["lora"]["rank"] == 8
    assert sent(form, base, lora=True).draft().tree()["model"]["lora"]["rank"] == 16, "the box was empty"


def test_a_box_that_holds_what_it_should_is_left_alone(form: Form) -> None:
    typing = sent(form, steps="12").boxes
    new = Draft().change("model.lora.rank", 32)
    base, preset, *_ = filled = form.filled(new, typing)
    assert boxes(form, filled) == {
        "optimisation.steps": str(new.tree()["optimisation"]["steps"]),
        "model.lora.rank": "32",
    }
    assert Draft.read(json.loads(base)) == new
    assert preset == "quickstart"
    assert base != form.filled(new, typing)[0], "derived values are computed each time"
    assert form.filled(None, typing) == [gr.skip()] * len(filled)


@pytest.mark.parametrize("base", [None, 7, "", "{", "[]", '"x"', "[" * 100_000, json.dumps({"preset": "/etc"})])
def test_a_base_that_no_page_sends_is_refused_and_starting_over_always_goes(form: Form, base: Any) -> None:
    forged = Sent(form, base, [None] * len(NAMES))
    if base is None or base == 7:
        assert forged.draft() == Draft()
    else:
        with pytest.raises(ConfigError):
            forged.draft()
    assert forged.valid() == Draft()


def test_a_form_is_read_from_the_text_that_a_browser_makes_of_it(form: Form) -> None:
    typed = sent(form, steps="12")
    assert Sent.of(form, json.dumps([typed.base, *typed.boxes])) == typed
    for text in (json.dumps([typed.base, *typed.boxes, None]), json.dumps([typed.base]), "7", "", None, "[" * 100_000):
        with pytest.raises(ConfigError, match="cannot be read"):
            Sent.of(form, text).draft()
        assert Sent.of(form, text).valid() == Draft()


def test_what_another_preset_takes_the_place_of_is_kept_aside(form: Form) -> None:
    mine = Draft().change("run.seed", 3).change("optimisation.steps", 9)
    other, problem = _from_preset(sent(form, mine), "gsm8k")
    assert (other.preset, other.changes, problem) == ("gsm8k", {}, "")
    _, _, words, button, *_ = form.filled(other, [None] * len(NAMES))
    assert "2 changes to &#39;quickstart&#39; are saved" in words
    assert button.visible
    third, _ = _from_preset(sent(form, other), "countdown")  # nothing was changed in between
    assert third.aside == mine
    back, _ = _bring_back(sent(form, third, seed="5"))
    assert back == mine
    assert back.aside == Draft("countdown", {"run.seed": 5})  # the edits return with their preset
    again, _ = _bring_back(sent(form, other))
    assert again is not None
    assert again.aside is None
    assert stored_or_new(third.as_dict()).aside == mine, "a reload keeps the draft"


def test_start_uses_what_was_typed_last(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    import kit.api
    from kit.ui import children
    from kit.ui.steps import start_run

    order = []

    def ask(self: Any, question: str, *_: Any, **__: Any) -> Any:
        order.append(question)
        return {"problem": None, "run_seconds": {"steps": 9.0}}

    monkeypatch.setattr(children.Benches, "ask", ask)
    form.site.sessions.append(lambda **_: order.append("end sessions"))
    monkeypatch.setattr(kit.api, "start", lambda config: form.site.store.create(config.run.id))
    note, place = start_run(form.site, sent(form, id="typed-last").draft)
    assert place == "/run?run=typed-last", note
    assert form.site.run("typed-last").record()["forecast"] == {"steps": 9.0}
    assert order == ["check", "end sessions", "validate", "plan", "end sessions"], "a chat's memory counts as free"
    note, place = start_run(form.site, sent(form, id="typed-last").draft)
    assert "There is a run &#39;typed-last&#39; already. Choose another name" in note
    assert "-o " not in note, "the page has a box for this key"
    assert place == ""


def test_nothing_is_planned_while_a_run_trains_unless_asked_for(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[str] = []
    answer = {
        "memory": {"peak_bytes": 1},
        "room_bytes": 9,
        "fits": True,
        "starts": True,
        "fixes": [],
        "place": "x",
        "run_seconds": {"steps": 3.0},
        "notes": ["prompts were not measured: the folder has no tokenizer"],
    }
    monkeypatch.setattr(form.site.benches, "ask", lambda question, *_, **__: questions.append(question) or answer)
    live = form.site.store.create("busy")
    live.write_status("running", step=0, eta_seconds=60.0)
    assert " trains. " in plan_run(form.site, Draft().as_text())[0], (
        "the time of the first score is not that of the run"
    )
    live.write_status("running", step=3, eta_seconds=60.0)
    html, fixes, apply, now, planned = plan_run(form.site, Draft().as_text())
    assert ">busy</a> trains until about" in html
    assert (questions, fixes, apply.visible, now.visible, planned) == ([], [], False, True, None)
    assert "Fits: " in plan_run(form.site, Draft().as_text(), while_training=True)[0]
    live.write_status("finished")
    html, _, _, now, planned = plan_run(form.site, Draft().as_text())
    assert "Takes about 3 s" in html
    assert "Prompts were not measured: the folder has no tokenizer" in html
    answer["starts"] = False
    assert "Takes about" not in plan_run(form.site, Draft().as_text())[0]
    del questions[-1]
    assert (questions, now.visible, planned) == (["plan"] * 2, False, Draft().as_text())


def test_a_run_is_deleted_only_when_it_has_ended(tmp_path: Path) -> None:
    site = Site(Settings(root=tmp_path / "runs", folder=tmp_path))
    site.store.create("done").write_status("finished")
    site.store.create("live").write_status("running")
    assert run.delete(site, None) == ["", ""], "not confirmed"
    assert run.delete(site, "done") == ["", "/"]
    assert "live; stop it first" in run.delete(site, "live")[0]
    assert "note fail" in run.delete(site, "../../etc")[0]
    assert [path.name for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")] == ["live"]


@pytest.mark.parametrize("preset", ["quickstart", "quickstart-real"])
def test_a_new_run_like_another_has_its_settings_and_no_name(tmp_path: Path, preset: str) -> None:
    from kit.objective import Objective
    from kit.runner.prepare import explicit

    site = Site(Settings(root=tmp_path / "runs", folder=tmp_path))
    made = site.store.create("seven")
    config = load_config(preset, ["optimisation.steps=7", "run.id=seven", f"run.root={tmp_path / 'moved'}"])
    config = explicit(config, Objective.from_spec({"recipe": config.objective.recipe}))  # as a run saves it
    made.write_text("config.yaml", config.to_yaml())
    text, note, place = run.like(site, "seven", Draft().as_text())
    assert (note, place) == ("", "/new")
    draft = Draft.read(text)
    assert (draft.preset, draft.changes) == (preset, {"optimisation.steps": 7})
