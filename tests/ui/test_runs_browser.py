"""Run, Compare, Chat and Export in a browser, from a start on the page to a verified export."""

from __future__ import annotations

import concurrent.futures
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")
from made_runs import batch, make
from playwright.sync_api import Page as Tab
from playwright.sync_api import expect
from test_browser import QUICK, fill, fits_a_phone, press, sees, status, step, tab, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
__all__ = ["tab"]
SLOW = 240_000


def choose(tab: Tab, elem_id: str, name: str) -> None:
    """Choose an entry of a drop-down list."""
    box = tab.locator(f"#{elem_id}")
    box.locator("input").first.click()
    box.get_by_role("option", name=name, exact=True).click()


def started(page: Any, run_id: str, steps: int, **more: Any) -> Any:
    """Start a run of the tiny model as the command line does."""
    import kit

    keys = QUICK | {"optimisation.steps": str(steps), "evaluation.before": "false", "evaluation.after": "false"} | more
    overrides = [f"{key}={value}" for key, value in keys.items()]
    return kit.start("quickstart", overrides=[*overrides, f"run.id={run_id}", f"run.root={page.root}"])


def test_empty_states(page: Any, tab: Callable[..., Tab]) -> None:
    assert not page.root.exists() or not [path for path in page.root.iterdir() if not path.name.startswith(".")]
    for path, text in {
        "/run": "No run yet",
        "/compare": "Two runs are needed",
        "/chat": "No trained model yet",
        "/export": "No trained model yet",
    }.items():
        empty = tab(page, path)
        sees(empty, text)
        fits_a_phone(empty)
        empty.close()


def test_a_newcomers_whole_way_from_a_file_to_a_verified_model(
    page: Any, tab: Callable[..., Tab], tmp_path: Path
) -> None:
    """A user with a table of questions and answers trains a model and exports it in the browser alone."""
    path = tmp_path / "mine.csv"
    path.write_text("topic,task,right\n" + "".join(f"sum,What is {i} + {i}?,{2 * i}\n" for i in range(40)))
    new = tab(page)
    sees(new, "No runs yet")
    new.get_by_role("button", name=re.compile("^My data")).click()
    new.wait_for_url("**/new?step=1")
    new.go_back()
    new.get_by_role("button", name=re.compile("^Look at a finished run")).click()
    new.wait_for_url("**/run?run=example")
    sees(new, "24 of 24")
    new.get_by_role("link", name="New run").click()
    expect(new.locator("#command textarea")).to_have_value(re.compile("train my-data"))

    new.locator("#drop-data input[type=file]").set_input_files(path)
    sees(new, "prompt 'task', right answers 'right', reward gsm8k-reasoning; the right answers in 'right' are numbers")
    expect(new.locator("#command textarea")).to_have_value(re.compile('reference_column="right"'))
    step(new, "3 Training")
    choose(new, "key-model-name", "embedded")
    expect(new.locator("#command textarea")).to_have_value(re.compile("model.name"))
    step(new, "1 Data")
    new.get_by_text("Limits, other column names, tasks").click()
    held = new.locator("#key-data-heldout textarea").first
    held.fill("8")
    held.blur()
    press(new, "Show rows as the model sees them")
    sees(new, "training row 0")
    sees(new, "What is left out of 40 rows")
    assert 'data.source="runs/.uploads/mine.csv"' in new.locator("#command textarea").input_value()
    assert sorted(path.name for path in (page.root / ".uploads").iterdir()) == [".arriving", "mine.csv"]

    step(new, "2 Reward")
    press(new, "Fill in examples for this row")
    sees(new, "rewards differ: this group teaches")
    sees(new, "accuracy read:")
    step(new, "Try attacks")
    press(new, "Try all of them")
    sees(new, re.compile(r"None of \d+ attacks"))
    press(new, "Audit on my rows")
    sees(new, "No attack is paid on any of 12 rows")
    new.get_by_text("Parameters and weights").click()
    parameters = new.locator("#key-reward-params textarea")
    parameters.fill("{format_weight: 0.21}")
    parameters.blur()
    expect(new.locator("#command textarea")).to_have_value(re.compile('format_weight": 0.21'))
    sees(new, "The other components can add 0.31")
    step(new, "3 Training")
    for key, value in QUICK.items():
        fill(new, key, value)
    name = new.locator("#run-name textarea, #run-name input").first
    name.fill("way")
    name.blur()
    sees(new, "Scored the first row")
    sees(new, re.compile("^Fits: "))
    press(new, "Start")
    new.wait_for_url("**/run?run=way")
    run = new
    sees(run, re.compile("starting|running|finished"))
    run.reload()  # during the run
    wait_for(lambda: status(page, "way")["state"] in ("finished", "failed"), 240)
    assert status(page, "way")["state"] == "finished", status(page, "way").get("reason")
    sees(run, "finished")
    sees(run, "Reward on training prompts")
    sees(run, "Held-out problems solved")
    step(run, "Completions")
    sees(run, re.compile(r"Step 2: \d of 2 groups teach"))
    run.get_by_role("link", name="Export").last.click()
    run.wait_for_url("**/export?run=way")
    expect(run.locator("#export-weights input")).to_have_value("the run's result")
    run.get_by_text("merged-16bit: ").click()
    press(run, "Export and verify")
    sees(run, "Exporting and verifying")
    run.locator("#export-results .verdict.ok").wait_for(timeout=SLOW)
    sees(run, "verified")
    sees(run, "tokens on which both agree")
    with run.expect_download() as got:
        run.get_by_role("link", name="model.safetensors").click()
    written = page.root / "way" / "export" / "merged-16bit" / "model.safetensors"
    assert Path(got.value.path()).read_bytes() == written.read_bytes()
    fits_a_phone(run)


def test_base_and_tuned_answer_side_by_side(page: Any, tab: Callable[..., Tab]) -> None:
    assert (page.root / "way" / "adapter").is_dir(), "made by the test above"
    chat = tab(page, "/chat?run=way")
    sees(chat, "Your first question loads the model")
    expect(chat.locator("#chat-ask")).to_be_visible()
    chat.locator("#chat-picked input").click()
    chat.get_by_role("option").nth(1).click()
    press(chat, "Ask both")
    chat.locator("#chat-answers .chip").first.wait_for(timeout=SLOW)
    sees(chat, "embedded, weights of step 2, on cpu")
    sees(chat, "After training")
    sees(chat, "reference")
    sees(chat, "One prompt says little")
    answers = chat.locator("#chat-base .bot.message, #chat-tuned .bot.message")
    expect(answers).to_have_count(2)
    before = answers.all_inner_texts()
    for number, text in enumerate(("", "12 + 30 ="), 2):  # the answers are equal for the same prompt and seed only
        chat.locator("#chat-prompt textarea").fill(text)
        press(chat, "Ask both")
        expect(answers).to_have_count(2 * number, timeout=60_000)
        expect(chat.locator("#chat-stop")).not_to_be_visible(timeout=60_000)
        texts = chat.locator("#chat-base .bot.message").all_inner_texts()
        assert (texts[-1] == before[0]) == (text == "")
    fits_a_phone(chat)


def test_a_run_outlives_its_page_and_is_stopped_and_resumed_from_another(
    tab: Callable[..., Tab], open_page: Any
) -> None:
    environment = {"OMP_NUM_THREADS": "1"}
    own = open_page(environment=environment)
    run = started(own, "long", 4000)
    first, second = (tab(own, apart=apart) for apart in (False, True))
    for view in (first, second):
        sees(view, "long")
        view.goto(f"{own.url}/run?run=long")
        sees(view, "running")
    wait_for(lambda: status(own, "long").get("step", 0) >= 5)
    for view in (first, second):
        view.locator("#run-charts svg").first.wait_for()
    own.kill()
    first.close()
    at = status(own, "long")["step"]
    wait_for(lambda: status(own, "long")["step"] > at)  # the run has continued
    again = open_page(folder=own.folder, port=own.port, environment=environment)
    third = tab(again)
    sees(third, "running")
    third.goto(f"{again.url}/run?run=long")
    sees(third, "running")
    chart = third.locator("#run-charts svg").first
    chart.wait_for()
    known = chart.locator("desc").text_content() or ""
    assert " at 1 to " in known, "the charts begin with the first step, not with the restart"
    expect(chart.locator("desc")).not_to_have_text(known, timeout=30_000)  # charts update by themselves
    # A screen that stayed open updates again, too.
    expect(second.locator("#run-charts svg desc").first).to_have_text(re.compile(" at 1 to "))
    third.locator("#run-stop").click()
    sees(third, "its step is finished and saved first")
    run.wait(120)
    assert run.status["state"] == "stopped"
    assert list(run.path.glob("checkpoint-*"))
    sees(third, "stopped")
    for view in (second, third):
        view.locator("#run-resume").wait_for()
    stopped_at = status(again, "long")["step"]
    step(third, "More")
    third.get_by_text("Checkpoints", exact=True).click()
    sees(third, "Resume continues from here")
    third.locator("#run-resume").click()
    sees(third, "continues from its last complete checkpoint")
    wait_for(lambda: status(again, "long").get("step", 0) > stopped_at)
    sees(third, "running")
    questions: list[str] = []
    third.once("dialog", lambda dialog: (questions.append(dialog.message), dialog.dismiss()))
    third.locator("#run-now").click()
    wait_for(lambda: questions)
    assert "It saves first where it can" in questions[0]
    assert status(again, "long")["state"] == "running"
    third.locator("#run-stop").click()
    sees(third, "its step is finished and saved first")
    run.wait(120)
    assert run.status["state"] == "stopped"
    third.goto(again.url)
    sees(third, "Nothing is running")


def test_a_refused_resume_says_why_and_a_run_is_stopped_at_once(page: Any, tab: Callable[..., Tab]) -> None:
    run = started(page, "changed", 4000)
    wait_for(lambda: status(page, "changed").get("step", 0) >= 2)
    run.stop()
    text = run.path / "data.json"
    known = text.read_text()
    text.write_text(re.sub(r'("sha256": ")[0-9a-f]{8}', r"\g<1>00000000", known))
    view = tab(page, "/run?run=changed")
    view.locator("#run-resume").click()
    sees(view, "It was not resumed")
    sees(view, re.compile("data"))
    assert "grpo-kit resume changed --force" in view.content()
    text.write_text(known)
    view.locator("#run-resume").click()
    wait_for(lambda: run.status["state"] == "running")
    view.on("dialog", lambda dialog: dialog.accept())
    view.locator("#run-now").click()
    wait_for(lambda: run.status["state"] in ("stopped", "interrupted", "failed"))
    sees(view, "stopped")


def test_charts_of_ten_thousand_steps(page: Any, tab: Callable[..., Tab]) -> None:
    make(page.root, "huge", 10_000)
    view = tab(page, "/run?run=huge")
    chart = view.locator("#run-charts svg").first
    chart.wait_for()
    expect(chart.locator("desc")).to_have_text(re.compile("10,000"))
    sees(view, "The policy has jumped away from the reference")
    shown = view.evaluate(
        "Math.max(...[...document.querySelectorAll('#run-charts [points]')].map(p => p.getAttribute('points').split(' ').length))"
    )
    assert shown <= 500
    assert view.locator("#run-charts svg").count() == 5
    fits_a_phone(view)


def test_the_explorer_searches_and_pages(page: Any, tab: Callable[..., Tab]) -> None:
    run = make(page.root, "explored")
    for number in range(2, 6):
        batch(run.completions, number, [f"{place} + {number} =" for place in range(6)])
    view = tab(page, "/run?run=explored")
    sees(view, "finished")
    step(view, "Completions")
    sees(view, "Step 20: 1 of 2 groups teach")
    slider = view.locator("#completions-step input[type=number]")
    slider.fill("5")
    slider.press("Enter")
    sees(view, "Step 5: 5 of 6 groups teach")
    expect(view.locator("#completions-shown .group")).to_have_count(3)
    view.locator("#completions-page input").fill("2")
    view.locator("#completions-page input").press("Enter")
    sees(view, "Step 5, group 4")
    view.locator("#completions-search textarea, #completions-search input").first.fill("3 + 4")
    view.locator("#completions-search textarea, #completions-search input").first.press("Enter")
    sees(view, "4 completions in 6 steps")
    view.locator("#completions-shown summary").first.press("Enter")  # by keyboard
    expect(view.locator("#completions-shown mark").first).to_have_text("3 + 4")


def test_arms_are_compared(page: Any, tab: Callable[..., Tab]) -> None:
    for seed in range(3):
        make(page.root, f"plain-s{seed}", share=0.2, overrides=(f"run.seed={seed}",))
        make(page.root, f"fast-s{seed}", share=0.9, overrides=(f"run.seed={seed}", "optimisation.learning_rate=0.001"))
    view = tab(page, "/compare?run=plain-s0")
    sees(view, "Two runs are needed")
    press(view, "Compare")
    sees(view, "Choose two runs or more")
    for name in ("plain-s1", "plain-s2", "fast-s0", "fast-s1", "fast-s2"):
        choose(view, "compare-runs", name)
    view.keyboard.press("Escape")
    press(view, "Compare")
    sees(view, "optimisation.learning_rate")
    expect(view.locator("#compare-verdict .notice.good")).to_have_count(1)
    view.locator("#compare-verdict svg").first.wait_for()
    view.reload()
    expect(view.locator("#compare-runs .token")).to_have_count(6)
    fits_a_phone(view)


def test_error_states(page: Any, tab: Callable[..., Tab]) -> None:
    lost = tab(page, "/run?run=lost")
    sees(lost, "There is no run 'lost'")
    run = make(page.root, "broken", state="failed")
    run.write_status("failed", reason="CUDA ran out of memory")
    for path in run.eval.iterdir():
        path.unlink()
    run.metrics_file.write_text("nonsense\n" + run.metrics_file.read_text())
    view = tab(page, "/run?run=broken")
    sees(view, "CUDA ran out of memory")
    sees(view, re.compile("line 1: not a JSON object"))
    sees(view, "No step was made")
    begun = time.monotonic()
    sees(tab(page, "/chat?run=broken"), "This run has no weights yet")
    assert time.monotonic() - begun < 60


def test_of_concurrent_starts_of_one_name_one_succeeds(page: Any) -> None:
    changes = {key: json.loads(value) for key, value in QUICK.items()} | {"run.id": "twice"}
    event = page.event("start")
    (gathered,) = [start for start in page.described["dependencies"] if start["id"] == event["trigger_after"]]
    boxes = [None] * (len(gathered["inputs"]) - 1)
    sent = [json.dumps([json.dumps({"preset": "quickstart", "changes": changes}), *boxes])]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [json.dumps(answer) for answer in pool.map(lambda _: page.queued(event["id"], sent, 240.0), range(4))]
    started = ["/run?run=twice" in answer for answer in answers]
    assert started.count(True) == 1, answers
    assert all("note fail" in answer for answer, won in zip(answers, started, strict=True) if not won)
    from kit.api import Run

    Run("twice", page.root).stop(now=True)
    assert status(page, "twice")["state"] == "stopped"
