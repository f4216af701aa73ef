"""The check of executed notebooks finds what it is for: each defect planted in the outputs of a cell."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest


def load_check() -> Any:
    path = Path(__file__).with_name("executed.py")
    spec = importlib.util.spec_from_file_location("executed_notebooks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stream(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": [text]}


def shown(**data: str) -> dict[str, Any]:
    return {"output_type": "execute_result", "data": {name.replace("_", "/"): text for name, text in data.items()}}


def executed(folder: Path, source: str, *outputs: dict[str, Any]) -> Path:
    cell = {"cell_type": "code", "source": [source], "execution_count": 1, "outputs": list(outputs)}
    path = folder / "a.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    return path


GOOD = [
    ("!grpo-kit plan a.yaml", stream("weights 3 GiB\n")),
    ("!grpo-kit objective check b || echo refused", stream("error: it leaks\nrefused\n")),
    ("run.plot()", shown(text_plain="<Figure>", **{"image/svg+xml": "<svg/>"})),
    ("import pandas as pd\npd.DataFrame([1])", shown(text_plain="0", text_html="<table></table>")),
    ("run = kit.train('a')", shown(text_html="<b>The run ran to its end.</b>")),
    ("run = kit.start('a')\nrun.status['state']", shown(text_plain="'queued'")),
]
BAD = [
    ("!grpo-kit plan a.yaml", stream("/bin/bash: line 1: grpo-kit: command not found\n"), "was not found"),
    ("!grpo-kit plan a.yaml", stream("sh: 1: grpo-kit: not found\n"), "was not found"),
    ("!grpo-kit plan a.yaml", stream("error: There is no a.yaml.\n"), "printed an error"),
    ("!grpo-kit plan a.yaml", stream("\x1b[31merror:\x1b[0m There is no a.yaml.\n"), "printed an error"),
    ("!grpo-kit plan a.yaml", None, "printed nothing"),
    ("f()", {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}, "it raised"),
    ("run.plot()", shown(text_plain="<Figure>"), "no picture"),
    ("import pandas as pd\npd.DataFrame([1])", shown(text_plain="0"), "no table"),
    ("metrics[['reward']].tail()", shown(text_plain="0"), "no table"),
    ("run = kit.train('a')", shown(text_html="<b>The run failed.</b>"), "no card"),
    ("run.watch()", None, "no card"),
]


@pytest.mark.parametrize(("source", "output"), GOOD)
def test_what_is_right_passes(tmp_path: Path, source: str, output: dict[str, Any], capsys: Any) -> None:
    path = executed(tmp_path, source, output)
    assert list(load_check().faults(path)) == []
    assert load_check().main(tmp_path) == 0


@pytest.mark.parametrize(("source", "output", "fault"), BAD)
def test_a_defect_is_named(tmp_path: Path, source: str, output: dict[str, Any] | None, fault: str, capsys: Any) -> None:
    path = executed(tmp_path, source, *([output] if output else []))
    assert [found for found in load_check().faults(path) if fault in found]
    assert load_check().main(tmp_path) == 1
    assert "a.ipynb, cell 0" in capsys.readouterr().out


def test_a_notebook_that_was_not_executed_does_not_pass(tmp_path: Path, capsys: Any) -> None:
    path = executed(tmp_path, "x = 1")
    assert load_check().main(tmp_path) == 0
    path.write_text(path.read_text().replace('"execution_count": 1', '"execution_count": null'))
    assert load_check().main(tmp_path) == 1
    assert "not all of its cells" in capsys.readouterr().out
