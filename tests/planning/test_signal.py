"""kit.planning.signal on a tiny model: tasks of every kind, and rates against hand counts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import rewards
from kit.config import load_config
from kit.planning.signal import BaseModel, check, describe, draw, measure
from rewards.protocol import Context, ItemComponent, Sample, Score

Rule = Callable[[Sample], Score]


@dataclass(frozen=True, kw_only=True)
class Ruled(ItemComponent):
    """A component made of a function."""

    rule: Rule

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        return self.rule(sample)


def preset(rule: Rule, checker: str | None = "rule") -> rewards.Preset:
    return rewards.Preset([(Ruled(name="rule", rule=rule), 1.0)], name="ruled", checker=checker)


def sometimes(sample: Sample) -> Score:
    """Right for about half of the completions of an untrained model, by the last digit."""
    digits = [character for character in sample.text if character.isdigit()]
    right = bool(digits) and int(digits[-1]) % 2 == 0
    return Score(float(right), "ok" if right else "wrong")


def never(sample: Sample) -> Score:
    return Score(0.0, "wrong")


def fails(sample: Sample) -> Score:
    raise KeyError("no such column")


def unreadable(sample: Sample) -> Score:
    return Score(0.0, "format")


@pytest.fixture(scope="module")
def loaded(model_folder: Any) -> tuple[Any, Any]:
    """The parts of a run of the tiny model, and the model."""
    from kit.models.loading import load_model
    from kit.runner.prepare import prepare

    tree = {
        "model": {"name": str(model_folder), "dtype": "float32", "lora": {"rank": 4, "alpha": 8}},
        "data": {"task_params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "limit": 80},
        "generation": {"num_generations": 8, "max_completion_tokens": 32},
        "optimisation": {"steps": 100, "batch_size": 64},
        "evaluation": {"before": False, "after": False},
        "run": {"threads": 1},
    }
    tree["data"]["heldout"] = 8
    parts = prepare(load_config(tree), fresh=False)
    return parts, load_model(parts.files, parts.config.model).model


def verdict_of(loaded: Any, rule: Rule, *, prompts: int = 16, checker: str | None = "rule", **changes: Any) -> Any:
    parts, model = loaded
    own = preset(rule, checker)
    config = parts.config
    if changes:
        config = config.model_copy(update={"generation": config.generation.model_copy(update=changes)})
    return measure(dataclasses.replace(parts, preset=own, checker=own, config=config), model, prompts)


def test_a_task_that_is_solved_sometimes_will_be_learned(loaded: Any) -> None:
    report = verdict_of(loaded, sometimes)
    assert report["verdict"]["verdict"] == "will learn"
    assert 0 < report["pass@1"]["value"] < report["pass@8"]["value"]
    assert report["pass@1"]["low"] <= report["pass@1"]["value"] <= report["pass@1"]["high"]
    json.dumps(report, allow_nan=False)


def test_out_of_memory_it_samples_fewer_at_once(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, sizes = BaseModel._generate, list[int]()

    def limited(self: BaseModel, model: Any, prompts: list[Any], *rest: Any) -> Any:
        sizes.append(len(prompts))
        if len(prompts) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(self, model, prompts, *rest)

    monkeypatch.setattr(BaseModel, "_generate", limited)
    assert verdict_of(loaded, sometimes)["verdict"]
    assert sizes[:2] == [64, 32]


def test_three_sampled_answers_are_shown_with_reward_status_and_reason(loaded: Any) -> None:
    report = verdict_of(loaded, unreadable, max_completion_tokens=4)
    assert len(report["samples"]) == 3
    for sample in report["samples"]:
        assert sample["prompt"]
        assert sample["completion"]
        assert (sample["reward"], sample["statuses"]) == (0.0, {"rule": "format"})
        assert sample["why"].startswith("Not right: rule found no answer in the expected format")
        assert sample["why"].endswith("it was cut at the token limit.")


def test_a_constant_reward_is_named_with_its_value_in_spite_of_cut_completions(loaded: Any) -> None:
    report = verdict_of(loaded, lambda sample: Score(0.5, "wrong"), checker=None, max_completion_tokens=4)
    assert report["truncated_share"]["value"] > 0.3
    assert report["verdict"]["because"] == "every completion got 0.5: the reward is constant"
    assert report["samples"][0]["why"].startswith("rule gives 0.5; ")


def test_the_lowest_reward_for_all_completions_points_to_their_format(loaded: Any) -> None:
    report = verdict_of(loaded, never, checker=None, max_completion_tokens=4)
    assert report["verdict"]["verdict"] == "no signal"
    assert "every completion got the lowest value, 0; " in report["verdict"]["because"]
    assert "format that the reward reads" in report["verdict"]["change"]


def test_a_reward_that_fails_is_named_with_its_reason(loaded: Any) -> None:
    report = verdict_of(loaded, fails)
    assert report["verdict"]["verdict"] == "reward fails"
    assert "no such column" in report["verdict"]["change"]
    assert report["failure_share"]["value"] == 1.0


def test_rows_are_drawn_at_random_by_seed() -> None:
    # Sorted by difficulty, as files often are: the first half is easy. 64 of 1000 by chance: 32 +- 4.
    places = draw(1000, 64, 0, 0)
    assert len(set(places)) == 64
    assert 16 < sum(place < 500 for place in places) < 48
    assert draw(1000, 64, 0, 0) == places
    assert draw(1000, 128, 0, 0)[:64] == places
    assert draw(1000, 64, 1, 0) != places != draw(1000, 64, 0, 1)
    assert sorted(draw(10, 64, 0, 0)) == list(range(10))


def _evaluation() -> Any:
    from kit.config import EvaluationConfig

    return EvaluationConfig(prompts=16, k=8, batch_size=64)


def test_rates_are_counts(loaded: Any) -> None:
    parts, model = loaded
    own = preset(sometimes)
    rows = parts.data.train.select(range(16)).to_list()
    base = BaseModel(rows, own, parts.files.tokenizer, _evaluation(), parts.config.generation, own)
    sampled = base.sample(model)
    report = describe(parts.config, sampled)
    right = [
        [sampled.verdict.totals[8 * group + place] == 1.0 for place in range(8)] for group in range(16)
    ]  # by the reward, which is 1 where the checker says right
    assert report["pass@1"]["value"] == pytest.approx(sum(map(sum, right)) / 128)
    assert report["pass@8"]["value"] == pytest.approx(sum(any(group) for group in right) / 16)
    assert report["spread_share"]["value"] == pytest.approx(sum(len(set(group)) == 2 for group in right) / 16)
    assert report["completion_tokens_mean"] == pytest.approx(sum(len(ids) for ids, _ in sampled.completions) / 128)


def test_the_process_prepares_as_a_run_does_and_writes_no_run(
    tree: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kit.planning import signal

    def here(module: str, request: dict[str, Any], stopped: str, *, quiet: bool) -> dict[str, Any]:
        return signal.job(json.loads(json.dumps(request | {"audit": True})), quiet)

    monkeypatch.setattr(signal, "call_for_result", here)
    report = check(load_config(tree), prompts=4, progress=False)
    assert not (tmp_path / "runs").exists()
    assert report["prompts"] == 4
    assert {"pass@1", f"pass@{report['k']}", "verdict"} <= set(report)
    assert report["audit"]["results"], "the page must request the audit, too"
