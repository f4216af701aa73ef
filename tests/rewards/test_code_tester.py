"""Tests that are programs: they run apart from the program, which only answers their calls."""

import os
import subprocess
import sys

import pytest

from rewards import PresetError, build_samples, load, sandbox
from rewards.components.code.tester import read_tests

pytestmark = pytest.mark.skipif(sandbox.level() is None, reason="no sandbox on this machine")

DOUBLE = "def f(n):\n    return 2 * n"
LOOP = "def check(candidate):\n    for n in range(50):\n        assert candidate(n) == n + n\n"
SHIFT_PROMPT = '''
def shift(text: str):
    """Moves every letter on by one."""
    return "".join(chr(ord(c) + 1) for c in text)


def unshift(text: str):
    """Takes what shift gives, and returns what it was given."""
'''
SHIFT_TEST = """
import random
def check(candidate):
    for _ in range(20):
        word = "".join(random.choice("abcdef") for _ in range(5))
        assert candidate(shift(word)) == word
"""
UNSHIFT = "def unshift(text):\n    return ''.join(chr(ord(c) - 1) for c in text)"


def evaluate(program, tests, prompt="p", **given):
    params = {key: given.pop(key) for key in ("scoring", "python", "memory_mb", "seconds") if key in given}
    columns = {key: [value] for key, value in ({"entry_point": "f"} | given).items()}
    samples = build_samples([prompt], [f"```python\n{program}\n```"], test=[tests], **columns)
    evaluation = load("code-function", **params).score(samples)
    return evaluation.statuses["accuracy"][0], evaluation.infos["accuracy"][0]


@pytest.mark.parametrize(
    ("tests", "right", "wrong"),
    [
        (LOOP, DOUBLE, DOUBLE.replace("2 * n", "2 * n if n < 40 else 0")),
        ("assert round(f(1), 3) == 0.333", "def f(n):\n    return n / 3", "def f(n):\n    return 0.33"),
        ("assert f(1) != 1", "def f(n):\n    return 2", "def f(n):\n    return n"),
        ("assert f(1) in (2, 3)", "def f(n):\n    return 3", "def f(n):\n    return 4"),
        ("assert 3 in f(1)", "def f(n):\n    return [n, 3]", "def f(n):\n    return [n]"),
        (
            "import pytest\ndef test_it():\n    with pytest.raises(ValueError, match='neg'): f(-1)\n    assert f(1) == 1",
            "def f(n):\n    if n < 0: raise ValueError('negative')\n    return n",
            "def f(n):\n    return n",
        ),
        (
            "import pytest\ndef test_it():\n    with pytest.raises(Exception):\n        f(-1)",
            "def f(n):\n    raise KeyError(n)",
            "import sys\ndef f(n):\n    sys.exit(0)",
        ),
        (
            "import pytest\n@pytest.mark.parametrize('n, out', [(1, 2), (2, 4)])\ndef test_f(n, out):\n    assert f(n) == out",
            DOUBLE,
            "def f(n):\n    return 2",
        ),
        ("import pytest\nassert f(3) == pytest.approx(1.0)", "def f(n):\n    return n / 3 + 1e-9", "def f(n):\n    return 1.1"),
        (
            "def near(a, b):\n    return abs(a - b) < 1e-6\ndef check(candidate):\n    assert near(candidate(3), 1)",
            "def f(n):\n    return n / 3",
            "def near(a, b):\n    return True\ndef f(n):\n    return 7",
        ),
        ("x = f(2)\nassert f(x) == 8", DOUBLE, "def f(n):\n    return 4 if n == 2 else 0"),  # asks again with what came out
        (
            "import math\ndef check(candidate):\n    for n in range(1, 40):\n"
            "        assert math.fabs(math.sqrt(candidate(n)) - n) < 1e-4",
            "def f(n):\n    return n * n",
            "def f(n):\n    return n * n if n < 39 else 0",
        ),
        ("assert f(2) == f(1) + 2", DOUBLE, "def f(n):\n    return n"),
        ("assert sorted(f({3, 1})) == ['1', '3']", "def f(s):\n    return [str(n) for n in s]", "def f(s):\n    return []"),
    ],
)  # fmt: skip
def test_tests_of_any_kind_are_run_with_the_programs_answers(tests, right, wrong):
    status, info = evaluate(right, tests)
    assert (status, info.get("reason")) == ("ok", None)
    assert evaluate(wrong, tests)[0] == "wrong"


def test_helpers_come_from_the_prompt_and_never_from_the_program():
    given = {"prompt": SHIFT_PROMPT, "entry_point": "unshift"}
    assert evaluate(UNSHIFT, SHIFT_TEST, **given)[0] == "ok"
    assert evaluate(UNSHIFT + "\ndef shift(text):\n    return text", SHIFT_TEST, **given)[0] == "ok"
    cheat = "def shift(text):\n    return text\ndef unshift(text):\n    return text"
    assert evaluate(cheat, SHIFT_TEST, **given)[0] == "wrong"
    fenced = f"Complete this:\n```python{SHIFT_PROMPT}```"
    assert evaluate(UNSHIFT, SHIFT_TEST, prompt=fenced, entry_point="unshift")[0] == "ok"
    status, info = evaluate(cheat, SHIFT_TEST, entry_point="unshift")
    assert status == "error"
    assert "the tests use shift, which neither they nor the setup nor the prompt define" in info["reason"]


@pytest.mark.parametrize(
    "program",
    [
        "class Yes:\n    def __eq__(self, other):\n        return True\ndef f(n):\n    return Yes()",
        "import os\ndef f(n):\n    os._exit(0)",
        'print(\'{"calls": [], "open": false, "units": 1, "failed": []}\')\ndef f(n):\n    return 0',
        "import time\ndef f(n):\n    time.sleep(60)",
        "raise SystemExit(0)",
        "x = 1",
    ],
)
def test_programs_that_cheat_are_wrong(program):
    assert evaluate(program, LOOP, seconds=0.5)[0] == "wrong"


def test_what_failed_is_said_and_each_test_counts_for_a_share():
    tests = "def test_a():\n    assert f(1) == 2\ndef test_b():\n    assert f(2) != 4, 'no'\nfor n in 1, 2: assert f(n) == n + n"
    status, info = evaluate(DOUBLE, tests, scoring="share")
    assert (status, info["passed"], info["tests"]) == ("wrong", 2, 3)
    assert info["reason"] == "assert f(2) != 4, 'no'  AssertionError: no"


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ("for n in range(3): pass", "no test calls f"),
        ("import nothing_of_the_kind\nfor n in (1,): assert f(n)", "ModuleNotFoundError"),
        ("while True: f(1)", "more than 5000 calls"),
        ("while True: f(1) if False else 0", "the tests do not end"),
        ("assert f(object()) != 1", "no test calls f"),
    ],
)
def test_tests_that_cannot_be_run_are_an_error_of_the_row(tests, says):
    status, info = evaluate(DOUBLE, tests, seconds=1.0)
    assert status == "error"
    assert says in info["reason"]


def test_names_are_found_before_anything_is_run():
    assert read_tests("for n in range(3):\n    assert twice(n) == 2 * n", None).function == "twice"
    with pytest.raises(ValueError, match="the tests call f, g"):
        read_tests("for n in range(3):\n    assert f(n) == g(n)", None)
    with pytest.raises(ValueError, match="no Python"):
        read_tests("assert f(", "f")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An interpreter with a package of its own, in a folder that the sandbox's users may enter."""
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
    version = sandbox.interpreter(environment).version
    for tests in ("assert f(2) == 6", "for n in range(3): assert f(n) == 3 * n"):
        status, info = evaluate(program, tests, python=environment)
        assert (status, info["python"]) == ("ok", version), info
        assert evaluate(program, tests)[0] == "wrong"  # without it: nothing but the standard library
    assert sandbox.run("import thrice; print(thrice.times(2))", python=environment).stdout == "6\n"


def test_an_interpreter_that_cannot_be_run_is_refused():
    with pytest.raises(PresetError, match="no/such/python"):
        load("code-stdio", python="/no/such/python")
