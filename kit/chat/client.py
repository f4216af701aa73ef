"""The client of a chat process, and the protocol between the two. Standard library only.

The child ends when the session is closed, when this process dies (its stdin ends), and after a time without questions.
One JSON object a line. To the process (`do`):

    ask      id, prompt (text or messages) or heldout (from 1), reference?, sides, sampling {seed, temperature, top_p,
             top_k, min_p, max_tokens}
    heldout  id, start (from 1), count              held-out prompts, for a picker
    cancel   id                                     the current answer ends; its text so far is kept

From the process (`event`):

    ready    run, step, model, device, heldout (how many), sampling (the run's), note?
    began    id, side            token  id, side, text
    answer   id, side, text, tokens, finish (stop, length, tool_calls, cancelled), seconds, reward
             {total, components} or null
    done     id, prompt, reference, cancelled
    rows     id, rows [{number, prompt, reference}], total
    error    id or null, kind, message
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import queue
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from kit.errors import ConfigError, RunError
from kit.runs.store import RunDir
from kit.runs.worker import Worker, as_error

SIDES = ("base", "tuned")
IDLE = 900.0
"""Seconds without a question after which the process ends and gives the memory back."""


SERVER = "kit.chat.server"
START_SECONDS = 600.0
"""The longest time of loading."""
GOING = 5.0
"""Seconds after which a closed process is killed."""


SAMPLING: dict[str, tuple[type[int] | type[float], float, float]] = {
    "seed": (int, 0, 2**53),
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, 1e-6, 1.0),
    "top_k": (int, 0, 2**31),
    "min_p": (float, 0.0, 1.0),
    "max_tokens": (int, 1, 65536),
}
"""Type, lowest and highest value of each sampling setting."""


def check_sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert sampling settings, which may be texts, to numbers. None and empty texts are left out. Raises `ConfigError`."""
    numbers = {}
    for name, value in settings.items():
        if name not in SAMPLING:
            raise ConfigError(f"There is no sampling option '{name}'. Known: {', '.join(SAMPLING)}.")
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        kind, low, high = SAMPLING[name]
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not low <= number <= high or (kind is int and not number.is_integer()):
            expected = f"a {'whole ' if kind is int else ''}number from {low:,.10g} to {high:,.10g}"
            raise ConfigError(f"{name} is '{str(value)[:40]}'; expected {expected}.")
        numbers[name] = kind(number)
    return numbers


class ChatSession:
    """A chat with the base and the tuned model of a run. It is a context manager, and safe to use from several threads.

    Args:
        run: the run's directory.
        checkpoint: `best`, `last` or a step; None is the run's result.
        idle: seconds without a question after which the process ends; the next question starts it again.
    """

    def __init__(self, run: RunDir, checkpoint: str | int | None = None, *, idle: float = IDLE) -> None:
        self.run, self.checkpoint, self.idle = run, checkpoint, idle
        self.ready: dict[str, Any] = {}
        self._worker: Worker | None = None
        self._waiting: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
        self._owners: dict[str, str | None] = {}  # of the questions in progress
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._log: Any = None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return (worker := self._worker) is not None and worker.poll() is None

    @property
    def answering(self) -> bool:
        """Whether a question is being answered, or the models are being loaded for one."""
        return bool(self._owners) or (self.alive and not self.ready)

    @property
    def pid(self) -> int | None:
        """The process's pid while it runs."""
        return worker.pid if (worker := self._worker) is not None and worker.poll() is None else None

    def start(self, timeout: float = START_SECONDS) -> dict[str, Any]:
        """Load the models unless they are loaded. Returns the `ready` message of the process. Raises `KitError`."""
        with self._lock:
            if self.alive:
                return self.ready
            request = {"run_dir": str(self.run.path.resolve()), "idle": self.idle,
                       "checkpoint": None if self.checkpoint is None else str(self.checkpoint)}  # fmt: skip
            # Open as long as the process lives.
            self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
            waiting = self._waiting = {"": queue.SimpleQueue()}
            self.ready = {}

            def deliver(message: dict[str, Any] | None) -> None:
                if message is None:
                    for mail in list(waiting.values()):
                        mail.put({"event": "closed"})
                elif "event" in message and (number := str(message.get("id") or "")) in waiting:
                    waiting[number].put(message)

            self._worker = Worker(SERVER, json.dumps(request), on_message=deliver, stderr=self._log)
            try:
                message = self._waiting[""].get(timeout=timeout)
            except queue.Empty:
                self.close()
                raise RunError(f"The models of run '{self.run.id}' were not loaded within {timeout:g} s.") from None
            if message["event"] == "closed":
                raise RunError(self._last_words())
            if message["event"] == "error":
                self.close()
                raise as_error(message.get("kind"), str(message.get("message")), RunError)
            self.ready = message
            return message

    def ask(
        self,
        prompt: str | Sequence[Mapping[str, str]] | None = None,
        *,
        heldout: int | None = None,
        reference: str | None = None,
        sides: Sequence[str] = SIDES,
        owner: str | None = None,
        **sampling: Any,
    ) -> Iterator[dict[str, Any]]:
        """Ask, and yield events as they come: `began`, `token` and `answer` for each side, then `done`.

        Args:
            prompt: a text, or messages; the run's system prompt is sent before it.
            heldout: instead of a prompt, the number of a held-out one, from 1; its reference is known.
            reference: the right answer, for the reward.
            sides: `base`, `tuned` or both.
            owner: a name for `cancel`, if several users share the session.
            sampling: seed, temperature (0: greedy), top_p, top_k, min_p, max_tokens; by default as in the run.

        Raises:
            KitError: a wrong question, or a process that died.
        """
        if (prompt is None) == (heldout is None):
            raise ConfigError("Ask either a prompt of your own or a held-out one.")
        sampling = check_sampling(sampling)
        if unknown := [side for side in sides if side not in SIDES] or ([] if sides else ["none"]):
            raise ConfigError(f"There is no side '{unknown[0]}'; expected base, tuned or both.")
        self.start()
        number, mail = self._post({"do": "ask", "prompt": prompt, "heldout": heldout, "reference": reference,
                                   "sides": list(sides), "sampling": sampling})  # fmt: skip
        self._owners[number], finished = owner, False
        try:
            for message in self._mail(mail):
                finished = message["event"] == "done"
                yield message
                if finished:
                    return
        finally:
            self._waiting.pop(number, None)
            self._owners.pop(number, None)
            if not finished:
                self._send({"do": "cancel", "id": number})

    def answer(self, prompt: str | None = None, **how: Any) -> dict[str, Any]:
        """Ask and wait: returns {prompt, reference, base: {text, tokens, finish, reward, ...}, tuned: {...}}."""
        result: dict[str, Any] = {}
        for message in self.ask(prompt, **how):
            if message["event"] == "answer":
                result[message["side"]] = {key: message[key] for key in message if key not in ("event", "id", "side")}
            elif message["event"] == "done":
                result = {"prompt": message["prompt"], "reference": message["reference"], **result}
        return result

    def heldout(self, start: int = 1, count: int = 20) -> dict[str, Any]:
        """Return held-out prompts: {rows: [{number, prompt, reference}], total}."""
        self.start()
        number, mail = self._post({"do": "heldout", "start": start, "count": count})
        try:
            return next(self._mail(mail))
        finally:
            self._waiting.pop(number, None)

    def cancel(self, owner: str | None = None) -> None:
        """End all current answers, or only those of `owner`. Their text so far is kept."""
        for number, whose in list(self._owners.items()):
            if owner is None or whose == owner:
                self._send({"do": "cancel", "id": number})

    def close(self) -> None:
        """End the process, also while it loads the models."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(GOING)

    def __enter__(self) -> ChatSession:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _post(self, message: dict[str, Any]) -> tuple[str, queue.SimpleQueue[dict[str, Any]]]:
        number = str(next(self._numbers))
        mail: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._waiting[number] = mail
        sent = False
        try:
            sent = self._send({**message, "id": number})
        finally:
            if not sent:
                self._waiting.pop(number, None)
        if not sent:
            raise RunError(self._last_words())
        return number, mail

    def _send(self, message: dict[str, Any]) -> bool:
        if (worker := self._worker) is None:
            return False
        try:
            return worker.send(message)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"This cannot be asked: {error}.") from None

    def _mail(self, mail: queue.SimpleQueue[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        while True:
            message = mail.get()
            if message["event"] == "error":
                raise as_error(message.get("kind"), str(message.get("message")), RunError)
            if message["event"] == "closed":
                raise RunError(self._last_words())
            yield message

    def _last_words(self) -> str:
        """Say why the process has ended, from its last output."""
        if (worker := self._worker) is None:
            return "The chat was closed before the answer was complete, e.g. because a run needs its memory. Ask again later."
        code = worker.poll()
        if code == -9:
            return "The chat's process was killed (signal 9): from outside, or by the kernel because memory ran out."
        output = ""
        with contextlib.suppress(Exception):
            self._log.seek(0)
            output = "\n".join(self._log.read().strip().splitlines()[-5:])
        words = f"The chat's process has ended (exit code {code})."
        return f"{words} Its last output:\n{output}" if output and code else words


def open_chat(run: RunDir, checkpoint: str | int | None = None, **how: Any) -> ChatSession:
    """Return a session on a run, not started yet. Raises `RunError` if the run has no weights."""
    from kit.evaluation.results import checkpoint_now, weights_of

    if not run.config.is_file():
        raise RunError(f"Run '{run.id}' has no config.yaml yet, so it has no model to chat with.")
    checkpoint = checkpoint_now(run, checkpoint)
    weights_of(run, checkpoint)
    return ChatSession(run, checkpoint, **how)
