"""Loss and gradient against TRL's own `GRPOTrainer._compute_loss`, run on a stand-in for the trainer."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import nanstd

from kit.objective import LossScale, Objective, RewardBatch

from .sampling import Sample, sample

EPS_LOW, EPS_HIGH = 0.2, 0.28
STEPS_PER_GENERATION = 6
ITEMS = 96  # tokens of the generation batch: 16 a micro-batch, exact in the float32 in which TRL divides
MAX_LENGTH = 11
REDUCTIONS = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dr_grpo": "fixed_length",
    "dapo": "global_token_mean",
    "cispo": "global_token_mean",
    "luspo": "sequence_sum",
}


def trl_loss(drawn: Sample, loss_type: str, **options: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
    """TRL's loss, its gradient and its metrics, for preset log-probabilities."""
    logps = drawn.logps.detach().clone().requires_grad_()
    metrics: dict[str, Any] = {"train": defaultdict(list)}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logps, drawn.entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=options.get("level", "token"),
        beta=options.get("beta", 0.0),
        args=SimpleNamespace(
            use_bias_correction_kl=options.get("bias_corrected", False),
            delta=options.get("delta"),
            steps_per_generation=STEPS_PER_GENERATION,
        ),
        loss_type=loss_type,
        epsilon_low=EPS_LOW,
        epsilon_high=EPS_HIGH,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=options.get("accumulation", 1),
        max_completion_length=MAX_LENGTH,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        _entropy_bonus_enabled=False,
        _metrics=metrics,
    )
    ids = torch.zeros_like(drawn.mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": drawn.mask.long(),
        "advantages": drawn.advantages,
        "ref_per_token_logps": drawn.ref_logps,
        "num_items_in_batch": torch.tensor(ITEMS),
    }
    if options.get("off_policy", True):
        inputs["old_per_token_logps"] = drawn.old_logps
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logps.grad is not None
    return loss.detach(), logps.grad, {key: values[0] for key, values in metrics["train"].items()}


def kit_loss(drawn: Sample, objective: Objective, accumulation: int, off_policy: bool) -> tuple[Tensor, Tensor, Any]:
    scale = LossScale(accumulation, ITEMS * accumulation / STEPS_PER_GENERATION, MAX_LENGTH)
    drawn.logps.grad = None
    old = drawn.old_logps if off_policy else drawn.logps.detach()
    out = objective.loss(drawn.batch(old_logps=old), scale)
    out.loss.backward()
    assert drawn.logps.grad is not None
    return out.loss.detach(), drawn.logps.grad, out.metrics


def equivalent(loss_type: str, beta: float, level: str, delta: float | None, bias_corrected: bool = False) -> Objective:
    """The objective that the options of TRL mean."""
    clip: dict[str, Any] = {"name": "ppo_clip", "eps_low": EPS_LOW, "eps_high": EPS_HIGH}
    if loss_type == "cispo":
        clip = {"name": "cispo", "eps_high": EPS_HIGH}
    elif level == "sequence":
        clip["name"] = "gspo"
    elif delta is not None:
        clip |= {"name": "two_sided", "delta": delta}
    kl = {"name": "kl", "coef": beta, "estimator": "k3", "bias_corrected": bias_corrected, "level": level}
    return Objective(clip=clip, regularizers=[kl] if beta else [], reduction=REDUCTIONS[loss_type])


TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-7}, torch.float64: {"rtol": 1e-12, "atol": 1e-14}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("off_policy", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", list(REDUCTIONS))
def test_loss_and_gradient_equal_trl(
    loss_type: str, beta: float, off_policy: bool, accumulation: int, dtype: torch.dtype
) -> None:
    for seed in range(3):
        drawn = sample(seed, (5, 9), dtype)
        theirs, their_gradient, _ = trl_loss(
            drawn, loss_type, beta=beta, off_policy=off_policy, accumulation=accumulation
        )
        ours, our_gradient, _ = kit_loss(drawn, equivalent(loss_type, beta, "token", None), accumulation, off_policy)
        torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])
        torch.testing.assert_close(our_gradient, their_gradient, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("off_policy", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("bias_corrected", [False, True])
@pytest.mark.parametrize(("level", "delta"), [("sequence", None), ("token", 1.5), ("token", None)])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "luspo"])
def test_levels_delta_and_kl_correction_equal_trl(
    loss_type: str,
    level: str,
    delta: float | None,
    bias_corrected: bool,
    beta: float,
    off_policy: bool,
    dtype: torch.dtype,
) -> None:
    drawn = sample(7, (5, 9), dtype)
    theirs, their_gradient, _ = trl_loss(
        drawn, loss_type, beta=beta, off_policy=off_policy, level=level, delta=delta, bias_corrected=bias_corrected
    )
    objective = equivalent(loss_type, beta, level, delta, bias_corrected)
    ours, our_gradient, _ = kit_loss(drawn, objective, 1, off_policy)
    torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])
    torch.testing.assert_close(our_gradient, their_gradient, **TOLERANCE[dtype])


@pytest.mark.parametrize("loss_type", list(REDUCTIONS))
def test_a_micro_batch_with_a_fully_masked_completion_equals_trl(loss_type: str) -> None:
    drawn = sample(3, (5, 9))
    drawn.mask[2] = False
    theirs, their_gradient, _ = trl_loss(drawn, loss_type)
    ours, our_gradient, _ = kit_loss(drawn, equivalent(loss_type, 0.0, "token", None), 1, True)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(our_gradient, their_gradient)


@pytest.mark.parametrize(
    ("name", "loss_type", "level", "clip"),
    [
        ("grpo", "grpo", "token", {"eps_low": EPS_LOW, "eps_high": EPS_HIGH}),
        ("bnpo", "bnpo", "token", {"eps_low": EPS_LOW, "eps_high": EPS_HIGH}),
        ("dr_grpo", "dr_grpo", "token", {"eps_low": EPS_LOW, "eps_high": EPS_HIGH}),
        ("dapo", "dapo", "token", {}),
        ("cispo", "cispo", "token", {"eps_high": EPS_HIGH}),
        ("gspo", "grpo", "sequence", {"eps_low": EPS_LOW, "eps_high": EPS_HIGH}),
    ],
)
def test_recipes_equal_trl(name: str, loss_type: str, level: str, clip: dict[str, float]) -> None:
    drawn = sample(11, (5, 9), torch.float32)
    theirs, their_gradient, _ = trl_loss(drawn, loss_type, level=level)
    ours, our_gradient, _ = kit_loss(drawn, Objective.from_spec({"recipe": name, "clip": clip}), 1, True)
    torch.testing.assert_close(ours, theirs, **TOLERANCE[torch.float32])
    torch.testing.assert_close(our_gradient, their_gradient, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_equal_trl(level: str) -> None:
    drawn = sample(5, (6, 9), spread=1.0)
    _, _, theirs = trl_loss(drawn, "grpo", beta=0.04, level=level)
    _, _, ours = kit_loss(drawn, equivalent("grpo", 0.04, level, None), 1, True)
    assert theirs["clip_ratio/region_mean"] > 0  # the sample does clip
    for key in ("low", "high", "region"):
        assert ours[f"clip_fraction/{key}"].value.item() == pytest.approx(theirs[f"clip_ratio/{key}_mean"])
    assert ours["kl/k3"].value.item() == pytest.approx(theirs["kl"])
    assert ours["entropy"].value.item() == pytest.approx(theirs["entropy"])


def test_cispo_clip_fraction_equals_trl() -> None:
    drawn = sample(5, (6, 9))
    _, _, theirs = trl_loss(drawn, "cispo")
    _, _, ours = kit_loss(drawn, equivalent("cispo", 0.0, "token", None), 1, True)
    assert theirs["cispo_clip_ratio"] > 0
    assert ours["clip_fraction/high"].value.item() == pytest.approx(theirs["cispo_clip_ratio"])


def trl_advantages(rewards: Tensor, generations: int, scale_rewards: str) -> Tensor:
    """The lines of `_generate_and_score_completions` under `sum_then_normalize`, with TRL's own `nanstd`."""
    grouped = rewards.view(-1, generations)
    mean = torch.nanmean(grouped, dim=1).repeat_interleave(generations)
    std = nanstd(rewards).expand_as(rewards)
    if scale_rewards == "group":
        std = nanstd(grouped, dim=1).repeat_interleave(generations)
        std = torch.zeros_like(rewards) if generations == 1 else std
    advantages = rewards - mean
    return torch.nan_to_num(advantages if scale_rewards == "none" else advantages / (std + 1e-4), nan=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("unscorable", [(), (1,), (1, 2), (4, 5, 6), (4, 5, 6, 7)])
@pytest.mark.parametrize("generations", [1, 4])
@pytest.mark.parametrize(
    ("name", "scale_rewards"), [("group_zscore", "group"), ("group_mean", "none"), ("batch_zscore", "batch")]
)
def test_advantages_equal_trl(
    name: str, scale_rewards: str, generations: int, unscorable: tuple[int, ...], dtype: torch.dtype
) -> None:
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=dtype)
    rewards[list(unscorable)] = torch.nan
    group = torch.arange(12) // generations
    ours = Objective(advantage=name).compute_advantages(RewardBatch(rewards, group))
    torch.testing.assert_close(ours, trl_advantages(rewards, generations, scale_rewards), rtol=1e-5, atol=1e-6)
