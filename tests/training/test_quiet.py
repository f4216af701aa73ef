"""kit.runner.console: what libraries log goes to the run's log, not to the terminal."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kit.models  # noqa: F401  (which leaves news out of what libraries log)
from kit.runner.console import LogCapture


def test_what_torch_logs_goes_to_the_file_and_its_own_handlers_come_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("torch.utils.anything")
    before = logging.getLogger("torch").handlers, logging.getLogger("torch").propagate
    assert before[0], "torch prints by a handler of its own; if it no longer does, _torch_quiet can go"
    logs = LogCapture()
    with logs.collecting():
        logger.warning("early")
        with logs.written_to(tmp_path / "log.txt"):
            logger.warning("late, of torch %s", torch.__version__)
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")
    assert [line.split(": ")[1][:4] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["earl", "late"]
    assert (logging.getLogger("torch").handlers, logging.getLogger("torch").propagate) == before


REGISTER = """
import enum
{first}
from torch.utils import _pytree

Kind = enum.Enum("Kind", "one two", type=str)
_pytree.register_constant(Kind)
_pytree.log.warning("something else about pytrees")
"""


def said_of_an_enum(first: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", REGISTER.format(first=first)], capture_output=True, text=True, check=True
    )
    return done.stderr


@pytest.mark.survival
def test_of_enums_that_torchao_registers_nothing_is_said_and_of_all_else_it_is() -> None:
    plain, ours = said_of_an_enum(""), said_of_an_enum("import kit.models.loading")
    assert "register_constant() on Enum subclasses" in plain, "torch no longer warns; its line in NO_NEWS can go"
    assert "Enum" not in ours
    assert "something else about pytrees" in ours


def test_of_a_kernel_that_bitsandbytes_does_not_find_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    name = "bitsandbytes.backends.cpu.ops"
    logger = logging.getLogger(name)
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "No module named 'kernels'")
    logger.warning("something else")
    assert caplog.messages == ["something else"]
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.backends.cpu import ops

    assert ops.logger.name == name, "bitsandbytes logs this under another name; NO_NEWS wants it"
