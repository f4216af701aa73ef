"""From the command to the page: the first response to a browser, and a tunnel that is not available."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gradio")

from kit.ui.settings import Settings

ACCOUNTS = {"ada": "correct-horse"}


def test_gradio_still_has_what_this_page_sets_of_it() -> None:
    """One private attribute is needed for security; the other saves 5 % of a core on an idle server."""
    import gradio as gr

    with gr.Blocks() as blocks:
        blocks.queue()
    assert blocks.has_launched is False
    assert (blocks._queue.sleep_when_free, blocks._queue.progress_update_sleep_when_free) < (0.05, 0.2)


def test_hidden_events_list_no_outputs(tmp_path: Path) -> None:
    """Otherwise Gradio's script searches the page for each output at each change of an event's state."""
    from kit.ui.page import build
    from kit.ui.site import Site

    page = build(Site(Settings(root=tmp_path / "runs", folder=tmp_path)))
    functions = page.get_config_file()["dependencies"]
    unseen = [event for event in functions if event["backend_fn"] and event["show_progress"] == "hidden"]
    assert len(unseen) > 60
    assert [event for event in unseen if event["show_progress_on"] != []] == []
    assert max(len(event["inputs"]) for event in functions if event["backend_fn"]) < 30, "inputs must be listed"
    loads = [event for event in functions if any(kind == "load" for _, kind in event["targets"])]
    load = max(loads, key=lambda event: len(event["outputs"]))
    assert len(load["inputs"]) == 1, "the page must not send boxes again that are unchanged"
    (reward,) = [
        box["id"] for box in page.get_config_file()["components"] if box["props"].get("elem_id") == "verdict-reward"
    ]
    fillers = [event for event in functions if event["backend_fn"] and reward in event["outputs"]]
    assert len(fillers) == 1, "'Checking …' of a second answer could arrive last and stay"
