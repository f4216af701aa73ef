"""The completions explorer: reading, sorting, filtering, display."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_runs import batch, make

import kit.ui.completions as data
from kit.ui import explorer as tab
from kit.ui.explorer import Explorer
from kit.ui.settings import Settings
from kit.ui.site import Site

HACK = "<script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture
def explorer(tmp_path: Path) -> Explorer:
    make(tmp_path / "runs")
    return Explorer(Site(Settings(root=tmp_path / "runs", folder=tmp_path)))


def look(explorer: Explorer, **inputs: Any) -> str:
    defaults = {"step": 0, "search": "", "page": 1}
    return str(explorer.look("one", *(defaults | inputs).values())[2])


def rows(explorer: Explorer) -> list[dict[str, Any]]:
    run = explorer.site.run("one")
    return data.rows(run, data.steps(run)[1])


def test_the_reward_is_the_weighted_sum_and_groups_are_the_prompts(explorer: Explorer) -> None:
    scored = rows(explorer)
    assert [row["total"] for row in scored[:4]] == pytest.approx([0.2, 0.2, 1.2, 1.2])
    assert [row["group"] for row in scored] == [0, 0, 0, 0, 1, 1, 1, 1]
    run = explorer.site.run("one")
    assert [group.differs for group in data.groups(run, data.steps(run)[1])] == [True, False]


def test_a_step_is_shown_in_pages_and_values_that_are_none_are_not_given(explorer: Explorer) -> None:
    run = explorer.site.run("one")
    batch(run.completions, 22, [f"{number} + 0 =" for number in range(7)])
    shown = explorer.look("one", 22, "", 2)
    assert shown[1].label == "Page, of 3"
    assert shown[2].count('class="group"') == tab.GROUPS_A_PAGE
    assert explorer.look("one", 22, "", 99)[2].count('class="group"') == 1
    for odd in (None, [], {}, "x" * 10_000, float("nan"), float("inf"), -1, True, {"__class__": 1}):
        assert isinstance(explorer.look("one", odd, odd, odd)[2], str)


def test_all_steps_are_searched_from_the_latest_as_far_as_time_lets(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = explorer.site.run("one")
    for step in range(2, 9):
        batch(run.completions, step, ["2 + 2 =", f"{step} + 1 ="])
    monkeypatch.setattr(data, "SEARCH_SECONDS", -1.0)
    assert "Read the latest 1 of 9 steps" in look(explorer, search="=")
    monkeypatch.setattr(data, "SEARCH_SECONDS", 60.0)
    text = look(explorer, search="7 + 1")
    assert "Read the latest" not in text
    assert "step 7, group 2" in text
    monkeypatch.setattr(data, "MOST_MATCHES", 10)
    matches = data.search(run, lambda row: True)
    assert (len(matches.rows), matches.read, {row["step"] for row in matches.rows}) == (10, 2, {8, 20})


def test_a_group_shows_every_component_status_and_extracted_answer(explorer: Explorer) -> None:
    text = look(explorer)
    assert "Step 20: 1 of 2 groups teach" in text
    for piece in ("timeout", "accuracy", "format", "accuracy read: ", "cut at the limit", "advantage -1.00",
                  "all rewards equal: nothing to learn", "reference"):  # fmt: skip
        assert piece in text, piece


def test_equal_completions_are_shown_once(explorer: Explorer) -> None:
    run = explorer.site.run("one")
    batch(run.completions, 21, ["5 - 1 ="], text="the same")
    group = data.groups(run, run.completions / "step-00021.parquet")[0]
    assert [len(each) for each in tab.alike(group.rows)] == [1, 3]  # one was cut
    assert "3 alike" in tab.show_group(group)


def test_what_a_model_wrote_cannot_become_part_of_the_page(explorer: Explorer) -> None:
    run = explorer.site.run("one")
    batch(run.completions, 30, [HACK, "2 + 2 ="], text=HACK)
    for inputs in ({}, {"search": "script"}):
        text = look(explorer, step=30, **inputs)
        assert "<script" not in text
        assert "<img" not in text
        assert "&lt;" in text


@pytest.mark.parametrize("broken", [b"", b"PAR1nonsense", b"\0" * 64])
def test_a_broken_file_is_named_and_the_others_are_shown(explorer: Explorer, broken: bytes) -> None:
    run = explorer.site.run("one")
    (run.completions / "step-00025.parquet").write_bytes(broken)
    assert "step-00025.parquet cannot be read" in look(explorer)
    assert "1 files cannot be read" in look(explorer, search="=")


def test_a_run_without_completions_says_so(explorer: Explorer) -> None:
    run = make(explorer.site.settings.root, "none")
    for path in run.completions.iterdir():
        path.unlink()
    assert "No completions saved" in explorer.look("none", *[None] * 3)[2]


def test_a_completion_of_several_turns_is_a_conversation(explorer: Explorer) -> None:
    run = explorer.site.run("one")
    messages = [
        {"role": "assistant", "content": "let me see", "tool_calls": [
            {"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": "<7>"}}}]},
        {"role": "tool", "name": "multiply", "content": HACK},
        {"role": "assistant", "content": "42"},
    ]  # fmt: skip
    path = batch(run.completions, 20, ["6 * 7 ="])
    rows = pq.read_table(path).to_pylist()
    for turns in (json.dumps(messages), "no json", json.dumps([7]), json.dumps({"a": 1})):
        pq.write_table(pa.Table.from_pylist([row | {"turns": turns} for row in rows]), path)
        text = look(explorer, step=20)
        assert HACK not in text
        if turns.startswith("[{"):
            pieces = ("1. model", "multiply(a=6, b=&#34;&lt;7&gt;&#34;)", "2. multiply answers")
            assert text.index(pieces[0]) < text.index(pieces[1]) < text.index(pieces[2])
            assert text.count('ok">trains<') == 2 * text.count("does not train") > 0
        else:
            assert "answer&gt;" in text
