"""Conversations of the held-out evaluation equal those of training: ids, masks and messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from kit.config import load_config
from kit.environments.calculator import Calculator
from kit.generation.multi_turn import MultiTurnSampler, environment_rewards, own_tokens
from kit.generation.prompts import count_tokens, lengths_of
from kit.generation.tools import ToolSetup, open_row
from kit.runner.prepare import with_prompt_limit
from tests.training.rollouts import generated
from tests.turns.conftest import QUESTION, SCRIPT

ROWS = [{"prompt": QUESTION, "reference": "84"}] * 4


class Scored(Calculator):
    def reset(self, **columns: Any) -> str:
        self.expressions = []
        return " Go."

    async def think(self, thought: str) -> str:
        """
        Thinks.

        Args:
            thought: What.
        """
        return thought.upper()

    def get_reward(self) -> float:
        return float(len(self.expressions))


def talk(tokenizer: Any, script: list[list[str]], interaction: ToolSetup, limit: int = 160) -> list[Any]:
    turns = iter(script)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        texts = next(turns)
        assert len(texts) == len(prompts)
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=256))
    return MultiTurnSampler(interaction, tokenizer, limit).converse(ROWS, generate, [tokenizer.eos_token_id], model)


def test_the_text_of_an_environment_counts_as_prompt(tokenizer: Any) -> None:
    """vLLM refuses longer sequences than the longest prompt and completion."""
    interaction, rows = ToolSetup(environments={None: Scored}), Dataset.from_list(ROWS)
    prompt, _, tools = open_row(interaction, ROWS[0])
    (length,) = count_tokens(tokenizer, [prompt], tools)
    assert (
        lengths_of(tokenizer, rows, interaction) == [length] * 4 > lengths_of(tokenizer, rows, ToolSetup(tuple(tools)))
    )
    config = load_config({"data": {"max_prompt_tokens": None}, "generation": {"engine": "vllm"}})
    data: Any = SimpleNamespace(train=rows, heldout=rows)
    assert with_prompt_limit(config, data, tokenizer, interaction).data.max_prompt_tokens == length


@pytest.mark.survival
@pytest.mark.parametrize("factory", [Calculator, Scored])
def test_evaluation_and_training_hold_the_same_conversation(
    tokenizer: Any, new_trainer: Callable[..., Any], factory: Any
) -> None:
    rollouts: list[Any] = []
    trainer = new_trainer([ROWS[0]], SCRIPT, environment_factory=factory, rollout_sinks=[rollouts.append])
    generated(trainer)
    (rollout,) = rollouts
    interaction = ToolSetup(environments={None: factory})
    turns = talk(tokenizer, SCRIPT, interaction)
    assert [list(turn[0]) for turn in turns] == rollout.completion_ids
    assert [turn.tool_mask for turn in turns] == rollout.tool_mask
    assert [turn.messages for turn in turns] == rollout.completions
    assert [turn[1] for turn in turns] == rollout.truncated
    assert [own_tokens(turn) for turn in turns] == [sum(mask) for mask in rollout.tool_mask]
    prompt_ids = MultiTurnSampler(interaction, tokenizer, 160).ids_of(turns[0].prompt, interaction.all_tools())
    assert prompt_ids == rollout.prompt_ids[0]


def test_environments_reward_what_was_done(tokenizer: Any) -> None:
    turns = talk(tokenizer, SCRIPT, ToolSetup(environments={None: Scored}))
    assert environment_rewards(turns) == [1.0, 0.0, 1.0, 1.0]
    think = '<tool_call>{"name": "think", "arguments": {"thought": "so"}}</tool_call><|im_end|>'
    turns = talk(tokenizer, [[think, *["a<|im_end|>"] * 3], ["b<|im_end|>"]], ToolSetup(environments={None: Scored}))
    assert turns[0].messages[1]["content"] == "SO"


@pytest.mark.survival
def test_a_run_with_an_environment_is_evaluated_with_it(
    attempt: Any, tree: dict[str, Any], tool_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    talks: list[int] = []
    converse = MultiTurnSampler.converse

    def counted(self: Any, rows: Any, *rest: Any) -> Any:
        talks.append(len(rows))
        return converse(self, rows, *rest)

    monkeypatch.setattr(MultiTurnSampler, "converse", counted)
    tree["model"]["name"] = str(tool_folder)
    tree["data"] = {"source": "reasoning-gym:products", "limit": 40, "heldout": 8, "max_prompt_tokens": 100}
    tree["evaluation"] |= {"after": True}
    run = attempt("generation.environment=kit.environments.calculator:Calculator")
    assert run.code == 0, run.message
    assert sum(talks) == 4 + 4 * 2
    scores = json.loads((run.folder.path / "eval" / "after.json").read_text())
    assert len(scores["per_problem"]["greedy_tokens"]) == 4
    table = pq.read_table(run.folder.completions / "step-00001.parquet").to_pylist()
    assert all(len(row["tool_mask"]) == len(row["completion_ids"]) for row in table)
    again = attempt("generation.environment=kit.environments.calculator:Calculator", "run.id=again")
    assert again.code == 0
    assert [line["loss"] for line in again.folder.metrics() if "loss" in line] == [
        line["loss"] for line in run.folder.metrics() if "loss" in line
    ]
