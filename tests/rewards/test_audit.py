"""rewards.audit: rates at which attacks earn reward; each attack finds a reward with the matching flaw."""

import json
import os
import time
from pathlib import Path

import pytest

import rewards
from rewards import Preset, RewardsError, audit, from_function
from rewards.__main__ import main
from rewards.audit import ATTACKS, read_data

ROOT = Path(__file__).parents[2]
ROWS = [
    {"prompt": f"What is ${n} + {n + 1}$?", "answer": str(2 * n + 1), "more": n} for n in range(10, 30)
] + [{"prompt": [{"role": "user", "content": "Say (1, 2)."}], "answer": "(1, 2)", "more": 0}]  # fmt: skip


def boxed(text: str) -> str:
    before, _, inner = text.rpartition("\\boxed{")
    return inner[:-1] if inner.endswith("}") and "boxed" not in before and "<" not in text else ""


def reward(judge):
    """A preset of a function `judge(content of the last box, reference)`."""

    def function(completions, answer, **columns):
        texts = [c[-1]["content"] if isinstance(c, list) else c for c in completions]
        return [float(judge(boxed(text or ""), expected)) for text, expected in zip(texts, answer, strict=True)]

    return Preset([(from_function(function)[0], 1.0)], name="mine")


def rates(preset, rows=ROWS, **options):
    report = audit.audit(preset, rows, style="boxed", **options)
    return {result.attack: (result.rows, result.paid) for result in report.results}, report


def computed(text):
    try:
        return eval(text, {"__builtins__": {}})
    except Exception:
        return None


PLANTED = {  # what a careless reward accepts, and the attack that must reveal it
    "echo": lambda answer, right: answer == right or ("+" in answer and str(computed(answer)) == right),
    "constants": lambda answer, right: answer in (right, "nan"),
    "hedges": lambda answer, right: right in answer.replace(",", " ").split(),
    "near-misses": lambda answer, right: answer.lstrip("-") == right,
    "shuffles": lambda answer, right: answer.isdigit() and answer[-1] in "13579" and "4" not in answer,
}


@pytest.mark.parametrize("attack", PLANTED)
def test_each_attack_finds_the_reward_that_is_careless_about_it(attack: str) -> None:
    preset = reward(PLANTED[attack])
    counts, report = rates(preset, ROWS[:20], attacks=(attack,))
    rows, paid = counts[attack]
    assert rows == 20
    assert paid > 10
    assert not report.passed
    assert any(problem.startswith(f"{attack} is paid on {paid} of 20 rows") for problem in report.problems)
    example = report.results[-1].examples[0]
    assert (example.row, example.reference) == (1, "21") or attack == "shuffles"
    exact, report = rates(reward(lambda answer, right: answer == right), ROWS[:20], attacks=(attack,))
    assert exact[attack] == (20, 0)
    assert report.passed


def test_the_audit_scores_references_to_validate_its_rates() -> None:
    counts, report = rates(reward(lambda answer, right: answer == right), attacks=("shuffles",))
    assert counts["right"] == (21, 21)
    assert counts["spellings"] == (21, 0)  # `$21$` is not `21` for this one
    _, report = rates(reward(lambda answer, right: False), attacks=("shuffles",))
    (problem,) = report.problems
    assert problem.startswith(
        "only 0 of 21 right answers are paid (mean score 0), so the other rates mean little. The style '"
    )
    assert "set it with --style" in problem


def test_a_reference_that_earns_nothing_is_not_paid_though_the_checker_accepts_it() -> None:
    def worthless(completions, more, **columns):
        return [-1.0 if "boxed" in str(text) and n < 15 else 0.0 for text, n in zip(completions, more, strict=True)]

    checker = rewards.load("math-verify", deadline=30.0).components[0]
    preset = Preset([checker, from_function(worthless)], checker="accuracy", allow_shaping_above_correctness=True)
    counts, report = rates(preset, ROWS[:20], attacks=())
    assert counts["right"] == (20, 15)  # the first five earn 1 - 1, as an empty completion does
    assert report.results[0].earned == 0.75
    assert report.notes == ["right: 5 of 20 right answers are not paid, the first one in row 1: '21'"]


def test_an_exception_costs_only_its_completion() -> None:
    def raises(completions, answer, **columns):
        return [float(text.endswith("{" + right + "}")) for text, right in zip(completions, answer, strict=True)]

    preset = Preset([(from_function(raises)[0], 1.0)], name="mine")
    counts, _ = rates(preset, ROWS[:5], attacks=("hedges",))  # among them a completion that is None
    assert counts == {"right": (5, 5), "spellings": (5, 0), "hedges": (5, 0)}


def test_the_style_is_the_one_that_is_paid() -> None:
    report = audit.audit(reward(lambda answer, right: answer == right), ROWS, attacks=())
    assert report.style == "boxed"
    assert audit.audit(rewards.load("gsm8k-hash"), ROWS, attacks=()).style == "hash"


def test_the_audit_reports_rewards_that_hang_or_fail() -> None:
    def careless(completions, answer, **columns):
        if "^{5^" in completions[0]:
            time.sleep(60)
        if "99999999!" in completions[0]:
            raise MemoryError("too large")
        return [float(boxed(text) == right) for text, right in zip(completions, answer, strict=True)]

    preset = Preset([(from_function(careless)[0], 1.0)], name="mine")
    begun = time.monotonic()
    report = audit.audit(preset, ROWS[:1], style="boxed", attacks=("slow", "shuffles"), seconds=0.2)
    assert time.monotonic() - begun < 20
    slow = next(result for result in report.results if result.attack == "slow")
    assert (slow.overran, slow.failed, slow.paid) == (2, 3, 0)  # the two towers of fives, and the factorial
    assert report.problems == [
        "slow: the reward takes more than 0.2 s for 2 of 12 completions; such a completion stalls training"
    ]
    (note,) = report.notes
    assert (
        "slow: the reward fails on 1 of 12 completions; first reason: MemoryError: too large (test_audit.py, line"
        in note
    )
    fails = audit.audit(reward(lambda answer, right: 1 / 0), ROWS[:2], style="boxed", attacks=())
    assert "the reward fails on all 2 right answers: ZeroDivisionError: division by zero" in fails.problems[0]


def test_a_reward_that_uses_a_gpu_already_is_called_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA cannot be used in a forked child, so every completion would fail there."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    used_in = os.getpid()

    def model(completions, answer, **columns):
        assert os.getpid() == used_in, "Cannot re-initialize CUDA in forked subprocess"
        return [float(boxed(text) == right) for text, right in zip(completions, answer, strict=True)]

    preset = Preset([(from_function(model)[0], 1.0)], name="mine")
    report = audit.audit(preset, ROWS[:1], style="boxed", attacks=(), seconds=5.0)
    assert (report.results[0].paid, report.results[0].failed) == (1, 0)


def test_a_process_that_dies_is_an_error_of_its_completion_alone() -> None:
    def dies(completions, answer, **columns):
        if "nan" in completions[0]:
            os._exit(1)
        return [float(boxed(text) == right) for text, right in zip(completions, answer, strict=True)]

    preset = Preset([(from_function(dies)[0], 1.0)], name="mine")
    report = audit.audit(preset, ROWS[:1], style="boxed", attacks=("constants",), seconds=5.0)
    right, _, constants = report.results
    assert (right.paid, constants.paid, constants.failed) == (1, 0, 2)  # nan, and nan+nani
    assert constants.tried > 50


FORMATS = {
    "rows.jsonl": '{"question": "6 x 12?", "answer": "72"}\n',
    "rows.json": '[{"problem": "6 x 12?", "solution": "72"}]',
    "rows.csv": "instruction,ground_truth\n6 x 12?,72\n",
    "lines.json": '{"prompt": "6 x 12?", "answer": "72"}\n{"prompt": "6 x 12?", "answer": "72"}\n',
    "verl.jsonl": '{"prompt": "6 x 12?", "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {"index": 3}}\n',
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_read_as_other_trainers_keep_them(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(FORMATS[name])
    row = read_data(file)[0]
    assert (row["prompt"], row["reference"]) == ("6 x 12?", "72")
    assert row.get("index", 3) == 3


def test_rows_are_read_from_parquet_and_by_columns_that_are_named(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    made = {"ask": ["6 x 12?"], "gold": [{"final": "72"}], "answer": ["by hand"]}
    parquet.write_table(pyarrow.table(made), tmp_path / "rows.parquet")
    (row,) = read_data(tmp_path / "rows.parquet", prompt="ask", reference="gold.final")
    assert (row["prompt"], row["reference"], row["answer"]) == ("6 x 12?", "72", "by hand")
    with pytest.raises(RewardsError, match=r"no column 'gold\.fin' for the reference"):
        read_data(tmp_path / "rows.parquet", reference="gold.fin")


def test_the_command_line_without_the_kit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"question": f"{n} + {n}?", "final": str(2 * n)}) for n in range(5, 9)]
    rows.write_text("\n".join([*lines, '{"question": "5 + 9?"}']))
    options = ["--data", str(rows), "--reference", "final", "--attack", "near-misses"]
    assert main(["audit", "gsm8k-hash", *options, "-o", "format_weight=0.2"]) == 0
    output = capsys.readouterr().out
    assert "No attack is paid on more than 0.5% of the rows." in output
    assert "note: 1 row(s) without a reference were left out" in output
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(ground_truth in solution_str), 'seen': True}\n"
    )
    assert main(["audit", f"{mine}:compute_score", *options, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert [(case["attack"], case["paid"]) for case in report["results"]][::2] == [("right", 4), ("near-misses", 4)]
    assert main(["audit", "gsm8k-hash", "--data", str(rows)]) == 2
    assert (
        "Columns: question, final, prompt. Rename the column of the reference, or pass its name with --reference."
        in capsys.readouterr().err
    )
    assert main(["audit", "gsm8k-hash", *options, "-o", "format_weight"]) == 2
    assert main(["list"]) == main(["show", "math-verify"]) == 0
    assert "math-dapo" in capsys.readouterr().out


def test_no_attack_is_paid_by_the_presets_for_numbers() -> None:
    for name in ("gsm8k-hash", "gsm8k-reasoning", "gsm8k-xml"):
        report = audit.audit(rewards.load(name), ROWS, most=8)
        assert report.passed, report.problems
        assert [result.attack for result in report.results] == ["right", "spellings", *ATTACKS]


def test_the_page_says_what_the_benchmark_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import reward_audit

    measured = json.loads((ROOT / "benchmarks/results/reward_audit.json").read_text())
    page = (ROOT / "docs/audit.md").read_text(encoding="utf-8")
    assert reward_audit.table(measured) in page
    for report in (each for each in measured["audits"] if not each["grader"].startswith("TRL")):
        rates = {result["attack"]: result["rate"] for result in report["results"]}
        limit = 0.01 if "not known" in report["grader"] else audit.LIMIT
        assert max(rates[attack] for attack in ATTACKS) <= limit, report["grader"]
