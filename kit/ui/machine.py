"""The strip on Home: what this machine is doing. nvidia-smi where there is a GPU, psutil for the rest; no torch."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time

import psutil
from markupsafe import Markup

from kit.ui import markup as m

SECONDS = 3.0
_QUERY = "--query-gpu=name,utilization.gpu,memory.used,memory.total,temperature.gpu"


class Reading:
    """The GPU's figures, read at most every few seconds however many browsers ask."""

    def __init__(self) -> None:
        self._lock, self._at, self._gpus = threading.Lock(), -SECONDS, list[list[str]]()

    def gpus(self) -> list[list[str]]:
        """[name, load %, used MiB, total MiB, °C] of each GPU."""
        with self._lock:
            if time.monotonic() - self._at >= SECONDS:
                self._at, self._gpus = time.monotonic(), _ask()
            return self._gpus


def _ask() -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, _QUERY, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 4]


_READING = Reading()


def strip() -> Markup:
    """Cards for each GPU, the processor and the memory."""
    cards = [_gpu(*one) for one in _READING.gpus()]
    if not cards:
        cards = [_gauge("GPU", "none", "runs use the CPU, which is right for the embedded model", None)]
    load, memory = psutil.cpu_percent(), psutil.virtual_memory()
    cards.append(_gauge("CPU", f"{load:.0f} %", f"{psutil.cpu_count()} cores", load / 100))
    used = memory.total - memory.available
    cards.append(
        _gauge("Memory", f"{used / 1024**3:.1f} of {memory.total / 1024**3:.0f} GiB", "in use", used / memory.total)
    )
    return m.tag("div", m.join(cards), class_="grid")


def _gpu(name: str, load: str, used: str, total: str, heat: str) -> Markup:
    try:
        share = float(used) / float(total)
        memory = f"{float(used) / 1024:.1f} of {float(total) / 1024:.0f} GiB"
    except (ValueError, ZeroDivisionError):
        share, memory = 0.0, "memory unknown"
    return _gauge(name, memory, f"{load} % busy, {heat} °C", share)


def _gauge(name: str, value: str, more: str, share: float | None) -> Markup:
    level = "" if share is None or share < 0.85 else "warn" if share < 0.95 else "fail"
    scale = m.bar(share, level, f"{name}: {value}") if share is not None else Markup("")
    head = m.tag("div", m.tag("b", name) + m.tag("span", value, class_="num"), class_="spread")
    return m.card(head, scale, m.tag("small", more))
