from __future__ import annotations

import pytest

import kit.objective


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
