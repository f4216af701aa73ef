"""Allowed values of a configuration from the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.config import load_config, preset_names
from kit.errors import ConfigError
from kit.ui.guard import check
from kit.ui.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "mine.py").write_text("def short(prompts, completions, **columns): return [0.0 for _ in completions]\n")
    (tmp_path / "other.py").write_text("")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}")
    (tmp_path / "data" / "out.jsonl").symlink_to("/etc/passwd")
    (tmp_path / "model").mkdir()
    return Settings(folder=tmp_path, hooks=(tmp_path / "mine.py",))


def judged(settings: Settings, *overrides: str) -> None:
    check(load_config("quickstart", list(overrides)), settings)


def test_folders_given_at_the_start_are_read_too(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("models")
    (other / "smol").mkdir()
    with pytest.raises(ConfigError, match="--folder FOLDER"):
        judged(settings, f"model.name={other / 'smol'}")
    wider = dataclasses.replace(settings, folders=(other,))
    judged(wider, f"model.name={other / 'smol'}")
    with pytest.raises(ConfigError, match="--folder FOLDER"):
        judged(wider, f"model.name={other.parent}")


def test_the_presets_pass(settings: Settings) -> None:
    for name in preset_names():
        if name != "custom-reward":  # that preset needs a file of the user
            check(load_config(name), settings)


@pytest.mark.parametrize(
    "override",
    [
        "data.source=data/train.jsonl",
        "data.source=openai/gsm8k",
        "model.name=model",
        "model.name=Qwen/Qwen2.5-0.5B-Instruct",
        "reward.functions=[{path: 'mine.py:short'}]",
        "objective.clip=mine.py:clip",
        "data.system_prompt='Answer like this: /etc, ../x, a.py:b'",
        "reward.params={format_weight: 0.1}",
        "data.split='train[:100]'",
        "data.split='train[:10%]+test'",
        "data.subset='a:b'",
        "data.revision=v1.py",
        "data.revision=refs/pr/3",
        "model.revision=v1.py",
    ],
)
def test_allowed_configurations_pass_the_guard(settings: Settings, override: str) -> None:
    judged(settings, override)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("data.source=/etc/passwd", "lies outside"),
        ("data.source=verifiers:x@rm", "names a package or a program"),
        ("data.source=process:x.py:X@tee", "names a package or a program"),
        ("data.source=../x.jsonl", "lies outside"),
        ("data.source=data/out.jsonl", "lies outside"),  # a link to a place outside
        ("data.source=~/x.jsonl", "lies outside"),
        ("model.name=/etc", "lies outside"),
        ("model.name=..", "lies outside"),
        ("model.chat_template=/etc/passwd", "lies outside"),
        ("reward.functions=[{path: 'other.py:f'}]", "the page takes no code"),
        ("reward.functions=[{path: 'os:system'}]", "the page takes no code"),
        ("objective.clip=other.py:clip", "the page takes no code"),
        ("objective.clip={name: 'os.path:join'}", "the page takes no code"),
        ("objective.regularizers=[{name: kl, coef: {schedule: 'os:system'}}]", "the page takes no code"),
        ("evaluation.checker=os:system", "the page takes no code"),
        ("objective.recipe=os:system", "the page takes no code"),
        ("run.root=/tmp/elsewhere", "run.root"),
        ("reward.params={api_key_env: HF_TOKEN}", "is refused by the page"),
        ("reward.params={allow_unsafe: true}", "is refused by the page"),
        ("reward.params={base_url: 'http://evil.example/v1'}", "another machine"),
        ("reward.params={base_url: 'http://127.0.0.1@evil.example/v1'}", "another machine"),
        ("reward.params={base_url: 'http://evil.example\\@127.0.0.1/v1'}", "another machine"),
        ("data.revision=../../x", "is a path"),
        ("model.revision='..\\x'", "is a path"),
        ("data.subset=/etc", "is a path"),
        ("reward.params={model: /etc}", "is a path"),
        ("model.attention=/etc/x", "is a path"),
    ],
)
def test_forbidden_configurations_are_refused(settings: Settings, override: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        judged(settings, override)


def test_every_text_of_a_configuration_is_looked_at(settings: Settings) -> None:
    """The guard walks all keys, so that a new key that takes code is refused until it is allowed."""
    from kit.ui import guard

    tree: dict[str, Any] = load_config("quickstart").model_dump(mode="json")

    def leaves(node: dict[str, Any], name: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
        for key, value in node.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{name}{key}.")
            if not value or isinstance(value, str):
                yield node, key, f"{name}{key}"

    places = [place for place in leaves(tree) if not any(f"{place[2]}.".startswith(f"{free}.") for free in guard.FREE)]
    assert len(places) > 30
    for node, key, name in places:
        before, node[key] = node[key], "os:system"
        assert [key_name for key_name, text in guard._leaves(tree) if text == "os:system"] == [name]
        node[key] = before


def test_code_of_a_model_is_never_run(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="use the command line"):
        judged(settings, "model.name=me/it", "model.trust_remote_code=true")
