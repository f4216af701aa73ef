"""benchmarks/gpu_check.py: what it compares and what it fails on, as far as that shows without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check

    return gpu_check


def test_transformers_with_a_colocated_engine_is_an_arm_in_16_bits(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import gpu_arms

    monkeypatch.setattr(gpu_arms, "find_spec", lambda name: object())
    found = gpu_check.arms(False)
    arm = next(arm for arm in found if (arm.backend, arm.engine) == ("transformers", "vllm"))
    config = gpu_check.configuration(arm, tmp_path, tmp_path, gpu_check.size_of(False))
    assert not config.model.load_in_4bit
    assert config.generation.vllm.gpu_memory_utilization == gpu_arms.ENGINE_SHARE
    assert config.optimisation.learning_rate == gpu_arms.ENGINE_LEARNING_RATE
    assert gpu_check.configuration(found[0], tmp_path, tmp_path, gpu_check.size_of(False)).model.load_in_4bit
    assert arm not in gpu_check.arms(False, room=False)
    assert len({arm.name for arm in found}) == len(found)
    assert gpu_check.holds_engine(16 * 2**30, 80 * 2**30)
    assert not gpu_check.holds_engine(16 * 2**30, 24 * 2**30)


def test_an_engine_off_the_trainers_weights_fails(gpu_check: Any) -> None:
    """Planted: weights that were not handed over, and an engine that was never compared."""
    steps = [{"loss": 0.1, "sampler/logp_difference": gap} for gap in (0.001, 0.002, 0.002, 0.003, 0.002)]
    assert gpu_check.handed_over(steps, 0.01)[0]
    assert not gpu_check.handed_over([*steps[:4], {"sampler/logp_difference": 0.2}], 0.01)[0]
    assert not gpu_check.handed_over([*steps[:4], {"sampler/logp_difference": float("nan")}], 0.01)[0]
    assert not gpu_check.handed_over([{"loss": 0.1}] * 5, 0.01)[0]


def test_transformers_arms_recompute_activations_as_a_run_does(gpu_check: Any, model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    args = SimpleNamespace(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer = SimpleNamespace(model=model, args=args)
    gpu_check.recompute_activations(trainer, "unsloth")
    assert not model.is_gradient_checkpointing
    gpu_check.recompute_activations(trainer, "transformers")
    assert model.is_gradient_checkpointing
    assert args.gradient_checkpointing_kwargs == {"use_reentrant": False}


def test_the_trainer_of_a_vllm_arm_is_given_the_engine(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch, model_folder: Path, tmp_path: Path
) -> None:
    from kit.training.engine_side import EngineSettings

    class Seen(Exception):
        pass

    def trainer(*_: Any, **keywords: Any) -> None:
        seen.update(keywords)
        raise Seen

    seen: dict[str, Any] = {}
    monkeypatch.setattr("kit.training.trainer.make_trainer_class", lambda: trainer)
    size = gpu_check.size_of(True)
    for engine, expected in (("vllm", EngineSettings), ("hf", type(None))):
        with pytest.raises(Seen):
            gpu_check.make_trainer(gpu_check.Arm("ours", "transformers", engine), model_folder, tmp_path, size)
        assert isinstance(seen["engine"], expected)


@pytest.mark.survival
def test_every_arm_takes_the_same_gradient_from_the_same_rollouts(gpu_check: Any) -> None:
    """The command itself, on the tiny model; packed, padded and TRL's own loss, each in a process of its own."""
    said: list[str] = []
    result = gpu_check.check(["tiny"], True, said.append)
    assert gpu_check.passed(result), result
    norms = {name: arm["gradient_norm"] for name, arm in result["models"]["tiny"].items()}
    assert len(norms) == 3
    assert norms["trl (transformers, hf)"] > 0
    assert list(norms.values()) == pytest.approx([norms["trl (transformers, hf)"]] * 3, rel=1e-5)
    assert all(name in gpu_check.table(result) for name in norms)
