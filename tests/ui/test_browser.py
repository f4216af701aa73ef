"""The page in a browser: New run and Home."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patience import wait_for

pytest.importorskip("playwright")
from playwright.sync_api import Browser, BrowserContext, Locator, expect
from playwright.sync_api import Page as Tab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
PATIENCE = 120_000  # milliseconds: a busy machine imports torch for the first plan
expect.set_options(timeout=30_000)
QUICK = {
    "optimisation.steps": "2",
    "generation.num_generations": "4",
    "optimisation.batch_size": "8",
    "generation.max_completion_tokens": "12",
    "evaluation.every": "0",
}
SCREENS = ("/", "/new", "/run", "/compare", "/chat", "/export")


@pytest.fixture
def tab(browser: Browser, known: BrowserContext) -> Iterator[Callable[..., Tab]]:
    """Return a function that opens a tab, which fails the test on a script error or a request to another host.

    With `apart`, the tab belongs to another browser context.
    """
    opened: list[Tab] = []
    places: set[str] = set()
    faults: list[str] = []

    def start(page: Any, path: str = "/", width: int = 1280, scheme: Any = "light", *, apart: bool = False) -> Tab:
        new = browser.new_page() if apart else known.new_page()
        new.set_viewport_size({"width": width, "height": 900})
        new.emulate_media(color_scheme=scheme)
        new.set_default_timeout(PATIENCE)
        new.on(
            "request", lambda r: faults.append(r.url) if not r.url.startswith((page.url, "data:", "blob:")) else None
        )
        new.on("pageerror", lambda error: faults.append(str(error)))
        opened.append(new)
        places.add(page.url)
        new.goto(page.url + path)
        new.locator(".k").locator("visible=true").first.wait_for()  # the first may be in a tab that is not open
        return new

    yield start
    for page in opened:
        page.close()
    storage = known.new_cdp_session(known.pages[0])
    for place in places:
        storage.send("Storage.clearDataForOrigin", {"origin": place, "storageTypes": "local_storage"})
    storage.detach()
    assert not faults, faults


def step(tab: Tab, name: str) -> None:
    """Open a tab by its title; on a narrow window, from the overflow menu."""
    tab.get_by_role("tab").locator("visible=true").first.wait_for()
    shown = tab.get_by_role("tab", name=name).locator("visible=true")
    if shown.count():
        shown.first.click()
        return
    for menu in tab.locator(".overflow-menu > button").locator("visible=true").all():
        menu.click()
        item = tab.get_by_role("button", name=name).locator("visible=true")
        if item.count():
            item.first.click()
            return
        menu.click()
    raise AssertionError(f"there is no {name}")


def press(tab: Tab, name: str) -> None:
    tab.get_by_role("button", name=name, exact=True).locator("visible=true").first.click()


def sees(tab: Tab, text: str | re.Pattern[str]) -> Locator:
    element = tab.get_by_text(text).locator("visible=true").first
    element.wait_for()
    return element


def fill(tab: Tab, key: str, value: str) -> None:
    box = tab.locator(f"#first-{key.replace('.', '-')} textarea, #first-{key.replace('.', '-')} input").first
    box.fill(value)
    box.blur()
    expect(tab.locator("#command textarea")).to_have_value(re.compile(re.escape(f"{key}={value}")))


def status(page: Any, run_id: str) -> dict[str, Any]:
    return dict(json.loads((page.root / run_id / "status.json").read_text()))


def test_the_signal_check_runs_by_itself_for_data_of_ones_own(page: Any, tab: Callable[..., Tab]) -> None:
    new = tab(page, "/new")
    card = new.locator("#verdict-learns")
    expect(card).to_contain_text("Not checked yet")  # an unchanged preset
    step(new, "3 Training")
    for key, value in QUICK.items():
        fill(new, key, value)
    step(new, "1 Data")
    new.get_by_text("Limits, other column names, tasks").click()
    limit = new.locator("#key-data-limit textarea, #key-data-limit input").first
    limit.fill("300")
    limit.blur()
    expect(card).to_contain_text(re.compile("rewards differ in .* of groups"), timeout=120_000)
    expect(card).to_contain_text(re.compile("No known attack works|is paid"))
    step(new, "3 Training")
    fill(new, "optimisation.steps", "3")  # does not change what was checked
    expect(card).to_contain_text(re.compile("rewards differ in .* of groups"))
    new.reload()
    expect(card).to_contain_text(re.compile("rewards differ in .* of groups"))  # the earlier result
    step(new, "2 Reward")
    step(new, "Signal check")
    sees(new, "answer of the untrained model")


def test_the_draft_is_there_after_a_reload_and_in_another_browser_it_is_not(page: Any, tab: Callable[..., Tab]) -> None:
    new = tab(page, "/new")
    step(new, "3 Training")
    fill(new, "optimisation.steps", "17")
    new.reload()
    expect(new.locator("#command textarea")).to_have_value("grpo-kit train quickstart -o optimisation.steps=17")
    step(new, "3 Training")
    expect(new.locator("#first-optimisation-steps textarea, #first-optimisation-steps input").first).to_have_value("17")
    other = tab(page, "/new", apart=True)
    expect(other.locator("#command textarea")).to_have_value("grpo-kit train quickstart")


def test_rows_are_shown_by_keyboard_alone(page: Any, tab: Callable[..., Tab]) -> None:
    new = tab(page, "/new")
    sees(new, "Settings are valid")

    def focus(text: str) -> None:
        for _ in range(60):
            new.keyboard.press("Tab")
            if text in new.evaluate("document.activeElement.textContent || document.activeElement.value || ''"):
                outline = new.evaluate(
                    "getComputedStyle(document.activeElement).outlineStyle + getComputedStyle(document.activeElement).boxShadow"
                )
                assert outline != "nonenone", f"{text}: the focus is invisible"
                return
        raise AssertionError(f"{text} cannot be reached with Tab")

    focus("Show rows")
    new.keyboard.press("Enter")
    sees(new, "training row 0")


def look(page: Tab, width: int, scheme: Any) -> None:
    """Set the width of the window and the system's colour scheme."""
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.wait_for_function("dark => document.body.classList.contains('dark') === dark", arg=scheme == "dark")


def fits_a_phone(page: Tab) -> None:
    """Assert that the screen fits a phone, dark and light, and that all screens can be reached."""
    for scheme in ("dark", "light"):
        look(page, 390, scheme)
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate(
            "[...document.querySelectorAll('.nav-holder a')].every(a => a.getBoundingClientRect().right <= 390)"
        ), "every screen can be reached"
        wide = page.evaluate(
            "[...document.querySelectorAll('.k .card, .k .note, .k .verdict, svg.chart')]"
            ".filter(e => e.getBoundingClientRect().right > 391).length"
        )
        assert wide == 0
        shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
        level = sum(map(int, re.findall(r"\d+", shade)[:3]))
        assert level < 150 if scheme == "dark" else level > 600, shade


@pytest.mark.parametrize("path", SCREENS[:2])
def test_a_phone_shows_the_first_screens(page: Any, tab: Callable[..., Tab], path: str) -> None:
    """Other tests check the remaining screens, filled and empty."""
    fits_a_phone(tab(page, path, width=390, scheme="dark"))


@pytest.mark.usefixtures("cold_processes")
def test_the_page_starts_quickly_and_idles(page: Any, tab: Callable[..., Tab], open_page: Any) -> None:
    """The bounds are for a busy machine; a quiet one needs 5 s to start, 1 s to paint, and under 2 % of a core."""
    import psutil

    begun = time.monotonic()
    own = open_page()
    up = time.monotonic() - begun
    begun = time.monotonic()
    tab(own)
    painted = time.monotonic() - begun
    process = psutil.Process(own.process.pid)
    time.sleep(2)
    before = process.cpu_times()
    time.sleep(6)
    after = process.cpu_times()
    load = (after.user + after.system - before.user - before.system) / 6
    print(f"up {up:.1f} s, painted {painted:.1f} s, idle {load:.1%}")
    assert up < 60
    assert painted < 15
    assert load < 0.05


def test_an_address_with_a_step_opens_it(page: Any, tab: Callable[..., Tab]) -> None:
    new = tab(page, "/new?step=2")
    expect(new.get_by_role("tab", name="2 Reward")).to_have_attribute("aria-selected", "true")


def test_nine_tabs_load_and_poll(page: Any, tab: Callable[..., Tab]) -> None:
    """A browser has six connections per host, so a stream that each tab keeps open would block the seventh."""
    opened = [tab(page, path) for path in (*SCREENS, "/", "/new", "/run")]
    polled: list[str] = []
    opened[0].on("requestfinished", lambda request: polled.append(request.url))
    wait_for(
        lambda: (opened[0].wait_for_timeout(200), any("run/predict" in url or "queue" in url for url in polled))[1], 20
    )
