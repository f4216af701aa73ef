"""`optimisation.learning_rate: auto`: the published rule, its value in a run's configuration, and its notes."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from kit.config import load_config
from kit.runner.prepare import learning_rate, learning_rate_notes, prepare


@pytest.mark.parametrize(
    ("kind", "hidden", "lora", "expected"),
    [
        ("llama", 4096, True, 2.9e-4),  # 5e-4 (2000 / 4096)^0.781 = 5e-4 * 0.5713
        ("llama", 2048, True, 4.9e-4),  # 5e-4 * 0.9816
        ("qwen3", 4096, True, 4.7e-4),  # 5e-4 (2000 / 4096)^0.0775 = 5e-4 * 0.9460
        ("qwen3", 4096, False, 4.7e-5),
        ("gemma2", 4096, True, 5e-4),  # no exponent is published
    ],
)
def test_the_published_rule(kind: str, hidden: int, lora: bool, expected: float) -> None:
    assert learning_rate(AutoConfig.for_model(kind, hidden_size=hidden), lora=lora) == pytest.approx(expected)


def test_auto_learning_rate_is_resolved_and_explained(tree: Any) -> None:
    tree["optimisation"]["learning_rate"] = "auto"
    tree["model"]["lora"] = {"rank": 64, "alpha": 64}
    requested = load_config(tree)
    parts = prepare(requested)
    rate = parts.config.optimisation.learning_rate
    assert rate == learning_rate(parts.files.config, lora=True)
    assert load_config(parts.config).optimisation.learning_rate == rate  # the value that a saved run has
    notes = " ".join(learning_rate_notes(requested, parts.config, parts.files.config))
    for words in (f"{rate:g} (auto", "alpha 64"):
        assert words in notes
    assert learning_rate_notes(parts.config, parts.config, parts.files.config) == []


def test_a_rate_far_below_the_rule_is_named(tree: Any) -> None:
    tree["optimisation"]["learning_rate"] = 1e-5
    config = load_config(tree)
    model_config = AutoConfig.for_model("qwen3", hidden_size=4096)
    (note,) = learning_rate_notes(config, config, model_config)
    assert "1e-05 is 47 times lower than that of optimisation.learning_rate: auto (0.00047)" in note
