"""The terminal belongs to our reporter: what libraries log, warn of and draw goes to the run's log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from kit.runs.files import disk_errors

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogFile(logging.FileHandler):
    """A log that does not get in the way: a line that the disk refuses is lost, and nothing else."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Leaves out the line; the run itself reports a full disk where something is lost by it."""


class LogBook:
    """Log records of this process: held back until there is a file for them, then written line by line."""

    def __init__(self) -> None:
        self._waiting = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, nothing that libraries log or warn of, and no bar of transformers, reaches the terminal."""
        root, kit = logging.getLogger(), logging.getLogger("kit")
        level = kit.level
        root.addHandler(self._waiting)
        kit.setLevel(logging.INFO)
        logging.captureWarnings(True)
        try:
            with _transformers_quiet(), _torch_quiet():
                yield
        finally:
            logging.captureWarnings(False)
            kit.setLevel(level)
            root.removeHandler(self._waiting)
            self._waiting.close()

    @contextmanager
    def written_to(self, path: Path) -> Iterator[None]:
        """Inside, records go to `path`, those held back so far first. Raises `RunError` when it cannot be opened."""
        with disk_errors(path):
            file = LogFile(path, encoding="utf-8")
        file.setFormatter(logging.Formatter(FORMAT))
        self._waiting.setTarget(file)
        self._waiting.flush()
        self._waiting.flushLevel = logging.NOTSET  # from now on each record is written at once
        try:
            yield
        finally:
            self._waiting.setTarget(None)
            file.close()


@contextmanager
def _transformers_quiet() -> Iterator[None]:
    """Hands the log of transformers, which has a handler of its own, to the root logger, and turns its bars off.

    Bars of hub downloads stay: they are long work that a person wants to see.
    """
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as theirs

    downloads, bars = not are_progress_bars_disabled(), theirs.is_progress_bar_enabled()
    theirs.get_logger()  # sets its handler up, if nobody has yet
    theirs.disable_default_handler()
    theirs.enable_propagation()
    theirs.disable_progress_bar()
    if downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        theirs.enable_default_handler()
        theirs.disable_propagation()
        if bars:
            theirs.enable_progress_bar()


@contextmanager
def _torch_quiet() -> Iterator[None]:
    """Hands the logs of torch, which print to stderr by handlers of their own, to the root logger."""
    import torch  # noqa: F401  # sets them up

    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    found = [logger for name in names if (logger := logging.getLogger(name)).handlers]
    before = [(logger, logger.handlers, logger.propagate) for logger in found]
    for logger in found:
        logger.handlers, logger.propagate = [], True
    try:
        yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate


def silence_steps(trainer: Any) -> None:
    """Keeps the trainer from printing a dictionary a step, and from writing a model card of its own into the run.

    The reporter has its own line; the trainer's card would call the result a fine-tuned version of nothing.
    """
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.create_model_card = lambda *args, **keywords: None
