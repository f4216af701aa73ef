"""The objective on New run: its curves before a run, and the clip's parameters as fields that write into the draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from kit.config import RunConfig
from kit.errors import ConfigError
from kit.planning import workbench
from kit.ui import objective
from kit.ui.draft import Draft
from kit.ui.form import Form, Sent
from kit.ui.server import without_applications
from kit.ui.settings import Settings
from kit.ui.site import Site


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> objective.BeforeARun:
    site = Site(Settings(root=tmp_path / "runs", folder=tmp_path))
    monkeypatch.setattr(site.benches, "ask", lambda question, **more: workbench.QUESTIONS[question](RunConfig(), more))
    with without_applications(), gr.Blocks() as blocks:
        form = Form(site, blocks)
        found = objective.BeforeARun(form)
    return found


def edit(tab: objective.BeforeARun, draft: Draft, **fields: Any) -> Draft:
    """The draft after an edit of the fields, which show it."""
    seen, _, clip, coef, *updates = tab.look(draft.as_text(), True, "")
    slots = [one.value if isinstance(one, gr.components.Component) else None for one in updates]
    for field, _ in tab.fields(draft.tree()["objective"]):
        slots[objective._slot(field)] = fields.get(field.parameter.name, slots[objective._slot(field)])
    sent = Sent(tab.form, draft.as_text(), tab.form.values(draft))
    changed, _ = tab.edited(sent, seen, fields.get("clip", clip.value), fields.get("coef", coef), *slots)
    return changed or draft


def test_before_a_run_the_curves_are_those_of_the_draft(before: objective.BeforeARun) -> None:
    draft = Draft().change("objective.recipe", "grpo")
    assert before.look(draft.as_text(), False, "")[1]["__type__"] == "update", "nothing is evaluated while it is closed"
    seen, text, *_ = before.look(draft.as_text(), True, "")
    assert text.count("<svg") == 3
    assert "logged no ratios" not in text
    assert "changed" not in text
    assert before.look(draft.as_text(), True, seen)[1]["__type__"] == "update", (
        "the same objective is not asked for again"
    )
    text = before.look(draft.change("objective.clip", {"name": "dual_clip", "c": 2.0}).as_text(), True, seen)[1]
    assert "grpo as it is" in text
    assert "as set here" in text


def test_parameters_of_a_clip_are_fields_with_their_meaning(before: objective.BeforeARun) -> None:
    for name, parameters in before.clips().items():
        assert all(one.words for one in parameters), f"a parameter of {name} has no meaning said"
        fields = before.fields({"recipe": "dapo", "clip": {"name": name}, "regularizers": None})
        assert len(fields) == len(parameters), f"{name} has more parameters than there are fields"
    draft = edit(before, Draft(), clip="two_sided")
    assert draft.changes == {"objective.clip": {"name": "two_sided"}}
    fields = {field.parameter.name: field for field, _ in before.fields(draft.tree()["objective"])}
    assert "where the advantage is negative" in fields["delta"].update("4.0").info
    draft = edit(before, draft, delta="3", level="sequence")
    assert draft.changes == {"objective.clip": {"name": "two_sided", "delta": 3.0, "level": "sequence"}}
    assert edit(before, draft, delta="").changes["objective.clip"] == {"name": "two_sided", "level": "sequence"}
    assert edit(before, draft, clip=objective.OWN_CLIP).changes == {}
    with pytest.raises(ConfigError, match="delta: expected a number"):
        edit(before, draft, delta="much")


def test_the_recipes_own_clip_is_changed_and_not_replaced(before: objective.BeforeARun) -> None:
    draft = edit(before, Draft(), eps_high="0.4", coef="0.02")
    assert draft.changes["objective.clip"] == {"eps_high": 0.4}
    assert draft.changes["objective.regularizers"] == [{"name": "kl", "coef": 0.02}]
    assert edit(before, draft, eps_high="", coef="").changes == {}
    assert edit(before, Draft()).changes == {}


def test_an_edit_that_follows_soon_on_another_is_kept(before: objective.BeforeARun) -> None:
    """The second is made while the fields are still filled from the draft before the first."""
    seen, _, clip, _coef, *updates = before.look(Draft().as_text(), True, "")
    first = Draft().change("objective.clip", {"eps_high": 0.4})
    slots = [one.value if isinstance(one, gr.components.Component) else None for one in updates]
    slots[2] = "0.4"
    sent = Sent(before.form, first.as_text(), before.form.values(first))
    second, _ = before.edited(sent, seen, clip.value, "0.02", *slots)
    assert second is not None
    assert second.changes == first.changes | {"objective.regularizers": [{"name": "kl", "coef": 0.02}]}


def test_what_no_page_sends_is_no_objective(before: objective.BeforeARun) -> None:
    draft = Draft()
    for foreign in (None, 3, "[", "[1]", '{"recipe": 3}', '{"clip": {"name": "os:system"}}'):
        assert (
            before.edited(Sent(before.form, draft.as_text(), before.form.values(draft)), foreign, "x", "1")[0] is None
        )
        assert "<svg" in before.look(draft.as_text(), True, foreign)[1]
    own = draft.change("objective.clip", {"name": "mine.py:clip"})
    assert "runs no such code" in before.look(own.as_text(), True, "")[1]
