"""The greedy completions of `remax`: made beside the rollout, and scored like it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.errors import ObjectiveError
from kit.trainer.greedy import check_greedy

from .rollouts import NewTrainer, generated, log_of

TIMES = ("time", "second", "memory/")


def greedy_by_hand(trainer: Any, prompt: str) -> list[int]:
    """The likeliest allowed token again and again, by whole forward passes."""
    tokenizer, ids = trainer.processing_class, []
    start = tokenizer(prompt)["input_ids"]
    silent = trainer.args.generation_kwargs["suppress_tokens"]
    for _ in range(trainer.args.max_completion_length):
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([start + ids])).logits[0, -1]
        logits[silent] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return ids


def test_greedy_rewards_are_those_of_greedy_completions_made_by_hand(new_trainer: NewTrainer, reward: Any) -> None:
    sink: list[Any] = []
    trainer = new_trainer(objective="remax", gradient_accumulation_steps=3, extra={"rollout_sinks": [sink.append]})
    estimate, read = trainer.objective.compute_advantages, []
    trainer.objective.compute_advantages = lambda batch: (read.append(batch.greedy_rewards), estimate(batch))[1]
    generated(trainer)
    (seen,) = sink
    prompts = [row["prompt"] for row in seen.rows]
    by_hand = [greedy_by_hand(trainer, prompt) for prompt in prompts[::4]]
    want = torch.tensor(reward(by_hand)).repeat_interleave(4)
    assert want.unique().numel() > 1
    assert any(ids not in by_hand for ids in seen.completion_ids)  # the rollout itself was sampled
    torch.testing.assert_close(read, [want])
    torch.testing.assert_close(seen.advantages, seen.rewards[:, 0] - want)
    metrics = trainer._metrics["train"]
    assert metrics["greedy/reward"] == [pytest.approx(want.mean().item())]
    assert metrics["greedy/tokens"] == [sum(len(ids) for ids in by_hand)]


def test_a_greedy_completion_without_a_score_gives_no_advantage(new_trainer: NewTrainer) -> None:
    calls = []

    def first_is_greedy(prompts: list[Any], **_: Any) -> list[float | None]:
        calls.append(len(prompts))
        return [None if len(calls) == 1 and row == 0 else float(row) for row in range(len(prompts))]

    trainer = new_trainer(objective="remax", gradient_accumulation_steps=2, extra={"reward_funcs": first_is_greedy})
    output = generated(trainer)
    assert calls == [2, 8]
    assert output["advantages"].tolist() == [0, 0, 0, 0, 3, 4, 5, 6]  # rewards 0 to 7, greedy ones NaN and 1


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_greedy_pass_leaves_no_trace_but_its_own_metrics(new_trainer: NewTrainer, prompts: Any, mode: str) -> None:
    """Completions, rewards, random stream and every other metric are those of a run without it."""
    seen: list[list[str]] = []

    def noted(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("text", list(completions))
        log_metric("letters", sum(map(len, completions)))
        seen.append(list(completions))
        return [float(len(text)) for text in completions]

    runs = []
    for advantage in ("remax", "group_mean"):
        options = {"num_generations_eval": 2, "per_device_eval_batch_size": 4}
        trainer = new_trainer(
            objective={"advantage": advantage, "clip": "ppo_clip"}, gradient_accumulation_steps=2, num_iterations=2,
            extra={"reward_funcs": noted, "eval_dataset": prompts, "skip_flat_groups": False}, **options,
        )  # fmt: skip
        sampling, sink = trainer.generation_config, []
        trainer.rollout_sinks = (sink.append,)
        torch.manual_seed(0)
        if mode == "train":
            trainer.train()
        else:
            trainer.evaluate()
        assert trainer.generation_config is sampling
        log = {key: value for key, value in log_of(trainer).items() if not any(word in key for word in TIMES)}
        own = {key for key in log if "greedy/" in key}
        # from the advantages, which do differ
        follows = (
            "loss",
            "grad_norm",
            "objective/",
            "advantage/",
            "with_advantage",
            "runtime",
        )
        kept = {k: v for k, v in log.items() if k not in own and not any(word in k for word in follows)}
        tables = {key: list(value) for key, value in trainer._logs.items() if key in ("prompt", "completion")}
        extra = {key: list(value) for key, value in trainer._logs["extra"].items()}
        rollouts = [(each.completion_ids, each.rewards.tolist(), dict(each.extra)) for each in sink]
        runs.append((own, kept, tables, extra, rollouts, trainer.state.num_input_tokens_seen, torch.rand(1).item()))
    assert {key.removeprefix("eval_") for key in runs[0][0]} == {"greedy/reward", "greedy/tokens"}
    assert runs[1][0] == set()
    assert runs[0][1:] == runs[1][1:]


OBSTACLES: dict[str, dict[str, Any]] = {
    "use_vllm": {"use_vllm": True},
    "use_transformers_continuous_batching": {"use_transformers_continuous_batching": True},
    "a rollout_func": {"rollout_func": print},
    "tools": {"tools": [print]},
    "an environment_factory": {"environment_factories": {"default": print}},
    "images": {"_is_vlm": True},
    "groups that are spread over processes": {
        "accelerator": SimpleNamespace(num_processes=2),
        "args": SimpleNamespace(per_device_train_batch_size=2, steps_per_generation=1),
    },
}


@pytest.mark.parametrize("name", [None, *OBSTACLES])
def test_the_greedy_pass_refuses_what_it_cannot_drive_by_name(name: str | None) -> None:
    plain: dict[str, Any] = {
        "use_vllm": False,
        "use_transformers_continuous_batching": False,
        "rollout_func": None,
        "tools": [],
        "environment_factories": None,
        "_is_vlm": False,
        "accelerator": SimpleNamespace(num_processes=1),
        "args": SimpleNamespace(per_device_train_batch_size=2, steps_per_generation=1),
        "num_generations": 4,
    }
    if name is None:
        check_greedy(SimpleNamespace(**plain))
        return
    with pytest.raises(ObjectiveError, match=rf"cannot make with {name}\. Generate text with"):
        check_greedy(SimpleNamespace(**plain | OBSTACLES[name]))


def test_the_refusal_is_in_the_trainer_and_only_for_an_advantage_that_needs_it(new_trainer: NewTrainer) -> None:
    def own(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {}

    with pytest.raises(ObjectiveError, match="cannot make with a rollout_func"):
        new_trainer(objective="remax", extra={"rollout_func": own})
    new_trainer(objective="rloo", extra={"rollout_func": own})
