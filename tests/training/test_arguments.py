"""Arguments of the trainer are explicit, so that defaults of other packages change no run; `learning_rate: auto`."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig
from trl import GRPOConfig

from kit.config import load_config
from kit.errors import EnvironmentUnsupported, ObjectiveError
from kit.models.backend import Backend, is_unsloths
from kit.runner.prepare import learning_rate, learning_rate_notes, prepare
from kit.trainer.arguments import changes, check_arguments, check_backend, pinned

GIVEN: dict[str, Any] = {"output_dir": "run", "use_cpu": True, "bf16": False, "learning_rate": 0.25}


class Moving(GRPOConfig):  # type: ignore[misc]
    """A `GRPOConfig` that changes defaults and an explicit value, as a backend may."""

    def __init__(self, weight_decay: float = 0.5, use_bias_correction_kl: bool = False, **options: Any) -> None:
        super().__init__(weight_decay=weight_decay, use_bias_correction_kl=use_bias_correction_kl, **options)
        self.epsilon_high = 0.28
        self.optim = "adamw_torch_fused"


Moving.__name__ = "GRPOConfig"


def test_pinned_arguments_are_those_of_trl() -> None:
    assert pinned(GRPOConfig, GIVEN).to_dict() == GRPOConfig(**GIVEN).to_dict()


def test_moved_defaults_and_changed_fields_are_put_back() -> None:
    moved, held = Moving(**GIVEN), pinned(Moving, GIVEN | {"optim": "adamw_torch"})
    assert (moved.weight_decay, moved.epsilon_high) == (0.5, 0.28)
    assert held.to_dict() == GRPOConfig(**GIVEN, optim="adamw_torch").to_dict()


def test_changes_lists_arguments_that_differ() -> None:
    requested, in_force = pinned(GRPOConfig, GIVEN), pinned(GRPOConfig, GIVEN | {"max_grad_norm": 0.25, "beta": 1.0})
    assert changes(requested, requested) == {}
    assert changes(requested, in_force) == {"max_grad_norm": [1.0, 0.25]}


def test_a_default_that_a_backend_has_moved_counts_as_unset() -> None:
    with pytest.raises(ObjectiveError, match=r"^epsilon_high=0\.28 would be ignored") as refusal:
        check_arguments(Moving(**GIVEN))
    assert "use_bias_correction_kl" not in str(refusal.value)
    check_arguments(pinned(Moving, GIVEN))
    check_arguments(GRPOConfig(**GIVEN))


class UnslothGRPOTrainer:
    """A stand-in for the class that Unsloth generates."""

    def wrapped(self, *args: Any, **more: Any) -> None:
        """Accept any arguments, as Unsloth's wrapper does."""


class GRPOTrainer:
    """A stand-in for TRL's class."""


def test_the_trainer_class_must_be_the_backends() -> None:
    unsloth, plain = Backend("unsloth", "cuda", ""), Backend("unsloth-cpu", "cpu", "")
    assert is_unsloths(type("Ours", (UnslothGRPOTrainer,), {}))
    assert not is_unsloths(GRPOTrainer)
    for base, backend in (
        (UnslothGRPOTrainer, unsloth),
        (GRPOTrainer, plain),
        (GRPOTrainer, None),
        (UnslothGRPOTrainer, None),
    ):
        check_backend(base, backend)
    with pytest.raises(EnvironmentUnsupported, match="did not replace"):
        check_backend(GRPOTrainer, unsloth)
    with pytest.raises(EnvironmentUnsupported, match="imported in this process"):
        check_backend(UnslothGRPOTrainer, plain)


@pytest.mark.parametrize(
    ("kind", "hidden", "lora", "expected"),
    [
        ("llama", 4096, True, 2.9e-4),  # 5e-4 (2000 / 4096)^0.781 = 5e-4 * 0.5713
        ("llama", 2048, True, 4.9e-4),  # 5e-4 * 0.9816
        ("qwen3", 4096, True, 4.7e-4),  # 5e-4 (2000 / 4096)^0.0775 = 5e-4 * 0.9460
        ("qwen3", 4096, False, 4.7e-5),
        ("gemma2", 4096, True, 5e-4),  # no exponent is published
    ],
)
def test_the_published_rule(kind: str, hidden: int, lora: bool, expected: float) -> None:
    assert learning_rate(AutoConfig.for_model(kind, hidden_size=hidden), lora=lora) == pytest.approx(expected)


def test_auto_learning_rate_is_resolved_and_explained(tree: Any) -> None:
    tree["optimisation"]["learning_rate"] = "auto"
    tree["model"]["lora"] = {"rank": 64, "alpha": 64}
    requested = load_config(tree)
    parts = prepare(requested)
    rate = parts.config.optimisation.learning_rate
    assert rate == learning_rate(parts.files.config, lora=True)
    assert load_config(parts.config).optimisation.learning_rate == rate  # the value that a saved run has
    notes = " ".join(learning_rate_notes(requested, parts.config, parts.files.config))
    for words in (f"{rate:g} (auto", "alpha 64"):
        assert words in notes
    assert learning_rate_notes(parts.config, parts.config, parts.files.config) == []


def test_a_rate_far_below_the_rule_is_named(tree: Any) -> None:
    tree["optimisation"]["learning_rate"] = 1e-5
    config = load_config(tree)
    model_config = AutoConfig.for_model("qwen3", hidden_size=4096)
    (note,) = learning_rate_notes(config, config, model_config)
    assert "1e-05 is 47 times lower than that of optimisation.learning_rate: auto (0.00047)" in note
