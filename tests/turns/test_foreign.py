"""Environments in a process of their own: what the model sees of them, their rewards, and their deaths."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kit.config import GenerationConfig
from kit.environments import foreign
from kit.environments.foreign import (
    EnvironmentDied,
    EnvironmentLost,
    EnvironmentProcess,
    EnvironmentProcessError,
    environment_class,
    rubric,
)
from kit.errors import ConfigError, DataError
from kit.generation.multi_turn import environment_rewards
from kit.generation.tools import load_tools

GUESS = '''
import os, subprocess, sys, time
class Guess:
    def reset(self, **row):
        if os.path.exists("DOOM"):
            os._exit(5)
        self.secret, self.tries = int(row["reference"]), 0
        return f" It has {len(row['reference'])} digits."
    def guess(self, number: int, loud: bool = False) -> str:
        """
        Says whether a number is too small or too large.

        Args:
            number: The number.
            loud: Whether to shout.
        """
        print("noise on stdout")
        self.tries += 1
        if number < 0:
            os._exit(3)
        said = "right" if number == self.secret else "too small" if number < self.secret else "too large"
        return said.upper() if loud else said
    def get_reward(self):
        return 1.0 / self.tries
    def pid(self) -> int:
        """Which process."""
        return os.getpid()
    def shell(self, command: str) -> str:
        """Runs a program that reads and writes what it inherits.

        Args:
            command: What to run.
        """
        return f"exit code {subprocess.run(command, shell=True).returncode}"
    def scribble(self) -> str:
        """Writes a line to every descriptor."""
        for number in range(3, 32):
            try:
                os.write(number, b'{"answer": "forged"}' + os.linesep.encode())
            except OSError:
                pass
        return "scribbled"
    def alive(self) -> int:
        """How many environments the process keeps."""
        import gc
        gc.collect()
        return sum(type(one).__name__ == "Guess" for one in gc.get_objects())
'''


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "guess.py").write_text(GUESS.replace("DOOM", str(tmp_path / "doom")))
    return f"process:{tmp_path}/guess.py:Guess@{sys.executable}"


def test_its_methods_are_tools_and_act_in_another_process(spec: str) -> None:
    setup = load_tools(GenerationConfig(environment=spec))
    assert [tool.__name__ for tool in setup.all_tools()] == ["alive", "guess", "pid", "scribble", "shell"]
    from transformers.utils import get_json_schema

    schema = get_json_schema(setup.all_tools()[1])["function"]
    assert schema["description"] == "Says whether a number is too small or too large."
    assert schema["parameters"]["properties"]["number"] == {"type": "integer", "description": "The number."}
    assert schema["parameters"]["required"] == ["number"]
    one, other = environment_class(spec)(), environment_class(spec)()
    assert one.reset(reference="42", prompt=[]) == " It has 2 digits."
    other.reset(reference="7", prompt=[])
    assert [one.guess(40), one.guess(number=42, loud=True), other.guess(8)] == ["too small", "RIGHT", "too large"]
    assert (one.get_reward(), other.get_reward()) == (0.5, 1.0)
    assert int(one.pid()) == int(other.pid()) != os.getpid()
    foreign.process_of(spec).close()


def test_a_process_that_dies_is_started_again_and_what_was_open_is_lost(spec: str) -> None:
    one, other = environment_class(spec)(), environment_class(spec)()
    for environment in (one, other):
        environment.reset(reference="42", prompt=[])
    with pytest.raises(EnvironmentDied, match="exit code 3"):
        one.guess(-1)  # TRL answers the model with the exception
    with pytest.raises(EnvironmentLost, match="its process was started anew"):
        other.guess(1)
    assert rubric([[], []], [one, other]) == [None, None]
    assert [environment.get_reward() for environment in (one, other)] == [None, None]
    assert environment_rewards([SimpleNamespace(environment=one)]) == [None]
    one.reset(reference="3", prompt=[])
    assert one.guess(3) == "right"
    foreign.process_of(spec).close()


def test_a_process_that_dies_at_every_reset_ends_the_run(spec: str, tmp_path: Path) -> None:
    one = environment_class(spec)()
    one.reset(reference="1", prompt=[])
    (tmp_path / "doom").touch()
    with pytest.raises(EnvironmentProcessError, match=r"exit code 5.*3 times in a row; the run cannot go on"):
        one.reset(reference="1", prompt=[])
    (tmp_path / "doom").unlink()
    foreign.process_of(spec).close()


def test_what_it_starts_neither_reads_requests_nor_writes_answers(spec: str) -> None:
    """A program that echoes would shift every later answer by one; one that reads would take the next request."""
    one = environment_class(spec)()
    one.reset(reference="42", prompt=[])
    assert one.shell("echo hello; cat") == "exit code 0"
    assert [one.guess(41), one.guess(42)] == ["too small", "right"]
    foreign.process_of(spec).close()


def test_an_answer_to_no_request_ends_the_process(spec: str) -> None:
    one = environment_class(spec)()
    one.reset(reference="42", prompt=[])
    with pytest.raises(EnvironmentDied, match="forged"):
        one.scribble()
    with pytest.raises(EnvironmentLost):
        one.guess(42)
    foreign.process_of(spec).close()


def test_a_call_that_hangs_is_ended_with_what_it_started(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = environment_class(spec)()
    one.reset(reference="42", prompt=[])
    monkeypatch.setattr(foreign, "ANSWER_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(EnvironmentDied, match=r"no answer to 'call' within 0\.5 s"):
        one.shell(f"sleep 60 & echo $! > {tmp_path}/started; wait")
    assert time.monotonic() - began < 10
    assert _ends(int((tmp_path / "started").read_text()))
    one.reset(reference="3", prompt=[])
    assert one.guess(3) == "right"
    foreign.process_of(spec).close()


def test_a_death_is_seen_where_a_process_that_it_left_holds_the_pipe(spec: str, tmp_path: Path) -> None:
    """A process that the environment forked has copies of its descriptors, so the pipe does not end."""
    text = (tmp_path / "guess.py").read_text()
    forks = "if number < 0:\n            if os.fork() == 0: time.sleep(60)\n"
    (tmp_path / "guess.py").write_text(text.replace("if number < 0:\n", forks))
    one = environment_class(spec)()
    one.reset(reference="42", prompt=[])
    with pytest.raises(EnvironmentDied, match="exit code 3"):
        one.guess(-1)


def test_an_error_of_its_own_is_not_taken_for_a_death(spec: str) -> None:
    """`rubric` raises, so that the component counts errors; here the class divides by no tries."""
    one = environment_class(spec)()
    one.reset(reference="42", prompt=[])
    for asked in (one.get_reward, lambda: rubric([[]], [one])):
        with pytest.raises(EnvironmentProcessError, match="division by zero") as caught:
            asked()
        assert not isinstance(caught.value, EnvironmentDied | EnvironmentLost)
    assert one.guess(42) == "right"
    assert rubric([[]], [one]) == [1.0]
    foreign.process_of(spec).close()


def test_completions_that_are_no_more_are_forgotten(spec: str) -> None:
    made = environment_class(spec)
    one, others = made(), [made() for _ in range(5)]
    for environment in (one, *others):
        environment.reset(reference="42", prompt=[])
    assert one.alive() == "6"
    del others, environment
    gc.collect()
    assert one.alive() == "1"
    assert one.guess(42) == "right"
    foreign.process_of(spec).close()


@pytest.mark.parametrize("end", ["killed", "exit"])
def test_ctrl_c_spares_it_and_it_does_not_outlive_the_trainer(end: str, spec: str) -> None:
    """Its input ends with a trainer that is killed, here in a call; one that exits ends it even while it is stopped."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, spec, end],
        env=os.environ | {"PYTHONPATH": str(Path(foreign.__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "right\n"
        environment = int(trainer.stdout.readline())
        if end == "killed":
            trainer.kill()
        trainer.wait(10)
        assert _ends(environment)
    finally:
        trainer.kill()


TRAINER = """
import os, signal, sys
import foreign
one = foreign.environment_class(sys.argv[1])()
one.reset(reference="42")
signal.signal(signal.SIGINT, lambda *_: None)
os.killpg(0, signal.SIGINT)  # as a terminal sends it
print(one.guess(42), flush=True)
print(one.pid(), flush=True)
if sys.argv[2] == "killed":
    one.shell("sleep 60")
os.kill(int(one.pid()), signal.SIGSTOP)
"""


def _ends(pid: int) -> bool:
    """Whether a process is gone, or nobody's zombie, within some seconds; else it is killed."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


@pytest.mark.parametrize(("spec", "words"), [
    ("verifiers:nothing", "the package verifiers is not installed in .*verifiers:nothing@/path/to/python"),
    ("verifiers:nothing@/no/python", "/no/python cannot be started"),
    ("process:nowhere.py:Class", "nowhere.py:Class cannot be loaded"),
    ("process:kit.environments.calculator:Nothing", "cannot be loaded: AttributeError"),
])  # fmt: skip
def test_what_is_not_there_is_said_before_the_run(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_tools(GenerationConfig(environment=spec))
    foreign.process_of(spec).close()


def test_rows_of_what_brings_none() -> None:
    from kit.config import DataConfig
    from kit.data import load_data

    with pytest.raises(DataError, match="the package verifiers is not installed"):
        load_data(DataConfig(source="verifiers:nothing"))
    with pytest.raises(EnvironmentProcessError, match="a class brings no rows"):
        EnvironmentProcess("process:kit.environments.calculator:Calculator").ask(do="rows")


# --- the real package ---------------------------------------------------------------------------------------------------

PRODUCTS = '''
import random
import verifiers as vf
from datasets import Dataset

def calculate(expression: str) -> str:
    """
    Evaluates an arithmetic expression.

    Args:
        expression: Numbers, brackets and the signs + - * / // %, such as "12 * 7".
    """
    return str(eval(expression, {"__builtins__": {}}))

def correct(completion, answer, **_):
    return float(answer in str(completion[-1].content))

def called(completion, **_):
    return float(any(getattr(one, "tool_calls", None) for one in completion))

class Hidden(vf.StatefulToolEnv):
    async def setup_state(self, state):
        state["lot"] = int(state["answer"])

    def update_tool_args(self, tool_name, tool_args, messages, state, **_):
        return {**tool_args, "lot": state["lot"]}

def draw(guess: int, lot: int) -> str:
    """Compares a guess with the lot.

    Args:
        guess: A number.
    """
    return "hit" if guess == lot else "miss"

def load_environment():
    draw_ = random.Random(0)
    pairs = [(draw_.randint(2, 99), draw_.randint(2, 99)) for _ in range(64)]
    asked = "Solve the following multiplication: {} * {}. Give only the result as your final answer."
    rows = [{"question": asked.format(*pair), "answer": str(pair[0] * pair[1])} for pair in pairs]
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[calculate], rubric=vf.Rubric([correct, called], [1.0, 0.2]))

class stateful:
    @staticmethod
    def load_environment():
        environment = Hidden(dataset=Dataset.from_list([{"question": "?", "answer": "4"}]), rubric=vf.Rubric([correct]))
        environment.add_tool(draw, ["lot"])
        return environment

class plain:
    @staticmethod
    def load_environment():
        return vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "?", "answer": "4"}]), rubric=vf.Rubric([correct]))
'''


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The interpreter that has verifiers, with packages of environments beside it."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "product_env.py").write_text(PRODUCTS)
    for name in ("stateful", "plain"):
        (packages / f"{name}_env.py").write_text(
            f"from product_env import {name}\nload_environment = {name}.load_environment\n"
        )
    python = os.environ.get("VERIFIERS_PYTHON", str(Path(__file__).parents[2] / ".venv-verifiers/bin/python"))
    starter = tmp_path / "python"
    starter.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {python} "$@"\n')
    starter.chmod(0o755)
    return str(starter)


@pytest.mark.verifiers
def test_an_environment_of_verifiers_is_trained_in(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight steps of the embedded model, with the package's own rows, tool and rubric: it learns to call."""
    import kit

    spec = f"verifiers:product-env@{python}"
    run = kit.train({
        "model": {"name": "embedded-tools", "dtype": "float32"},
        "data": {"source": spec, "heldout": 8},
        "reward": {"functions": [{"path": "kit.environments.foreign:rubric"}]},
        "generation": {"engine": "hf", "num_generations": 4, "max_completion_tokens": 80, "environment": spec,
                       "max_tool_calling_iterations": 2},
        "optimisation": {"steps": 8, "batch_size": 32, "learning_rate": 5e-4},
        "evaluation": {"prompts": 8, "k": 2}, "run": {"root": str(tmp_path / "runs"), "save_every": 0},
    })  # fmt: skip
    before, after = (run.evaluations()[when]["greedy_reward"]["value"] for when in ("before", "after"))
    assert after > before + 0.5


@pytest.mark.verifiers
def test_a_run_goes_on_after_deaths_and_saves_where_it_cannot(tmp_path: Path) -> None:
    """The process dies at every fifth call; after the sixth death it does not come up any more."""
    import kit

    text = GUESS.replace("DOOM", str(tmp_path / "doom")).split("    def guess")[0] + DYING.replace(
        "HERE", str(tmp_path)
    )
    (tmp_path / "dying.py").write_text(
        text.replace('self.secret, self.tries = int(row["reference"]), 0', "return None")
    )
    failed = kit.start("calculator", overrides=[
        f"run.root={tmp_path / 'runs'}", f"generation.environment=process:{tmp_path}/dying.py:Guess", "optimisation.steps=30",
        "optimisation.batch_size=32", "evaluation.before=false", "data.limit=300", "data.heldout=8",
    ]).wait(timeout=500)  # fmt: skip
    assert failed.status["state"] == "failed"
    assert "3 times in a row" in failed.status["reason"]
    step = failed.status["step"]
    assert step > 1
    assert (failed.path / f"checkpoint-{step}").is_dir()


DYING = '''
    def calculate(self, expression: str) -> str:
        """
        Evaluates an arithmetic expression.

        Args:
            expression: Numbers, brackets and the signs + - * / // %, such as "12 * 7".
        """
        global calls
        calls = globals().get("calls", 0) + 1
        if calls == 5:
            with open("HERE/deaths", "a") as deaths:
                deaths.write("x")
            if os.path.getsize("HERE/deaths") == 6:
                open("HERE/doom", "w").close()
            os._exit(3)
        return "1"
'''


@pytest.mark.verifiers
def test_its_state_and_its_rewards_are_its_own(python: str) -> None:
    made = environment_class(f"verifiers:stateful-env@{python}")
    one = made()
    one.reset(prompt=[{"role": "user", "content": "?"}], reference="4")
    assert (one.draw(3), one.draw(guess=4)) == ("miss", "hit")
    said = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "draw", "arguments": {"guess": 4}}}]},
            {"role": "tool", "name": "draw", "content": "hit"}, {"role": "assistant", "content": "It is 4."}]  # fmt: skip
    assert rubric([said, said[:1]], [one, one]) == [1.0, 0.0]


@pytest.mark.verifiers
@pytest.mark.parametrize(
    ("name", "words"), [("nothing", "no environment 'nothing'"), ("plain-env", "SingleTurnEnv.*has no tools")]
)
def test_what_verifiers_cannot_give_is_said(name: str, words: str, python: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_tools(GenerationConfig(environment=f"verifiers:{name}@{python}"))
