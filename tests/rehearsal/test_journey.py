"""Complete journeys on simulated GPUs: configurations of presets and notebooks from the main loop to an export.

CI runs those of `SHORT`. `GRPO_KIT_REHEARSE=all pytest -n 0 -m rehearsal tests/rehearsal/test_journey.py` runs all.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm_processes

pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
ALL = os.environ.get("GRPO_KIT_REHEARSE") == "all"
SHORT = {"transformers": ["gsm8k-t4", "gsm8k-l4-vllm", "countdown-standby"], "unsloth": ["calculator-unsloth"]}
FURTHER = {"transformers": ["calculator", "qwen35"], "unsloth": ["02-unsloth-t4"]}
"""By backend. The first ones make the standard of CI, all of them the long form."""
CASES = {backend: SHORT[backend] + (FURTHER[backend] if ALL else []) for backend in SHORT}
EXACT = {"gsm8k-l4-vllm": 0.1, "countdown-standby": 0.01, "calculator-unsloth": 0.01}
"""Nats between engine and trainer on average: the stand-in reads the 4-bit weights as they were before they were rounded."""
Journey = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="session")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Journey:
    """Return a function that runs a case once and returns its result.

    Cases of transformers share a process. Unsloth caches properties of its process's GPU, so each of its cases has its own.
    """
    folder = tmp_path_factory.mktemp("journeys")
    root, tests = HERE.parents[1], HERE.parent
    path = os.pathsep.join(map(str, (root, tests, HERE, tests / "unsloth_backend")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def come(name: str) -> dict[str, Any]:
        outcome = folder / f"{name}.json"
        if not outcome.exists():
            names = CASES["transformers"] if name in CASES["transformers"] else [name]
            with warm_processes.cold():  # a warm process imported torch and TRL without a GPU
                command = [sys.executable, str(HERE / "journey.py"), str(folder), *names]
                run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=880)
            assert run.returncode == 0, run.stderr[-4000:]
        result: dict[str, Any] = json.loads(outcome.read_text())
        return result

    return come


@pytest.mark.parametrize("name", [name for names in CASES.values() for name in names])
def test_a_journey_reaches_its_end(journey: Journey, name: str) -> None:
    result = journey(name)
    assert "error" not in result, result["traceback"]
    assert result["state"] == "finished"
    assert result["steps"] == [1, 2]
    assert all(math.isfinite(loss) for loss in result["losses"])
    assert result["evaluations"] == ["after", "before", "step-00001"]
    assert result["mixed"] == []
    assert result["export"]["verification"]["verified"], result["export"]["verification"]
    assert result["moved"] > 0, "no weight of the adapter was trained"
    if name == "gsm8k-t4":
        assert result["checkpointing"] == [True, True], (
            "checkpointing must stay on after the first rollout ran out of memory"
        )


@pytest.mark.parametrize("name", list(EXACT))
def test_the_engine_has_the_trainers_weights(journey: Journey, name: str) -> None:
    """Engine and trainer agree at every step, with the adapter alone or with merged weights, with standby and without."""
    result = journey(name)
    assert result["engine"]["name"] == "vllm"
    assert len(result["differences"]) == 2
    assert max(result["differences"]) < EXACT[name]
