from __future__ import annotations

import subprocess
import sys

import pytest

import kit.objective


@pytest.mark.parametrize(
    "statement",
    [
        "import kit.objective",
        "from kit.objective import recipe_names; recipe_names()",
        "from kit.objective import Schedule",
        "from kit.objective.recipes import resolve; resolve({'recipe': 'dapo'})",
    ],
)
def test_specs_and_recipes_load_no_torch(statement: str) -> None:
    code = f"{statement}; import sys; assert not {{'torch', 'transformers', 'trl'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there_and_sorted() -> None:
    assert kit.objective.__all__ == sorted(kit.objective.__all__)
    for name in kit.objective.__all__:
        assert getattr(kit.objective, name) is not None
    assert set(kit.objective.__all__) <= set(dir(kit.objective))


def test_a_registry_stays_a_registry_after_its_module_was_imported() -> None:
    import kit.objective.clip

    assert kit.objective.clips is kit.objective.clip.clips


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kit.objective.nothing
