"""The process of a chat: `python -m kit.chat.server REQUEST` (JSON). The protocol is in client.py.

It ends after a time without questions, and when its stdin ends, because the session is closed or its parent process has ended,
also during an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from kit.runs.worker import claim_stdout, decode, encode, is_lost, is_user_error

if TYPE_CHECKING:
    from kit.chat.answering import ChatModels


class Wire:
    """The JSON lines from and to the session. `questions`: a queue; `cancelled`: ids of cancelled questions."""

    def __init__(self, outgoing: BinaryIO) -> None:
        self.questions: queue.Queue[dict[str, Any]] = queue.Queue()
        self.cancelled: set[str] = set()
        self._out, self._lock = outgoing, threading.Lock()

    def send(self, event: str, **fields: Any) -> None:
        """Send one event. Ends the process if its parent has ended."""
        try:
            with self._lock:
                self._out.write(encode({"event": event, **fields}))
                self._out.flush()
        except (OSError, ValueError):
            os._exit(0)

    def listen(self, incoming: TextIO) -> None:
        """Read messages until stdin ends, then end the process."""
        for line in incoming:
            message = decode(line)
            if message is None:
                self.send("error", id=None, kind="RunError", message="a line is not a JSON object and was ignored")
            elif message.get("do") == "cancel":
                self.cancelled.add(str(message.get("id")))
            else:
                self.questions.put(message)
        os._exit(0)


def serve(request: dict[str, Any], wire: Wire) -> None:
    """Load the models, send `ready`, and answer until no question came for `idle` seconds."""
    from kit.runner.console import LogCapture
    from kit.runs.store import RunDir

    with LogCapture().collecting():
        try:
            from kit.chat.answering import ChatModels

            models = ChatModels(RunDir(Path(request["run_dir"])), request["checkpoint"])
            wire.send("ready", **models.about())
        except Exception as error:
            wire.send("error", id=None, **_words(error))
            return
        with contextlib.suppress(queue.Empty):
            while _handle(models, wire.questions.get(timeout=request["idle"]), wire):
                pass


def _handle(models: ChatModels, message: dict[str, Any], wire: Wire) -> bool:
    """Answer a question. Returns whether this process can answer another one."""
    number = str(message.get("id"))
    try:
        if message.get("do") == "heldout":
            rows = models.pick(int(message.get("start") or 1), int(message.get("count") or 20))
            wire.send("rows", id=number, **rows)
        elif message.get("do") == "ask":
            _answer(models, message, number, wire)
        else:
            wire.send("error", id=number, kind="ConfigError", message=f"there is no request '{message.get('do')}'")
    except Exception as error:
        wire.send("error", id=number, **_words(error))
        return not is_lost(error)
    finally:
        wire.cancelled.discard(number)
        from kit.models.failures import release

        release()  # the GPU memory of the answer, for a run on the same GPU
    return True


def _answer(models: ChatModels, message: dict[str, Any], number: str, wire: Wire) -> None:
    from kit.generation.prompts import question

    request = models.question(message)
    for side in request.sides:
        if number in wire.cancelled:
            break
        wire.send("began", id=number, side=side)
        answer = models.answer(
            request, side,
            lambda text, side=side: wire.send("token", id=number, side=side, text=text),  # type: ignore[misc]
            lambda: number in wire.cancelled,
        )  # fmt: skip
        wire.send("answer", id=number, side=side, **answer)
    prompt, reference = question(request.row["prompt"]), request.row.get("reference")
    wire.send("done", id=number, prompt=prompt, reference=reference, cancelled=number in wire.cancelled)


def _words(error: Exception) -> dict[str, str]:
    if is_user_error(error):
        return {"kind": type(error).__name__, "message": str(error)}
    import traceback

    traceback.print_exception(error)  # to stderr, which the session stores
    from kit.models.failures import is_out_of_memory

    if is_out_of_memory(error):
        return {
            "kind": "RunError",
            "message": "Memory ran out. Ask for fewer tokens (max_tokens), or close other programs.",
        }
    if is_lost(error):
        return {
            "kind": "RunError",
            "message": f"The GPU failed ({error}), so this process ends. The next question loads the models again.",
        }
    return {"kind": "RunError", "message": f"The answer failed: {type(error).__name__}: {error}"}


def main(argv: list[str]) -> int:
    """Serve with stdout reserved for the protocol; other output goes to stderr."""
    wire = Wire(claim_stdout())
    threading.Thread(target=wire.listen, args=(sys.stdin,), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        serve(json.loads(argv[0]), wire)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads that wait for input would delay an ordinary exit
