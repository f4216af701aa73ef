"""GPU memory of a chat: it is freed after each answer, and a process whose GPU has failed ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kit.chat import answering, server
from kit.models import failures


class Wire(server.Wire):
    """Record the events, and provide two questions at once."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.events: list[dict[str, Any]] = []
        for number in ("1", "2"):
            self.questions.put({"do": "ask", "id": number, "prompt": "1 + 1 ="})

    def send(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    class Models:
        def __init__(self, *_: Any) -> None: ...

        def about(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(answering, "ChatModels", Models)
    return Wire()


def serve(wire: Wire) -> list[tuple[str, str | None]]:
    server.serve({"run_dir": "runs/none", "checkpoint": None, "idle": 0.1}, wire)
    return [(event["event"], event.get("id")) for event in wire.events]


@pytest.mark.parametrize("lost", [True, False])
def test_a_process_whose_gpu_has_failed_says_so_and_ends(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    def fail(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered") if lost else ValueError("too long")

    monkeypatch.setattr(server, "_answer", fail)
    events = serve(wire)
    assert events == [("ready", None), ("error", "1")] + ([] if lost else [("error", "2")])
    assert ("GPU failed" in wire.events[1]["message"]) is lost


def test_memory_is_given_back_after_every_answer(wire: Wire, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(server, "_answer", lambda *_: None)
    monkeypatch.setattr(failures, "release", lambda: given_back.append(len(wire.events)))
    serve(wire)
    assert len(given_back) == 2
