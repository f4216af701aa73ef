import subprocess
import sys
import time

import pytest

from rewards import Preset, PresetError, build_samples, load
from rewards.attacks import known_attacks, render_answer
from rewards.components.math_verify import MathVerify
from rewards.evaluation import run_component
from rewards.protocol import Context

PROMPT = r"What is 6 x 12? Put the answer in \boxed{}, for example \boxed{5}."
HANGING = r"\int_0^1 \sin(x^{x^{x^x}}) \cdot e^{\cos(\tan x)} dx"


def judged(*completions, reference="72", **fields):
    samples = build_samples([PROMPT] * len(completions), list(completions), reference=[reference] * len(completions))
    return run_component(MathVerify(deadline=10.0, **fields), samples, Context())


def statuses(*completions, **columns):
    return [score.status for score in judged(*completions, **columns)]


def test_right_answers_in_other_words_are_right():
    completions = [r"\boxed{72}", r"\boxed{72.00}", r"\boxed{$72$ cm}", r"\boxed{6\cdot 12 = 72}", r"\boxed{x=72}"]
    assert statuses(*completions) == ["ok"] * 5
    assert statuses(r"\boxed{6\cdot 12}", lenient=True) == ["ok"]


def test_wrong_answers_are_wrong_and_missing_ones_format():
    completions = [r"\boxed{70}", r"\boxed{8=72}", r"\boxed{70 or 72}", "72", r"\boxed{72", r"\boxed{}"]
    assert statuses(*completions) == ["wrong", "wrong", "wrong", "format", "format", "format"]


def test_boxes_that_differ_are_refused_unless_the_last_is_to_count():
    completion = r"\boxed{70}, no: \boxed{72}"
    assert statuses(completion) == ["format"]
    assert statuses(completion, lenient=True) == ["ok"]
    assert statuses(r"\boxed{72}, no: \boxed{70}", lenient=True) == ["wrong"]
    assert statuses(r"\boxed{72} or \boxed{70}", r"\boxed{70} or \boxed{72}", lenient=True) == ["wrong"] * 2


def test_half_a_reference_is_not_enough():
    reference = r"Therefore, the answers are $\boxed{-2}$ and $\boxed{1}$."
    completions = [
        r"\boxed{1}",
        r"\boxed{-2}",
        r"\boxed{-2, 1}",
        r"$\boxed{1}$ and $\boxed{-2}$",
        r"\boxed{1} and \boxed{2}",
    ]
    assert statuses(*completions, reference=reference) == ["wrong", "wrong", "ok", "ok", "wrong"]


def test_reasoning_that_the_prompt_opened_has_to_be_closed():
    completions = [r"maybe \boxed{72}", r"so</think>\boxed{72}", r"<think>so</think>\boxed{72}"]
    samples = build_samples(["Q <think>\n"] * 3, completions, reference=["72"] * 3)
    assert [s.status for s in run_component(MathVerify(), samples, Context())] == ["format", "ok", "ok"]


def test_an_answer_that_hangs_is_a_timeout_and_the_others_keep_their_scores():
    run_component(MathVerify(), build_samples(["?"], [r"\boxed{y+x}"], reference=["x+y"]), Context())  # a warm worker
    texts = [r"\boxed{y+x}", rf"\boxed{{{HANGING}}}", r"\boxed{y+1x}"]
    samples = build_samples(["?"] * 3, texts, reference=["x+y"] * 3)
    start = time.monotonic()
    scores = run_component(MathVerify(deadline=0.6), samples, Context())
    assert [score.status for score in scores] == ["ok", "timeout", "ok"]
    assert [score.value for score in scores] == [1.0, 0.0, 1.0]
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    "reference", [None, True, "", [], {}, float("nan"), r"\frac{", pytest.param(10**5000, id="huge"), "\ud800{"]
)
def test_unusable_references_are_errors_and_never_right(reference):
    [score] = judged(r"\boxed{\frac{1}{2}}", reference=reference)
    assert score.status in ("error", "wrong")
    assert score.value == 0.0


def test_a_batch_has_a_budget_that_grows_with_it():
    assert MathVerify(budget=30.0).batch_seconds(8) == MathVerify(budget=30.0).batch_seconds(1000) == 30.0
    assert MathVerify(budget=30.0).batch_seconds(4000) == 120.0
    assert MathVerify(budget=None).batch_seconds(9) is None
    texts = [rf"\boxed{{{HANGING}+1{at}}}" for at in range(40)]
    preset = Preset([(MathVerify(deadline=5.0, budget=0.6, lenient=True), 1.0)])
    start = time.monotonic()
    evaluation = preset.score(build_samples(["?"] * 40, texts, reference=["2"] * 40))
    assert evaluation.statuses["accuracy"] == ["infra"] * 40
    assert evaluation.totals == [None] * 40
    assert "budget of 0.6 s" in evaluation.infos["accuracy"][-1]["reason"]
    assert time.monotonic() - start < 10


def test_scoring_loads_no_sympy_here():
    code = (
        "import sys; from rewards import build_samples, isolation, load; preset = load('math-verify');"
        "isolation.Pool.run = lambda pool, tasks, **limits: [isolation.Outcome('ok', 'equal') for _ in tasks];"  # no worker
        "print(preset.score(build_samples(['?'], [r'\\boxed{y + x}'], reference=['x+y'])).totals, 'sympy' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[1.0] False"


def test_unknown_places_are_refused():
    with pytest.raises(PresetError, match="any, boxed"):
        load("math-verify", answer_in="box")


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PresetError, match="pip install math-verify"):
        load("math-verify")


@pytest.mark.parametrize("style", ["boxed", "answer", "hash", "Answer: {answer}"])
def test_no_known_attack_is_correct(style):
    attacks = known_attacks(PROMPT, "72", "70", style)
    preset = load("math-dapo", deadline=10.0)  # looks in every place
    completions = [render_answer(style, "72"), render_answer(style, "70"), *[attack.completion for attack in attacks]]
    size = len(completions)
    evaluation = preset.score(build_samples([PROMPT] * size, completions, reference=["72"] * size))
    assert evaluation.statuses["accuracy"][:2] == ["ok", "wrong"]
    assert set(evaluation.statuses["accuracy"][2:]) <= {"wrong", "format"}
