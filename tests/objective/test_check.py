"""kit.objective.check: all hooks of the kit pass, and every planted defect is reported."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kit import objective
from kit.objective import LossScale, RewardBatch, TokenBatch
from kit.objective.check import Finding, check_hook
from kit.objective.hook import Hook
from kit.objective.registry import HookRegistry

REGISTRIES: list[HookRegistry] = [
    getattr(objective, name) for name in ("advantages", "clips", "weights", "regularizers", "reductions")
]
EVERY = [(registry, name) for registry in REGISTRIES for name in registry]
SETTINGS: list[tuple[HookRegistry, dict[str, Any]]] = [
    (objective.advantages, {"name": "gae", "gamma": 0.9, "lam": 0.5, "whiten": False}),
    (objective.advantages, {"name": "reinforce_pp_baseline", "gamma": 0.5}),
    (objective.clips, {"name": "two_sided", "level": "sequence"}),
    (objective.clips, {"name": "sapo", "level": "sequence"}),
    (objective.clips, {"name": "cispo", "level": "sequence"}),
    (objective.clips, {"name": "vespo", "sampler_cap": 2.0}),
    (objective.clips, {"name": "ppo_clip", "eps_high": "linear(0.2, 0.4, 10)"}),
    *[
        (objective.weights, {"name": "sampler_correction", "mode": mode, "min": 0.5})
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric")
    ],
    *[(objective.regularizers, {"name": "kl", "estimator": name}) for name in ("k1", "k2", "abs", "full")],
    (objective.regularizers, {"name": "kl", "bias_corrected": True, "level": "sequence"}),
    (objective.regularizers, {"name": "kl", "coef": "adaptive_kl(target=0.05)"}),
    (objective.regularizers, {"name": "entropy_bonus", "average": "tokens"}),
    (objective.regularizers, {"name": "entropy_bonus", "coef": "linear(0, 0.1, 10)"}),
    (objective.reductions, {"name": "fixed_length", "length": 3}),
]


def failed(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if not finding.passed]


@functools.cache
def of_the_kit(registry: HookRegistry, entry: str, seed: int) -> list[Finding]:
    """The findings of the check on a hook of the kit with these settings (JSON)."""
    return check_hook(registry.build(json.loads(entry)), seed)


def one(findings: list[Finding], name: str) -> Finding:
    (finding,) = [finding for finding in findings if finding.name == name]
    return finding


@pytest.mark.parametrize(
    ("registry", "name"), EVERY, ids=lambda value: value.kind if isinstance(value, HookRegistry) else value
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_every_builtin_hook_passes_its_checks(registry: HookRegistry, name: str, seed: int) -> None:
    assert failed(of_the_kit(registry, json.dumps({"name": name}), seed)) == []


@pytest.mark.parametrize(
    ("registry", "entry"), SETTINGS, ids=lambda value: value.kind if isinstance(value, HookRegistry) else str(value)
)
def test_every_hook_passes_with_other_settings(registry: HookRegistry, entry: dict[str, Any]) -> None:
    assert failed(of_the_kit(registry, json.dumps(entry), 0)) == []


# --- planted defects: clips, regularizers ----------------------------------------------------------------------------


def raises(batch: TokenBatch) -> Tensor:
    return batch.logps @ batch.advantages


def per_sequence(batch: TokenBatch) -> Tensor:
    return -batch.sequence_ratio * batch.advantages.mean(1, keepdim=True)


def no_tensor(batch: TokenBatch) -> Any:
    return 1.0


def undeclared(batch: TokenBatch) -> Tensor:
    return (batch.logps - batch.ref_logps) ** 2 - batch.advantages * batch.logps


def edits(batch: TokenBatch) -> Tensor:
    batch.old_logps.clamp_(min=-0.5)
    return -batch.advantages * batch.ratio


def draws_lots(batch: TokenBatch) -> Tensor:
    return -batch.advantages * batch.ratio * torch.rand_like(batch.logps)


def infinite(batch: TokenBatch) -> Tensor:
    return -batch.advantages * batch.logps / batch.log_ratio


def root_of_zero(batch: TokenBatch) -> Tensor:
    return -batch.advantages * batch.ratio + (batch.log_ratio**2).sqrt()


def detached(batch: TokenBatch) -> Tensor:
    return -batch.advantages * batch.ratio.detach()


def unmoved(batch: TokenBatch) -> Tensor:
    return -batch.advantages + 0.0 * batch.logps


def counts_columns(batch: TokenBatch) -> Tensor:
    return -batch.advantages * (batch.logps - batch.logps.mean(-1, keepdim=True))


def plain_product(batch: TokenBatch) -> Tensor:
    product = batch.log_ratio.sum(-1, keepdim=True).exp()
    return -batch.advantages * product * torch.ones_like(batch.logps)


def ignores_advantages(batch: TokenBatch) -> Tensor:
    return -batch.ratio


def adds_advantages(batch: TokenBatch) -> Tensor:
    return -batch.advantages - batch.ratio


CLIPS: list[tuple[Callable[..., Any], str, str]] = [
    (raises, "runs", "RuntimeError"),
    (per_sequence, "runs", "shape (5, 1), expected (5, 9)"),
    (no_tensor, "runs", "returned float, expected a tensor"),
    (undeclared, "runs", "undeclared.needs = {"),
    (edits, "runs", "edited old_logps in place"),
    (draws_lots, "same again", "another result the second time"),
    (infinite, "runs", "NaN or infinity for a finite batch"),
    (root_of_zero, "gradient", "NaN or infinity in the gradient to logps, on policy"),
    (detached, "runs", "without gradient"),
    (unmoved, "gradient", "is 0 at every token"),
    (counts_columns, "padding", "more padding changes the loss"),
    (plain_product, "extreme ratios", "bounded_exp"),
    (ignores_advantages, "advantage", "ignores batch.advantages"),
    (adds_advantages, "advantage", "ignores batch.advantages"),
]


@pytest.mark.parametrize(("function", "name", "words"), CLIPS, ids=lambda value: getattr(value, "__name__", None))
def test_a_clip_with_a_defect_fails_where_it_should(function: Callable[..., Any], name: str, words: str) -> None:
    finding = one(check_hook(objective.clips.build(function)), name)
    assert not finding.passed
    assert words in finding.detail


@pytest.mark.parametrize("name", ["clipped", "metrics"])
def test_what_a_hook_reports_wrongly_fails_under_one_heading(name: str) -> None:
    def own(batch: TokenBatch) -> Tensor:
        return -batch.advantages * batch.ratio

    setattr(own, name, lambda batch: {"up": 3})
    (finding,) = failed(check_hook(objective.clips.build(own)))
    assert finding.name == "runs"
    assert f"own.{name} of clip" in finding.detail
    assert "returned int for up. Expected a dict of tensors" in finding.detail


def test_a_mean_over_no_tokens_is_found() -> None:
    hook = objective.regularizers.build(lambda batch: -batch.logps[batch.mask].mean())
    finding = one(check_hook(hook), "empty micro-batch")
    assert not finding.passed
    assert "NaN" in finding.detail


def test_a_detached_regularizer_fails_unless_it_is_only_logged() -> None:
    assert not one(check_hook(objective.regularizers.build(detached)), "runs").passed
    findings = check_hook(objective.regularizers.build({"name": detached, "coef": 0.0}))
    assert failed(findings) == []
    silent = one(findings, "gradient")
    assert silent.note
    assert "only logged" in silent.detail


@pytest.mark.parametrize(
    ("function", "result", "words"),
    [
        (lambda batch: batch.advantages * batch.ratio, "failed", "of every token. Change the sign"),
        (lambda batch: torch.sign(batch.advantages) * batch.ratio, "failed", "of every token. Change the sign"),
        # right by half: bad completions are learned, too
        (
            lambda batch: -batch.advantages.abs() * batch.ratio,
            "note",
            "a positive advantage lowers the probability at ",
        ),
    ],
    ids=["plus_for_minus", "sign_only", "magnitude_only"],
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in (1, 2))])
def test_a_clip_of_the_wrong_sign_is_reported(function: Callable[..., Any], seed: int, result: str, words: str) -> None:
    finding = one(check_hook(objective.clips.build(function), seed), "direction")
    assert finding.result == result
    assert words in finding.detail


def test_a_clip_without_gradient_on_policy_is_noted() -> None:
    def late(batch: TokenBatch) -> Tensor:
        return -batch.advantages * batch.log_ratio**2

    finding = one(check_hook(objective.clips.build(late)), "advantage")
    assert finding.note
    assert "on policy the gradient is 0" in finding.detail


class Remembers:
    """A weight with state: the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: TokenBatch) -> Tensor:
        self.calls += 1
        return self.calls * torch.ones_like(batch.logps)


class Saves(Remembers):
    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def test_state_is_fine_if_it_is_saved_and_left_as_it_was() -> None:
    assert not one(check_hook(objective.weights.build(Remembers())), "same again").passed
    keeper = Saves()
    keeper.calls = 3
    assert failed(check_hook(objective.weights.build(keeper))) == []
    assert keeper.calls == 3


# --- planted defects: advantages -------------------------------------------------------------------------------------


def wrong_shape(batch: RewardBatch) -> Tensor:
    return batch.rewards[:, None].nan_to_num(0.0)


def mean_with_nan(batch: RewardBatch) -> Tensor:
    return batch.rewards - batch.rewards.mean()


def by_position(batch: RewardBatch) -> Tensor:
    pairs = batch.rewards.nan_to_num(0.0).view(-1, 2)
    return (pairs - pairs.mean(1, keepdim=True)).flatten()


def divides_by_spread(batch: RewardBatch) -> Tensor:
    known = batch.rewards[batch.scorable]
    return ((batch.rewards - known.mean()) / known.std()).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf) / (
        (known - known.mean()).abs().sum()
    )


def counts_the_unscored(batch: RewardBatch) -> Tensor:
    assert batch.values is not None
    return batch.rewards.nan_to_num(0.0) - batch.values.mean()


counts_the_unscored.needs = {"values"}  # type: ignore[attr-defined]


def averages_over_columns(batch: RewardBatch) -> Tensor:
    assert batch.token_rewards is not None
    return batch.token_rewards.mean(1)


averages_over_columns.needs = {"token_rewards"}  # type: ignore[attr-defined]


def reads_lengths(batch: RewardBatch) -> Tensor:
    return batch.rewards.nan_to_num(0.0) / batch.lengths.clamp(min=1)  # type: ignore[union-attr]


def edits_rewards(batch: RewardBatch) -> Tensor:
    return batch.rewards.nan_to_num_(0.0)


def noisy(batch: RewardBatch) -> Tensor:
    return batch.rewards + torch.randn_like(batch.rewards)


@pytest.mark.parametrize(
    ("function", "name", "words"),
    [
        (wrong_shape, "runs", "expected (12,) or (12, 9)"),
        (mean_with_nan, "runs", "batch.scorable or nanmean"),
        (by_position, "order", "by batch.group, not by position"),
        (divides_by_spread, "no spread", "NaN or infinity"),
        (counts_the_unscored, "unscorable", "change the advantages of others"),
        (averages_over_columns, "padding", "more padding changes the advantages"),
        (reads_lengths, "runs", "reads_lengths.needs = {"),
        (edits_rewards, "runs", "edited rewards in place"),
        (noisy, "same again", "another result the second time"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_advantage_with_a_defect_fails_where_it_should(function: Any, name: str, words: str) -> None:
    finding = one(check_hook(objective.advantages.build(function)), name)
    assert not finding.passed
    assert words in finding.detail


# --- planted defects: reductions -------------------------------------------------------------------------------------


def reduction(function: Callable[[Tensor, Tensor, LossScale], Any]) -> Hook:
    return objective.reductions.build(function)


@pytest.mark.parametrize(
    ("function", "name", "words"),
    [
        (lambda per_token, mask, scale: per_token.sum(1), "runs", "expected ()"),
        (lambda per_token, mask, scale: per_token.add_(1.0).sum(), "runs", "edited per_token in place"),
        (lambda per_token, mask, scale: per_token.sum() * torch.rand(()), "same again", "the second time"),
        (lambda per_token, mask, scale: (per_token.sum(1) / mask.sum(1)).mean(), "runs", "NaN or infinity"),
        (lambda per_token, mask, scale: per_token.detach().sum(), "gradient", "without gradient"),
        (lambda per_token, mask, scale: per_token.sum() * 0, "gradient", "is 0 at every token"),
        (lambda per_token, mask, scale: per_token.mean(), "padding", "with the mask, not with the number of columns"),
        (
            lambda per_token, mask, scale: per_token[mask].mean(),
            "empty micro-batch",
            "NaN or infinity",
        ),
        (
            lambda per_token, mask, scale: per_token.sum() if mask.any() else torch.zeros(()),
            "empty micro-batch",
            "without gradient",
        ),
    ],
)
def test_a_reduction_with_a_defect_fails_where_it_should(function: Any, name: str, words: str) -> None:
    finding = one(check_hook(reduction(function)), name)
    assert not finding.passed
    assert words in finding.detail


def test_a_reduction_that_forgets_the_accumulation_is_noted() -> None:
    # two micro-batches of 2 completions give S1/2 + S2/2, one of 4 gives (S1 + S2)/4: twice as much
    finding = one(check_hook(reduction(lambda per_token, mask, scale: per_token.sum() / mask.shape[0])), "accumulation")
    assert finding.note
    assert "2 times" in finding.detail
