"""The events of the page, called with values that no browser would send."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from pairwise import rest_in_matrix
from test_security_http import page

__all__ = ["page"]


@functools.cache
def config_of(url: str) -> dict[str, Any]:
    """What Gradio says of the page at this address: the same to all who ask."""
    with urlopen(f"{url}/config") as answer:
        return dict(json.load(answer))


def event(page: Any, target: str) -> dict[str, Any]:
    """The event that is triggered by the component with this elem_id or button text."""
    config = config_of(page.url)
    wanted = {
        one["id"] for one in config["components"] if target in (one["props"].get("elem_id"), one["props"].get("value"))
    }
    found = [
        one for one in config["dependencies"] if one.get("backend_fn") and any(at in wanted for at, _ in one["targets"])
    ]
    assert found, f"no event of {target}"
    return found[0]


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


def start(page: Any, base: str, box: Any = None) -> None:
    """Presses Start with boxes that all hold the same, filled from a draft: it must do nothing."""
    found = event(page, "start")
    before = sorted(path.name for path in page.root.iterdir())
    said = json.dumps(page.queued(found["id"], [base, *[box] * (len(found["inputs"]) - 1)]))
    assert "note fail" in said or "error" in said, said[:500]
    assert "Traceback" not in said
    assert "root:x:" not in said
    assert sorted(path.name for path in page.root.iterdir()) == before
    assert not Path("/tmp/elsewhere").exists()


@pytest.mark.parametrize("draft", rest_in_matrix(3, FORGED), ids=lambda draft: json.dumps(draft)[:70])
def test_a_forged_draft_starts_nothing(page: Any, draft: Any) -> None:
    start(page, json.dumps(draft))


BOXES: list[Any] = ["../../etc", "os:system", True, 7, ["x"], {"a": 1}, "x" * 20_001, "[" * 200, "&a [*a]"]


@pytest.mark.parametrize("box", BOXES, ids=lambda box: str(box)[:20])
def test_forged_boxes_start_nothing(page: Any, box: Any) -> None:
    start(page, json.dumps({"preset": "quickstart"}), box)


def test_forged_values_of_a_list_are_refused(page: Any) -> None:
    found = event(page, "preset")
    for value in ("../../etc/passwd", ["quickstart"], {"a": 1}, 7, None):
        answer = page.predict(found["id"], [value, *[None] * (len(found["inputs"]) - 1)])
        assert answer.status in (200, 422, 500)
        assert "Traceback" not in answer.text
        if answer.status == 200:
            assert answer.json()["data"][1].get("__type__") == "update", answer.text[:300]  # skipped: nothing changed


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
