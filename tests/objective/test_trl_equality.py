"""Loss and gradient against TRL's `GRPOTrainer._compute_loss`, called with a stand-in for the trainer."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairwise import every_pair
from torch import Tensor
from trl.experimental.gmpo import GMPOTrainer
from trl.experimental.sdpo import loss_utils
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import nanstd

from kit.objective import LossScale, Objective, RewardBatch, TokenBatch, regularizers

from .sampling import Sample, sample

EPS_LOW, EPS_HIGH = 0.2, 0.28
STEPS_PER_GENERATION = 6
ITEMS = 96  # tokens of the generation batch: 16 a micro-batch, exact in the float32 in which TRL divides
MAX_LENGTH = 11
TAU_POS, TAU_NEG = 0.75, 1.0625  # exact in the float32 in which TRL keeps them
REDUCTIONS = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dr_grpo": "fixed_length",
    "dapo": "global_token_mean",
    "cispo": "global_token_mean",
    "luspo": "sequence_sum",
    "sapo": "sequence_mean",
    "vespo": "global_token_mean",
}


def sampler_ratio(drawn: Sample, mode: str, low: float | None, high: float | None) -> Tensor:
    """TRL's `vllm_importance_sampling_ratio`, which TRL computes within its generation: (B, T) or (B, 1)."""
    gap = torch.nan_to_num((drawn.old_logps - drawn.sampler_logps) * drawn.mask, nan=0.0)
    ratio = torch.exp(gap.sum(-1, keepdim=True) if mode.startswith("sequence") else gap)
    if mode.endswith("truncate"):
        return torch.clamp(ratio, min=low, max=high)
    outside = (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))
    return ratio.masked_fill(outside, 0.0)


def trl_loss(drawn: Sample, loss_type: str, **options: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
    """TRL's loss, its gradient and its metrics, for given log-probabilities."""
    logps = drawn.logps.detach().clone().requires_grad_()
    metrics: dict[str, Any] = {"train": defaultdict(list)}
    accelerator = SimpleNamespace(
        num_processes=1,
        reduce=lambda x, reduction: x,
        gather=lambda x: x,
        pad_across_processes=lambda x, dim, pad_index: x,
        sync_gradients=True,
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logps, drawn.entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=options.get("top_entropy_quantile", 1.0),
        get_high_entropy_mask=lambda *args: GRPOTrainer.get_high_entropy_mask(trainer, *args),
        off_policy_mask_threshold=options.get("off_policy_delta"),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        importance_sampling_level=options.get("level", "token"),
        beta=options.get("beta", 0.0),
        args=SimpleNamespace(
            use_bias_correction_kl=options.get("bias_corrected", False),
            delta=options.get("delta"),
            steps_per_generation=STEPS_PER_GENERATION,
            sapo_temperature_pos=TAU_POS,
            sapo_temperature_neg=TAU_NEG,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        loss_type=loss_type,
        epsilon_low=EPS_LOW,
        epsilon_high=EPS_HIGH,
        use_vllm="sampler" in options,
        vllm_importance_sampling_correction="sampler" in options,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=options.get("accumulation", 1),
        max_completion_length=MAX_LENGTH,
        accelerator=accelerator,
        _entropy_bonus_enabled="entropy_coef" in options,
        use_adaptive_entropy=False,
        entropy_coef=options.get("entropy_coef"),
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
    if "sampler" in options:
        inputs["importance_sampling_ratio"] = sampler_ratio(drawn, *options["sampler"])
    if options.get("give_sampler_logps"):
        inputs["sampling_per_token_logps"] = drawn.sampler_logps
    kind = GMPOTrainer if loss_type == "gmpo" else GRPOTrainer
    loss = kind._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logps.grad is not None
    return loss.detach(), logps.grad, {key: values[0] for key, values in metrics["train"].items()}


def kit_loss(
    drawn: Sample, objective: Objective, accumulation: int, off_policy: bool, **changes: Any
) -> tuple[Tensor, Tensor, Any]:
    scale = LossScale(accumulation, ITEMS * accumulation / STEPS_PER_GENERATION, MAX_LENGTH)
    drawn.logps.grad = None
    old = drawn.old_logps if off_policy else drawn.logps.detach()
    out = objective.loss(drawn.batch(old_logps=old, **changes), scale)
    out.loss.backward()
    assert drawn.logps.grad is not None
    return out.loss.detach(), drawn.logps.grad, out.metrics


def equivalent(loss_type: str, beta: float, level: str, delta: float | None, bias_corrected: bool = False) -> Objective:
    """The objective that equals these options of TRL."""
    clip: dict[str, Any] = {"name": "ppo_clip", "eps_low": EPS_LOW, "eps_high": EPS_HIGH}
    if loss_type == "cispo":
        clip = {"name": "cispo", "eps_high": EPS_HIGH, "level": level}
    elif loss_type == "sapo":
        clip = {"name": "sapo", "tau_pos": TAU_POS, "tau_neg": TAU_NEG, "level": level}
    elif loss_type == "vespo":
        clip = {"name": "vespo"}
    elif delta is not None:
        clip |= {"name": "two_sided", "delta": delta, "level": level}
    elif level == "sequence":
        clip["name"] = "gspo"
    kl = {"name": "kl", "coef": beta, "estimator": "k3", "bias_corrected": bias_corrected, "level": level}
    return Objective(clip=clip, regularizers=[kl] if beta else [], reduction=REDUCTIONS[loss_type])


TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-7}, torch.float64: {"rtol": 1e-12, "atol": 1e-14}}


@every_pair(
    {
        "loss_type": list(REDUCTIONS),
        "beta": [0.0, 0.04],
        "off_policy": [True, False],
        "accumulation": [1, 3],
        "dtype": list(TOLERANCE),
    }
)
def test_loss_and_gradient_equal_trl(
    loss_type: str, beta: float, off_policy: bool, accumulation: int, dtype: torch.dtype
) -> None:
    for seed in range(3):
        drawn = sample(seed, (5, 9), dtype)
        expected, their_gradient, _ = trl_loss(
            drawn, loss_type, beta=beta, off_policy=off_policy, accumulation=accumulation
        )
        loss, our_gradient, _ = kit_loss(drawn, equivalent(loss_type, beta, "token", None), accumulation, off_policy)
        torch.testing.assert_close(loss, expected, **TOLERANCE[dtype])
        torch.testing.assert_close(our_gradient, their_gradient, **TOLERANCE[dtype])


@every_pair(
    {
        "loss_type": list(REDUCTIONS),
        "level, delta": [("sequence", None), ("sequence", 1.3), ("token", 1.5), ("token", None)],
        "bias_corrected": [False, True],
        "beta": [0.0, 0.04],
        "off_policy": [True, False],
        "dtype": list(TOLERANCE),
    }
)
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
    expected, their_gradient, _ = trl_loss(
        drawn, loss_type, beta=beta, off_policy=off_policy, level=level, delta=delta, bias_corrected=bias_corrected
    )
    objective = equivalent(loss_type, beta, level, delta, bias_corrected)
    loss, our_gradient, _ = kit_loss(drawn, objective, 1, off_policy)
    torch.testing.assert_close(loss, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(our_gradient, their_gradient, **TOLERANCE[dtype])


@pytest.mark.parametrize("loss_type", list(REDUCTIONS))
def test_a_micro_batch_with_a_fully_masked_completion_equals_trl(loss_type: str) -> None:
    drawn = sample(3, (5, 9))
    drawn.mask[2] = False
    expected, their_gradient, _ = trl_loss(drawn, loss_type)
    loss, our_gradient, _ = kit_loss(drawn, equivalent(loss_type, 0.0, "token", None), 1, True)
    torch.testing.assert_close(loss, expected)
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
        ("sapo", "sapo", "token", {"tau_pos": TAU_POS, "tau_neg": TAU_NEG}),
        ("vespo", "vespo", "sequence", {}),
        ("luspo", "luspo", "sequence", {"eps_low": EPS_LOW, "eps_high": EPS_HIGH}),
    ],
)
def test_recipes_equal_trl(name: str, loss_type: str, level: str, clip: dict[str, float]) -> None:
    drawn = sample(11, (5, 9), torch.float32)
    expected, their_gradient, _ = trl_loss(drawn, loss_type, level=level)
    loss, our_gradient, _ = kit_loss(drawn, Objective.from_spec({"recipe": name, "clip": clip}), 1, True)
    torch.testing.assert_close(loss, expected, **TOLERANCE[torch.float32])
    torch.testing.assert_close(our_gradient, their_gradient, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_equal_trl(level: str) -> None:
    drawn = sample(5, (6, 9), spread=1.0)
    _, _, expected = trl_loss(drawn, "grpo", beta=0.04, level=level)
    _, _, metrics = kit_loss(drawn, equivalent("grpo", 0.04, level, None), 1, True)
    assert expected["clip_ratio/region_mean"] > 0  # the sample does clip
    for key in ("low", "high", "region"):
        assert metrics[f"clip_fraction/{key}"].value.item() == pytest.approx(expected[f"clip_ratio/{key}_mean"])
    assert metrics["kl/k3"].value.item() == pytest.approx(expected["kl"])
    assert metrics["entropy"].value.item() == pytest.approx(expected["entropy"])


def test_cispo_clip_fraction_equals_trl() -> None:
    drawn = sample(5, (6, 9))
    _, _, expected = trl_loss(drawn, "cispo")
    _, _, metrics = kit_loss(drawn, equivalent("cispo", 0.0, "token", None), 1, True)
    assert expected["cispo_clip_ratio"] > 0
    assert metrics["clip_fraction/high"].value.item() == pytest.approx(expected["cispo_clip_ratio"])


def agree(drawn: Sample, loss_type: str, weights: list[Any], terms: list[Any], changes: Any, **options: Any) -> None:
    """Assert that loss and gradient of the objective with these parts equal TRL's with these options."""
    level, beta = options.get("level", "token"), options.get("beta", 0.0)
    plain = equivalent(loss_type, beta, level, None).to_spec()
    objective = Objective(**{**plain, "weights": weights, "regularizers": [*plain["regularizers"], *terms]})
    expected, their_gradient, _ = trl_loss(drawn, loss_type, **options)
    loss, our_gradient, _ = kit_loss(drawn, objective, options.get("accumulation", 1), True, **changes)
    torch.testing.assert_close(loss, expected, **TOLERANCE[drawn.logps.dtype])
    torch.testing.assert_close(our_gradient, their_gradient, **TOLERANCE[drawn.logps.dtype])
    assert their_gradient.abs().sum() > 0


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
EVERY_LOSS = pytest.mark.parametrize("loss_type", list(REDUCTIONS))


@every_pair(
    {
        "loss_type": [name for name in REDUCTIONS if name != "vespo"],
        "mode": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
        "low, high": [(None, 1.2), (0.8, None), (0.8, 1.2)],
        "beta": [0.0, 0.04],
        "dtype": list(TOLERANCE),
    }
)
def test_sampler_correction_equals_trl(
    loss_type: str, mode: str, low: float | None, high: float | None, beta: float, dtype: torch.dtype
) -> None:
    drawn = sample(4, (6, 9), dtype)
    weight = {"name": "sampler_correction", "mode": mode, "min": low, "max": high}
    agree(drawn, loss_type, [weight], [], {}, sampler=(mode, low, high), beta=beta)


@BOTH
@pytest.mark.parametrize("cap", [1.0, 1.1, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_vespo_with_the_sampler_ratio_equals_trl(seed: int, cap: float, dtype: torch.dtype) -> None:
    drawn = sample(seed, (6, 9), dtype)
    expected, their_gradient, _ = trl_loss(drawn, "vespo", sampler=("token_truncate", None, cap))
    objective = Objective.from_spec({"recipe": "vespo", "clip": {"sampler_cap": cap}})
    loss, our_gradient, _ = kit_loss(drawn, objective, 1, True)
    torch.testing.assert_close(loss, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(our_gradient, their_gradient, **TOLERANCE[dtype])


@every_pair(
    {"loss_type": list(REDUCTIONS), "level": ["token", "sequence"], "top": [0.2, 0.5], "dtype": list(TOLERANCE)}
)
def test_high_entropy_only_equals_trl(loss_type: str, level: str, top: float, dtype: torch.dtype) -> None:
    drawn = sample(6, (6, 9), dtype)
    drawn.entropy = drawn.entropy.float().to(dtype)  # TRL takes the quantile in float32
    weight = {"name": "high_entropy_only", "quantile": 1 - top}
    agree(drawn, loss_type, [weight], [], {}, top_entropy_quantile=top, level=level)


@every_pair({"loss_type": list(REDUCTIONS), "delta": [0.0, 0.05], "engine": [False, True], "dtype": list(TOLERANCE)})
def test_off_policy_mask_equals_trl(loss_type: str, delta: float, engine: bool, dtype: torch.dtype) -> None:
    drawn = sample(2, (8, 9), dtype)
    changes = {} if engine else {"sampler_logps": None}
    weight = {"name": "off_policy_mask", "delta": delta}
    assert not Objective(weights=[weight]).weights[0](drawn.batch(**changes)).all()  # the sample does mask
    agree(drawn, loss_type, [weight], [], changes, off_policy_delta=delta, give_sampler_logps=engine)


@BOTH
@pytest.mark.parametrize("accumulation", [1, 3])
@EVERY_LOSS
def test_entropy_bonus_equals_trl(loss_type: str, accumulation: int, dtype: torch.dtype) -> None:
    drawn = sample(3, (6, 9), dtype)
    gradients = []
    bonus = {"name": "entropy_bonus", "average": "tokens", "coef": 0.1}
    agree(drawn, loss_type, [], [bonus], {}, entropy_coef=0.1, accumulation=accumulation)
    plain = equivalent(loss_type, 0.0, "token", None).to_spec()
    objective = Objective(**{**plain, "regularizers": [bonus]})
    for loss in (trl_loss, lambda each, name, **_: kit_loss(each, objective, accumulation, True)):
        drawn.entropy = drawn.entropy.detach().requires_grad_()
        loss(drawn, loss_type, entropy_coef=0.1, accumulation=accumulation)
        gradients.append(drawn.entropy.grad)
    torch.testing.assert_close(*gradients, **TOLERANCE[dtype])


@BOTH
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_gmpo_equals_trl(seed: int, accumulation: int, dtype: torch.dtype) -> None:
    drawn = sample(seed, (6, 9), dtype)
    expected, their_gradient, metrics = trl_loss(drawn, "gmpo", accumulation=accumulation)
    objective = Objective.from_spec({"recipe": "gmpo", "clip": {"eps_low": EPS_LOW, "eps_high": EPS_HIGH}})
    loss, our_gradient, ours_logged = kit_loss(drawn, objective, accumulation, True)
    torch.testing.assert_close(loss, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(our_gradient, their_gradient, **TOLERANCE[dtype])
    for key in ("low", "high", "region"):
        assert ours_logged[f"clip_fraction/{key}"].value.item() == pytest.approx(metrics[f"clip_ratio/{key}_mean"])


def test_vespo_weight_equals_trl() -> None:
    drawn = sample(5, (6, 9))
    _, _, expected = trl_loss(drawn, "vespo")
    _, _, metrics = kit_loss(drawn, Objective.from_spec("vespo"), 1, True)
    assert metrics["vespo/phi"].value.item() == pytest.approx(expected["vespo/phi_seq_mean"])


def trl_advantages(rewards: Tensor, generations: int, scale_rewards: str) -> Tensor:
    """The formula of `_generate_and_score_completions` for `sum_then_normalize`, with TRL's own `nanstd`."""
    grouped = rewards.view(-1, generations)
    mean = torch.nanmean(grouped, dim=1).repeat_interleave(generations)
    std = nanstd(rewards).expand_as(rewards)
    if scale_rewards == "group":
        std = nanstd(grouped, dim=1).repeat_interleave(generations)
        std = torch.zeros_like(rewards) if generations == 1 else std
    advantages = rewards - mean
    return torch.nan_to_num(advantages if scale_rewards == "none" else advantages / (std + 1e-4), nan=0.0)


@every_pair(
    {
        "name, scale_rewards": [("group_zscore", "group"), ("group_mean", "none"), ("batch_zscore", "batch")],
        "generations": [1, 4],
        "unscorable": [(), (1,), (1, 2), (4, 5, 6), (4, 5, 6, 7)],
        "dtype": list(TOLERANCE),
    }
)
def test_advantages_equal_trl(
    name: str, scale_rewards: str, generations: int, unscorable: tuple[int, ...], dtype: torch.dtype
) -> None:
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=dtype)
    rewards[list(unscorable)] = torch.nan
    group = torch.arange(12) // generations
    advantages = Objective(advantage=name).compute_advantages(RewardBatch(rewards, group))
    torch.testing.assert_close(advantages, trl_advantages(rewards, generations, scale_rewards), rtol=1e-5, atol=1e-6)


def test_distillation_of_sampled_tokens_has_the_gradient_of_trl() -> None:
    logits = torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(2))

    def chosen(values: Tensor) -> Tensor:
        return values.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)

    mask = torch.ones(3, 4, dtype=torch.bool)
    logps = chosen(logits)
    batch = TokenBatch(logps, logps.detach(), torch.zeros(3, 1), mask, teacher_logps=chosen(teacher))
    gradient = torch.autograd.grad(regularizers.distill(tokens="sampled")(batch).sum(), logits, retain_graph=True)[0]
    expected = loss_utils.compute_sampled_token_self_distillation_loss(logits, teacher, ids, distillation_alpha=1.0)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), logits)[0])
