"""Events of the page, called with values that a browser does not send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pairwise import rest_in_matrix
from test_security_http import page

__all__ = ["page"]


FORGED: list[Any] = [
    {"preset": "../../etc/passwd"},
    {"preset": "quickstart", "changes": {"run.root": "/tmp/elsewhere"}},
    {"preset": "quickstart", "changes": {"run.id": "../../escaped"}},
    {"preset": "quickstart", "changes": {"reward.functions": [{"path": "evil.py:reward"}]}},
    {"preset": "quickstart", "changes": {"model.trust_remote_code": True, "model.name": "some/model"}},
    {"preset": "quickstart", "changes": {"data.source": "/etc/passwd"}},
    {"preset": "quickstart", "changes": {"reward.preset": "no-such-preset"}},
    {"preset": "quickstart", "changes": {"data.task_params": json.loads("[" * 60 + "]" * 60)}},
    {"preset": "quickstart", "changes": {"optimisation.steps": "; rm -rf /"}},
    17,
]
"""What a browser might send; test_guard.py and test_draft.py have the longer lists."""


def together(page: Any, base: Any, box: Any = None) -> str:
    """The text that the browser's script makes of a draft and boxes that all have the value `box`."""
    before = page.event("start")["trigger_after"]
    (first,) = [event for event in page.described["dependencies"] if event["id"] == before]
    return json.dumps([base, *[box] * (len(first["inputs"]) - 1)])


def start(page: Any, sent: Any) -> None:
    """Trigger Start with this text, and assert that nothing is started or written."""
    event = page.event("start")
    before = sorted(path.name for path in page.root.iterdir())
    answer = json.dumps(page.queued(event["id"], [sent]))
    assert "note fail" in answer or "error" in answer, answer[:500]
    assert "Traceback" not in answer
    assert "root:x:" not in answer
    assert sorted(path.name for path in page.root.iterdir()) == before
    assert not Path("/tmp/elsewhere").exists()


@pytest.mark.parametrize("draft", rest_in_matrix(3, FORGED), ids=lambda draft: json.dumps(draft)[:70])
def test_a_forged_draft_starts_nothing(page: Any, draft: Any) -> None:
    start(page, together(page, json.dumps(draft)))


BOXES: list[Any] = ["../../etc", "os:system", True, 7, ["x"], {"a": 1}, "x" * 20_001, "[" * 200, "&a [*a]"]


@pytest.mark.parametrize("box", rest_in_matrix(3, BOXES), ids=lambda box: str(box)[:20])
def test_forged_boxes_start_nothing(page: Any, box: Any) -> None:
    start(page, together(page, json.dumps({"preset": "quickstart"}), box))


TEXTS: list[Any] = [None, 7, "", "nonsense", "{}", "[]", '["{}"]', "[" * 100_000, json.dumps(["{}"] * 1000), ["{}"]]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text)[:20])
def test_what_no_page_puts_together_starts_nothing(page: Any, text: Any) -> None:
    start(page, text)


def test_forged_values_of_a_list_are_refused(page: Any) -> None:
    event = page.event("preset")
    for value in ("../../etc/passwd", ["quickstart"], {"a": 1}, 7, None):
        answer = page.predict(event["id"], [value, together(page, None)])
        assert answer.status in (200, 422, 500)
        assert "Traceback" not in answer.text
        if answer.status == 200:
            assert answer.json()["data"][1].get("__type__") == "update", answer.text[:300]  # skipped: nothing changed
