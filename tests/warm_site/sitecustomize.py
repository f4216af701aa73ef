"""With this folder on PYTHONPATH every Python process starts others as tests/warm_processes.py says, itself a cold one or not."""

import importlib.util
import sys
from pathlib import Path

if "warm_processes" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("warm_processes", Path(__file__).parents[1] / "warm_processes.py")
    sys.modules["warm_processes"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["warm_processes"])
    sys.modules["warm_processes"].install()
