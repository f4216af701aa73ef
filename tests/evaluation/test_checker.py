"""kit.evaluation.checker: the component that decides correctness, and errors that name the setting to change."""

from __future__ import annotations

from typing import Any

import pytest

import rewards
from kit.config import EvaluationConfig, GenerationConfig, RunConfig, load_config
from kit.errors import ConfigError
from kit.evaluation.checker import build_checker
from kit.evaluation.heldout import HeldOut, problem_id
from kit.runner.prepare import check_reward


def one(completions: Any) -> list[float]:
    return [1.0 for _ in completions]


UNCHECKED = rewards.Preset(rewards.from_functions([(one, 1.0)]).components, checker=None)


def config(*overrides: str) -> RunConfig:
    return load_config("quickstart", overrides)


def test_the_training_presets_parameters_go_with_its_name_only() -> None:
    judge = "reward.params={base_url: 'http://localhost:1', model: some}"
    same = config("reward.preset=judge-rubric", judge, "evaluation.checker=judge-rubric")
    assert build_checker(same, UNCHECKED).checker == "judge"
    with pytest.raises(ConfigError, match=r"'judge-rubric' cannot be used without parameters .*needs base_url, model"):
        build_checker(config("evaluation.checker=judge-rubric"), UNCHECKED)


@pytest.mark.parametrize(
    ("overrides", "preset", "words"),
    [
        (["evaluation.patience=2", "evaluation.every=0"], "gsm8k-hash", r"evaluation\.patience needs held-out .*every, for"),
        (["evaluation.alarm=stop", "evaluation.every=0"], "gsm8k-hash", r"evaluation\.alarm: stop needs held-out"),
        (["evaluation.metric=pass@k"], None, r"pass@k is a share of right answers.*evaluation\.checker"),
        (["evaluation.metric=greedy_accuracy"], None, r"the reward has no checker"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_what_to_set(overrides: list[str], preset: str | None, words: str) -> None:
    checker = rewards.load(preset) if preset else UNCHECKED
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        build_checker(config(*overrides), checker)


def test_a_judge_that_can_read_no_row_is_refused_before_the_run() -> None:
    samples = rewards.build_samples(["2 + 2 ="], ["#### 4"], question=["2 + 2"])
    countdown = rewards.load("countdown")
    with pytest.raises(ConfigError, match=r"'countdown' cannot judge the rows.*Columns: question"):
        check_reward(config("evaluation.checker=countdown"), UNCHECKED, countdown, samples, ["question"])
    check_reward(config(), UNCHECKED, countdown, samples, ["question"])  # the check is disabled


class Tokens:
    """A tokenizer for completions of one token, which stands for a text."""

    texts = ("#### 4", "#### 5", "4 it is")
    eos_token_id, pad_token_id = 0, 0

    def decode(self, ids: list[int], **_: Any) -> str:
        return self.texts[ids[0]]


def test_the_judge_says_what_is_right_and_the_reward_is_the_training_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    def hacked(completions: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    rows = [{"prompt": "2 + 2 =", "reference": "4"}, {"prompt": "3 + 1 =", "reference": "4"}]
    greedy, sampled = [([0], False), ([1], False)], [([0], False), ([0], False), ([1], False), ([2], False)]
    monkeypatch.setattr(HeldOut, "_complete", lambda self, model, prompts, sample, *_: sampled if sample else greedy)
    monkeypatch.setattr("kit.evaluation.heldout.evaluating", lambda *_: __import__("contextlib").nullcontext())
    heldout = HeldOut(
        rows, rewards.from_functions([(hacked, 1.0)]), Tokens(), EvaluationConfig(k=2, seed=5), GenerationConfig(),
        rewards.load("gsm8k-hash"),
    )  # fmt: skip
    result = heldout.score(None, step=30)
    assert (result["step"], result["seed"], result["checker"]) == (30, 5, "gsm8k-hash/accuracy")
    assert result["greedy_accuracy"]["value"] == 0.5
    assert result["greedy_reward"]["value"] == 6.0  # the length of the text, independent of correctness
    assert result["pass@2"]["value"] == 0.5
    assert result["per_problem"] == {
        "id": [problem_id(row) for row in rows],
        "greedy_correct": [True, False],
        "sampled_correct": [2, 0],
        "greedy_reward": [6.0, 6.0],
        "greedy_tokens": [1, 1],
        "sampled_tokens_mean": [1.0, 1.0],
    }
    assert HeldOut(rows, UNCHECKED, Tokens(), EvaluationConfig(k=2), GenerationConfig()).checker_name is None
