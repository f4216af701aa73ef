"""Exports asked for on the page, to their end: merged, quantised, pushed to a hub, and what a missing tool leads to."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("gradio")
from exporting_runs import make_run

sys.path.append(str(Path(__file__).parents[1] / "exporting"))

from kit.ui.export import Screen
from kit.ui.settings import Settings
from kit.ui.site import Site

pytestmark = pytest.mark.browser
SECONDS = 240.0


@pytest.fixture(scope="module")
def screen(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Screen]:
    """The screen over a run with an adapter."""
    folder = tmp_path_factory.mktemp("exports-page")
    make_run(folder / "runs", "it", model_folder)
    site = Site(Settings(root=folder / "runs", folder=folder))
    yield Screen(site)
    site.close()


def asked(screen: Screen, kind: str, quantization: str = "q8_0") -> list[str]:
    """[what is said at once, what stands in the place of progress at the end, the results], after a click."""
    said = screen.begin("it", kind, "the run's result", quantization)[0]
    end = time.monotonic() + SECONDS
    while (job := screen.site.jobs.get(screen.key(screen.site.run("it"), kind))) and job.state == "running":
        assert time.monotonic() < end, job.line
        time.sleep(0.1)
    _, notice, progress, results, stop, _ = screen.look("it", kind, {})
    assert notice == ""
    assert not stop.visible
    return [said, progress, results]


def verdict(results: str, name: str) -> str:
    """What is said of one export."""
    return next(part for part in results.split('<div class="verdict ')[1:] if f"<b>{name}</b>" in part)


def test_a_merged_model_is_verified_and_replaced(screen: Screen) -> None:
    said, progress, results = asked(screen, "merged-16bit")
    assert (said, progress) == ("", "")
    found = verdict(results, "merged-16bit")
    assert found.startswith("ok")
    assert "tokens on which both agree" in found
    assert "/runs/it/export/merged-16bit/model.safetensors" in found
    assert asked(screen, "merged-16bit")[:2] == ["", ""]


@pytest.mark.parametrize("kind", ["gguf", "ollama"])
def test_what_a_missing_tool_is_called_and_how_to_get_it(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    said, progress, results = asked(screen, kind)
    assert re.search("convert_hf_to_gguf.py.*git clone", said, re.DOTALL), progress  # at once, before a child is begun
    assert "Traceback" not in said + progress
    assert f"<b>{kind}</b>" not in results
