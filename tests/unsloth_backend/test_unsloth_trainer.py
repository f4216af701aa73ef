"""Hooks affect the trainer class that Unsloth generates for CUDA, tested on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from worker import recipes

from kit.trainer.arguments import TRL_LOSS_ARGUMENTS

pytestmark = [pytest.mark.unsloth, pytest.mark.timeout(900)]
WITH_KL = "grpo with kl"
Worked = dict[str, Any]


def test_the_base_is_the_class_that_unsloth_generates(worked: Worked) -> None:
    names = worked["unsloth"]["class"]
    assert names[0] == "HookedGRPOTrainer"
    assert "UnslothGRPOTrainer" in names
    assert "GRPOTrainer" not in names


def test_its_constructor_seeds_the_process_in_which_the_engine_of_a_loaded_model_draws(worked: Worked) -> None:
    """Unsloth starts the engine with seed 0, and vLLM draws with the random state of the process, which is seeded afterwards."""
    (constructor,) = [source for source in worked["unsloth"]["constructors"] if "VLLMGeneration(" in source]
    assert -1 < constructor.find("set_seed(args.seed, device_specific=True)") < constructor.find("VLLMGeneration(")


@pytest.mark.parametrize("recipe", [*recipes(), WITH_KL])
def test_loss_and_gradients_equal_those_on_trls_class(worked: Worked, recipe: str) -> None:
    actual, stock = worked["unsloth"]["recipes"][recipe], worked["stock"]["recipes"][recipe]
    torch.testing.assert_close(actual["losses"], stock["losses"], rtol=1e-4, atol=1e-6)
    assert actual["gradients"].keys() == stock["gradients"].keys() != set()
    for name, want in stock["gradients"].items():
        assert want.norm() > 0, f"no gradient reaches {name}: the comparison would be empty"
        assert (actual["gradients"][name] - want).norm() <= 1e-4 * want.norm(), name


def test_a_planted_regularizer_changes_loss_and_gradients(worked: Worked) -> None:
    recipes = worked["unsloth"]["recipes"]
    plain, planted = recipes["grpo"], recipes[WITH_KL]
    assert (plain["losses"] - planted["losses"]).abs().min() > 1e-4
    changed = [
        (planted["gradients"][name] - value).norm() > 0.01 * value.norm() for name, value in plain["gradients"].items()
    ]
    assert all(changed)


def test_it_trains_with_the_checks_of_the_first_steps(worked: Worked) -> None:
    result = worked["unsloth"]
    assert result["steps"] == 2
    assert [entry["step"] for entry in result["log"] if entry.get("grad_norm", 0) > 0] == [1, 2]
    assert any("kl" in name for name in result["log"][0])
    assert result["moved_by"], "no adapter weights were found"
    assert [name for name, most in result["moved_by"].items() if not most > 0] == []


@pytest.mark.parametrize(
    ("defect", "words"),
    [
        ("own scorer", "carry no gradient"),
        ("another loss", "without calling the objective"),
        ("mask dropped", "padding wrongly"),
        ("gradient not finite", "NaN or infinite"),
    ],
)
def test_every_guard_fires_on_its_planted_defect(worked: Worked, defect: str, words: str) -> None:
    assert words in worked["unsloth"]["guards"][defect]


def test_and_on_nothing_else(worked: Worked) -> None:
    assert worked["unsloth"]["guards"]["none"] == ""


def test_every_default_that_unsloth_moves_is_pinned(worked: Worked) -> None:
    stock, unsloth = worked["stock"]["arguments"], worked["unsloth"]["arguments"]
    assert {"learning_rate", "optim", "loss_type"} <= worked["unsloth"]["moved"].keys()
    different = {name: (value, unsloth.get(name)) for name, value in stock.items() if value != unsloth.get(name)}
    assert different.pop("router_aux_loss_coef") == (None, 0.0)  # Unsloth's class refuses other values for experts
    assert different.keys() <= {"gradient_checkpointing_kwargs"}, different  # reentrant or not: the gradients are equal
    assert set(TRL_LOSS_ARGUMENTS) & worked["unsloth"]["moved"].keys()


def test_a_trainer_that_makes_bfloat16_of_float32_is_refused(worked: Worked) -> None:
    assert "bf16 False became True" in worked["unsloth"]["float32"]


def test_an_engine_with_standby_keeps_the_share_that_is_configured(worked: Worked) -> None:
    """By default, Unsloth takes most of the GPU's memory, which `plan` does not expect."""
    assert worked["unsloth"]["shares asleep"] == [(0.3, True), (pytest.approx(0.78375), True)]


def test_an_engine_samples_all_completions_of_a_step_at_once(worked: Worked) -> None:
    """By default, Unsloth samples 16 at a time on an L4, so that vLLM generates a step of 64 in four turns."""
    at_once = worked["unsloth"]["completions at once"]
    assert set(at_once["unsloth"].values()) == {16}
    assert at_once["kit"] == {8: 9, 64: 65, 256: 257, 512: 257}


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3_5"])
def test_adapters_are_on_the_language_model_alone_and_an_engine_takes_them(worked: Worked, architecture: str) -> None:
    """Unsloth's `all-linear` adds adapters to the vision tower, too, which Unsloth refuses with an engine."""
    layers = worked["unsloth"]["towers"][architecture]
    assert layers["kit"] == layers["transformers"] != []
    assert layers["with an engine"] == layers["kit"]
    assert not any("vision" in name or "visual" in name for name in layers["kit"])
    assert "Finetuning vision layers is not supported" in layers["all-linear with an engine"]


def test_an_engine_that_shares_the_weights_wakes_and_has_the_adapter_of_each_step(worked: Worked) -> None:
    """No weights are handed over, each rollout has a new LoRA request, and no file is written to the working directory."""
    record = worked["unsloth"]["shared engine"]
    assert record["rollouts"] == [[[7], [7]]] * 2
    assert record["asleep"] == [{"kv_cache"}] * 3
    assert record["numbers"] == [1, 2]
    assert record["B"][0] == 0.0 < record["B"][1]
    assert record["pushed"] == [[]]
    assert record["ends"] == [5, 7], "the end tokens of the model's own files"
    assert record["written"] == []
