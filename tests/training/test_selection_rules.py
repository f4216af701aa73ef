"""What the methods of `selection:` cannot do is refused, with what to set instead."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kit.config import SelectionConfig, load_config
from kit.errors import ConfigError
from kit.objective import Objective
from kit.trainer.selection.rules import check_selection, incompatibilities

from .rollouts import NewTrainer

Spec = dict[str, Any]

NOT_TOGETHER: dict[str, tuple[Spec, Spec, str]] = {
    "more kept than made": ({"pods": {"keep": 9}}, {}, r"selection.pods.keep: 9 .* at most 8"),
    "cppo, too": ({"cppo": {"keep": 9}}, {}, r"selection.cppo.keep: 9 .* at most 8"),
    "no equal parts": ({"cppo": {"keep": 3}}, {"parts": 16}, r"leaves 24 .* 16 equal micro-batches. Set it to 2 or 4 or 6"),
    "two that choose": ({"pods": {}, "cppo": {}}, {}, "both choose"),
    "processes": ({"greso": {}}, {"processes": 2}, "2 processes"),
    "tools": ({"pods": {}}, {"turns": True}, "act twice"),
    "pictures": ({"cppo": {}}, {"images": True}, "pictures"),
    "a greedy baseline": ({"dynamic_sampling": {}}, {"objective": "remax"}, "greedy completion"),
    "a greedy baseline kept": ({"pods": {}}, {"objective": "remax"}, "leave_one_out"),
    "components": ({"greso": {}}, {"objective": "gdpo"}, "components"),
    "tokens": ({"dynamic_sampling": {}}, {"objective": "reinforce_pp"}, "tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_TOGETHER)
def test_what_cannot_be_together_is_refused_with_what_to_do(name: str) -> None:
    methods, change, words = NOT_TOGETHER[name]
    plain: Spec = {"size": 8, "rows": 64, "parts": 1, "turns": False, "processes": 1, "images": False}
    objective = Objective.from_spec(change.get("objective", "grpo"))
    chosen = SelectionConfig.model_validate(methods)
    given = {key: value for key, value in change.items() if key != "objective"}
    found = list(incompatibilities(chosen, objective, **plain | given))
    assert any(re.search(words, text) for text in found), found
    assert all(re.search("[Ss]et ", text) for text in found)
    if change:
        assert not list(incompatibilities(chosen, Objective.from_spec("grpo"), **plain))


def test_a_configuration_is_refused_by_its_own_numbers() -> None:
    objective = Objective.from_spec("dapo")
    config = load_config("quickstart", ["selection.cppo={keep: 3}", "optimisation.micro_batch_size=1"])
    with pytest.raises(ConfigError, match="128 equal micro-batches"):
        check_selection(config, objective)
    check_selection(load_config("quickstart", ["selection.cppo={keep: 3}"]), objective)
    check_selection(load_config("quickstart"), objective, processes=2, images=True)


def test_a_trainer_refuses_by_what_it_was_built_with(new_trainer: NewTrainer) -> None:
    with pytest.raises(ConfigError, match="at most 4"):
        new_trainer(objective="grpo", extra={"selection": SelectionConfig.model_validate({"pods": {"keep": 5}})})
    with pytest.raises(ConfigError, match="needs an objective"):
        new_trainer(objective=None, extra={"selection": SelectionConfig.model_validate({"pods": {"keep": 2}})})
