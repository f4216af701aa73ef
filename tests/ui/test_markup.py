"""HTML pieces of the page: contents of completions stay text."""

from __future__ import annotations

from typing import Any

import pytest

from kit.ui import markup as m
from kit.ui import results

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\"' style=x {0}"


def test_texts_are_escaped_everywhere() -> None:
    part = {"name": EVIL, "value": 1.0, "status": EVIL, "seconds": 0.1, "reason": EVIL, "extracted": EVIL}
    group = {
        "prompt": EVIL, "reference": EVIL, "checker": EVIL, "weights": {EVIL: 1.0}, "advantages": [1.0],
        "items": [{"text": EVIL, "total": 1.0, "correct": True, "parts": [part]}],
    }  # fmt: skip
    attacks = {
        "passed": False, "problems": [EVIL], "notes": [EVIL], "right": EVIL, "wrong": EVIL, "style": EVIL,
        "cases": [
            {"kind": kind, "name": EVIL, "completion": EVIL, "total": 1.0, "why": EVIL} for kind in ("good", "bad", "attack")
        ],
    }  # fmt: skip

    def audited(passed: bool) -> dict[str, object]:
        example = {"row": 1, "name": EVIL, "completion": EVIL, "reference": EVIL}
        result = {"attack": EVIL, "rows": 1, "paid": 1, "rate": 1.0, "tried": 1, "seconds": 0.1, "examples": [example]}
        return {"passed": passed, "problems": [EVIL], "results": [result]}

    pages = [
        results.show_group(group),
        results.show_row({"place": 0, "prompt": EVIL, "reference": EVIL}),
        results.show_attacks(attacks),
        *(m.page(results.audit_table(audited(passed))) for passed in (True, False)),
        m.error(EVIL),
        m.empty(EVIL, EVIL),
        m.page(
            m.table([EVIL], [[EVIL]]), m.badge(EVIL, EVIL), m.note(EVIL, EVIL), m.bar(0.5, EVIL, EVIL), m.panel(EVIL)
        ),
    ]
    for page in pages:
        assert "<script" not in page
        assert "<img" not in page
        assert "&lt;script&gt;" in page


def test_keys_in_an_error_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "abcdefgh12345")
    assert "abcdefgh12345" not in m.error("403 for abcdefgh12345")
    assert "hf_" not in m.error("bad token hf_" + "a" * 30)


def test_a_signal_check_ends_in_a_sentence_and_a_change() -> None:
    change = "-o generation.num_generations=16 -o optimisation.batch_size=64"
    shares = ("pass@1", "pass@8", "reward", "spread_share", "truncated_share", "wrong_format_share", "failure_share")
    signal = {name: {"value": 0.1, "low": 0.05, "high": 0.2} for name in shares} | {
        "verdict": {"verdict": "too hard", "because": "<b>", "change": change},
        "prompts": 8,
        "k": 8,
        "completion_tokens_mean": 13.0,
        "samples": [{"prompt": "p", "completion": "<i>", "reward": 0.25, "why": "not right"}],
        "audit": {"passed": False, "problems": ["echo is paid on 3 of 12 rows"], "results": []},
        "seconds": {"rollout": 1.0, "reward": 0.0},
    }
    html = results.show_signal(signal)
    assert "Too hard" in html
    assert "verdict fail" in html
    assert "<b>." not in html
    assert "10% [5%, 20%]" in html
    assert results.actions_of(signal) == ["generation.num_generations=16", "optimisation.batch_size=64"]
    assert "Set Group size to 16 and Batch size to 64." in html
    assert "completions 1.0 s, rewards 0.0 s" in html
    assert "&lt;i&gt;" in html
    assert "0.25" in html
    assert html.count("echo is paid on 3 of 12 rows") == 1
    assert "echo is paid on 3 of 12 rows" in results.show_card(signal)
    without = signal | {"verdict": {"verdict": "will learn", "because": "x", "change": ""}}
    assert results.actions_of(without) == []


def test_the_change_of_a_signal_check_is_something_that_the_page_has() -> None:
    for change, words in [
        ("--prompts 62", "Sample 62 prompts."),
        ("Correct it; test it with: grpo-kit reward test", "Correct it; test it in the tab Score"),
        ("Choose another reward: grpo-kit reward list", "reward: see the list at the top"),
    ]:
        signal = {"verdict": {"change": change}}
        assert results.actions_of(signal) == []
        assert words in results.change_of(signal)


def test_the_button_of_a_signal_check_changes_settings() -> None:
    from types import SimpleNamespace

    from kit.ui.draft import Draft
    from kit.ui.lab import apply_actions

    sent: Any = SimpleNamespace(draft=Draft)
    draft, done = apply_actions(sent, ["generation.num_generations=16", 3])
    assert draft.changes == {"generation.num_generations": 16}
    assert "Set Group size to 16: done" in done
