"""Every refusal detects its planted defect."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.errors import EnvironmentUnsupported, ObjectiveError
from kit.models.libraries import check_trl
from kit.trainer.arguments import TRL_LOSS_ARGUMENTS, check_arguments
from kit.trainer.trainer import HookedGRPOTrainer

NewTrainer = Callable[..., Any]


@pytest.fixture(autouse=True)
def _tested_versions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KIT_ALLOW_UNTESTED", raising=False)


# --- version ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.14.3", "1.150.0", "1.15"])
def test_an_untested_trl_is_refused_with_what_was_seen_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("trl.__version__", version)
    with pytest.raises(EnvironmentUnsupported, match=re.escape(f"TRL {version} is installed")) as refusal:
        check_trl()
    assert "pip install 'trl==1.15.*'" in str(refusal.value)
    with pytest.raises(EnvironmentUnsupported):  # and the class cannot be imported either
        runpy.run_path(str(inspect.getsourcefile(HookedGRPOTrainer)))


# --- base class -------------------------------------------------------------------------------------------------------

OVERRIDDEN = {
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep", "compute_entropy"),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_generate_and_score_completions": ("inputs",),
    "_save_checkpoint": ("model", "trial"),
    "_get_output_dir": ("trial",),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_get_train_sampler": ("dataset",),
    "log": ("logs", "start_time"),
}


def test_the_installed_trl_has_every_method_and_parameter_that_is_overridden() -> None:
    from trl import GRPOTrainer

    for method, needed in OVERRIDDEN.items():
        assert set(needed) <= set(inspect.signature(getattr(GRPOTrainer, method)).parameters), method
        assert getattr(HookedGRPOTrainer, method) is not getattr(GRPOTrainer, method), method


# --- arguments of TRL's own loss --------------------------------------------------------------------------------------


def test_trls_sampler_correction_beside_an_objective_is_refused_and_without_vllm_left_alone(
    arguments: Callable[..., Any], tmp_path: Path
) -> None:
    args = arguments(tmp_path)
    assert args.vllm_importance_sampling_correction
    check_arguments(args)  # TRL's default; it only acts if vLLM generates
    args.use_vllm = True
    with pytest.raises(ObjectiveError, match="vllm_importance_sampling_correction=True would be ignored"):
        check_arguments(args)
    args.vllm_importance_sampling_correction = False
    check_arguments(args)


def test_default_arguments_pass_also_when_spelt_out(arguments: Callable[..., Any], tmp_path: Path) -> None:
    check_arguments(arguments(tmp_path))
    check_arguments(arguments(tmp_path, beta=0.0, loss_type="dapo", epsilon=0.2, scale_rewards=True))


def test_the_guard_covers_every_argument_that_trls_loss_reads() -> None:
    """A new argument of TRL's loss fails this test, so that the kit cannot ignore it without notice."""
    from trl import GRPOTrainer

    read = set(re.findall(r"self\.args\.(\w+)", inspect.getsource(GRPOTrainer._compute_loss)))
    ours_too = {"steps_per_generation"}
    details_of_adaptive_entropy = {name for name in read if name.startswith("entropy_")}  # need the switch
    assert read - ours_too - details_of_adaptive_entropy <= set(TRL_LOSS_ARGUMENTS)


def test_the_refusal_is_in_the_trainer_and_only_beside_an_objective(new_trainer: NewTrainer) -> None:
    with pytest.raises(ObjectiveError, match=r"beta=0\.04 would be ignored"):
        new_trainer(objective="grpo", beta=0.04)
    assert new_trainer(beta=0.04, loss_type="grpo").beta == 0.04


def test_the_callers_arguments_are_left_alone(
    new_trainer: NewTrainer, arguments: Callable[..., Any], tmp_path: Path
) -> None:
    args = arguments(tmp_path)
    trainer = new_trainer(objective={"regularizers": ["kl"]}, extra={"args": args})
    assert trainer.beta != 0  # TRL keeps a reference if beta is not 0
    assert args.beta == 0


# --- objective --------------------------------------------------------------------------------------------------------


def test_a_hook_that_wants_what_the_run_lacks_stops_it(new_trainer: NewTrainer) -> None:
    from kit.objective import Objective

    def correction(batch: Any) -> Any:
        return (batch.old_logps - batch.sampler_logps).exp()

    correction.needs = {"sampler_logps"}  # type: ignore[attr-defined]
    with pytest.raises(ObjectiveError, match="needs sampler_logps, but the generation engine reported no"):
        new_trainer(objective=Objective(weights=[correction])).train()


def test_a_loss_replaced_after_construction_stops_the_first_step(new_trainer: NewTrainer) -> None:
    from trl import GRPOTrainer

    trainer = new_trainer(objective="grpo", max_steps=3)
    stock = GRPOTrainer._compute_loss.__get__(trainer)
    trainer.compute_loss = lambda model, inputs, *args, **keywords: stock(model, inputs)
    with pytest.raises(ObjectiveError, match="without calling the objective"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_log_probabilities_without_gradient_stop_the_first_step(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(objective="grpo")
    score = trainer.scorer.score

    def detached(*args: Any, **keywords: Any) -> Any:
        output = score(*args, **keywords)
        return replace(output, logps=output.logps.detach())

    trainer.scorer.score = detached
    with pytest.raises(ObjectiveError, match="log-probabilities carry no gradient"):
        trainer.train()
