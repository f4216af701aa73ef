"""The events of the page, called with values that no browser would send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_security_http import page

__all__ = ["page"]


def event(page: Any, target: str) -> dict[str, Any]:
    """The event that is triggered by the component with this elem_id or button text."""
    config = page.config()
    wanted = {
        one["id"] for one in config["components"] if target in (one["props"].get("elem_id"), one["props"].get("value"))
    }
    found = [
        one for one in config["dependencies"] if one.get("backend_fn") and any(at in wanted for at, _ in one["targets"])
    ]
    assert found, f"no event of {target}"
    return found[0]


def new_run_event(page: Any, target: str, values: list[Any]) -> Any:
    """Calls the event of a button of New run with forged values in its inputs."""
    found = event(page, target)
    return page.predict(found["id"], values) if found.get("queue") is False else page.queued(found["id"], values)


def text_of(answer: Any) -> str:
    return json.dumps(answer) if isinstance(answer, dict) else answer.text


FORGED: list[Any] = [
    {"preset": "../../etc/passwd"},
    {"preset": ["quickstart"]},
    {"preset": "quickstart", "changes": {"run.root": "/tmp/elsewhere"}},
    {"preset": "quickstart", "changes": {"run.id": "../../escaped"}},
    {"preset": "quickstart", "changes": {"run.id": "/etc"}},
    {"preset": "quickstart", "changes": {"reward": {"functions": [{"path": "os:system"}]}}},
    {"preset": "quickstart", "changes": {"reward.functions": [{"path": "evil.py:reward"}]}},
    {"preset": "quickstart", "changes": {"objective.clip": "evil.py:clip"}},
    {"preset": "quickstart", "changes": {"objective.regularizers": [{"name": "os.path:join"}]}},
    {"preset": "quickstart", "changes": {"generation.rollout": "evil.py:rollout"}},
    {"preset": "quickstart", "changes": {"generation.tools": ["subprocess:run"]}},
    {"preset": "quickstart", "changes": {"model.name": "/etc"}},
    {"preset": "quickstart", "changes": {"model.name": "../.."}},
    {"preset": "quickstart", "changes": {"model.chat_template": "/etc/passwd"}},
    {"preset": "quickstart", "changes": {"model.trust_remote_code": True, "model.name": "some/model"}},
    {"preset": "quickstart", "changes": {"data.source": "/etc/passwd"}},
    {"preset": "quickstart", "changes": {"data.source": "../secret.jsonl"}},
    {"preset": "quickstart", "changes": {"reward.params": {"base_url": "http://evil.example", "model": "m"}}},
    {"preset": "quickstart", "changes": {"reward.preset": "code-stdio", "reward.params": {"allow_unsafe": True}}},
    {"preset": "quickstart", "changes": {"reward.preset": "sql-exec", "reward.params": {"root": "/"}}},
    {"preset": "quickstart", "changes": {"reward.preset": "no-such-preset"}},
    {"preset": "quickstart", "changes": {"__class__": 1}},
    {"preset": "quickstart", "changes": {"model.name": "x" * 30000}},
    {"preset": "quickstart", "changes": {f"model.k{number}": 1 for number in range(300)}},
    {"preset": "quickstart", "changes": {"data.task_params": json.loads("[" * 60 + "]" * 60)}},
    {"preset": "quickstart", "changes": {"optimisation.steps": "; rm -rf /"}},
    {"preset": "quickstart", "changes": "nonsense"},
    "nonsense",
    17,
    [],
]  # fmt: skip


@pytest.mark.parametrize("draft", FORGED, ids=lambda draft: json.dumps(draft)[:70])
def test_a_forged_draft_starts_nothing(page: Any, draft: Any) -> None:
    before = sorted(path.name for path in page.root.iterdir())
    answer = new_run_event(page, "start", [draft])
    said = text_of(answer)
    assert "note fail" in said, said[:500]
    assert "Traceback" not in said
    assert "root:x:" not in said
    assert sorted(path.name for path in page.root.iterdir()) == before
    assert not Path("/tmp/elsewhere").exists()


def test_forged_values_of_a_list_are_refused(page: Any) -> None:
    found = event(page, "preset")
    for value in ("../../etc/passwd", ["quickstart"], {"a": 1}, 7, None):
        answer = page.predict(found["id"], [None, value])
        assert answer.status in (200, 422, 500)
        assert "Traceback" not in answer.text
        if answer.status == 200:
            assert answer.json()["data"][0].get("__type__") == "update", answer.text[:300]  # skipped: nothing changed


@pytest.mark.parametrize(
    "run_id", ["../good", "/etc", "good/../..", "x" * 5000, {"a": 1}, ["good"], 3, None, "..", "good\0"]
)
def test_stop_takes_ids_of_live_runs_only(page: Any, run_id: Any) -> None:
    found = event(page, "home-stop")
    answer = page.predict(found["id"], [run_id])
    assert answer.status == 500 or "note" in answer.text
    assert "Traceback" not in answer.text
    assert not list(page.folder.rglob("control"))


def test_unknown_events_are_refused(page: Any) -> None:
    for number in (10_000, -1, "look", None):
        answer = page.predict(number, [])
        assert answer.status in (400, 404, 422, 500)
        assert "Traceback" not in answer.text
