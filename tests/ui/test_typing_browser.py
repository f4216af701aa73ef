"""Typing, choosing and clicking in a browser at the speed of people."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("playwright")
from playwright.sync_api import Locator, expect
from playwright.sync_api import Page as Tab
from test_browser import press, sees, step, tab, wait_for
from test_runs_browser import choose

import kit.api
from kit.config import load_config
from kit.errors import RunError
from kit.ui import children, new_run
from kit.ui.form import Form

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
__all__ = ["tab"]


@pytest.fixture(scope="module")
def starts() -> list[tuple[Any, ...]]:
    """The runs that the page would have started."""
    return []


@pytest.fixture(scope="module")
def here(serve_here: Any, tmp_path_factory: pytest.TempPathFactory, starts: list[Any]) -> Iterator[Any]:
    """A page in this process that plans and starts nothing."""

    def answer(self: Any, question: str, *args: Any, **named: Any) -> Any:
        if question in ("validate", "check"):
            return {"problem": None, "right": 1.0, "wrong": 0.0, "tried": 0, "paid": 0}
        raise RunError("nothing is read here")

    def begin(config: Any) -> Any:
        starts.append(("start", config.run.id, config.optimisation.steps))
        raise RunError("nothing is started here")

    folder = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder / "gradio"))
        patch.setattr(children.Benches, "ask", answer)
        patch.setattr(kit.api, "start", begin)
        yield serve_here(folder)


def box(tab: Tab, elem_id: str) -> Locator:
    return tab.locator(f"#{elem_id} textarea, #{elem_id} input").first


def test_type_tab_and_type(here: Any, tab: Callable[..., Tab]) -> None:
    new = tab(here, "/new")
    sees(new, "Settings are valid")
    step(new, "3 Training")
    for delay, steps, rate in ((40, "123", "0.00076543"), (120, "456", "0.00012345")):
        box(new, "first-optimisation-steps").click()
        new.keyboard.press("Control+a")
        new.keyboard.type(steps, delay=delay)
        new.keyboard.press("Tab")
        new.keyboard.press("Control+a")
        new.keyboard.type(rate, delay=delay)
        expect(box(new, "first-optimisation-learning_rate")).to_have_value(rate)
        new.keyboard.press("Tab")
        command = new.locator("#command textarea")
        expect(command).to_have_value(re.compile(f"steps={steps} -o optimisation.learning_rate={rate}"))


def test_two_concurrent_edits_both_stay(here: Any, tab: Callable[..., Tab]) -> None:
    new = tab(here, "/new")
    sees(new, "Settings are valid")
    step(new, "3 Training")
    new.wait_for_timeout(1500)  # the first answer of the page fills all boxes
    box(new, "key-model-lora-rank").fill("32")
    new.get_by_label("4-bit weights").locator("visible=true").first.click(delay=60)
    expect(new.locator("#command textarea")).to_have_value(
        re.compile("-o model.load_in_4bit=true -o model.lora.rank=32")
    )
    new.wait_for_timeout(2000)
    requests: list[str] = []
    new.on("request", lambda request: requests.append(request.url))
    new.wait_for_timeout(2000)
    assert len(requests) <= 2, "the timer alone asks: what follows from a draft is asked for once, and not for ever"


def test_an_answer_that_is_too_late_does_not_bring_the_old_draft_back(
    here: Any, tab: Callable[..., Tab], monkeypatch: pytest.MonkeyPatch
) -> None:
    known, answered = new_run.show_draft, threading.Event()

    def late(sent: Any) -> Any:
        answer = known(sent)
        if "77" in sent.boxes:
            time.sleep(2)
            answered.set()
        return answer

    monkeypatch.setattr(new_run, "show_draft", late)
    new = tab(here, "/new")
    sees(new, "Settings are valid")
    step(new, "3 Training")
    for click, preset in (("Start over", "quickstart"), ("", "gsm8k")):
        answered.clear()
        box(new, "key-model-lora-rank").fill("77")
        box(new, "key-model-lora-rank").blur()
        new.wait_for_timeout(300)  # the request is under way
        press(new, click) if click else choose(new, "preset", preset)
        command = new.locator("#command textarea")
        expect(command).to_have_value(re.compile(f"train {preset} (?!.*rank)"))
        assert answered.wait(10)
        new.wait_for_timeout(1500)
        expect(command).to_have_value(re.compile(f"train {preset} (?!.*rank)"))
        expect(box(new, "key-model-lora-rank")).to_have_value("16" if preset == "quickstart" else "32")


def test_what_is_changed_and_typed_before_the_first_answer_stays(
    here: Any, tab: Callable[..., Tab], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Form.filled

    def late(*args: Any) -> Any:
        time.sleep(2)
        return known(*args)

    monkeypatch.setattr(Form, "filled", late)
    new = tab(here, "/new")
    step(new, "3 Training")
    new.get_by_label("4-bit weights").locator("visible=true").first.click()
    box(new, "key-model-lora-rank").click()
    box(new, "key-model-lora-rank").fill("24")
    new.wait_for_timeout(3500)
    expect(new.locator("#command textarea")).to_have_value(re.compile("load_in_4bit=true"))
    expect(box(new, "key-model-lora-rank")).to_have_value("24")
    box(new, "key-model-lora-rank").blur()
    expect(new.locator("#command textarea")).to_have_value(re.compile("rank=24"))


def test_a_name_typed_just_before_start_is_used(here: Any, tab: Callable[..., Tab], starts: list[Any]) -> None:
    new = tab(here, "/new")
    sees(new, "Settings are valid")
    step(new, "3 Training")
    for held in (0, 90):
        box(new, "run-name").fill(f"held-{held}")
        before = len(starts)
        new.locator("#start").click(delay=held)
        wait_for(lambda before=before: len(starts) > before)
        sees(new, "nothing is started here")
        assert starts[before:] == [("start", f"held-{held}", load_config("quickstart").optimisation.steps)]
        box(new, "run-name").fill("another")
        box(new, "run-name").blur()
        expect(new.locator("#start-said")).not_to_contain_text("nothing is started here")


def test_the_plan_of_a_previous_draft_is_not_shown(
    here: Any, tab: Callable[..., Tab], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = children.Benches.ask

    def answer(self: Any, question: str, config: Any, **named: Any) -> Any:
        if question != "plan":
            return known(self, question, config, **named)
        time.sleep(2)
        raise RunError(f"planned {config.optimisation.steps} steps")

    monkeypatch.setattr(children.Benches, "ask", answer)
    new = tab(here, "/new?step=3")
    sees(new, "Settings are valid")
    box(new, "first-optimisation-steps").fill("33")
    box(new, "first-optimisation-steps").blur()
    expect(new.locator("#command textarea")).to_have_value(re.compile("steps=33"))
    texts = [(new.wait_for_timeout(200), new.locator("#verdict-fits").inner_text())[1] for _ in range(20)]
    assert sum("planned 24" in text for text in texts) <= 1
    assert "planned 33" in texts[-1]


def test_an_edit_clears_results_and_starts_no_signal_check_without_a_plan(
    here: Any, tab: Callable[..., Tab], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[str] = []
    monkeypatch.setattr(children.Jobs, "start", lambda self, key, *_: checks.append(key))
    new = tab(here, "/new")
    sees(new, "Settings are valid")
    step(new, "2 Reward")
    new.get_by_text("Parameters and weights").click()
    score = new.locator("#lab-scores")
    press(new, "Fill in examples for this row")
    expect(score).to_contain_text("nothing is read here")
    box(new, "run-name").fill("named")
    box(new, "run-name").blur()
    expect(new.locator("#command textarea")).to_have_value(re.compile("named"))
    expect(score).to_contain_text("nothing is read here")
    box(new, "key-reward-params").fill("{format_weight: 0.3}")
    box(new, "key-reward-params").blur()
    sees(new, "nothing is read here")  # the planner's answer
    expect(score).not_to_contain_text("nothing is read here")  # the score is that of the previous reward
    new.wait_for_timeout(2500 * new_run.POLL_SECONDS)
    assert checks == []
