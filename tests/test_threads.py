"""OpenMP threads sleep while they wait: `import kit` sets this for its child processes unless the user has set it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.threads import SLEEPY, WAIT_POLICY, let_threads_sleep

ROOT = Path(__file__).parents[1]
CLEAN = {name: value for name, value in os.environ.items() if name not in WAIT_POLICY} | {"PYTHONPATH": str(ROOT)}


def python(code: str, *arguments: str, **own: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new process with the environment variables `own` and no other variable of the wait policy."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=CLEAN | own, capture_output=True, text=True, check=True)


def openmp_of_torch(code: str, **own: str) -> str:
    """Return the settings that torch's libgomp prints when it is loaded after `code`."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).parent / "lib/libgomp.so.1"
    if not library.exists():
        pytest.skip("this torch uses another OpenMP than libgomp")
    load = f"{code}\nimport ctypes, sys\nctypes.CDLL(sys.argv[1])"
    return python(load, str(library), OMP_DISPLAY_ENV="VERBOSE", **own).stderr


def test_openmp_of_a_torch_loaded_after_the_kit_sleeps() -> None:
    taken = f"GOMP_SPINCOUNT = '{SLEEPY['GOMP_SPINCOUNT']}'"
    assert taken in openmp_of_torch("import kit")
    assert taken not in openmp_of_torch("import sys")


@pytest.mark.parametrize("name", sorted(WAIT_POLICY))
def test_nothing_is_set_beside_a_variable_of_the_users_own(name: str) -> None:
    own = {name: ""}
    let_threads_sleep(own)
    assert own == {name: ""}


def test_processes_that_the_kit_starts_get_the_setting() -> None:
    shown = python("import json; from kit.runs.worker import environment; print(json.dumps(environment()))").stdout
    assert SLEEPY.items() <= json.loads(shown).items()
