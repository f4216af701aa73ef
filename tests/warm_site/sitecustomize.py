"""With this folder on PYTHONPATH, every Python process starts others as tests/warm_processes.py does; the process itself is cold.

A command `grpo-kit` of a shell below a notebook's cell runs in a warm process, too.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path


def _carry_out(words: list[str]) -> None:
    """Run the command `grpo-kit WORDS` in a warm process, and exit with its code."""
    command = subprocess.Popen([sys.executable, "-m", "kit.cli", *words])
    while True:
        try:
            code = command.wait()
            os._exit(code if code >= 0 else 128 - code)
        except KeyboardInterrupt:
            command.send_signal(signal.SIGINT)


if "warm_processes" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("warm_processes", Path(__file__).parents[1] / "warm_processes.py")
    sys.modules["warm_processes"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["warm_processes"])
    sys.modules["warm_processes"].install()
    if sys.modules["warm_processes"].installed and Path(*sys.orig_argv[1:2]).name == "grpo-kit":
        _carry_out(sys.orig_argv[2:])
