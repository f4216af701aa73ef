"""kit.trainer.scoring_ahead: rewards of a part while the next one is generated, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from kit.config import load_config
from kit.errors import ConfigError
from kit.trainer.generator import Generator
from kit.trainer.rollout import RolloutState
from rewards.preset import Preset
from rewards.protocol import Context, ItemComponent, Sample, Score

WAIT = 20.0


@dataclass(frozen=True, kw_only=True)
class Drawn(ItemComponent):
    """A value of a completion's own tokens, its place and what the group's random numbers give."""

    name: str = "drawn"
    calls: list[tuple[int, int]] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        assert ctx.extras["trainer_state"].global_step == ctx.step
        self.begun.set()
        self.calls.append((sample.group_id, sample.index))
        noise = ctx.rng(sample.group_id).random()
        return Score((sum(sample.token_ids or ()) % 7 + sample.index + noise + len(sample.prompt_ids or ())) / 100)


class Centred:
    """Looks across the batch, so that it cannot be scored in parts."""

    name, floor, low, high, version = "centred", 0.0, -1000.0, 1000.0, "1"

    def score(self, samples: Any, ctx: Context) -> list[Score]:
        sums = [sum(sample.token_ids) for sample in samples]
        return [Score(float(one - sum(sums) / len(sums))) for one in sums]


@pytest.fixture
def rollouts(new_trainer: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """One step with four groups; returns the rollout and the trainer."""

    def make(components: Any, chunks: int, watch: Callable[[Any], None] = lambda trainer: None) -> tuple[Any, Any]:
        seen: list[Any] = []
        preset = Preset([(component, 1.0) for component in components])
        extra = {"reward_funcs": preset.trl(seed=3), "rollout_sinks": [seen.append]}
        size = {"per_device_train_batch_size": 16, "max_steps": 1}
        trainer = new_trainer(objective="grpo", unchecked=True, extra=extra, **size)
        trainer.generator.chunks = chunks
        watch(trainer)
        trainer.train()
        return seen[0], trainer

    return make


def without_overlap(trainer: Any) -> None:
    trainer._begin_rewards = lambda *_: None


def test_values_are_those_of_a_batch_scored_at_once(rollouts: Callable[..., Any]) -> None:
    ahead, _ = rollouts([Drawn()], 3)
    behind, _ = rollouts([Drawn()], 3, without_overlap)
    assert ahead.completion_ids == behind.completion_ids
    assert len({tuple(ids) for ids in ahead.completion_ids}) > 4
    assert torch.equal(ahead.rewards, behind.rewards)
    assert torch.equal(ahead.advantages, behind.advantages)
    assert ahead.extra == behind.extra


def test_a_part_is_scored_while_the_next_is_generated(rollouts: Callable[..., Any]) -> None:
    component, order = Drawn(), []

    def watch(trainer: Any) -> None:
        generate = trainer.model.generate

        def wait(*given: Any, **keywords: Any) -> Any:
            if order:  # the second part: goes on only once the first is being scored
                order.append(component.begun.wait(WAIT))
            order.append(True)
            return generate(*given, **keywords)

        trainer.model.generate = wait

    rollouts([component], 2, watch)
    assert order == [True, True, True]


def test_a_component_that_looks_across_the_batch_gets_all_of_it(rollouts: Callable[..., Any]) -> None:
    rollout, _ = rollouts([Drawn(), Centred()], 2)
    sums = torch.tensor([float(sum(ids)) for ids in rollout.completion_ids])
    torch.testing.assert_close(rollout.rewards[:, 1], sums - sums.mean())


class Marked(Drawn):
    """Planted: says of itself that it looks at one completion, and does not."""

    itemwise: ClassVar[bool] = True

    def score(self, samples: Any, ctx: Context) -> list[Score]:
        return Centred().score(samples, ctx)


def test_the_comparison_would_notice_a_component_that_claims_too_much(rollouts: Callable[..., Any]) -> None:
    ahead, _ = rollouts([Marked()], 2)
    behind, _ = rollouts([Marked()], 2, without_overlap)
    assert not torch.equal(ahead.rewards, behind.rewards)


@pytest.mark.parametrize(("prompts", "calls"), [(8, [4, 4]), (10, [10])])
def test_a_process_that_has_half_a_group_generates_all_of_it(prompts: int, calls: list[int]) -> None:
    """Two processes may share a batch of 20 in groups of 4."""
    from types import SimpleNamespace

    made: list[int] = []

    def turn(prompt_ids: Any, *_: Any) -> tuple[Any, Any]:
        made.append(len(prompt_ids))
        return [[row[0]] for row in prompt_ids], None

    policy = SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(2, 2))
    generator = Generator(SimpleNamespace(rule=lambda name: "slice"), policy)
    generator.chunks = 2
    state = RolloutState([{}] * prompts)
    given = [[row] for row in range(prompts)]
    ids, _ = generator.turn(turn, state, given, None, {}, 4, begin_rewards=lambda *_: None)
    assert made == calls
    assert ids == [[row] for row in range(prompts)]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["generation.chunks=2", "generation.engine=vllm"], "vLLM takes a batch at once"),
        (["generation.chunks=2", "generation.tools=[a.py:b]"], "tools makes whole batches"),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("quickstart", overrides)
