"""What status.json says a run is doing while it makes no steps."""

from __future__ import annotations

from typing import Any

import pytest

import kit


def test_the_status_says_when_held_out_problems_are_scored(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kit.evaluation.heldout import HeldOut
    from kit.runner.recording import Recorder

    seen: list[tuple[str, object]] = []
    score, step = HeldOut.score, Recorder.on_step_end

    def look() -> None:
        status = kit.Run("it").status
        seen.append((status["state"], status.get("phase")))

    def scored(self: HeldOut, model: Any, progress: Any = None, **keywords: Any) -> Any:
        look()
        return score(self, model, progress, **keywords)

    def stepped(self: Recorder, *rest: Any, **keywords: Any) -> None:
        step(self, *rest, **keywords)
        look()

    monkeypatch.setattr(HeldOut, "score", scored)
    monkeypatch.setattr(Recorder, "on_step_end", stepped)
    result = attempt("evaluation.before=true", "evaluation.after=true", "optimisation.steps=1", "evaluation.prompts=3")
    assert result.code == 0
    assert seen == [("starting", "held-out score"), ("running", None), ("running", "held-out score")]
    assert result.folder.status()["phase"] is None
