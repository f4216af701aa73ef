"""The completions explorer: what is read, sorted, filtered and shown."""

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
from kit.ui.completions import Batches
from kit.ui.explorer import Explorer, Query
from kit.ui.settings import Settings
from kit.ui.site import Site

HACK = "<script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture
def explorer(tmp_path: Path) -> Explorer:
    make(tmp_path / "runs")
    return Explorer(Site(Settings(root=tmp_path / "runs", folder=tmp_path)))


def look(explorer: Explorer, **asked: Any) -> str:
    wish = {
        "step": 0,
        "keep": "all",
        "search": "",
        "page": 1,
        "before": 0,
        "colour": "",
    }
    return str(explorer.look("one", *(wish | asked).values())[2])


def rows(explorer: Explorer) -> list[dict[str, Any]]:
    run = explorer.site.run("one")
    return explorer.batches.rows(run, explorer.batches.steps(run)[0][1])


def test_the_reward_is_the_weighted_sum_and_groups_are_the_prompts(explorer: Explorer) -> None:
    found = rows(explorer)
    assert [row["total"] for row in found[:4]] == pytest.approx([0.2, 0.2, 1.2, 1.2])
    assert [row["group"] for row in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    run = explorer.site.run("one")
    groups = explorer.batches.groups(run, explorer.batches.steps(run)[0][1])
    assert [group.spread > 0 for group in groups] == [True, False]


def test_a_group_shows_every_component_status_and_extracted_answer(explorer: Explorer) -> None:
    text = look(explorer)
    assert "Step 20: 1 of 2 groups teach" in text
    for piece in ("timeout", "accuracy", "format", "accuracy read: ", "cut at the limit", "advantage -1.00",
                  "all alike: no lesson", "reference"):  # fmt: skip
        assert piece in text, piece


def test_alike_completions_are_told_once(explorer: Explorer) -> None:
    run = explorer.site.run("one")
    batch(run.completions, 21, ["5 - 1 ="], text="the same")
    found = explorer.batches.groups(run, run.completions / "step-00021.parquet")[0]
    assert [len(each) for each in tab.alike(found.rows)] == [1, 3]  # one was cut
    assert "3 alike" in tab.show_group(found)


@pytest.mark.parametrize(
    ("keep", "count"),
    [
        ("all", 8),
        ("cut at the limit", 2),
        ("not cut", 6),
        ("made likelier", 2),
        ("made less likely", 2),
        ("reward failed", 1),
    ],
)
def test_filters(explorer: Explorer, keep: str, count: int) -> None:
    wish = Query.of(0, keep, "", 1, 0)
    assert sum(map(wish.wants, rows(explorer))) == count


def test_a_page_holds_a_few_and_never_all(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    run = explorer.site.run("one")
    batch(run.completions, 22, [f"{n} + 0 =" for n in range(40)])
    found = explorer.look("one", 22, "all", "+ 0", 1, 0)
    assert str(found[2]).count('class="completion"') == tab.ROWS_A_PAGE
    assert found[1].label == "Page, of 14"
    assert str(explorer.look("one", 22, "all", "", 99, 0)[2]).count('class="group"') == 1


def test_all_steps_are_searched_from_the_latest_as_far_as_time_lets(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = explorer.site.run("one")
    for step in range(2, 9):
        batch(run.completions, step, ["2 + 2 =", f"{step} + 1 ="])
    monkeypatch.setattr(data, "SCAN_SECONDS", -1.0)
    found = explorer.look("one", 0, "all", "=", 1, 0)
    assert "Read the latest 1 of 9 steps, back to step 20" in found[2]
    assert found[4] == 20
    assert "back to step 8" in explorer.look("one", 0, "all", "=", 1, 20)[2]
    monkeypatch.setattr(data, "SCAN_SECONDS", 60.0)
    whole = explorer.look("one", 0, "all", "7 + 1", 1, 0)
    assert "Read the latest" not in whole[2]
    assert "step 7, group 2" in whole[2]


def test_what_a_model_wrote_cannot_become_part_of_the_page(explorer: Explorer) -> None:
    run = explorer.site.run("one")
    batch(run.completions, 30, [HACK, "2 + 2 ="], text=HACK)
    for asked in ({}, {"search": "script"}):
        text = look(explorer, step=30, **asked)
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
    assert "No completions on record" in explorer.look("none", *[None] * 6)[2]


def token_file(run: Any, step: int, rollout: int, row: int, **columns: list[Any]) -> None:
    run.tokens.mkdir(exist_ok=True)
    table = {"step": step, "rollout": rollout, "row": row, **columns}
    pq.write_table(pa.Table.from_pylist([table]), run.tokens / f"step-{step:05d}.parquet")


def test_tokens_are_coloured_by_what_was_kept_of_the_last_pass(explorer: Explorer) -> None:
    run = explorer.site.run("one")
    values: dict[str, list[Any]] = {"text": ["<b>", " x", "!"], "logp": [-0.5, -2.0, -1.0], "trains": [1.0, 1.0, 0.0]}
    token_file(run, 20, 20, 5, **values, log_ratio=[0.0, 0.0, 0.0], advantage=[1.0, 1.0, 1.0])
    token_file(run, 21, 20, 5, **values, log_ratio=[0.05, -0.05, 0.0], advantage=[1.0, 1.0, 1.0])
    token_file(run, 22, 21, 5, **values | {"text": ["other"] * 3})  # of another generation batch
    text = look(explorer, colour="ratio")
    assert '<i class="u" style="--s:0.51"' in text  # (e^0.05 - 1) / 0.1
    assert "&lt;b&gt;</i>" in text
    assert '<i class="d" style="--s:0.49"' in text  # (1 - e^-0.05) / 0.1
    assert 'class="off" title="does not train' in text
    assert "ratio: 0.951 to 1.05, mean 1" in text
    assert "other" not in text
    assert "no token values were kept" in text  # of the others
    assert text.index("ratio: 0.951") < text.index("no token values were kept")
    assert "no teacher less policy of single tokens" in look(explorer, colour="teacher less policy")
    assert "--s:" not in look(explorer)
    assert "surprise: 0.5 to 2, mean 1.25" in look(explorer, colour="surprise")
    (run.tokens / "step-00021.parquet").write_bytes(b"broken")
    assert "ratio: 1 to 1" in look(explorer, colour="ratio")


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
            assert (
                text.index("1. model")
                < text.index("multiply(a=6, b=&#34;&lt;7&gt;&#34;)")
                < text.index("2. multiply answers")
            )
            assert text.count('ok">trains<') == 2 * text.count("masked: does not train") > 0
        else:
            assert "answer&gt;" in text


def test_whatever_a_browser_sends_is_read_as_a_wish() -> None:
    odd = [None, [], {}, "x" * 10_000, float("nan"), float("inf"), -1, True, {"__class__": 1}]
    for value in odd:
        wish = Query.of(*[value] * 6)
        assert wish.colour == ""
        assert wish.keep in tab.KEEP
        assert wish.page >= 1
        assert len(wish.search) <= tab.LONGEST_SEARCH


def test_files_of_other_names_are_none(tmp_path: Path) -> None:
    run = make(tmp_path)
    for name in ("step-.parquet", "step-00001.parquet.tmp", "other.parquet", "step-1.partial"):
        (run.completions / name).write_bytes(b"x")
    assert [step for step, _ in Batches().steps(run)] == [1, 20]


def all_of(explorer: Explorer) -> tuple[list[Any], list[list[int]]]:
    """Every row that the list of all steps comes by, look after look, and the steps of each look."""
    run, before, found, looks = explorer.site.run("one"), None, [], []
    while True:
        rows, scan = explorer.batches.search(run, lambda row: True, before)
        found += rows
        looks.append(sorted({row["step"] for row in rows}))
        if scan.whole:
            return found, looks
        before = scan.reached


def test_a_list_of_all_steps_loses_nothing_at_its_bound(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MOST_FOUND", 20)
    run = explorer.site.run("one")
    for step in (2, 3, 4):
        batch(run.completions, step, [f"{place} + 1 =" for place in range(2)])
    found, looks = all_of(explorer)
    assert len(found) == len({(row["step"], row["group"], row["place"]) for row in found}) == 5 * 8
    assert looks == [[4, 20], [2, 3], [1]]
    text = look(explorer, search="=")
    assert "Read the latest 2 of 5 steps, back to step 4" in text
    monkeypatch.setattr(data, "MOST_FOUND", 16)  # met exactly
    assert all_of(explorer)[1] == looks


def test_a_step_that_alone_has_too_many_is_said_to_be_cut(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (data, tab):
        monkeypatch.setattr(name, "MOST_FOUND", 6)
    run = explorer.site.run("one")
    rows, scan = explorer.batches.search(run, lambda row: True)
    assert (len(rows), scan.reached, scan.cut) == (6, 20, (20, 8))
    text = look(explorer, search="=")
    assert "Step 20 alone has 8 like that; its first 6 are shown" in text
    rows, scan = explorer.batches.search(run, lambda row: True, scan.reached)
    assert (len(rows), scan.whole, scan.cut) == (6, True, (1, 8))


@pytest.mark.parametrize("env", [None, "{ half", '{"trainer_arguments": {"reward_weights": [1.0]}}'])
def test_rewards_without_known_weights_are_said_to_be_so(explorer: Explorer, env: str | None) -> None:
    run = explorer.site.run("one")
    modes: list[dict[str, Any]] = [{}, {"search": "="}]
    assert not any("each part counts 1" in look(explorer, **asked) for asked in modes)
    run.env.unlink() if env is None else run.env.write_text(env)
    assert all("each part counts 1" in look(explorer, **asked) for asked in modes)
