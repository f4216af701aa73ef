"""The inputs of New run: a displayed value is read back unchanged; parameters and range of the reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import gradio as gr
import pytest

import rewards
from kit.config import RunConfig, load_config, preset_names
from kit.config.loading import lookup
from kit.planning.workbench import answer
from kit.ui import guard, reward
from kit.ui.draft import Draft
from kit.ui.form import Form, read, shown
from kit.ui.new_run import build
from kit.ui.settings import Settings
from kit.ui.site import Site


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Form:
    """The form of the complete screen."""
    folder: Path = tmp_path_factory.mktemp("form")
    made: list[Form] = []
    start = Form.__init__

    class Kept(Form):
        def __init__(self, site: Site, blocks: gr.Blocks) -> None:
            start(self, site, blocks)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch, gr.Blocks() as blocks:
        patch.setattr("kit.ui.new_run.Form", Kept)
        build(Site(Settings(root=folder / "runs", folder=folder)), blocks)
    return made[0]


def test_every_box_is_of_a_key_and_has_a_name(form: Form) -> None:
    assert len(form.boxes) == len({box.name for box in form.boxes}) > 20
    for box in form.boxes:
        model: Any = RunConfig
        for part in box.name.split(".")[:-1]:
            annotation = model.model_fields[part].annotation
            model = next(kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields"))
        assert box.name.rpartition(".")[2] in model.model_fields
        assert box.component.label


@pytest.mark.parametrize("preset", preset_names())
def test_what_is_shown_is_what_is_read(form: Form, preset: str) -> None:
    tree = load_config(preset).model_dump(mode="json")
    for box in form.boxes:
        value = lookup(tree, box.name)
        if box.kind != "section":
            assert read(box.kind, shown(box.kind, value)) == value, box.name


def test_a_small_learning_rate_stays_as_it_was_written() -> None:
    assert read("yaml", "1e-5") == 1e-5
    assert shown("yaml", 1e-5) == "1e-05"
    assert read("yaml", "1e-05") == 1e-5
    assert read("yaml", shown("yaml", "auto")) == "auto"


def test_a_text_is_no_yaml_and_anchors_are_not_followed() -> None:
    assert read("text", "3: {x}") == "3: {x}"
    assert read("yaml", "{x: 3}") == {"x": 3}
    assert read("yaml", "[&a [1], *a]") == "[&a [1], *a]"


def test_names_are_chosen_from_what_is_registered(form: Form) -> None:
    import rewards

    choices = {box.name: [value for _, value in box.component.choices] for box in form.boxes if box.kind == "choice"}
    assert set(rewards.names()) <= set(choices["reward.preset"])
    assert "dapo" in choices["objective.recipe"]
    assert Draft().tree()["objective"]["recipe"] in choices["objective.recipe"]


def test_every_parameter_is_listed_with_its_words_but_those_of_the_command_line() -> None:
    for name in rewards.names():
        _, table = reward.described(Draft().change("reward.preset", name).as_text())
        for parameter in rewards.parameters(name):
            assert parameter.words, f"{name}: {parameter.name} is not documented"
            assert (f">{parameter.name}</code>" in table) == (parameter.name not in guard.COMMAND_LINE_ONLY)


def weights(**config: Any) -> Any:
    response = answer({"question": "weights", "config": {"reward": config}})
    return response.get("answer", response.get("error"))


def test_what_parts_can_earn_and_the_limit_of_shaping() -> None:
    report = weights(preset="gsm8k-reasoning")
    text = "The other components can add 0.30, a right answer (accuracy) adds 1.00: a wrong answer cannot win."
    assert text in reward.earnings(report)
    further = [{"path": "preset:length-target", "weight": 0.5}, {"path": "preset:gsm8k-hash", "weight": 0.1}]
    report = weights(preset="gsm8k-reasoning", functions=further)
    assert [part["name"] for part in report["parts"]][-2:] == ["gsm8k-hash.accuracy", "gsm8k-hash.format"]
    assert report["checker"] == "accuracy"
    assert "Shaping could outweigh correctness" in weights(preset="gsm8k-reasoning", params={"format_weight": 2.0})
    assert "Shaping could outweigh" in weights(
        preset="gsm8k-reasoning", functions=[{"path": "preset:gsm8k-hash", "weight": 2.0}]
    )
