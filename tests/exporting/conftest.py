"""Runs to export."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from exporting_runs import make_run

from kit.runs.store import RunDir


@pytest.fixture(scope="session")
def made(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The run with an adapter, shared by tests, which must not change it."""
    return make_run(tmp_path_factory.mktemp("exporting") / "runs", "it", model_folder)


@pytest.fixture
def run(made: RunDir, tmp_path: Path) -> RunDir:
    """A copy of that run, which a test may change."""
    shutil.copytree(made.path, tmp_path / "runs" / "it")
    return RunDir(tmp_path / "runs" / "it")
