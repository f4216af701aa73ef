"""The reward's form: fields from a preset's signature, and what they write into the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

import rewards
from kit.config import load_config
from kit.errors import ConfigError
from kit.planning.workbench import answer
from kit.ui import guard, lab, reward
from kit.ui.draft import Draft
from kit.ui.form import Form, Sent
from kit.ui.server import without_applications
from kit.ui.settings import Settings
from kit.ui.site import Site

NONE: dict[str, Any] = {}


@pytest.fixture
def form(tmp_path: Path) -> Form:
    with without_applications(), gr.Blocks() as blocks:
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
    now = json.dumps(["gsm8k-reasoning", {}, "", []])
    draft, _, shown = reward.edited(sent(form), now, *values("gsm8k-reasoning", {}, format_weight=0.35, strict="false"))
    assert draft is not None
    assert draft.changes == {"reward.params": {"format_weight": 0.35, "strict": False}}
    # What the fields have said themselves is not written back into them.
    assert all(one == gr.skip() for one in reward.filled(draft.as_dict(), shown))
    params = {"format_weight": 0.35}
    now = json.dumps(["gsm8k-reasoning", params, "", []])
    draft, *_ = reward.edited(sent(form, params=params), now, *values("gsm8k-reasoning", params, format_weight=0.2))
    assert draft is not None
    assert draft.changes == {}
    assert (
        reward.edited(sent(form), json.dumps(["gsm8k-reasoning", {}, "", []]), *values("gsm8k-reasoning", {}))[0]
        is None
    )


def test_what_is_no_value_is_said(form: Form) -> None:
    now = json.dumps(["length-target", {}, "", []])
    with pytest.raises(ConfigError, match=r"target: expected a whole number.* \(seen: 'many'\)"):
        reward.edited(sent(form, preset="length-target"), now, *values("length-target", {}, target="many"))


@pytest.mark.parametrize(
    "forged",
    [
        "",
        "[]",
        "[1, 2]",
        '["no-such", {}, "", []]',
        '["length-target", {}, "preset:length-target", []]',
        "{" * 2000,
        None,
        7,
    ],
)
def test_forged_fields_change_nothing(form: Form, forged: Any) -> None:
    assert reward.edited(sent(form), forged, *[{"a": 1}] * sum(reward.SLOTS.values()))[0] is None


def test_only_what_has_changed_is_sent_to_fields_of_the_same_preset() -> None:
    first, *updates, chooser = reward.filled({"preset": "my-data"}, "")
    assert json.loads(first) == ["gsm8k-reasoning", {}, "", []]
    assert not chooser.visible  # there is one preset alone
    assert sum(bool(one.get("visible")) if isinstance(one, dict) else one.visible for one in updates) == 3
    _, *updates, chooser = reward.filled(
        {"preset": "my-data", "changes": {"reward.params": {"tag_weight": 0.5}}}, first
    )
    assert [one.value for one in updates if not isinstance(one, dict)] == [0.5]
    assert chooser == gr.skip()
    assert len(reward.filled({"preset": "my-data"}, first)) == len(updates) + 2


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


def test_presets_are_added_with_a_weight_and_taken_out(form: Form) -> None:
    draft, _ = reward.added(sent(form), "preset:length-target", 0.25)
    assert draft.changes == {"reward.functions": [{"path": "preset:length-target", "weight": 0.25}]}
    assert draft.config(form.site.settings).reward.functions[0].preset == "length-target"
    again = Sent(form, draft.as_text(), form.values(draft))
    with pytest.raises(ConfigError, match="among them already"):
        reward.added(again, "preset:length-target", 1.0)
    assert reward.removed(again, "1. preset:length-target × 0.25")[0].changes == {}


def test_a_further_preset_has_fields_of_its_own(form: Form) -> None:
    path = "preset:length-target"
    draft, _ = reward.added(sent(form), path, 0.25)
    first, *updates, chooser = reward.filled(draft.as_dict(), "", path)
    assert json.loads(first) == ["length-target", {}, path, [path]]
    assert (chooser.visible, chooser.value) == (True, path)
    assert [value for _, value in chooser.choices] == ["", path]
    assert [one.label for one in updates if not isinstance(one, dict)] == [
        field.parameter.name.replace("_", " ") for field in reward.fields("length-target", NONE)
    ]
    again = Sent(form, draft.as_text(), form.values(draft))
    draft, _, now = reward.edited(again, first, *values("length-target", {}, target="40"))
    assert draft is not None
    assert draft.changes == {"reward.functions": [{"path": path, "weight": 0.25, "params": {"target": 40}}]}
    assert draft.config(form.site.settings).reward.functions[0].params == {"target": 40}
    assert all(one == gr.skip() for one in reward.filled(draft.as_dict(), now, path))
    # Back at the reward itself, or when it was taken out, the fields are the reward's again.
    for left in (reward.filled(draft.as_dict(), now, ""), reward.filled(sent(form).draft().as_dict(), now, path)):
        assert json.loads(left[0])[:3] == ["gsm8k-reasoning", {}, ""]
        assert left[-1].value == ""
    # Its default is left out.
    again = Sent(form, draft.as_text(), form.values(draft))
    default = reward.fields("length-target", NONE)[0].shown(NONE)
    draft, *_ = reward.edited(again, now, *values("length-target", {"target": 40}, target=default))
    assert draft is None or draft.changes["reward.functions"] == [{"path": path, "weight": 0.25}]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"path": "preset:no-such"}, "there is no preset 'no-such'"),
        ({"path": "preset:sql-exec", "params": {"root": "/"}}, "not taken from the page"),
        ({"path": "preset:code-stdio", "params": {"allow_unsafe": True}}, "not taken from the page"),
        (
            {"path": "preset:judge-rubric", "params": {"base_url": "http://evil.example", "model": "m"}},
            "another machine",
        ),
        ({"path": "preset:reward-model", "params": {"model": "../x"}}, "is a path"),
    ],
)
def test_a_further_preset_says_no_more_than_the_first_may(tmp_path: Path, entry: dict[str, Any], why: str) -> None:
    config = load_config({"reward": {"functions": [entry]}})
    with pytest.raises(ConfigError, match=why):
        guard.check(config, Settings(folder=tmp_path))


def test_functions_of_given_files_are_listed_without_running_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit\ndef short(completions): ...\ndef _helper(): ...\n")
    assert reward.functions([file, tmp_path / "gone.py"]) == [f"{file}:short"]


def weights(**given: Any) -> Any:
    said = answer({"question": "weights", "config": {"reward": given}})
    return said.get("answer", said.get("error"))


def test_what_parts_can_earn_and_the_limit_of_shaping() -> None:
    found = weights(preset="gsm8k-reasoning")
    text = "All shaping together moves the total by at most 0.30, and right or wrong (accuracy) by 1.00"
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
    assert "moves the total by at most 1.50, and right or wrong (accuracy) by 2.00: a wrong answer cannot beat" in text
    parts[1]["weight"] = 2.0
    assert "by at most 2.50, and right or wrong (accuracy) by 2.00: a wrong answer could" in reward.earnings(
        {"checker": "accuracy", "parts": parts}
    )


# Play


def test_arguments_are_a_text_or_yaml() -> None:
    assert lab.arguments({"expression": "string"}, "12 * 7") == {"expression": "12 * 7"}
    assert lab.arguments({"expression": "string"}, "{expression: 1+1}") == {"expression": "1+1"}
    assert lab.arguments({"x": "integer", "y": "integer"}, "{x: 1, y: 2}") == {"x": 1, "y": 2}
    with pytest.raises(Exception, match="Write the arguments as"):
        lab.arguments({"x": "integer", "y": "integer"}, "3")
    assert lab.calls_of('[{"name": "a", "arguments": {}}, 3, {"name": 1}]') == [{"name": "a", "arguments": {}}]
    assert lab.calls_of("[" * 5000) == []
