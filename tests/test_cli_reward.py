"""`grpo-kit reward`: list, show, test and audit; exit code 1 for a reward that pays an attack, 2 for user errors."""

from __future__ import annotations

import json
from pathlib import Path

import command_line
import pytest

import rewards


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, code: int = 0) -> str:
    return command_line.run("reward", *arguments, code=code)


def rows(*records: dict[str, object]) -> str:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    return "rows.jsonl"


ROW = {"prompt": "6 x 12?", "answer": "72", "style": "boxed", "right": "72", "wrong": "70"}
SUBSTRING = (
    "def substring(completions, answer, **kwargs):\n    return [float(a in c) for c, a in zip(completions, answer)]\n"
)


def test_list_names_every_preset_with_its_summary() -> None:
    output = run("list")
    assert all(name in output for name in rewards.names())
    assert "Grade-school maths" in output


@pytest.mark.parametrize("name", rewards.names())
def test_show_gives_the_docstring_and_the_components(name: str) -> None:
    output = run("show", name)
    assert all(word in output for word in ("Formula:", "Range:", "Columns:", "Source:"))
    assert "component" in output or "cannot be shown" in output


def test_test_prints_every_part_with_its_status() -> None:
    output = run("test", "gsm8k-reasoning")
    for word in ("good", "bad", "attack", "hedged", "1 ok", "0 wrong", "0 format", "duplicated_tag", "total", "tags"):
        assert word in output
    assert "No attack and no wrong answer scores as high as a right one: 3 good, 4 bad" in output


def test_a_function_that_can_be_hacked_gives_exit_code_1() -> None:
    Path("mine.py").write_text(SUBSTRING)
    output = run("test", "mine.py:substring", "--data", rows(ROW), code=1)
    assert "problem: Row 1: attack 'hedged' scores 1, a right answer 1." in output
    assert "problem(s) with 1 good, 1 bad" in output


def test_completions_without_a_verdict_are_scored_and_shown() -> None:
    output = run("test", "gsm8k-hash", "--data", rows({"answer": "72", "completion": ["#### 72", "#### 71"]}))
    assert "1.1" in output
    assert "No row has a good completion to compare with" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gsm8k-hsh"], "Did you mean 'gsm8k-hash'"),
        (["mine.py:substring"], "--data rows.jsonl"),
        (["gsm8k-hash", "--data", "nowhere.jsonl"], "cannot be read"),
        (["gsm8k-hash", "--data", "empty.jsonl"], "is empty"),
        (["gsm8k-hash", "--data", "broken.jsonl"], "line 1 is not JSON"),
        (["gsm8k-hash", "-o", "format_weight"], "not an override"),
        (["judge-rubric"], "base_url"),
    ],
)
def test_errors_of_the_user_are_one_message_and_exit_code_2(arguments: list[str], words: str) -> None:
    Path("mine.py").write_text(SUBSTRING)
    Path("empty.jsonl").write_text("\n")
    Path("broken.jsonl").write_text("{")
    rows(ROW)
    output = run("test", *arguments, code=2)
    assert output.startswith("error: ")
    assert words in " ".join(output.split())


def test_the_reward_of_a_run_reads_the_columns_of_the_run() -> None:
    source = """def label(completions, label, urgency, **_):
    texts = [each[-1]["content"] for each in completions]
    rows = zip(texts, label, urgency, strict=True)
    return [0.1 * (level == 2) + text.endswith(f"<answer>{right}</answer>") for text, right, level in rows]
"""
    Path("mine.py").write_text(source)
    tickets = [{"ticket": f"Ticket {n}", "label": name, "urgency": 2} for n, name in enumerate(["bug", "login"] * 4)]
    Path("tickets.jsonl").write_text("".join(json.dumps(ticket) + "\n" for ticket in tickets))
    Path("run.yaml").write_text(
        "{model: {name: embedded}, reward: {functions: ['mine.py:label']},\n"
        " data: {source: tickets.jsonl, prompt_column: ticket, reference_column: label}}"
    )
    audited = run("audit", "run.yaml", "--attack", "near-misses", "--json")
    right = json.loads(audited)["results"][0]
    assert (right["rows"], right["paid"]) == (4, 4)
    marked = [ticket | {"good": ["<answer>bug</answer>"], "bad": ["<answer>login</answer>"]} for ticket in tickets[:1]]
    scored = run("test", "run.yaml", "--data", rows(*marked), code=1)  # a wrong completion earns reward
    assert "1.1 ok" in scored
    assert "0.1 wrong" in scored
    assert "No rows come with 'run.yaml'" in run("test", "run.yaml", code=2)


def test_an_audit_says_what_paid_means() -> None:
    data = rows(*({"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(5, 9)))
    output = run("audit", "gsm8k-hash", "--data", data, "--attack", "near-misses")
    assert "Paid means: 'accuracy' accepts the answer. The column 'earns' also counts format." in output
    assert "Pass a file with --data" in run("audit", "gsm8k-hash", code=2)
