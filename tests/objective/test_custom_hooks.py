"""The user's own hooks: loading, and checks of their outputs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.errors import ConfigError, ObjectiveError
from kit.objective import LossScale, Objective, RewardBatch, TokenBatch, clips, regularizers

from .sampling import gradient, sample

FILE = '''
import torch

def power_clip(batch, power: float = 2.0):
    """The ratio to a power, unclipped."""
    return -batch.advantages * batch.ratio**power

def pull(limit: float = 0.1):
    """A factory: pull towards the reference where further than limit."""
    def function(batch):
        gap = (batch.logps - batch.ref_logps).abs()
        return torch.where(gap > limit, gap, gap.new_zeros(()))
    function.needs = {"ref_logps"}
    return function

number = 3
'''


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    path = tmp_path / "my_hooks.py"
    path.write_text(FILE)
    return path


def plain_pull(batch: TokenBatch, strength: float = 1.0) -> Tensor:
    assert batch.ref_logps is not None
    return strength * (batch.logps - batch.ref_logps) ** 2


plain_pull.needs = {"ref_logps"}  # type: ignore[attr-defined]


# --- import and use ----------------------------------------------------------------------------------------------


def test_a_clip_from_a_file_changes_the_gradient_as_its_maths_says(hooks: Path) -> None:
    drawn = sample(0, spread=0.0)
    _, plain = gradient(Objective(clip="ppo_clip"), drawn)
    _, squared = gradient(Objective(clip=f"{hooks}:power_clip"), drawn)
    torch.testing.assert_close(squared, 2 * plain)  # d r²/dlogp = 2 where r = 1
    _, cubed = gradient(Objective(clip={"name": f"{hooks}:power_clip", "power": 3}), drawn)
    torch.testing.assert_close(cubed, 3 * plain)


def test_a_factory_from_a_file_has_its_needs_and_its_own_metric(hooks: Path) -> None:
    objective = Objective(regularizers=[{"name": f"{hooks}:pull", "coef": 0.5, "limit": 0.0}])
    assert objective.needs == {"ref_logps"}
    drawn = sample()
    metrics = gradient(objective, drawn)[0].metrics
    gap = (drawn.logps - drawn.ref_logps).abs()[drawn.mask].mean()
    assert metrics["objective/pull"].value.item() == pytest.approx(gap.item())


def test_a_float_of_a_custom_hook_may_be_a_schedule(hooks: Path) -> None:
    objective = Objective(clip={"name": f"{hooks}:power_clip", "power": "linear(1, 3, 2)"})
    drawn = sample(0, spread=0.0)
    slopes = []
    for drawn.step in range(3):
        slopes.append(gradient(objective, drawn)[1])
    torch.testing.assert_close(slopes[1], 2 * slopes[0])
    torch.testing.assert_close(slopes[2], 3 * slopes[0])


@pytest.mark.parametrize("eps", [0.05, "linear(0.05, 0.9, 10)"])
def test_reports_of_a_custom_hook_get_its_hyper_parameters(eps: Any) -> None:
    def own(batch: TokenBatch, eps=0.2) -> Tensor:  # a float by its default
        return -batch.advantages * batch.ratio.clamp(1 - eps, 1 + eps)

    own.clipped = lambda batch, eps=0.2: {"outside": (batch.ratio - 1).abs() > eps}  # type: ignore[attr-defined]
    own.metrics = lambda batch: {"log_ratio": batch.log_ratio}  # type: ignore[attr-defined]
    drawn = sample(0).batch()
    metrics = Objective(clip={"name": own, "eps": eps}).loss(drawn).metrics
    outside = ((drawn.ratio - 1).abs() > 0.05) & drawn.mask
    assert metrics["clip_fraction/outside"].value.item() == pytest.approx((outside.sum() / drawn.mask.sum()).item())
    assert metrics["log_ratio"].value.item() == pytest.approx(drawn.log_ratio[drawn.mask].mean().item(), abs=1e-6)


@pytest.mark.parametrize("form", ["function", "dict", "path"])
def test_every_form_of_a_callable_is_the_same(form: str) -> None:
    path = f"{plain_pull.__module__}:plain_pull"
    forms: dict[str, Any] = {"function": plain_pull, "dict": {"name": plain_pull, "strength": 1}, "path": path}
    objective = Objective(regularizers=[forms[form]])
    assert objective.to_spec()["regularizers"] == [{"name": path, "strength": 1.0, "coef": 1.0}]
    assert Objective.from_spec(objective.to_spec()).to_spec() == objective.to_spec()


def test_weights_multiply_each_other_and_carry_no_gradient() -> None:
    drawn = sample()
    _, plain = gradient(Objective(clip="ppo_clip"), drawn)

    def double(batch: TokenBatch) -> Tensor:
        return 2.0 * torch.exp(batch.logps - batch.logps.detach())

    out, weighted = gradient(Objective(clip="ppo_clip", weights=[double, double]), drawn)
    torch.testing.assert_close(weighted, 4 * plain)
    assert {"weight/double", "weight/double_2"} <= set(out.metrics)


def test_a_custom_reduction_is_used() -> None:
    def total(per_token: Tensor, mask: Tensor, scale: LossScale, factor: float = 1.0) -> Tensor:
        return factor * per_token.sum() / scale.accumulation

    drawn = sample()
    _, expected = gradient(Objective(reduction="sequence_sum"), drawn)
    _, actual = gradient(Objective(reduction={"name": total, "factor": 0.25}), drawn)
    torch.testing.assert_close(actual, expected)  # 4 completions


def test_state_of_another_objective_is_refused() -> None:
    with pytest.raises(
        ObjectiveError, match=r"saved objective state is for \['weights.0'\], .* keeps state for no parts"
    ):
        Objective().load_state_dict({"weights.0": {"calls": 3}})


# --- planted defects ---------------------------------------------------------------------------------------------


def in_place(batch: TokenBatch) -> Tensor:
    batch.old_logps.mul_(1.0)
    return -batch.advantages * batch.ratio


def nan_at_live(batch: TokenBatch) -> Tensor:
    return batch.logps / (batch.logps - batch.logps.detach())


def detached(batch: TokenBatch) -> Tensor:
    return -batch.advantages * batch.ratio.detach()


def per_sequence(batch: TokenBatch) -> Tensor:
    return -batch.advantages * batch.sequence_ratio


def no_tensor(batch: TokenBatch) -> Any:
    return 1.0


def late_factory(batch: Any) -> Any:
    return lambda other: other.logps


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (in_place, r"clip '.*in_place' edited old_logps in place"),
        (nan_at_live, r"clip '.*nan_at_live' returned NaN or infinity for a finite batch"),
        (detached, r"clip '.*detached' returned a tensor without gradient"),
        (per_sequence, r"clip '.*per_sequence' returned shape \(4, 1\), expected \(4, 7\). Use .expand"),
        (no_tensor, r"clip '.*no_tensor' returned float, expected a tensor"),
        (late_factory, r"clip '.*late_factory' returned function, .* If it is a factory"),
    ],
)
def test_a_clip_that_breaks_its_contract_is_named(function: Any, message: str) -> None:
    with pytest.raises(ObjectiveError, match=message):
        Objective(clip=function).loss(sample().batch())


def test_nan_in_the_batch_is_not_blamed_on_the_hook() -> None:
    drawn = sample()
    old = drawn.old_logps.clone()
    old[drawn.mask] = float("nan")
    with pytest.raises(ObjectiveError, match="the batch has some in old_logps"):
        Objective(clip=lambda batch: -batch.ratio).loss(drawn.batch(old_logps=old))


def test_garbage_at_padding_is_no_defect_and_does_not_leak() -> None:
    def careless(batch: TokenBatch) -> Tensor:
        return -batch.advantages * batch.ratio * torch.where(batch.mask, 1.0, float("nan"))

    drawn = sample()
    _, expected = gradient(Objective(clip=lambda batch: -batch.advantages * batch.ratio), drawn)
    _, actual = gradient(Objective(clip=careless), drawn)
    assert (actual[~drawn.mask] == 0).all()
    torch.testing.assert_close(actual, expected)


def test_an_exception_of_a_hook_says_which_hook_and_what_it_declared() -> None:
    def forgot_needs(batch: TokenBatch) -> Tensor:
        return batch.logps - batch.ref_logps  # type: ignore[operator]

    with pytest.raises(ObjectiveError) as caught:
        Objective(regularizers=[forgot_needs]).loss(sample().batch(ref_logps=None))
    assert "regularizer 'forgot_needs' raised TypeError" in str(caught.value)
    assert "(test_custom_hooks.py, line" in str(caught.value)
    assert "It declares needs=[]. Fields that no hook needs are None in the batch, now: ref_logps" in str(caught.value)
    assert 'forgot_needs.needs = {"..."}' in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)


def detached(batch: TokenBatch) -> Tensor:
    return (batch.logps.detach() + 1.0) ** 2


@pytest.mark.parametrize("term", [detached, lambda batch: torch.ones_like(batch.logps), lambda batch: torch.ones(())])
def test_a_term_that_pulls_on_nothing_is_refused(term: Any) -> None:
    with pytest.raises(ObjectiveError, match=r"without gradient.*coef: 0"):
        Objective(regularizers=[{"name": "kl", "coef": 0.0}, term]).loss(sample().batch())


def test_a_term_that_pulls_on_nothing_may_be_logged(hooks: Path) -> None:
    hook = registry_of(detached)(coef=0.0)
    assert "objective/detached" in Objective(regularizers=[hook]).loss(sample().batch()).metrics


def registry_of(function: Any) -> Any:
    """The factory of a custom regularizer."""
    return lambda **options: regularizers.build({"name": f"{__name__}:{function.__name__}", **options})


def test_a_hook_with_state_takes_no_schedule(hooks: Path) -> None:
    class Counter:
        def __call__(self, batch: TokenBatch) -> Tensor:
            return -batch.advantages * batch.ratio

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    def factory(rate: float = 0.1) -> Any:
        return Counter()

    clips._custom(factory, "factory", importable=False)(rate=0.2)
    with pytest.raises(ConfigError, match="has state, so rate cannot follow a schedule"):
        clips._custom(factory, "factory", importable=False)(rate="linear(0.1, 0.0, 10)")


def unknown_need(batch: TokenBatch) -> Tensor:
    return batch.logps


unknown_need.needs = {"ref_logp"}  # type: ignore[attr-defined]


def two_required(batch: TokenBatch, power: float) -> Tensor:
    return batch.logps * power


def takes_coef(batch: TokenBatch, coef: float = 1.0) -> Tensor:
    return batch.logps * coef


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (two_required, r"has the parameters without default \(batch, power\). Expected either a function of \(batch\)"),
        (takes_coef, "the kit uses the name 'coef' itself"),
        (unknown_need, r"needs the unknown field 'ref_logp'\. Did you mean 'ref_logps'\?"),
        (lambda scale=1.0: scale, r"regularizer '<lambda>' returned float, not a function"),
        (torch.abs, "has no Python signature; wrap it in a function"),
        ({"name": regularizers.kl()}, "is a hook whose hyper-parameters are set already. Pass the name kl instead"),
        (3, "A regularizer is a name, a dict or a callable, got 3"),
        ({"name": plain_pull, "strenght": 2}, r"no hyper-parameter 'strenght'. Did you mean 'strength'\?"),
        (clips.ppo_clip(), "clip 'ppo_clip' is no regularizer"),
        (clips.ppo_clip, "clip 'ppo_clip' is no regularizer"),
        ({"name": plain_pull, "strength": "linear(0.1, 0.2)"}, "linear needs start, end, steps: missing 1 required"),
        ({"name": lambda batch, power=2: batch.logps**power, "power": "linear(2, 1, 9)"}, "annotate it as float"),
        ("nowhere.py:pull", "there is no file"),
    ],
)
def test_what_cannot_be_a_hook_is_refused_when_it_is_named(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Objective(regularizers=[entry])


def test_a_lambda_works_but_cannot_be_written_down() -> None:
    objective = Objective(clip=lambda batch: -batch.advantages * batch.ratio)
    gradient(objective, sample())
    with pytest.raises(ConfigError, match="clip '<lambda>' cannot be written to YAML"):
        objective.to_spec()


# --- registries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coef", "message"),
    [
        (float("inf"), "coef must be finite, got inf"),
        (-float("inf"), "coef must be finite, got -inf"),
        (float("nan"), "coef must be a number or a schedule, got nan"),
        (-0.1, "coef must satisfy 0 <= coef, got -0.1"),
    ],
)
def test_a_coef_is_finite_and_not_negative(coef: float, message: str) -> None:
    with pytest.raises(ConfigError, match=f"regularizer 'kl': {message}"):
        Objective(regularizers=[{"name": "kl", "coef": coef}])
    with pytest.raises(ConfigError, match=f"regularizer '.*plain_pull': {message}"):
        Objective(regularizers=[{"name": plain_pull, "coef": coef}])


def test_the_ratio_that_a_hook_of_ones_own_reads_is_logged_too() -> None:
    def own(batch: TokenBatch) -> Tensor:
        return -batch.advantages * batch.ratio

    metrics = Objective(clip=own).loss(sample().batch()).metrics
    kits = Objective(clip="ppo_clip").loss(sample().batch()).metrics
    assert metrics["ratio/mean"].value.item() == pytest.approx(kits["ratio/mean"].value.item())
    assert "ratio/mean" not in Objective(clip="reinforce").loss(sample().batch()).metrics


def test_a_hook_of_another_kind_is_refused_by_its_kind() -> None:
    def centred(batch: RewardBatch) -> Tensor:
        return batch.rewards - batch.rewards.mean()

    centred.kind = "advantage"  # type: ignore[attr-defined]
    assert Objective(advantage=centred).advantage.kind == "advantage"
    with pytest.raises(ConfigError, match=r"centred' declares kind = 'advantage', so it cannot be used as a clip"):
        Objective(clip=centred)


def test_a_hyper_parameter_that_follows_a_schedule_is_logged() -> None:
    batch = dataclasses.replace(sample().batch(), step=5)
    metrics = Objective(clip={"name": "ppo_clip", "eps_high": "linear(0.4, 0.2, 10)"}).loss(batch).metrics
    assert metrics["coef/ppo_clip.eps_high"].value.item() == pytest.approx(0.3)
    assert not any(name.startswith("coef/") for name in Objective(clip="ppo_clip").loss(batch).metrics)
