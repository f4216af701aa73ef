"""Runs in a notebook: a card below the cell that follows the run's files while it trains, and stays when it has ended.

And what `KIT_SMOKE=1` makes of a notebook: the same cells with a tiny model and few steps, to see that all of them work.
"""

from __future__ import annotations

import contextvars
import os
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


SHORT = [
    "optimisation.steps=4",
    "optimisation.batch_size=16",
    "generation.num_generations=4",
    "evaluation.prompts=10",
    "evaluation.k=2",
    "evaluation.every=2",
    "run.save_every=2",
    "run.threads=1",
]
"""A run of seconds. One thread: the tiny model gains nothing from more, and loses by them on a machine that is busy."""
EMBEDDED = [
    "model={name: embedded, dtype: float32}",
    "data={source: 'reasoning-gym:chain_sum', task_params: {min_terms: 2, max_terms: 4, min_digits: 1, max_digits: 1}, "
    "limit: 220, heldout: 20}",
    "reward={preset: reasoning-gym}",
    "generation={engine: hf, max_completion_tokens: 64}",
    "objective.weights=[]",
    "optimisation={learning_rate: 5.0e-4}",
]
"""Model, data, reward and engine that need no GPU and no network, in place of whatever is configured.

Without the weights of the objective, since some of them ask for an engine's own log-probabilities.
"""


def smoke(*, everything: bool = False) -> list[str]:
    """Overrides of a notebook's configuration: none, unless the environment has KIT_SMOKE=1.

    Then a run takes seconds; `everything` replaces model, data, reward and engine, too, where they need a GPU or the network.
    """
    if os.environ.get("KIT_SMOKE") != "1":
        return []
    return [*EMBEDDED, *SHORT] if everything else list(SHORT)


def smoke_model(architecture: str | None = None, folder: str = "smoke-model") -> str:
    """A model's folder, for where a name on the hub would stand: the embedded model, or one of another architecture.

    Args:
        architecture: a `model_type` of transformers; a tiny model of it with random weights is written.
        folder: where to, with the embedded model's tokenizer.
    """
    from kit.models.embedded import source_of

    embedded = source_of("embedded")
    if architecture is None:
        return embedded
    from transformers import AutoConfig, AutoTokenizer

    from kit.model_check.tiny import tiny_config, tiny_model

    tokenizer = AutoTokenizer.from_pretrained(embedded)
    config = tiny_config(AutoConfig.for_model(architecture), len(tokenizer))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    tiny_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def smoke_sums(rows: int) -> Any:
    """A `datasets.Dataset` of sums with the columns `question` and `answer`, as GSM8K has them."""
    from datasets import Dataset

    asked = "State the final answer to the following arithmetic problem: {} + {} ="
    sums = [(number % 10, (number + number // 10) % 10) for number in range(rows)]
    return Dataset.from_list([{"question": asked.format(a, b), "answer": str(a + b)} for a, b in sums])
