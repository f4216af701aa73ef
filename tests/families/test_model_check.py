"""`grpo-kit model check`: its card, its exit codes, and errors for missing folders and ids."""

from __future__ import annotations

import importlib.util
import json
import weakref

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

from kit.cli.app import app
from kit.model_check.check import check_model
from kit.models import loading as models

runner = CliRunner()


def test_a_folder_with_a_configuration_alone_is_enough(tmp_path):
    AutoConfig.for_model("qwen3").save_pretrained(tmp_path)
    done = runner.invoke(app, ["model", "check", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    card = json.loads(done.stdout[done.stdout.index("{") :])
    assert card["trains"]
    assert card["tokenizer"].startswith("the kit's")
    statuses = {finding["what"]: finding["status"] for finding in card["findings"]}
    assert {name: statuses[name] for name in ("scores", "padding", "train", "LoRA", "vision", "packing")} == {
        "scores": "tested", "padding": "tested", "train": "tested", "LoRA": "tested", "vision": "untested", "packing": "tested",
    }  # fmt: skip


def test_an_architecture_that_misreads_padding_fails(monkeypatch):
    """Plant positions that are not counted from the mask."""
    monkeypatch.setattr("kit.models.family.has_position_table", lambda model: False)
    done = runner.invoke(app, ["model", "check", "gpt2"])
    assert done.exit_code == 1
    assert "does not handle padding" in done.stdout
    assert "It does not train" in done.stdout


def test_no_two_copies_of_the_real_weights_are_held(model_folder, monkeypatch, tmp_path):
    """Plant a loader that fails while an earlier model is still referenced, and a full disk."""
    read, loaded = models._load_with_transformers, []

    def once(files, config, dtype):
        assert not [reference for reference in loaded if reference() is not None], (
            "the previous model is still referenced"
        )
        model = read(files, config, dtype)
        loaded.append(weakref.ref(model))
        quantised.append(config.load_in_4bit)
        return model

    def full(*_, **__):
        raise OSError("No space left on device")

    quantised = []
    monkeypatch.setattr(models, "_load_with_transformers", once)
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    card = check_model(str(model_folder), weights=True)
    findings = {what: (status, why) for what, status, why in card.findings}
    assert card.weights.startswith("its own")
    for what in ("scores", "padding", "LoRA"):
        assert findings[what][0] == "tested", findings[what]
    if importlib.util.find_spec("bitsandbytes") is not None:
        assert findings["4-bit"][0] == "tested", findings["4-bit"]
        assert quantised == [False, False, True]


@pytest.mark.families
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_pictures_are_tried_where_there_is_a_processor(name, multimodal):
    done = runner.invoke(app, ["model", "check", str(multimodal(name)), "--json"])
    card = json.loads(done.stdout[done.stdout.index("{") :])
    assert done.exit_code == 0, done.output
    assert {f["what"]: f["status"] for f in card["findings"]}["vision"] == "tested"


def test_what_is_not_there_is_refused_with_the_alternative(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    empty = runner.invoke(app, ["model", "check", str(tmp_path)])
    assert empty.exit_code == 2
    unknown = runner.invoke(app, ["model", "check", "nobody/nothing-of-that-name"])
    assert unknown.exit_code == 2
    assert "use a folder with a config.json" in " ".join(unknown.output.split())
