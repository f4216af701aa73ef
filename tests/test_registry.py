"""kit.registry: names, nearest names, and objects from files and modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.errors import ConfigError
from kit.registry import Registry, import_object


@pytest.fixture
def colours() -> Registry[int]:
    registry: Registry[int] = Registry("colour")
    registry.register("red")(1)
    registry.register("green")(2)
    return registry


def test_a_name_cannot_be_registered_twice(colours: Registry[int]) -> None:
    with pytest.raises(ConfigError, match="colour 'red' is already registered"):
        colours.register("red")(3)
    assert colours["red"] == 1


def test_an_unknown_name_is_met_with_the_nearest_and_all_others(colours: Registry[int]) -> None:
    with pytest.raises(ConfigError, match=r"No colour is called 'gren'. Did you mean 'green'\? Known: green, red"):
        colours["gren"]


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "hooks.py").write_text(f"def value():\n    return {value}\n")
    assert [import_object(f"{f}/hooks.py:value", base=tmp_path)() for f in "ab"] == [1, 2]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nothing.py:f", "there is no file"),
        ("os.path:joint", "Did you mean 'join'"),
        (":f", "is not a path to a function"),
        ("os.path:", "is not a path to a function"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_broke(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        import_object(spec)


@pytest.mark.parametrize("body", ["def f(:", "raise SystemExit(3)"])
def test_a_file_that_fails_to_import_is_the_users_error_and_can_be_mended(body: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(body + "\n")
    with pytest.raises(ConfigError, match=r"broken\.py fails to load"):
        import_object("broken.py:f", base=tmp_path)
    file.write_text("def f():\n    return 'mended'\n")
    assert import_object("broken.py:f", base=tmp_path)() == "mended"
