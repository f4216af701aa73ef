"""Polling without work: a screen asks every two seconds, and is answered only when a file that it shows has changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gradio as gr

from kit.runs.child import is_user_error

POLL_SECONDS = 2.0


def stamp(paths: Iterable[Path], extra: object = None) -> str:
    """A text that changes when one of the files does: time and size of each, or its absence."""
    parts = [repr(extra)]
    for path in paths:
        try:
            found = os.stat(path)
            parts.append(f"{found.st_mtime_ns}:{found.st_size}")
        except OSError:
            parts.append("-")
    return "|".join(parts)


def unless_unchanged(now: str, seen: Any, make: Callable[[], tuple[Any, ...]], outputs: int) -> list[Any]:
    """`[now, *make()]`, or as many `gr.skip()` where the browser has shown this already.

    `seen` comes from the browser and is compared, nothing else; `outputs` is how many values `make` gives.
    """
    if seen == now:
        return [gr.skip()] * (outputs + 1)
    return [now, *make()]


def poll(
    tick: Callable[..., Any], inputs: list[Any], outputs: list[Any], *, seconds: float = POLL_SECONDS
) -> tuple[gr.Timer, Any]:
    """A timer that calls `tick` outside the queue. Returns the timer and the event."""
    timer = gr.Timer(seconds)
    event = timer.tick(tick, inputs, outputs, queue=False, show_progress="hidden", api_visibility="private")
    return timer, event


def said(work: Callable[[], Any], otherwise: Callable[[str], Any]) -> Any:
    """What `work` gives; for a user's mistake what `otherwise` makes of the message. No traceback reaches a page."""
    try:
        return work()
    except Exception as problem:
        if not is_user_error(problem):
            raise
        return otherwise(str(problem))
