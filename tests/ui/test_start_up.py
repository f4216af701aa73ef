"""From the command to the page: what is left out of Gradio's start, and a tunnel that cannot be had."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")
import httpx
from starlette.routing import Mount

from kit.ui import server
from kit.ui.server import import_gradio, without_applications
from kit.ui.settings import Settings

ACCOUNTS = {"ada": "correct-horse"}


def test_no_stubs_are_written_while_gradio_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a component's class is made by asks for its file first; everybody else is answered as ever."""
    seen: list[object] = []

    def imports(name: str, *more: Any, **named: Any) -> Any:
        if name == "gradio":
            component = type("Component", (), {"EVENTS": []})
            with pytest.raises(OSError, match="no stub"):
                inspect.getfile(component)
            seen.append(inspect.getfile(Path))
        return known(name, *more, **named)

    import builtins

    known = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", imports)
    before = inspect.getfile
    assert import_gradio().__name__ == "gradio"
    assert seen == [before(Path)]
    assert inspect.getfile is before


def test_one_application_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradio.routes import App

    made: list[object] = []
    known = App.create_app

    def counted(*given: Any, **named: Any) -> Any:
        made.append(app := known(*given, **named))
        return app

    monkeypatch.setattr(App, "create_app", staticmethod(counted))
    gate = server.make_app(Settings(root=tmp_path / "runs", folder=tmp_path))
    assert len(made) == 1
    mounted = next(route.app for route in gate.app.routes if isinstance(route, Mount))
    assert mounted is made[0]
    assert mounted.get_blocks().app is mounted  # the queue asks it for its address


def test_what_is_left_out_is_there_again_after_a_mistake() -> None:
    from gradio import Blocks
    from gradio.routes import App

    before = App.create_app, Blocks.get_config_file
    with pytest.raises(ValueError, match="broken"), without_applications():
        raise ValueError("broken")
    assert (App.create_app, Blocks.get_config_file) == before


def test_the_screens_are_described_once_they_are_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradio import Blocks

    described, describe = [], Blocks.get_config_file

    def counted(self: Any) -> Any:
        described.append(describe(self))
        return described[-1]

    monkeypatch.setattr(Blocks, "get_config_file", counted)
    gate = server.make_app(Settings(root=tmp_path / "runs", folder=tmp_path))
    mounted = next(route.app for route in gate.app.routes if isinstance(route, Mount))
    assert len(described) <= 2
    assert mounted.get_blocks().config == described[-1]
    assert set(described[-1]["page"]) == {"", "new", "run", "compare", "chat", "export"}


def test_no_output_is_told_of_an_event_that_nobody_is_to_see(tmp_path: Path) -> None:
    """Gradio's script would look each output up in the whole page, at every change of every event's state."""
    from kit.ui.page import build
    from kit.ui.site import Site

    with without_applications():
        page = build(Site(Settings(root=tmp_path / "runs", folder=tmp_path)))
    functions = page.get_config_file()["dependencies"]
    unseen = [one for one in functions if one["backend_fn"] and one["show_progress"] == "hidden"]
    assert len(unseen) > 100
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
