"""rewards.testing reports attacks that score as high as a right answer, and every preset resists the known attacks."""

import pytest
from pairwise import rest_in_matrix

import rewards
from rewards import Preset, RewardsError, from_function, testing
from rewards.__main__ import main
from rewards.attacks import STYLES, known_attacks, render_answer

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")


def loads(name):
    """Return whether a preset needs neither parameters nor a model; the others have their own tests."""
    try:
        rewards.load(name)
    except RewardsError:
        return False
    return True


@pytest.mark.parametrize("name", rewards.names())
def test_every_preset_has_rows_with_good_and_bad_completions(name):
    kinds = set()
    for row in testing.golden(name):
        kinds |= {kind for kind, answer in (("good", "right"), ("bad", "wrong")) if {kind, answer} & row.keys()}
    assert kinds == {"good", "bad"}


@pytest.mark.parametrize("name", rest_in_matrix(3, [name for name in rewards.names() if loads(name)]))
def test_no_preset_is_hacked(name):
    report = testing.check(rewards.load(name), testing.golden(name))
    assert report.problems == []
    assert report.passed
    assert sum(case.kind == "attack" for case in report.cases) >= 13
    failed = {
        (case.name, status, *case.reasons.values())
        for case in report.cases
        for status in case.statuses.values()
        if status in ("error", "infra")
    }
    assert failed == set()


def test_a_reward_that_looks_for_the_answer_anywhere_is_found_out():
    def substring(completions, answer, **kwargs):
        return [float(a in c) for c, a in zip(completions, answer, strict=True)]

    row = {"prompt": "6 x 12?", "answer": "72", "style": "boxed", "right": "72", "wrong": "70"}
    report = testing.check(Preset([from_function(substring)], name="substring"), [row])
    assert not report.passed
    attacks = {problem.split("'")[1] for problem in report.problems}
    assert {"hedged", "equation", "list of answers", "truncated in the answer", "huge text"} <= attacks


def test_an_empty_bad_completion_is_no_wrong_answer_of_an_attack():
    def exact(completions, **kwargs):
        return [float(c.strip() == "a b") for c in completions]

    report = testing.check(Preset([from_function(exact)]), [{"good": ["a b"], "bad": [""]}])
    assert report.passed, report.problems


def test_rows_in_a_style_that_the_reward_does_not_read_are_a_few_lines_and_a_hint(tmp_path, capsys):
    rows = [f"{n} + {n}?,{2 * n},boxed,{2 * n}" for n in range(5, 45)]
    (tmp_path / "rows.csv").write_text("\n".join(["prompt,answer,style,right", *rows]))
    assert main(["test", "preset:gsm8k-reasoning", "--data", str(tmp_path / "rows.csv")]) == 1
    lines = capsys.readouterr().out.splitlines()
    problems = [line for line in lines if line.startswith("problem: ")]
    assert problems[0] == "problem: Row 1: good completion 'work, so \\boxed{10}' is not correct for accuracy."
    assert problems[3] == "problem: ... and 37 more like these"
    assert len(problems) < 15
    hint = "It accepts every right answer in the style 'answer', such as '<think>work</think><answer>10</answer>'."
    assert hint in "".join(lines)


def test_totals_decide_where_there_is_no_checker():
    def words(completions, **kwargs):
        return [min(len(c.split()), 10) / 10 for c in completions]

    preset = Preset([from_function(words)], name="words")
    report = testing.check(preset, [{"good": ["a b c d"], "bad": ["a b", "a b c d e"]}], attacks=False)
    # 0.4 for the good one; 0.2 and 0.5 for the bad ones
    assert report.problems == ["Row 1: bad completion 'a b c d e' scores 0.5, a right answer 0.4."]
    assert [case.total for case in report.cases] == [0.4, 0.2, 0.5]


def test_an_attack_that_breaks_a_function_costs_only_itself():
    def fragile(completions, **kwargs):
        return [float(c.split()[-1] == "72") for c in completions]  # IndexError for blank text

    report = testing.check(
        Preset([from_function(fragile)], name="fragile"), [{"good": ["it is 72"], "bad": ["it is 7"]}]
    )
    assert [case.total for case in report.cases if case.kind != "attack"] == [1.0, 0.0]
    assert any("the reward fails on the attack 'empty'. IndexError" in note for note in report.notes)


def test_completions_have_the_shape_that_the_rows_have():
    def chat(completions, **kwargs):
        return [float((c[0]["content"] or "").strip() == "72") for c in completions]

    preset = Preset([from_function(chat)], name="chat")
    prompt = [{"role": "user", "content": "6 x 12?"}]
    messages, text = [[{"role": "assistant", "content": "72"}]], ["72"]
    for row in ({"good": messages}, {"good": text}, {"style": "plain", "right": "72", "wrong": "70"}):
        report = testing.check(preset, [{"prompt": prompt, **row}])
        assert report.passed, report.problems


@pytest.mark.parametrize("style", [*STYLES, "Answer: {answer}"])
def test_attacks_fit_the_style_and_have_names_of_their_own(style):
    attacks = known_attacks("6 x 12?", "72", "70", style)
    assert len({attack.name for attack in attacks}) == len(attacks) >= 13
    assert render_answer(style, "72") not in {attack.completion for attack in attacks}
    assert {"missing", "empty", "prompt echo", "keyword stuffed", "huge text"} <= {attack.name for attack in attacks}
    assert render_answer(style, " \n ") in {attack.completion for attack in attacks}


def test_a_reward_that_fails_is_one_problem_and_not_a_list_of_attacks():
    def broken(completions, **columns):
        raise RuntimeError("no such column")

    rows = [{"prompt": "6 x 12?", "answer": "72", "style": "boxed", "right": "72", "wrong": "70"}]
    report = testing.check(rewards.from_functions([(broken, 1.0)]), rows)
    (problem,) = report.problems
    assert problem.startswith(
        "Row 1: the reward failed on 1 of 1 good completions: RuntimeError: no such column (test_testing.py,"
    )


def test_a_style_with_an_unknown_placeholder_is_refused() -> None:
    with pytest.raises(RewardsError, match=r"contains \{urgency\}; only \{answer\} is replaced"):
        render_answer("{urgency} <answer>{answer}</answer>", "billing")
    assert render_answer(r"\text{so} \frac{a}{b}: \boxed{{answer}}", "2") == r"\text{so} \frac{a}{b}: \boxed{2}"
    assert render_answer('{"category": "{answer}"}', "billing") == '{"category": "billing"}'
