"""Parameters that make a preset useless are refused when it is built."""

import pytest

from rewards import PresetError, load, names, parameters

WRONG = [
    ("math-verify", {"deadline": 0}),
    ("math-verify", {"deadline": None}),
    ("math-verify", {"format_weight": -1}),
    ("math-verify", {"format_weight": float("nan")}),
    ("math-verify", {"format_weight": True}),
    ("code-stdio", {"memory_mb": float("inf")}),
    ("mcq-letter", {"first_index": "3"}),
    ("mcq-letter", {"strict": "maybe"}),
]


@pytest.mark.parametrize(("preset", "params"), WRONG)
def test_values_of_another_type_or_range_are_refused(preset, params):
    [(name, _)] = params.items()
    with pytest.raises(PresetError, match=f"Preset '{preset}': {name} is .* Pass "):
        load(preset, **params)


@pytest.mark.parametrize("name", names())
def test_defaults_of_every_preset_are_values_that_fit(name):
    for parameter in parameters(name):
        assert parameter.required or parameter.accepts(parameter.default), parameter
