"""A card in a notebook that follows the files of a run while it trains, and stays afterwards."""

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
"""Pause between two updates in multiples of their duration, so that the card uses at most a twentieth of a core."""
MOST_LINES = 400


def in_notebook() -> bool:
    """Whether the output of this process is displayed in a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


@contextmanager
def shown(run: RunDir) -> Iterator[Callable[[str], None]]:
    """Shows a card of the run below the cell. Yields a function to call with each line of output of the run.

    Errors in drawing are shown, not raised.
    """
    from IPython.display import display

    from kit.report.run_report import card

    lines, ended = deque[str](maxlen=MOST_LINES), threading.Event()

    def content(*, over: bool = False) -> dict[str, str]:
        printed = list(lines)
        text = "\n".join([f"run {run.id}", *printed])
        try:
            return {"text/html": card(run, printed, over=over), "text/plain": text}
        except Exception as error:  # an error in the card must not stop the run
            return {"text/plain": f"{text}\n(no card: {type(error).__name__}: {error})"}

    output = display(content(), raw=True, display_id=True)

    def follow() -> None:
        pause = REFRESH_SECONDS
        while not ended.wait(pause):
            began = time.monotonic()
            output.update(content(), raw=True)
            pause = max(REFRESH_SECONDS, SHARE * (time.monotonic() - began))

    # In a copy of this context, by which a kernel assigns the output to a cell.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(follow,), name="card", daemon=True)
    thread.start()
    try:
        yield lambda line: lines.append(line.rstrip("\n"))
    finally:
        ended.set()
        thread.join()
        output.update(content(over=True), raw=True)


def watch(folder: RunDir) -> None:
    """Shows the card of a run until the run has ended. Interrupting the cell does not stop the run."""
    with shown(folder):
        try:
            while folder.settled()["state"] in ALIVE:
                time.sleep(REFRESH_SECONDS / 4)
        except KeyboardInterrupt:
            return
