"""From the command to the page: what a browser is told, and a tunnel that cannot be had."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")
import httpx

from kit.ui import server
from kit.ui.settings import Settings

ACCOUNTS = {"ada": "correct-horse"}


def test_gradio_still_has_what_this_page_sets_of_it() -> None:
    """A private attribute that security rests on."""
    import gradio as gr

    with gr.Blocks() as blocks:
        blocks.queue()
    assert blocks.has_launched is False


def test_no_output_is_told_of_an_event_that_nobody_is_to_see(tmp_path: Path) -> None:
    """Gradio's script would look each output up in the whole page, at every change of every event's state."""
    from kit.ui.page import build
    from kit.ui.site import Site

    page = build(Site(Settings(root=tmp_path / "runs", folder=tmp_path)))
    functions = page.get_config_file()["dependencies"]
    unseen = [one for one in functions if one["backend_fn"] and one["show_progress"] == "hidden"]
    assert len(unseen) > 60
    assert [one for one in unseen if one["show_progress_on"] != []] == []
    assert max(len(one["inputs"]) for one in functions if one["backend_fn"]) < 30, "inputs are told, too"
    loads = [one for one in functions if any(kind == "load" for _, kind in one["targets"])]
    load = max(loads, key=lambda one: len(one["outputs"]))
    assert len(load["inputs"]) == 1, "the boxes are as they were built: a browser takes long to send them"


def test_without_a_relay_the_page_goes_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*given: Any, **named: Any) -> Any:
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(httpx, "get", unreachable)
    server.share(Settings(share=True, accounts=ACCOUNTS, port=7999))
    said = capsys.readouterr()
    assert "asked for at Gradio's relay" in said.out
    assert "no public address" in said.err
    assert "ConnectError: Name or service not known" in said.err
    assert "ssh -L 7999:127.0.0.1:7999" in said.err
    assert "correct-horse" not in said.out + said.err


def test_with_a_relay_the_address_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from gradio import networking

    asked: dict[str, Any] = {}

    def tunnel(**named: Any) -> str:
        asked.update(named)
        return "https://abc.gradio.live"

    monkeypatch.setattr(networking, "setup_tunnel", tunnel)
    server.share(Settings(share=True, accounts=ACCOUNTS, port=7999))
    assert "and at https://abc.gradio.live" in capsys.readouterr().out
    assert (asked["local_host"], asked["local_port"]) == ("127.0.0.1", 7999)
    assert len(asked["share_token"]) >= 32


@pytest.mark.browser
def test_a_shared_page_without_a_network_is_served_and_asks_who_it_is(open_page: Any) -> None:
    nowhere = dict.fromkeys(("HTTPS_PROXY", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    page = open_page("--share", "--auth", "KIT_ACCOUNTS", environment=nowhere | {"KIT_ACCOUNTS": "ada:correct-horse"})
    lines = [page.process.stdout.readline().decode() for _ in range(3)]
    assert "the page is at" in "".join(lines)
    log = page.folder / "server.log"
    end = time.monotonic() + 60
    while "no public address" not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.2)
    assert page.ask("GET", "/").status == 401
    assert page.ask("GET", "/health").status == 401
    assert "Traceback" not in log.read_text()
