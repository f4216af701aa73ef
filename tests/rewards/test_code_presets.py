"""The code presets against right, wrong and dishonest programs."""

import os
import pickle
import subprocess
import sys
import time

import pytest

from rewards import PresetError, build_samples, load, sandbox
from rewards.components.code import graders
from rewards.components.code.graders import CodeStdio
from rewards.sandbox import Result, forkserver

pytestmark = pytest.mark.skipif(bool(sandbox.problem()), reason="no sandbox on this machine")

SQUARES = [{"input": str(n), "output": f"{n}\n{n * n}\n"} for n in (2, 3, 5)]
CALLS = {"function": "square", "calls": [{"args": [n], "expected": n * n} for n in (2, 3, 5)]}
HONEST_STDIO = "n = int(input())\nprint(n)\nprint(n * n)"
HONEST_FUNCTION = "def square(n):\n    return n * n"


def fenced(program):
    return f"<think>work</think>\n```python\n{program}\n```"


def evaluate(name, *programs, reference, raw=False, **params):
    completions = list(programs) if raw else [fenced(program) for program in programs]
    columns = {"reference": [reference] * len(completions)}
    columns |= {key: [params.pop(key)] * len(completions) for key in ("time_limit", "memory_limit") if key in params}
    return load(name, **params).score(build_samples(["p"] * len(completions), completions, **columns))


STDIO_WRONG = {
    "exits before printing": "import sys\nsys.exit(0)",
    "prints a prefix": "print(input())",
    "prints the first test's output": "print(2)\nprint(4)",
    "prints more": f"{HONEST_STDIO}\nprint(1)",
    "right output, then a crash": f"{HONEST_STDIO}\nraise SystemExit(3)",
    "right output, then an endless loop": f"{HONEST_STDIO}\nimport sys; sys.stdout.flush()\nimport time; time.sleep(60)",
    "no Python": "square it",
    "NUL": "print(1)\0",
    "lone surrogate": "print('\ud800')",
    "prints to stderr": "import sys\nn = int(input())\nprint(n, n * n, sep='\\n', file=sys.stderr)",
    "looks for the tests": (
        "import os, glob\nfound = [p for root in ('/', '/tmp', '/box') for p in glob.glob(root + '/*')]\n"
        "hits = []\nfor p in found:\n    try: hits += [p] if '25' in open(p).read() else []\n    except OSError: pass\n"
        "print(hits)"
    ),
    "patches builtins": (
        "import builtins\nclass Same(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\n"
        "builtins.str = Same\nbuiltins.all = lambda *a: True\nbuiltins.zip = lambda *a, **k: []\nprint(Same(1))"
    ),
}


def test_stdio_programs_that_are_right_and_wrong():
    evaluation = evaluate("code-stdio", HONEST_STDIO, *STDIO_WRONG.values(), reference=SQUARES, seconds=1.0)
    assert evaluation.totals == [1.0] + [0.0] * len(STDIO_WRONG)
    assert evaluation.statuses["accuracy"] == ["ok"] + ["wrong"] * len(STDIO_WRONG)
    assert evaluation.failure_share == 0.0


ALWAYS_EQUAL = "class Same:\n    __eq__ = lambda self, other: True\n    __bool__ = lambda self: True\n"
FUNCTION_WRONG = {
    "exits": "import sys\nsys.exit(0)",
    "exits when called": "import os\ndef square(n):\n    os._exit(0)",
    "equals everything": f"{ALWAYS_EQUAL}\ndef square(n):\n    return Same()",
    "an int that equals everything": (
        "class Same(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\n"
        "def square(n):\n    return Same(1)"
    ),
    "a str instead": "def square(n):\n    return str(n * n)",
    "the first expected value": "def square(n):\n    return 4",
    "a patched json": "import json\njson.dumps = lambda *a: '{\"value\": true}'\ndef square(n):\n    return 0",
    "a forged line": (
        "import os, sys\nfor _ in range(3): sys._getframe(1).f_locals['answer'](value='ok')\nos._exit(0)"
    ),
    "more lines than calls": (
        "import sys\ndef square(n):\n    for _ in range(40): sys._getframe(1).f_locals['answer'](value=n * n)\n"
        "    return n * n"
    ),
    "not there": "def cube(n):\n    return n ** 3",
    "raises": "def square(n):\n    raise ValueError(n)",
    "hangs": "import time\ndef square(n):\n    time.sleep(60)",
    "endless recursion": "def square(n):\n    return square(n)",
    "deep value": "def square(n):\n    v = []\n    for _ in range(5000): v = [v]\n    return v",
    "patched builtins": (
        "import builtins\nbuiltins.type = lambda *a: int\nbuiltins.isinstance = lambda *a: True\n"
        "class Same:\n    __eq__ = lambda s, o: True\ndef square(n):\n    return Same()"
    ),
    "reads the caller": (
        "import inspect\ndef square(n):\n    for frame in inspect.stack():\n"
        "        for value in frame.frame.f_locals.get('request', {}).values():\n"
        "            if str(5 * 5) in str(value): return n * n\n    return None"
    ),
}


def test_functions_that_are_right_and_wrong():
    evaluation = evaluate("code-function", HONEST_FUNCTION, *FUNCTION_WRONG.values(), reference=CALLS, seconds=1.0)
    verdicts = dict(zip(["honest", *FUNCTION_WRONG], evaluation.statuses["accuracy"], strict=True))
    assert verdicts == {"honest": "ok"} | dict.fromkeys(FUNCTION_WRONG, "wrong")
    assert evaluation.totals == [1.0] + [0.0] * len(FUNCTION_WRONG)


def test_every_plain_value_goes_in_and_comes_out_unchanged():
    values = "1, (2,), [3], {4, 5}, {'a': None, 2: True}, 1e300, -0.5, 2 ** 70, False, 'é\\0', None"
    program = "def same(*values):\n    return values"
    tests = f"assert same({values}) == ({values})"
    assert evaluate("code-function", program, reference=tests).totals == [1.0]
    assert evaluate("code-function", program, reference=tests.replace("False", "0", 1)).totals == [0.0]


def test_a_share_is_paid_only_when_asked_for():
    # right for 2 of 3 tests: 2 and 3, not 5
    stdio = "n = int(input())\nprint(n)\nprint(n * n if n < 5 else 0)"
    function = "def square(n):\n    return n * n if n < 5 else sys.exit(0)"
    for name, program, tests in (("code-stdio", stdio, SQUARES), ("code-function", function, CALLS)):
        assert evaluate(name, program, reference=tests).totals == [0.0]
        shared = evaluate(name, program, reference=tests, scoring="share")
        assert shared.totals == [pytest.approx(2 / 3)]
        assert shared.statuses["accuracy"] == ["wrong"]


def test_contests_take_limits_from_the_row():
    slow = f"import time\ntime.sleep(0.3)\n{HONEST_STDIO}"
    assert evaluate("code-stdio", slow, reference=SQUARES[:1]).totals == [1.0]
    late = evaluate("code-stdio", slow, reference=SQUARES[:1], time_limit=0.25)
    assert late.totals == [0.0]
    assert "stopped after 0.25 s" in late.infos["accuracy"][0]["reason"]
    assert evaluate("code-stdio", slow, reference=SQUARES[:1], time_limit=0.25, time_factor=8).totals == [1.0]
    big = f"kept = bytearray(300 << 20)\n{HONEST_STDIO}"
    assert evaluate("code-stdio", big, reference=SQUARES[:1]).totals == [1.0]
    assert evaluate("code-stdio", big, reference=SQUARES[:1], memory_limit=200).totals == [0.0]


def test_a_budget_ends_the_tests_of_a_completion():
    slow = f"import time\ntime.sleep(0.2)\n{HONEST_STDIO}"
    evaluation = evaluate("code-stdio", slow, reference=SQUARES * 20, scoring="share", budget_seconds=0.5)
    assert 0.0 <= evaluation.totals[0] <= 3 / 60
    assert evaluation.statuses["accuracy"] == ["wrong"]


def test_drawn_tests_are_the_same_for_a_group_and_follow_the_seed():
    component = CodeStdio(max_tests=2)
    samples = build_samples(["p", "p", "q"], ["", "", ""])
    pick = lambda sample, **ctx: component._drawn(list(range(100)), sample, graders.Context(**ctx))  # noqa: E731
    assert pick(samples[0], seed=1, step=2) == pick(samples[1], seed=1, step=2)
    others = [pick(samples[2], seed=1, step=2), pick(samples[0], seed=2, step=2), pick(samples[0], seed=1, step=3)]
    assert all(other != pick(samples[0], seed=1, step=2) for other in others)


@pytest.mark.parametrize("name", ["code-stdio", "code-function"])
@pytest.mark.parametrize(
    "reference", [None, 7, "{", [], [None], {"inputs": 1}, "\ud800", {"calls": []}, [{"input": "1", "output": " "}]]
)
def test_rows_without_usable_tests_are_errors(name, reference):
    evaluation = evaluate(name, HONEST_STDIO, reference=reference)
    assert evaluation.statuses["accuracy"] == ["error"]
    assert evaluation.totals == [0.0]
    assert "tests" in evaluation.infos["accuracy"][0]["reason"]


def test_mbpp_and_humaneval_rows_work_as_they_come():
    samples = build_samples(
        ["p"],
        [fenced("def f(x):\n    return math.sqrt(x)")],
        test_list=[["assert f(4) == 2", "assert abs(f(2) - 1.414) < 1e-3"]],
        test_setup_code=["import math"],
        solution=["def f(x): ..."],
    )
    assert load("code-function").score(samples).totals == [1.0]
    samples = build_samples(
        ["p"],
        [fenced("def g(x):\n    return [x]")],
        test=["def check(candidate):\n    assert candidate(1) == [1]\n"],
        entry_point=["g"],
    )
    assert load("code-function").score(samples).totals == [1.0]


def test_expected_values_never_enter_the_sandbox(monkeypatch):
    executed = []

    def record(isolated, job):
        executed.append(job)
        return Result(status="ok", stdout="")

    monkeypatch.setattr(graders, "run_job", record)
    secret = 918273645
    evaluate(
        "code-function", HONEST_FUNCTION, reference={"function": "square", "calls": [{"args": [1], "expected": secret}]}
    )
    evaluate("code-function", HONEST_FUNCTION, reference=f"assert square(1) == {secret}")
    evaluate("code-stdio", HONEST_STDIO, reference=[{"input": "1", "output": str(secret)}])
    assert len(executed) == 3
    assert all(str(secret) not in repr(job) for job in executed)


def test_a_sandbox_that_does_not_start_is_infra_and_excludes(monkeypatch):
    monkeypatch.setattr(graders, "run_job", lambda isolated, job: Result(status="infra", reason="no processes left"))
    evaluation = evaluate("code-stdio", HONEST_STDIO, reference=SQUARES)
    assert evaluation.statuses["accuracy"] == ["infra"]
    assert evaluation.totals == [None]


def test_without_a_sandbox_presets_are_refused_when_loaded(monkeypatch):
    monkeypatch.setattr(forkserver, "problem", lambda: "no Landlock")
    for name in ("code-stdio", "code-function"):
        with pytest.raises(PresetError, match=r"Run on Linux 5\.13 or later"):
            load(name)
        assert load(name, allow_unsafe=True).checker == "accuracy"
    component = pickle.loads(pickle.dumps(CodeStdio()))
    [score] = component.score(build_samples(["p"], [fenced(HONEST_STDIO)], reference=[SQUARES]), graders.Context())
    assert score.status == "infra"


RETURNS = [
    ("import collections\ndef f(x):\n    return collections.Counter([x, x])", "assert f(1) == {1: 2}", True),
    (
        "from collections import defaultdict\ndef f(x):\n    d = defaultdict(list)\n    d[x].append(2)\n    return d",
        "assert f(1) == {1: [2]}",
        True,
    ),
    (
        "from collections import namedtuple\ndef f(x):\n    return namedtuple('P', 'a b')(1, 2)",
        "assert f(1) == (1, 2)",
        True,
    ),
    ("def f(x):\n    return range(3)", "assert list(f(1)) == [0, 1, 2]", True),
    ("def f(x):\n    return map(str, [1])", "assert set(f(1)) == {'1'}", True),
    ("def f(x):\n    return {1: 2}.values()", "assert sum(f(1)) == 2", True),
    ("def f(x):\n    return range(3)", "assert f(1) == [0, 1, 2]", False),
    (
        "class L(list):\n    def __iter__(self): return iter([9])\ndef f(x):\n    return L([1])",
        "assert f(1) == [9]",
        False,
    ),
    ("class I(int):\n    def __eq__(self, other): return True\ndef f(x):\n    return I(1)", "assert f(1) == 2", False),
    (
        "class Solution:\n    def f(self, x: List[int]) -> Optional[int]:\n        return math.gcd(*x)",
        {"fn_name": "f", "inputs": [[[4, 6]]], "outputs": [2]},
        True,
    ),
    ("from __future__ import annotations\ndef f(x):\n    return pow(x, 2, 5)", "assert f(3) == 4", True),
]


@pytest.mark.parametrize(("program", "test", "right"), RETURNS)
def test_real_solutions_are_judged_by_their_return_values(program, test, right):
    tests = [test] if isinstance(test, str) else test
    samples = build_samples(["f"], [f"```python\n{program}\n```"], reference=[tests])
    assert load("code-function").is_correct(samples) == [right]


def test_endless_programs_come_last_and_a_batch_ends_in_its_time():
    endless = [
        f"import time\nwhile True: time.sleep({n})" for n in range(1, 5)
    ]  # the limits are those of the wall's clock
    endless += ["while True: x = 1"]
    right = [f"{HONEST_STDIO}\n# {n}" for n in range(6)]
    start = time.monotonic()
    evaluation = evaluate(
        "code-stdio", *endless, *right, reference=SQUARES, scoring="share", seconds=2.0, batch_seconds=3.0, workers=2
    )
    assert time.monotonic() - start < 10  # 5 x 3 tests x 2 s / 2 = 15 s without a limit
    assert evaluation.statuses["accuracy"][5:] == ["ok"] * 6
    assert {"infra"} <= set(evaluation.statuses["accuracy"][:5]) <= {"infra", "wrong"}
    reasons = {
        i["reason"]
        for i, s in zip(evaluation.infos["accuracy"], evaluation.statuses["accuracy"], strict=True)
        if s == "infra"
    }
    assert reasons == {"other programs used the batch's 3 s"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An interpreter with an extra package, in a folder that the sandbox's users may read."""
    base = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
    folder = tmp_path_factory.mktemp("env")
    for each in (folder, *folder.parents[:3]):
        os.chmod(each, 0o755)
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    [packages] = (folder / "env").glob("lib/python3*/site-packages")
    (packages / "thrice.py").write_text("def times(n):\n    return 3 * n\n")
    return str(folder / "env" / "bin" / "python")


def test_programs_may_use_the_packages_of_an_interpreter_that_is_named(environment):
    program = "import thrice\ndef f(n):\n    return thrice.times(n)"
    tests = "assert f(2) == 6"
    evaluation = evaluate("code-function", program, reference=tests, python=environment)
    assert evaluation.totals == [1.0]
    assert evaluation.infos["accuracy"][0]["python"] == sandbox.interpreter(environment).version
    assert evaluate("code-function", program, reference=tests).totals == [0.0]  # the standard library alone
    assert sandbox.run("import thrice; print(thrice.times(2))", python=environment).stdout == "6\n"


def test_an_interpreter_that_cannot_be_run_is_refused():
    with pytest.raises(PresetError, match="no/such/python"):
        load("code-stdio", python="/no/such/python")
