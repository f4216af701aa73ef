"""Verdicts on programs are cached by content; verdicts that depend on time or memory are not."""

import pytest

from rewards import build_samples, load
from rewards.components.code import graders
from rewards.isolation import forget
from rewards.protocol import Context
from rewards.sandbox import Result

DOUBLE, WRONG = "```python\nprint(2 * int(input()))\n```", "```python\nprint(4)\n```"
TESTS = [{"input": "2", "output": "4"}, {"input": "5", "output": "10"}]


@pytest.fixture
def jobs(monkeypatch):
    """Record the jobs that reach the sandbox, which is replaced by running the program without isolation."""
    forget()
    executed = []

    def play(isolated, job):
        executed.append(job)
        if "sleep" in job.program:
            return Result(status="timeout", reason="over 5 s")
        double = "input" in job.program
        return Result(status="ok", stdout=f"{2 * int(job.stdin) if double else 4}\n")

    monkeypatch.setattr(graders, "run_job", play)
    yield executed
    forget()


def totals(completions, *, tests=TESTS, context=None, **options):
    samples = build_samples(["Double it."] * len(completions), completions, reference=[tests] * len(completions))
    return load("code-stdio", workers=1, **options).score(samples, context or Context()).totals


def test_equal_programs_of_a_batch_and_of_later_ones_run_once(jobs):
    assert totals([DOUBLE, WRONG, DOUBLE, DOUBLE]) == [1.0, 0.0, 1.0, 1.0]
    assert len(jobs) == 4  # two tests of each of two programs
    assert totals([WRONG, DOUBLE]) == [0.0, 1.0]
    assert len(jobs) == 4


def test_other_tests_limits_and_scoring_are_other_questions(jobs):
    totals([DOUBLE])
    for options in (
        {"tests": TESTS[:1]},
        {"seconds": 1.0},
        {"memory_mb": 256},
        {"scoring": "share"},
        {"tolerance": 0.1},
    ):
        before = len(jobs)
        totals([DOUBLE], **options)
        assert len(jobs) > before, options


def test_a_program_that_ran_out_of_time_gets_another_chance(jobs):
    slow = "```python\nimport time; time.sleep(9)\n```"
    assert totals([slow]) == totals([slow]) == [0.0]
    assert len(jobs) == 2
