"""Runs the worker processes once per session; the tests read their results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_processes

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def worked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the worker processes; return their rollouts, losses, gradients and reports as `stock`, `unsloth` and `packs`."""
    import torch

    folder = tmp_path_factory.mktemp("unsloth")
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def work(which: str) -> None:
        command = [sys.executable, str(HERE / "worker.py"), which, str(folder)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]

    work("stock")
    with warm_processes.cold():  # warm processes have imported TRL, but Unsloth must be imported first
        work("unsloth")
    return {which: torch.load(folder / f"{which}.pt", weights_only=False) for which in ("stock", "unsloth", "packs")}
