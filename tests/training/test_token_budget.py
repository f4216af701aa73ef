"""A micro-batch in parts of bounded tokens: the same loss and gradient, and no graph above the token budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from kit.config import load_config
from kit.errors import ObjectiveError
from kit.generation import decoding
from kit.models import memory
from kit.models.backend import Backend
from kit.models.failures import BatchSizeBackoff
from kit.models.shape import shape_of
from kit.objective import Objective
from kit.objective.objective import parts_obstacle
from kit.objective.recipes import recipe_names
from kit.runner import build
from kit.trainer.policy_loss import MicroBatch, SequenceLengths, TokenBudget, split_by_tokens

from .rollouts import KL, NewTrainer
from .steps import ROWS, assert_same, in_a_step, mixed_rollout, switch, use, watching

BUDGET = 60


@pytest.fixture(scope="module")
def mixed(new_trainer: NewTrainer) -> tuple[Any, list[dict[str, Any]]]:
    """One rollout for all objectives whose advantages are per completion."""
    rich = {"recipe": "dapo", "regularizers": [KL, {"name": "nll_on_correct"}]}
    return mixed_rollout(new_trainer, rich)


# --- the plan ---------------------------------------------------------------------------------------------------------


def rows_of(*sizes: tuple[str, int, int]) -> list[SequenceLengths]:
    return [SequenceLengths(*size) for size in sizes]


def test_parts_keep_prompts_together_and_to_the_budget() -> None:
    rows = rows_of(("a", 10, 5), ("b", 4, 4), ("a", 10, 3), ("b", 4, 2), ("c", 6, 6), ("a", 10, 4))
    parts = split_by_tokens(rows, range(6), TokenBudget(tokens=30))
    assert sorted(number for part in parts for number in part) == list(range(6))
    assert all(TokenBudget().cost([rows[n] for n in part]) <= 30 for part in parts)
    assert [0, 5] in parts  # the longest two rows of a group, whose third does not fit
    assert any({1, 3} <= set(part) for part in parts)
    undivided = split_by_tokens(rows, range(6), TokenBudget(tokens=96))
    assert undivided == [[0, 1, 2, 3, 4, 5]]
    assert split_by_tokens(rows, [4, 1], TokenBudget()) == [[4, 1]]
    assert split_by_tokens(rows, [], TokenBudget(tokens=5)) == []


def test_padding_counts_only_where_it_goes_through_the_model() -> None:
    rows = rows_of(("a", 10, 10), ("b", 2, 1), ("c", 2, 1))
    assert TokenBudget().cost(rows) == 60
    assert TokenBudget(padded=False).cost(rows) == 26
    assert split_by_tokens(rows, range(3), TokenBudget(tokens=26, padded=False)) == [[0, 1, 2]]
    assert split_by_tokens(rows, range(3), TokenBudget(tokens=26)) == [[0], [1, 2]]


def test_one_row_above_the_budget_goes_alone_and_rows_are_bounded_too() -> None:
    rows = rows_of(("a", 50, 50), ("b", 2, 1), ("b", 2, 1), ("b", 2, 1))
    assert split_by_tokens(rows, range(4), TokenBudget(tokens=10)) == [[0], [1, 2, 3]]
    assert split_by_tokens(rows, range(4), TokenBudget(rows=2)) == [[0, 3], [1, 2]]


# --- loss and gradient ------------------------------------------------------------------------------------------------


SPECS: dict[str, Any] = {name: name for name in recipe_names() if name not in ("ppo", "opd", "sdpo")} | {
    "regularizers": {
        "recipe": "bnpo", "weights": ["off_policy_mask", "drop_truncated"],
        "regularizers": [{**KL, "bias_corrected": True}, "entropy_bonus", "nll_on_correct"],
    },
    "quantile": {
        "recipe": "bnpo", "weights": ["high_entropy_only"],
        "regularizers": [{"name": "entropy_bonus", "average": "tokens"}],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(SPECS))
def test_an_objective_has_the_same_gradient_in_parts(mixed: tuple[Any, list[dict[str, Any]]], name: str) -> None:
    trainer, batches = mixed
    for batch in batches:
        batch["truncated"] = torch.arange(ROWS) % 4 == 1
    use(trainer, SPECS[name])
    switch(trainer)
    want = in_a_step(trainer, batches)
    switch(trainer, budget=BUDGET)
    with watching(trainer) as passes:
        assert_same(in_a_step(trainer, batches), want)
    assert len(passes.rows) > len(batches)
    assert max(passes.tokens) <= BUDGET
    twice = parts_obstacle(trainer.objective) is not None
    assert twice == (name == "quantile")  # no recipe looks across completions
    assert passes.without_graph == (len(passes.rows) if twice else 0)
    assert set(passes.alive) == {0}  # each graph was freed before the next pass


# --- defects ----------------------------------------------------------------------------------------------------------


def test_the_first_steps_see_a_hook_that_is_wrongly_called_separable(new_trainer: NewTrainer) -> None:
    def centred(batch: Any) -> Any:
        return -batch.advantages * batch.ratio * (batch.ratio + batch.logps.mean() - 0.5).sum(1, keepdim=True)

    centred.row_separable = True  # type: ignore[attr-defined]
    trainer = new_trainer(objective=Objective(clip=centred), extra={"token_budget": 40}, per_device_train_batch_size=8)
    torch.manual_seed(0)
    with pytest.raises(ObjectiveError, match="is not that of the objective"):
        trainer.train()


def test_scores_without_a_graph_keep_to_the_budget(mixed: tuple[Any, list[dict[str, Any]]]) -> None:
    trainer, batches = mixed
    use(trainer, "dapo")
    rows, scorer, counts = MicroBatch(batches[0]).rows, trainer.scorer, list[int]()
    layer = trainer.accelerator.unwrap_model(trainer.model).get_decoder().layers[0]
    handle = layer.register_forward_hook(lambda *args: counts.append(args[-1].shape[:-1].numel()))
    try:
        with torch.no_grad():
            undivided = scorer.score(trainer.model, rows)
            counts.clear()
            trainer.set_savings(token_budget=2 * rows.ids.shape[1])
            parts = scorer.score(trainer.model, rows)
    finally:
        handle.remove()
        switch(trainer)
    torch.testing.assert_close(parts.logps, undivided.logps, rtol=0, atol=1e-5)
    assert len(counts) > 1
    assert max(counts) <= 2 * rows.ids.shape[1]


Sizes = Callable[..., tuple[int | None, int | None, dict[str, str]]]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """Return `sizes(GiB, overrides)`: token budget, batch of the rollout, and notes of a Qwen3 run with that free memory."""

    def choose(
        gib: float, *overrides: str, device: str = "cuda", env: Any = None, checkpoint: str | None = "checkpoint-3"
    ) -> Any:
        requested = ["model.lora={}", "data.max_prompt_tokens=200", "generation.max_completion_tokens=4000",
                 "optimisation.batch_size=64", "generation.num_generations=8", "generation.engine=hf", *overrides]  # fmt: skip
        files = SimpleNamespace(
            shape=shape_of(Qwen3Config(num_hidden_layers=28)), backend=Backend("transformers", device, "")
        )
        parts: Any = SimpleNamespace(
            config=load_config("quickstart", requested), files=files, objective=Objective.from_spec("grpo")
        )
        monkeypatch.setattr(memory, "free_memory", lambda device: gib * memory.GIB)
        for module in (memory, build):
            monkeypatch.setattr(module, "card_of", lambda device: None)
        previous: Any = None if env is None else SimpleNamespace(checkpoint=checkpoint, env=env)
        return build.chosen_sizes(parts, previous)

    return choose


def test_a_run_generates_what_fits_at_once_and_goes_on_so(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(gib: float, *overrides: str, **options: Any) -> int | None:
        _, batch_size, notes = sizes(gib, *overrides, **options)
        note = notes["generation_batch"]
        assert (batch_size is not None and "env" not in options) == note.startswith(f"{batch_size} of ")
        return batch_size

    assert chosen(1000) is None
    at_once = [chosen(gib) for gib in (180, 150, 120, 100, 50, 0.1)]
    assert at_once == sorted(at_once, reverse=True)
    assert at_once[-1] == 1  # at least one, even if it does not fit
    assert all(size % 8 == 0 for size in at_once if size > 8)
    assert len({size for size in at_once if 8 <= size < 64}) > 1
    assert chosen(30, device="cpu") is None
    assert chosen(30, "generation.engine=vllm") is None
    before = {"engine": {"name": "hf"}}
    assert chosen(30, env=before | {"generation_batch": 24}) == 24
    assert chosen(0.1, env=before) is None  # an earlier run continues with its own setting
    for changed in ({"engine": {"name": "vllm"}}, before | {"gpu": "another GPU"}):
        assert sizes(0.1, env=changed)[1] == 1
    backoff = BatchSizeBackoff()
    backoff.sizes, backoff.chosen = {"generation": 24}, frozenset({"generation"})  # of a larger GPU
    backoff.load_state_dict({"generation": 2, "training": 4})
    assert backoff.sizes == {"generation": 24, "training": 4}
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert chosen(30) is None  # several processes divide nothing


def test_a_run_chooses_its_budget_and_keeps_it_when_resumed(sizes: Sizes) -> None:
    def budget(gib: float, *overrides: str, **options: Any) -> tuple[int | None, str]:
        size, _, notes = sizes(gib, "generation.max_completion_tokens=64", *overrides, device="cpu", **options)
        return size, notes["token_budget"]

    assert budget(1e6)[0] is None
    assert budget(1e6, "optimisation.token_budget=512") == (512, "")
    assert budget(1e6, "optimisation.token_budget=0") == (None, "")
    before = {"token_budget": 4096}
    assert budget(1e6, env=before) == (4096, "at most 4096 tokens at once, as at the start of the run")
    assert budget(1e6, env=before, checkpoint=None)[0] is None  # without a checkpoint, the earlier run has no effect
    chosen, note = budget(0.001)
    assert chosen == 200 + 64  # at least one completion, whatever the memory
    assert note.startswith(f"at most {chosen} tokens at once, chosen for 1.0 GiB")


def test_a_run_generates_as_many_at_once_as_were_chosen(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = {"token_budget": "", "generation_batch": "3 of 8 completions are generated at a time."}
    monkeypatch.setattr(build, "chosen_sizes", lambda *_: (None, 3, notes))
    batch_sizes, decode = [], decoding.decode

    def watched(model: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
        batch_sizes.append(len(input_ids))
        return decode(model, input_ids, **inputs)

    monkeypatch.setattr(decoding, "decode", watched)
    done = attempt()
    assert done.code == 0, done.message
    assert batch_sizes == [3, 3, 2, 3, 3, 2]
    assert "3 of 8 completions are generated at a time" in done.shown
    assert json.loads((done.folder.path / "env.json").read_text())["generation_batch"] == 3
