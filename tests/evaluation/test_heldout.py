"""kit.evaluation.heldout: scores of known completions equal hand arithmetic, and scoring leaves no trace in the model."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rewards
from kit.config import EvaluationConfig, GenerationConfig, ModelConfig
from kit.evaluation.heldout import HeldOut
from kit.models.failures import BatchSizeBackoff


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> Any:
    from kit.models.loading import find_model, load_model

    config = ModelConfig(name=str(model_folder), dtype="float32")
    return load_model(find_model(config, chat=True), config)


ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {n} + 1?"}], "reference": str(n + 1), "answer": f"#### {n + 1}"}
    for n in range(4)
]


def heldout(loaded: Any, preset: Any = None, **changes: Any) -> HeldOut:
    config = EvaluationConfig(**{"prompts": 4, "k": 2, "batch_size": 3} | changes)
    preset = preset or rewards.load("gsm8k-hash")
    return HeldOut(ROWS, preset, loaded.tokenizer, config, GenerationConfig(max_completion_tokens=8))


def scripted(
    loaded: Any, greedy: list[str], sampled: list[str], monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> Any:
    """The scores of a model that gives these completions."""

    def complete(self: HeldOut, model: Any, prompts: list[str], sample: bool, *_: Any) -> list[tuple[list[int], bool]]:
        texts = sampled if sample else greedy
        assert len(prompts) == len(texts)
        return [(loaded.tokenizer(text)["input_ids"], not text) for text in texts]

    monkeypatch.setattr(HeldOut, "_complete", complete)
    return heldout(loaded, **changes).score(loaded.model)


def test_scores_are_those_of_the_answers(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = ["#### 1", "#### 2", "#### 9", ""]
    sampled = ["#### 1", "#### 1", "#### 2", "no", "#### 3", "#### 9", "", "#### 0"]
    score = scripted(loaded, greedy, sampled, monkeypatch)
    assert score["greedy_accuracy"]["value"] == 0.5  # 2 of 4
    assert score["pass@1"]["value"] == pytest.approx((2 / 2 + 1 / 2 + 1 / 2 + 0) / 4)
    assert score["pass@2"]["value"] == pytest.approx((1 + 1 + 1 + 0) / 4)
    assert score["truncated_share"] == 1 / 8
    assert score["problems"] == 4
    assert score["generation"] == {
        "max_completion_tokens": 8, "top_p": 1.0, "top_k": 0, "min_p": None
    }  # fmt: skip
    assert [sample["completion"] for sample in score["samples"]] == greedy
    assert score["samples"][0]["prompt"] == "What is 0 + 1?"
    assert score["samples"][0]["reference"] == "1"


def test_the_score_repeats_and_does_not_depend_on_the_batch(loaded: Any) -> None:
    def stable(score: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in score.items() if key != "seconds"}

    first = stable(heldout(loaded).score(loaded.model))
    assert stable(heldout(loaded).score(loaded.model)) == first
    other = stable(heldout(loaded, batch_size=1).score(loaded.model))
    assert other["samples"] == first["samples"]  # greedy completions: padding changes nothing


@pytest.mark.parametrize("training", [True, False])
def test_random_state_and_mode_are_as_before(loaded: Any, training: bool) -> None:
    import torch

    loaded.model.train(training)
    before = torch.random.get_rng_state()
    heldout(loaded).score(loaded.model)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert loaded.model.training is training


def test_gradient_checkpointing_is_off_inside_and_on_again_even_after_a_failure(loaded: Any) -> None:
    inside: list[bool] = []

    def fail(*_: Any) -> None:
        inside.append(loaded.model.is_gradient_checkpointing)
        raise ZeroDivisionError

    loaded.model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        with pytest.raises(ZeroDivisionError):
            heldout(loaded).score(loaded.model, fail)
        assert inside == [False]
        assert loaded.model.is_gradient_checkpointing
    finally:
        loaded.model.gradient_checkpointing_disable()


@pytest.mark.parametrize("failing", [0, 3])
def test_the_cache_of_unsloths_generation_is_freed(loaded: Any, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """It would stay beside vLLM's. Half allocated when memory ran out, it would break the next pass."""
    spec = importlib.util.find_spec("unsloth")  # without importing it
    if spec is None:
        pytest.skip("Unsloth is not installed")
    source = Path(str(spec.origin)).parent / "models" / "_decode_graphs.py"
    graphs = SimpleNamespace(**runpy.run_path(str(source)))
    monkeypatch.setitem(sys.modules, "unsloth.models._decode_graphs", graphs)
    model, scorer = loaded.model, heldout(loaded)
    attention, empty, generate = next(model.modules()), torch.empty, type(model).generate
    made, sizes = list[Any](), list[int]()

    def limited(*arguments: Any, **keywords: Any) -> torch.Tensor:
        made.append(arguments)
        if len(made) == failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*arguments, **keywords)

    def allocating(self: Any, input_ids: torch.Tensor, **keywords: Any) -> Any:
        sizes.append(len(input_ids))
        prompt = torch.zeros(len(input_ids), 2, 5, 4)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", limited)
            graphs.alloc_decode_buffers(
                attention, prompt, prompt, len(input_ids), 2, 2, 4, 8, torch.float32, "cpu", 512
            )
        return generate(self, input_ids=input_ids, **keywords)

    monkeypatch.setattr(type(model), "generate", allocating)
    scorer.memory = BatchSizeBackoff()
    scorer.score(model)
    assert sizes[:2] == [3, 2 if failing else 1]
    assert not [name for name in attention.__dict__ if name.startswith(("paged", "temp"))]


def test_functions_see_messages_and_what_trainers_hand_over(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training; TRL's functions read `completion[0]["content"]`."""

    def first_letter(
        prompts: Any, completions: Any, log_extra: Any, log_metric: Any, trainer_state: Any, **_: Any
    ) -> list[float]:
        assert trainer_state.global_step == 0
        log_extra("letters", [c[0]["content"][:1] for c in completions])
        log_metric("seen", 1.0)
        return [float(c[0]["content"].startswith("y")) for c in completions]

    preset = rewards.from_functions([(first_letter, 1.0)])
    score = scripted(loaded, ["yes", "no", "yes", "yes"], ["no"] * 8, monkeypatch, preset=preset)
    assert score["greedy_reward"]["value"] == 3 / 4
    assert score["reward_failure_share"] == 0.0
