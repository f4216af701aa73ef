"""The models that the chat keeps loaded: one process a run at most, two in all, ended after a time without questions.

They die with the server, however it ends: each watches for its parent. Before one is loaded while a run trains, it is
asked whether memory will do, as training must not die of a chat.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import psutil

from kit.config import RunConfig, load_config
from kit.errors import KitError, RunError
from kit.runs.files import human_size
from kit.runs.store import ALIVE, RunDir
from kit.ui.live import stamp
from kit.ui.machine import Reading
from kit.ui.site import Site

if TYPE_CHECKING:
    from kit.chat.client import ChatSession

MOST_SESSIONS = 2
IDLE_SECONDS = 600.0
PROCESS_BYTES = 800 * 1024**2
"""What Python and torch take beside the weights."""
ROOM_LEFT = 1.25
"""The model is let in where so many times its size is free."""
BYTES_A_WEIGHT = {"float32": 4, "float16": 2, "bfloat16": 2, "auto": 2}


class Pool:
    """Sessions by run and weights."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, tuple[str, ChatSession]] = OrderedDict()

    def session(self, run: RunDir, checkpoint: str | None) -> ChatSession:
        """A session on these weights as they are now, loaded or not; other weights of the same run take its place.

        Raises `KitError`.
        """
        from kit.chat.client import open_chat

        checkpoint, key = resolved(run, checkpoint)
        with self._lock:
            known = self._sessions.get(run.id)
            if known is not None and known[0] == key:
                self._sessions.move_to_end(run.id)
                if known[1].alive:
                    return known[1]
        self.check_memory(run)
        with self._lock:
            known = self._sessions.get(run.id)
            if known is not None and known[0] == key:  # ended when it was idle, or another browser was faster
                return known[1]
            fresh = open_chat(run, checkpoint, idle=IDLE_SECONDS)
            old = [self._sessions.pop(run.id)] if known is not None else []
            while len(self._sessions) >= MOST_SESSIONS:
                old.append(self._sessions.popitem(last=False)[1])
            self._sessions[run.id] = (key, fresh)
        for _, session in old:
            session.close()
        return fresh

    def loaded(self, run_id: str) -> ChatSession | None:
        """The run's session while its process lives."""
        with self._lock:
            known = self._sessions.get(run_id)
        return known[1] if known is not None and known[1].alive else None

    def check_memory(self, run: RunDir) -> None:
        """Raises `RunError` where a run is training and the model would not fit beside it."""
        live = [other.id for other, status in self.site.store.statuses() if status["state"] in ALIVE]
        if not live:
            return
        config = load_config(run.config)
        try:
            plan = self.site.benches.ask("plan", config, name=run.id, given=[])
            weights = int(plan["model"]["parameters"])
        except (KitError, KeyError, TypeError):
            raise RunError(
                f"'{live[0]}' is training, and how much memory this model takes cannot be told; wait until it has ended."
            ) from None
        self._check_room(live[0], needed_bytes(config, weights))

    def _check_room(self, live: str, needed: int) -> None:
        free = {"memory": psutil.virtual_memory().available}
        gpus = Reading().gpus()
        if gpus and all(figure.isdigit() for figure in gpus[0][2:4]):
            free["GPU memory"] = (int(gpus[0][3]) - int(gpus[0][2])) * 1024**2
        for name, room in free.items():
            if room < needed:
                raise RunError(
                    f"'{live}' is training, and there would not be room for this model beside it: about "
                    f"{human_size(needed)} are needed and {human_size(room)} of {name} are free. Stop the run or wait."
                )


def resolved(run: RunDir, checkpoint: str | None) -> tuple[str | None, str]:
    """The checkpoint that is meant now, and a text that changes with its files: `best`, `last` and a result that was
    written anew are other weights under the same name. Raises `RunError`."""
    from kit.evaluation.selection import weights_of

    if checkpoint is None and run.status()["state"] in ALIVE:
        checkpoint = "last"
    step, folder = weights_of(run, checkpoint)
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise RunError(f"{folder} cannot be read: {error.strerror or error}. Choose other weights.") from None
    return None if checkpoint is None else str(step), stamp([folder, *files], str(folder))


def needed_bytes(config: RunConfig, weights: int) -> int:
    """Bytes that base and adapter take while they answer."""
    size = 0.6 if config.model.load_in_4bit else BYTES_A_WEIGHT.get(str(config.model.dtype), 4)
    return int(ROOM_LEFT * (weights * size + PROCESS_BYTES))
