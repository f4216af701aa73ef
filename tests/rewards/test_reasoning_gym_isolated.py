import json
import subprocess
import sys

import pytest
from reward_parts import answered

from rewards import Context, build_samples
from rewards.components import reasoning_gym
from rewards.components.reasoning_gym import ReasoningGymAccuracy
from rewards.evaluation import run_component

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")

ENTRIES = {
    "simple_integration": {
        "question": "Find the indefinite integral: ∫ 2*x dx",
        "answer": "x**2 + C",
        "metadata": {"integrand": "2*x", "variable": "x", "expected_answer_expression": "x**2"},
    },
    "polynomial_multiplication": {"question": "(x + 1)*(x - 1)", "answer": "x**2 - 1", "metadata": {}},
    "chain_sum": {"question": "60 + 12 =", "answer": "72", "metadata": {}},
    "prime_factorization": {
        "question": "Factorise 6.",
        "answer": "2 × 3",
        "metadata": {"number": 6, "factors": [2, 3]},
    },
    "no_such_task": {"question": "", "answer": "72", "metadata": {}},
}
ANSWERS = ["x**2 + C", "x^2", "x**2 - 1", "(x-1)*(x+1)", "72", "72.0", "It is 72", "2 × 3", "two", "x**(", "1/0"]


def scores(component):
    rows = [(task, answer) for task in ENTRIES for answer in ANSWERS]
    samples = build_samples(
        ["p"] * len(rows),
        [answered(answer) for _, answer in rows],
        task=[task for task, _ in rows],
        entry=[json.dumps(ENTRIES[task]) for task, _ in rows],
    )
    return [(s.value, s.status, dict(s.info)) for s in run_component(component, samples, Context())]


def test_a_worker_gives_the_scores_that_this_process_gives():
    everything = ReasoningGymAccuracy(isolated=frozenset(ENTRIES), strict=False, deadline=20)
    here = scores(ReasoningGymAccuracy(isolated=frozenset(), strict=False))
    assert scores(everything) == here
    assert {status for _, status, _ in here} == {"ok", "wrong", "error"}


def test_a_slow_verifier_is_a_timeout_of_its_item():
    # SymPy simplifies its derivative for long, and the verifier would catch any exception that a signal raised.
    slow = "sin(x)*cos(2*x)*tan(3*x)*exp(sin(x))/(1+sin(x)*cos(5*x)*tan(7*x))"
    entry = json.dumps(ENTRIES["simple_integration"])
    answers = [answered(slow), answered("x**2 + C")]
    samples = build_samples(["p"] * 2, answers, task=["simple_integration"] * 2, entry=[entry] * 2)
    first, second = run_component(ReasoningGymAccuracy(deadline=0.8), samples, Context())
    assert (first.status, first.info) == ("timeout", {"extracted": slow, "reason": "over the deadline of 0.8 s"})
    assert second.status == "ok"


def test_a_score_that_is_no_number_is_an_error_of_the_row(monkeypatch):
    monkeypatch.setattr(reasoning_gym, "_score_answer", lambda task: lambda answer, entry: float("nan"))
    samples = build_samples(["p"], [answered("72")], task=["chain_sum"], entry=[json.dumps(ENTRIES["chain_sum"])])
    [score] = run_component(ReasoningGymAccuracy(), samples, Context())
    assert (score.status, score.info["reason"]) == ("error", "score_answer returned nan")


ALONE = """
import sys
from rewards.components import reasoning_gym as tasks
some = tasks.factory("chain_sum")
print(sorted({"sympy", "matplotlib", "reasoning_gym", "reasoning_gym.factory"} & set(sys.modules)))
problem = some.create_dataset("chain_sum", seed=5, size=9)[8]
known = sys.argv[1].split()
alone = [name for name in known if tasks._some_tasks(name) is not None]
assert all(name in tasks._some_tasks(name).DATASETS for name in alone)
print(len(alone) > 0.85 * len(known), [name for name in known if name not in tasks.factory(name).DATASETS],
      "chain_summ" in tasks.factory("chain_summ").DATASETS)
from reasoning_gym.factory import DATASETS, create_dataset
assert create_dataset("chain_sum", seed=5, size=9)[8] == problem
print(len(some.DATASETS) < 30, len(DATASETS) > 100, tasks.factory("chain_sum").DATASETS is DATASETS)
"""


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.matrix), 12])
def test_one_task_is_read_without_the_whole_package(share):
    """A new process imports neither SymPy nor matplotlib for a sum, finds each task and rejects unknown ones.

    The problems are the same, and `import reasoning_gym` still gives the real package. The default suite tries every twelfth
    task.
    """
    names = sorted(reasoning_gym.factory().DATASETS)[::share]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE, " ".join(names)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split("\n")[:3] == ["[]", "True [] False", "True True True"]
