"""Rows with `prompt_ids` in the trainer: the ids that were given are generated from, scored, and shown to rewards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.errors import DataError
from tests.turns.conftest import QUESTION, generated

NewTrainer = Callable[..., Any]


@pytest.fixture(scope="module")
def odd_ids(tokenizer: Any) -> list[int]:
    """Ids whose text the tokenizer would write otherwise: each character of "multiplication" alone."""
    ids = [tokenizer.convert_tokens_to_ids(character) for character in "multiplication"]
    again = tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]
    assert again != ids, "this would prove nothing"
    assert tokenizer.decode(again) == tokenizer.decode(ids)
    return ids


def test_the_ids_that_were_given_are_generated_from_scored_and_shown(
    new_trainer: NewTrainer, odd_ids: list[int]
) -> None:
    rows = [{"prompt": QUESTION, "prompt_ids": odd_ids}, {"prompt": QUESTION, "prompt_ids": None}]
    both = {"arguments": {"per_device_train_batch_size": 8, "max_completion_length": 4}}
    trainer = new_trainer(rows, **both)
    asked: list[list[int]] = []
    single_turn = trainer._generate_single_turn

    def watched(prompt_ids: Any, *rest: Any, **keywords: Any) -> Any:
        asked.extend(prompt_ids)
        return single_turn(prompt_ids, *rest, **keywords)

    trainer._generate_single_turn = watched
    scored: list[torch.Tensor] = []
    score = trainer.scorer.score

    def scoring(model: Any, rows: Any, *rest: Any) -> Any:
        scored.extend(row[live.bool()] for row, live in zip(rows.ids, rows.mask, strict=True))
        return score(model, rows, *rest)

    trainer.scorer.score = scoring
    output = generated(trainer)
    rendered = trainer.processing_class.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)
    expected = [odd_ids] * 4 + [rendered["input_ids"]] * 4
    assert asked == expected
    assert trainer.seen[0]["prompt_ids"] == expected
    live = [row[mask.bool()].tolist() for row, mask in zip(output["prompt_ids"], output["prompt_mask"], strict=True)]
    assert live == expected
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, output)
    completions = trainer.seen[0]["completion_ids"]
    assert [row.tolist() for row in scored[-8:]] == [ids + own for ids, own in zip(expected, completions, strict=True)]


def test_ids_of_a_rendered_prompt_train_like_its_text(new_trainer: NewTrainer, tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)["input_ids"]
    other = [{"role": "user", "content": "something else"}]
    losses = []
    for row in ({"prompt": QUESTION}, {"prompt": other, "prompt_ids": ids}):
        trainer = new_trainer([row], arguments={"max_completion_length": 6})
        torch.manual_seed(0)
        trainer.train()
        losses.append([value.detach().clone() for value in trainer.model.parameters() if value.requires_grad])
    assert all(torch.equal(one, two) for one, two in zip(*losses, strict=True))


def test_an_environment_may_not_add_to_a_prompt_of_ids(new_trainer: NewTrainer, odd_ids: list[int]) -> None:
    class Speaking:
        def reset(self, **columns: Any) -> str:
            return " And more."

    trainer = new_trainer([{"prompt": QUESTION, "prompt_ids": odd_ids}], environment_factory=Speaking)
    with pytest.raises(DataError, match="Return None from reset"):
        generated(trainer)


def test_a_run_on_ids(attempt: Any, tree: dict[str, Any], tmp_path: Path, model_folder: Path) -> None:
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    rows = []
    for left in range(6):
        for right in range(4):
            text = f"{left} + {right} ="
            ids = [token for piece in text for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]
            rows.append({"prompt_ids": ids, "answer": str(left + right)})
    rows += [{"prompt": f"{number} - 1 =", "answer": str(number - 1)} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    tree["data"] = {"source": "rows.jsonl", "heldout": 6, "max_prompt_tokens": 40}
    tree["reward"] = {"preset": "math-match"}
    tree["evaluation"] |= {"after": True}
    run = attempt()
    assert run.code == 0, run.message
    table = pq.read_table(run.folder.completions / "step-00001.parquet").to_pylist()
    by_text = {tokenizer.decode(row["prompt_ids"]): row["prompt_ids"] for row in rows if "prompt_ids" in row}
    for row in table:
        own = by_text.get(row["prompt"])
        assert row["prompt_ids"] == own if own else tokenizer.decode(row["prompt_ids"]).startswith("<|im_start|>user")
    assert any(row["prompt"] in by_text for row in table)
    scores = json.loads((run.folder.path / "eval" / "after.json").read_text())
    assert scores["problems"] == 4
