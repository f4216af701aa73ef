"""The reward's form: fields from a preset's signature, and what they write into the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

import rewards
from kit.errors import ConfigError
from kit.planning.workbench import answer
from kit.ui import guard, reward
from kit.ui.draft import Draft
from kit.ui.form import Form, Sent
from kit.ui.settings import Settings
from kit.ui.site import Site

NONE: dict[str, Any] = {}


@pytest.fixture
def form(tmp_path: Path) -> Form:
    with gr.Blocks() as blocks:
        form = Form(Site(Settings(root=tmp_path / "runs", folder=tmp_path)), blocks)
        form.add("reward.preset")
        form.add("reward.params")
    return form


def sent(form: Form, **changes: Any) -> Sent:
    draft = Draft.read({"preset": "my-data", "changes": {f"reward.{name}": value for name, value in changes.items()}})
    return Sent(form, draft.as_text(), form.values(draft))


def values(preset: str, params: dict[str, Any], **edits: Any) -> list[Any]:
    """What the inputs hold, a few of them edited."""
    found: list[Any] = [None] * sum(reward.SLOTS.values())
    for field in reward.fields(preset, params):
        found[reward._place(field)] = edits.get(field.parameter.name, field.shown(params))
    return found


def test_fields_have_kind_words_range_and_default() -> None:
    weight, tags, strict = reward.fields("gsm8k-reasoning", {})
    assert [(one.parameter.name, one.kind) for one in (weight, tags, strict)] == [
        ("format_weight", "weight"), ("tag_weight", "weight"), ("strict", "choice"),
    ]  # fmt: skip
    shown = weight.update(0.2)
    assert shown.info == "Weight of the layout; 0 leaves it out. A number, 0 or above it. Default 0.2."
    assert strict.shown({}) == "true"


def test_every_preset_has_fields_that_give_back_its_defaults() -> None:
    for name in rewards.names():
        for field in reward.fields(name, NONE):
            assert field.parameter.words, f"{name}: {field.parameter.name} is not documented"
            default = field.parameter.default
            read = field.read(field.shown(NONE))
            assert (list(read) if isinstance(read, tuple) else read) == (
                list(default) if isinstance(default, tuple) else default
            )
            assert field.parameter.name not in guard.COMMAND_LINE_ONLY


def test_a_field_that_is_edited_changes_the_parameters_and_a_default_is_left_out(form: Form) -> None:
    now = json.dumps(["gsm8k-reasoning", {}])
    draft, _, shown = reward.edited(sent(form), now, *values("gsm8k-reasoning", {}, format_weight=0.35, strict="false"))
    assert draft is not None
    assert draft.changes == {"reward.params": {"format_weight": 0.35, "strict": False}}
    # What the fields have said themselves is not written back into them.
    assert all(one == gr.skip() for one in reward.filled(draft.as_dict(), shown))
    params = {"format_weight": 0.35}
    now = json.dumps(["gsm8k-reasoning", params])
    draft, *_ = reward.edited(sent(form, params=params), now, *values("gsm8k-reasoning", params, format_weight=0.2))
    assert draft is not None
    assert draft.changes == {}
    assert reward.edited(sent(form), json.dumps(["gsm8k-reasoning", {}]), *values("gsm8k-reasoning", {}))[0] is None


def test_what_is_no_value_is_said(form: Form) -> None:
    now = json.dumps(["length-target", {}])
    with pytest.raises(ConfigError, match=r"target: expected a whole number.* \(seen: 'many'\)"):
        reward.edited(sent(form, preset="length-target"), now, *values("length-target", {}, target="many"))


@pytest.mark.parametrize(
    "forged",
    [
        "",
        "[]",
        "[1, 2]",
        '["no-such", {}]',
        '["length-target", {}, "preset:length-target", []]',
        "{" * 2000,
        None,
        7,
    ],
)
def test_forged_fields_change_nothing(form: Form, forged: Any) -> None:
    assert reward.edited(sent(form), forged, *[{"a": 1}] * sum(reward.SLOTS.values()))[0] is None


def test_only_what_has_changed_is_sent_to_fields_of_the_same_preset() -> None:
    first, *updates = reward.filled({"preset": "my-data"}, "")
    assert json.loads(first) == ["gsm8k-reasoning", {}]
    assert sum(bool(one.get("visible")) if isinstance(one, dict) else one.visible for one in updates) == 3
    _, *updates = reward.filled({"preset": "my-data", "changes": {"reward.params": {"tag_weight": 0.5}}}, first)
    assert [one.value for one in updates if not isinstance(one, dict)] == [0.5]
    assert len(reward.filled({"preset": "my-data"}, first)) == len(updates) + 1


def test_a_reward_that_cannot_score_the_chosen_file_says_so_at_once() -> None:
    """Before rows are scored or anything is validated; a reward that it names is one."""
    draft = Draft()
    assert 'class="note fail"' not in reward.described(draft.as_text())
    file = draft.change("data.source", "mine/x.csv")
    assert "x.csv has no such task in its rows" in reward.described(file.as_text())
    for name in ("math-match", "qa-short"):
        assert name in rewards.names()
        assert name in reward.UNFIT
        assert 'class="note fail"' not in reward.described(file.change("reward.preset", name).as_text())


def weights(**given: Any) -> Any:
    said = answer({"question": "weights", "config": {"reward": given}})
    return said.get("answer", said.get("error"))


def test_what_parts_can_earn_and_the_limit_of_shaping() -> None:
    found = weights(preset="gsm8k-reasoning")
    text = "The other parts can add 0.30, being right (accuracy) 1.00: a wrong answer cannot win."
    assert text in reward.earnings(found)
    further = [{"path": "preset:length-target", "weight": 0.5}, {"path": "preset:gsm8k-hash", "weight": 0.1}]
    found = weights(preset="gsm8k-reasoning", functions=further)
    assert [part["name"] for part in found["parts"]][-2:] == ["gsm8k-hash.accuracy", "gsm8k-hash.format"]
    assert found["checker"] == "accuracy"
    assert "Shaping could outweigh correctness" in weights(preset="gsm8k-reasoning", params={"format_weight": 2.0})
    assert "Shaping could outweigh" in weights(
        preset="gsm8k-reasoning", functions=[{"path": "preset:gsm8k-hash", "weight": 2.0}]
    )


def test_what_a_part_adds_has_two_ends() -> None:
    """A punishment never adds, and a checker in [-1, 1] takes as well as it gives."""
    parts = [
        {"name": "accuracy", "weight": 1.0, "low": -1.0, "high": 1.0},
        {"name": "overlong", "weight": 1.0, "low": -1.0, "high": 0.0},
        {"name": "repeats", "weight": -0.5, "low": 0.0, "high": 1.0},
    ]
    text = reward.earnings({"checker": "accuracy", "parts": parts})
    for adds in ("-1.00 to 1.00", "-1.00 to 0.00", "-0.50 to 0.00"):
        assert f">{adds}<" in text
    assert "The other parts can add 1.50, being right (accuracy) 2.00: a wrong answer cannot win." in text
    parts[1]["weight"] = 2.0
    assert "can add 2.50, being right (accuracy) 2.00: a wrong answer can win." in reward.earnings(
        {"checker": "accuracy", "parts": parts}
    )
