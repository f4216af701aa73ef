"""kit.registry: names, nearest names, and objects from files and modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.errors import ConfigError
from kit.registry import Registry, did_you_mean, import_object, is_import_path


@pytest.fixture
def colours() -> Registry[int]:
    registry: Registry[int] = Registry("colour")
    registry.register("red")(1)
    registry.register("green")(2)
    return registry


def test_registered_objects_come_back_by_name_in_order(colours: Registry[int]) -> None:
    assert colours["red"] == 1
    assert list(colours) == ["green", "red"]
    assert len(colours) == 2
    assert "red" in colours
    assert "blue" not in colours


def test_registering_returns_the_object_itself() -> None:
    registry: Registry[object] = Registry("thing")

    @registry.register("f")
    def f() -> None: ...

    assert registry["f"] is f


def test_a_name_cannot_be_registered_twice(colours: Registry[int]) -> None:
    with pytest.raises(ConfigError, match="colour 'red' is already registered"):
        colours.register("red")(3)
    assert colours["red"] == 1


def test_an_unknown_name_is_met_with_the_nearest_and_all_others(colours: Registry[int]) -> None:
    with pytest.raises(ConfigError, match=r"No colour is called 'gren'. Did you mean 'green'\? Known: green, red"):
        colours["gren"]


def test_nothing_is_suggested_when_nothing_is_near() -> None:
    assert did_you_mean("xyz", ["red", "green"]) == ""


@pytest.mark.parametrize(("spec", "is_path"), [("f.py:g", True), ("a.b:c", True), ("ppo_clip", False)])
def test_an_import_path_has_a_colon(spec: str, is_path: bool) -> None:
    assert is_import_path(spec) is is_path


def test_an_object_comes_from_a_file_once(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("state = []\ndef mine():\n    return state\n")
    first = import_object("hooks.py:mine", base=tmp_path)
    again = import_object(f"{tmp_path / 'hooks.py'}:mine")
    assert first is again
    assert first() is again()


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "hooks.py").write_text(f"def value():\n    return {value}\n")
    assert [import_object(f"{f}/hooks.py:value", base=tmp_path)() for f in "ab"] == [1, 2]


def test_an_object_comes_from_a_module() -> None:
    assert import_object("os.path:join")("a", "b") == "a/b"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nothing.py:f", "there is no file"),
        ("no_such_module_here:f", "cannot be imported"),
        ("os.path:joint", "Did you mean 'join'"),
        (":f", "is no path to a function"),
        ("os.path:", "is no path to a function"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_broke(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        import_object(spec)


def test_a_missing_name_lists_what_the_file_defines(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("def brevity(x):\n    return x\n")
    with pytest.raises(ConfigError, match=r"Did you mean 'brevity'\? Valid: brevity"):
        import_object("some.py:brevty", base=tmp_path)


@pytest.mark.parametrize("body", ["1 / 0", "import no_such_module_here", "def f(:", "raise SystemExit(3)"])
def test_a_file_that_fails_to_import_is_the_users_error_and_can_be_mended(body: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(body + "\n")
    with pytest.raises(ConfigError, match=r"broken\.py fails to load"):
        import_object("broken.py:f", base=tmp_path)
    file.write_text("def f():\n    return 'mended'\n")
    assert import_object("broken.py:f", base=tmp_path)() == "mended"


def test_a_module_that_fails_to_import_is_the_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module_of_mine.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        import_object("broken_module_of_mine:f")
