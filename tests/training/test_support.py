"""Truncated sampling: log-probabilities over the tokens that the sampler allowed, old, new and reference alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation import SuppressTokensLogitsProcessor

from kit.config import load_config
from kit.errors import ConfigError, ModelError
from kit.runner.prepare import build_objective, check_truncated
from kit.scoring.head import Projection
from kit.scoring.support import packed, renormalised
from kit.trainer.micro_batch import EXTRA, MicroBatch

TRUNCATED = {"top_p": 0.8, "top_k": 6, "min_p": 0.02, "temperature": 0.7}


def test_scores_are_those_of_the_distribution_that_was_sampled(new_trainer: Callable[..., Any], prompts: Any) -> None:
    """Against the model's own logits through transformers' own truncation, every token of every completion."""
    kl = {"recipe": "grpo", "regularizers": [{"name": "kl", "coef": 0.1}]}
    trainer = new_trainer(objective=kl, num_iterations=2, per_device_train_batch_size=8, **TRUNCATED)
    trainer.generator.replay_support = True
    trainer.model.train()
    output = trainer._generate_and_score_completions([dict(prompts[row]) for row in (0, 1) for _ in range(4)])
    batch, silent = MicroBatch(output), trainer.args.generation_kwargs["suppress_tokens"]
    processors = LogitsProcessorList([
        SuppressTokensLogitsProcessor(silent), TopKLogitsWarper(6), TopPLogitsWarper(0.8), MinPLogitsWarper(0.02),
    ])  # fmt: skip
    assert all(bool(one) for one in batch[f"{EXTRA}support"][0][1:3])
    policy = trainer.model
    biased = []
    with torch.no_grad():
        found = trainer.scorer.score(policy, batch.rows).logps
        with policy.disable_adapter():
            reference = trainer.scorer.score(policy, batch.rows).logps
        full = trainer.scorer.score(
            policy, MicroBatch({k: v for k, v in output.items() if "support" not in k}).rows
        ).logps
        for row in range(8):
            own, live = batch.rows.ids[row][batch.rows.mask[row].bool()], int(batch.completion_mask[row].sum())
            logits = policy(own[None]).logits[0, -live - 1 : -1].float() / 0.7
            expected = processors(own[None].expand(live, -1), logits).log_softmax(-1)
            expected = expected.gather(1, own[-live:, None]).squeeze(1)
            torch.testing.assert_close(found[row, :live], expected, atol=2e-5, rtol=0)
            biased.append((full[row, :live] - expected).exp())
    torch.testing.assert_close(output["old_per_token_logps"], found, atol=1e-6, rtol=0)
    torch.testing.assert_close(output["ref_per_token_logps"], reference, atol=1e-6, rtol=0)
    assert float(torch.cat(biased).mean()) < 0.95  # what the ratio of the full to the sampled distribution was


@pytest.mark.parametrize(("bias", "softcap", "scale"), [(False, None, 1.0), (True, 5.0, 0.5)])
def test_the_gradient_is_that_of_a_softmax_over_the_support(bias: bool, softcap: float | None, scale: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 8, requires_grad=True)
    head = Projection(hidden, torch.randn(30, 8), torch.randn(30) if bias else None, 0.7, softcap, scale)
    supports = [torch.randperm(30)[: 2 + n] for n in range(5)]
    targets = torch.stack([ids[-1] for ids in supports])
    live = torch.tensor([[True, False, True], [True, True, True]])
    pieces = [packed([supports[0], torch.tensor([1, 2]), supports[1]]), packed(supports[2:])]
    logits = hidden @ head.weight.T + (head.bias if head.bias is not None else 0.0)
    logits = scale * logits
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / 0.7
    mask = torch.ones(5, 30, dtype=torch.bool)
    for row, ids in enumerate(supports):
        mask[row, ids] = False
    expected = logits.masked_fill(mask, -torch.inf).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    found = renormalised(head, targets, pieces, live)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(one.sum(), hidden, retain_graph=True)[0] for one in (found, expected))
    torch.testing.assert_close(ours, theirs)
    wrong = torch.stack(
        [next(i for i in range(30) if i not in ids) + torch.zeros((), dtype=torch.long) for ids in supports]
    )
    with pytest.raises(ModelError, match="not among those that the sampler allowed"):
        renormalised(head, wrong, pieces, live)


def test_a_run_replays_its_support_and_is_on_policy(attempt: Any) -> None:
    done = attempt("generation.replay_support=true", "generation.top_p=0.7", "optimisation.iterations=2")
    assert done.code == 0, done.message
    assert next(line["clip_fraction/region"] for line in done.folder.metrics() if "clip_fraction/region" in line) == 0.0


@pytest.mark.parametrize("hook", ["sampler_correction", "off_policy_mask"])
def test_a_truncated_sampler_is_not_compared_with_a_full_policy(hook: str) -> None:
    def check(**generation: Any) -> None:
        config = load_config({"generation": generation, "objective": {"weights": [hook]}})
        check_truncated(config, build_objective(config))

    for truncated in ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}):
        with pytest.raises(ConfigError, match="their ratio is biased"):
            check(engine="vllm", **truncated)
        if "top_k" in truncated:
            check(engine="vllm", replay_support=True, **truncated)
    check(engine="vllm")


def test_support_is_refused_where_it_is_not_known() -> None:
    with pytest.raises(ConfigError, match="replay_support"):
        load_config({"generation": {"replay_support": True, "tools": ["a.py:b"]}})
    config = load_config({"generation": {"replay_support": True}, "selection": {"dynamic_sampling": {}}})
    with pytest.raises(ConfigError, match=r"selection\.dynamic_sampling"):
        check_truncated(config, build_objective(config))
