"""Runs in a notebook: a card below the cell that follows the run's files while it trains, and stays when it has ended."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def shown(run: RunDir) -> Iterator[Callable[[str], None]]:
    """Shows a card below the cell that follows the run. Yields a function to call with each line that the run prints.

    Drawing never raises.
    """
    from IPython.display import display

    from kit.report.run_report import card

    lines, ended = deque[str](maxlen=MOST_LINES), threading.Event()

    def content(*, over: bool = False) -> dict[str, str]:
        printed = list(lines)
        text = "\n".join([f"run {run.id}", *printed])
        try:
            return {"text/html": card(run, printed, over=over), "text/plain": text}
        except Exception as error:  # whatever is odd about a run's files, its result matters more
            return {"text/plain": f"{text}\n(no card: {type(error).__name__}: {error})"}

    output = display(content(), raw=True, display_id=True)

    def follow() -> None:
        pause = REFRESH_SECONDS
        while not ended.wait(pause):
            began = time.monotonic()
            output.update(content(), raw=True)
            pause = max(REFRESH_SECONDS, SHARE * (time.monotonic() - began))

    # In a copy of this context: that is how a kernel knows to which cell an output belongs.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(follow,), name="card", daemon=True)
    thread.start()
    try:
        yield lambda line: lines.append(line.rstrip("\n"))
    finally:
        ended.set()
        thread.join()
        output.update(content(over=True), raw=True)


def watch(folder: RunDir) -> None:
    """Shows the card of a run until the run has ended. Interrupting the cell ends the display, not the run."""
    with shown(folder):
        try:
            while folder.settled()["state"] in ALIVE:
                time.sleep(REFRESH_SECONDS / 4)
        except KeyboardInterrupt:
            return
