"""The reward of New run: its parameters, and the range of its components."""

from __future__ import annotations

from typing import Any

import rewards
from kit.planning.workbench import answer
from kit.ui import guard, reward
from kit.ui.draft import Draft


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
