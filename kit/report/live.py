"""Runs in a notebook: a card below the cell that follows the run's files while it trains, and stays when it has ended."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kit.runs.store import ALIVE, RunDir

REFRESH_SECONDS = 1.0
SHARE = 20
"""Pause between two drawings, in multiples of the time that one takes: a long run's card costs a twentieth of a core."""
MOST_LINES = 400


def in_notebook() -> bool:
    """Whether what is displayed here ends up below the cell of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class Card:
    """The live card of a run in a notebook's cell. `hear` takes a line that the run prints; drawing never raises."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._lock = threading.Lock()
        self._display: Any = None

    def hear(self, line: str) -> None:
        """A line that the run has printed."""
        with self._lock:
            self._lines.append(line.rstrip("\n"))

    def show(self, *, over: bool = False) -> None:
        """Draws the card, in the place where it was drawn first. `over`: nothing more will come."""
        from IPython.display import display

        content = self._bundle(over)
        if self._display is None:
            self._display = display(content, raw=True, display_id=True)
        else:
            self._display.update(content, raw=True)

    def _bundle(self, over: bool) -> dict[str, str]:
        from kit.report.run_report import card

        with self._lock:
            lines = list(self._lines)
        text = "\n".join([f"run {self.run.id}", *lines])
        try:
            return {"text/html": card(self.run, lines, over=over), "text/plain": text}
        except Exception as error:  # whatever is odd about a run's files, its result matters more
            return {"text/plain": f"{text}\n(no card: {type(error).__name__}: {error})"}


@contextmanager
def shown(run: RunDir) -> Iterator[Callable[[str], None]]:
    """Shows a card that follows the run. Yields a function to call with each line that the run prints."""
    card, done = Card(run), threading.Event()
    card.show()

    def follow() -> None:
        pause = REFRESH_SECONDS
        while not done.wait(pause):
            began = time.monotonic()
            card.show()
            pause = max(REFRESH_SECONDS, SHARE * (time.monotonic() - began))

    # In a copy of this context: that is how a kernel knows to which cell an output belongs.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(follow,), name="card", daemon=True)
    thread.start()
    try:
        yield card.hear
    finally:
        done.set()
        thread.join()
        card.show(over=True)


def watch(folder: RunDir) -> None:
    """Shows the card of a run until the run has ended. Interrupting the cell ends the display, not the run."""
    with shown(folder):
        try:
            while folder.settled()["state"] in ALIVE:
                time.sleep(REFRESH_SECONDS / 4)
        except KeyboardInterrupt:
            return
