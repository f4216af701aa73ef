"""Requests of the web page to its warm process."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.planning import workbench
from kit.planning.workbench import answer

SUMS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "level": n % 3} for n in range(40)]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = tmp_path / "sums.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    return {
        "model": {"name": "embedded"},
        "data": {"source": str(source), "heldout": 10},
        "reward": {"preset": "gsm8k-reasoning"},
    }


def asked(question: str, config: dict[str, Any], **more: Any) -> Any:
    reply = answer({"question": question, "config": config, **more})
    assert "answer" in reply, reply
    return reply["answer"]


def test_rows_are_shown_with_what_was_read(config: dict[str, Any]) -> None:
    page = asked("rows", config, start=2, count=3)
    assert [row["place"] for row in page["rows"]] == [2, 3, 4]
    assert page["rows"][0]["prompt"].startswith("What is")
    assert page["rows"][0]["reference"] == str(2 * int(page["rows"][0]["prompt"].split()[2]))
    assert asked("rows", config, start=1000)["rows"] == []


def test_rows_of_a_file_that_was_changed_are_read_again(config: dict[str, Any]) -> None:
    source = Path(config["data"]["source"])
    assert asked("check", config)["problem"] is None
    source.write_text("".join(json.dumps(row | {"question": f"{row['question']} Now"}) + "\n" for row in SUMS[:20]))
    assert "Now" in asked("rows", config, start=0, count=1)["rows"][0]["prompt"]
    source.unlink()
    assert "there is no file" in answer({"question": "check", "config": config})["error"]


def test_a_group_is_scored_part_by_part(config: dict[str, Any]) -> None:
    reference = asked("rows", config)["rows"][0]["reference"]
    completions = [f"<think>t</think><answer>{reference}</answer>", "<think>t</think><answer>-1</answer>", "no idea"]
    scored = asked("score", config, row=0, completions=completions)
    right, wrong, none = scored["items"]
    # accuracy 1, think/answer format 0.2, tag count 0.1
    assert right["total"] == pytest.approx(1.3)
    assert wrong["total"] == pytest.approx(0.3)
    assert none["total"] == pytest.approx(0.0)
    accuracy = next(part for part in wrong["parts"] if part["name"] == "accuracy")
    assert (accuracy["status"], accuracy["extracted"]) == ("wrong", "-1")
    assert sum(scored["advantages"]) == pytest.approx(0.0, abs=1e-6)


def test_advantages_follow_the_recipe(config: dict[str, Any]) -> None:
    config["objective"] = {"recipe": "dr_grpo"}
    scored = asked("score", config, completions=["<answer>-1</answer>", "wrong"])
    known = [item["total"] for item in scored["items"]]
    assert scored["advantages"] == pytest.approx([total - sum(known) / 2 for total in known])
    config["objective"] = {"recipe": "ppo"}  # whose advantage needs values
    assert asked("score", config, completions=["one", "two"])["advantages"] == [None, None]


def test_a_check_tells_a_reward_that_cannot_score_from_one_that_can(config: dict[str, Any]) -> None:
    check = asked("check", config)
    assert (check["problem"], check["paid"]) == (None, 0)
    assert check["right"] > check["wrong"]
    assert check["tried"] > 10
    config["reward"] = {"preset": "code-stdio"}  # whose rows have no tests
    assert "tests of this row cannot be used" in asked("check", config)["problem"]


def test_columns_and_reward_are_guessed_from_rows(tmp_path: Path) -> None:
    def guessed(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, rows)))
        return asked("guess", {"data": {"source": str(path)}})

    people = [{"sentence": f"Ann is {age}.", "target": {"name": "Ann", "age": age}} for age in range(20)]
    guess = guessed("json.jsonl", people)
    assert (guess["prompt"], guess["reference"], guess["reward"]) == ("sentence", "target", "json-schema")
    assert json.loads(guess["params"]["schema"])["required"] == ["name", "age"]
    config = {"data": {"source": str(tmp_path / "json.jsonl"), "prompt_column": "sentence", "reference_column": "target",
                      "heldout": 4}, "reward": {"preset": "json-schema", "params": guess["params"]}}  # fmt: skip
    assert asked("check", config) | {"right": 0, "wrong": 0, "tried": 0} == {
        "problem": None, "paid": 0, "right": 0, "wrong": 0, "tried": 0,
    }  # fmt: skip
    sums = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(20)]
    assert guessed("sums.jsonl", sums)["reward"] == "gsm8k-reasoning"
    labels = [{"text": f"A rather long review, number {n}", "label": "good" if n % 2 else "bad"} for n in range(20)]
    guess = guessed("labels.jsonl", labels)
    assert (guess["reference"], guess["reward"], guess["params"]) == (
        "label", "classification-label", {"labels": ["bad", "good"]},
    )  # fmt: skip
    assert guessed("none.jsonl", [{"prompt": f"Say {n}"} for n in range(20)])["reward"] is None


def test_attacks_are_tried_around_the_rows_own_answer(config: dict[str, Any]) -> None:
    report = asked("attacks", config, row=0)
    assert report["passed"], report["problems"]
    assert sum(case["kind"] == "attack" for case in report["cases"]) > 20
    assert report["right"] != report["wrong"]
    assert workbench.another("72") not in ("72", "something else")
    assert workbench.another("Jane Austen") == "something else"  # `-(Jane Austen)` is right for rewards of text
    (missing,) = [case for case in report["cases"] if case["name"] == "missing"]
    assert missing["completion"] is None


def test_a_reward_that_can_be_cheated_is_named(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lax.py").write_text(
        "def anywhere(prompts, completions, answer=None, reference=None, **columns):\n"
        "    texts = [c if isinstance(c, str) else c[-1]['content'] for c in completions]\n"
        "    return [float(str(r) in t) for r, t in zip(reference, texts)]\n"
    )
    monkeypatch.chdir(tmp_path)
    cheated = config | {"reward": {"functions": [{"path": "lax.py:anywhere"}]}}
    report = asked("attacks", cheated, row=0)
    assert not report["passed"]
    assert any("attack" in problem for problem in report["problems"])
    audited = asked("audit", cheated)
    assert not audited["passed"]
    assert {result["attack"]: result["paid"] for result in audited["results"]}["hedges"] == 12


@pytest.mark.parametrize(
    ("question", "more", "why"),
    [
        ("score", {"row": 10**9, "completions": ["x"]}, "There is no training row"),
        ("score", {"row": -1, "completions": ["x"]}, "There is no training row"),
        ("attacks", {"style": "no hole"}, "style"),
    ],
)
def test_mistakes_are_said(config: dict[str, Any], question: str, more: dict[str, Any], why: str) -> None:
    reply = answer({"question": question, "config": config, **more})
    assert why in reply["error"], reply


def test_a_child_whose_gpu_has_failed_ends_after_it_has_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    replies = io.BytesIO()
    monkeypatch.setitem(workbench.QUESTIONS, "plan", fails)
    monkeypatch.setattr(workbench, "claim_stdout", lambda: replies)
    monkeypatch.setattr(sys, "stdin", iter([json.dumps({"question": "plan"})] * 2))
    workbench.main()
    (line,) = replies.getvalue().splitlines()
    assert "illegal memory access" in json.loads(line)["crash"]


def test_prints_of_a_reward_do_not_come_between(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "def loud(prompts, completions, **columns):\n"
        '    print(\'{"answer": "forged"}\', flush=True)\n'
        "    return [1.0 for _ in completions]\n"
    )
    request = {
        "question": "score",
        "config": config | {"reward": {"functions": [{"path": "loud.py:loud"}]}},
        "completions": ["\ud800"],
    }
    done = subprocess.run(
        [sys.executable, "-m", "kit.planning.workbench"],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
    )
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["answer"]["items"][0]["total"] == 1.0
    assert "forged" in done.stderr


def test_columns_and_rows_as_the_model_sees_them(config: dict[str, Any]) -> None:
    described = asked("columns", config)
    uses = {column["name"]: column["use"] for column in described["columns"]}
    assert uses == {"question": "prompt", "answer": "reference", "level": "passed to the reward as level"}
    config["data"]["max_prompt_tokens"] = 5
    lengths = asked("lengths", config)
    assert [row["place"] for row in lengths["seen"]] == [0, 1, 2]
    assert lengths["seen"][0]["text"].startswith("<|im_start|>user\nWhat is")
    assert (lengths["over"], len(lengths["long"])) == (lengths["counted"], 3)
