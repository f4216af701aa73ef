"""kit.runner.console: logs of libraries go to the run's log, not to the terminal."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from kit.runner.console import LogCapture


def test_what_torch_logs_goes_to_the_file_and_its_own_handlers_come_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("torch.utils.anything")
    before = logging.getLogger("torch").handlers, logging.getLogger("torch").propagate
    assert before[0], "torch prints by a handler of its own; if it no longer does, _libraries_quiet need not touch it"
    logs = LogCapture()
    with logs.collecting():
        logger.warning("early")
        with logs.written_to(tmp_path / "log.txt"):
            logger.warning("late, of torch %s", torch.__version__)
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")
    assert [line.split(": ")[1][:4] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["earl", "late"]
    assert (logging.getLogger("torch").handlers, logging.getLogger("torch").propagate) == before
