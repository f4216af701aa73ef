"""kit.report.run_report: the contents of a report in every state of a run, and contents that must not be in it."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kit.cli.app import app
from kit.report.record import read
from kit.report.run_report import render, write_report
from kit.runs.store import RunDir

from .conftest import line, score

Make = Callable[..., RunDir]
LOADING = {"src", "href", "data", "poster", "srcset", "action", "background", "xlink:href", "formaction"}


class Elements(HTMLParser):
    """The elements of a document with their attributes, and the text outside style sheets."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._style = "", False
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        self.text += "" if self._style else data + " "

    def handle_endtag(self, tag: str) -> None:
        self._style = False


def outside_references(document: str) -> list[str]:
    """The references that a browser would load."""
    elements = Elements(document)
    faults = [
        f"<{tag} {name}={value}>"
        for tag, attributes in elements.found
        for name, value in attributes.items()
        if name in LOADING and not (value or "").startswith("#")
    ]
    faults += [
        tag for tag, _ in elements.found if tag in ("script", "link", "img", "iframe", "object", "embed", "base")
    ]
    style = document.partition("<style>")[2].partition("</style>")[0]
    return faults + [word for word in ("url(", "@import") if word in style]


def test_a_report_has_every_section_and_curve_and_asks_for_nothing_outside_itself(make_run: Make) -> None:
    run = make_run()
    path = write_report(run)
    document = path.read_text(encoding="utf-8")
    assert path == run.path / "report.html"
    assert outside_references(document) == []
    assert "Content-Security-Policy" in document
    assert "default-src 'none'" in document
    titles = [
        "Reward on training prompts", "Components of the reward", "Held-out problems solved", "Held-out reward, greedy",
        "Completion length", "Cut at the length limit", "KL to the reference policy", "Entropy", "Clipped by the objective",
        "Groups with equal rewards", "Gradient norm", "Learning rate", "Time per step",
    ]  # fmt: skip
    for title in titles:
        assert f"<title>{title}</title><desc>" in document, title
    text = Elements(document).text
    for words in (
        "is finished after 20 of 20 steps", "Held-out scores", "Samples", "ab" * 32,
        "optimisation.steps", "torch: 2.13.0", "grpo-kit train config.yaml -o run.id=one-again", "answer 0", "answer 20",
    ):  # fmt: skip
        assert words in text, words


def test_the_difference_is_of_the_same_problems_and_says_whether_it_is_chance(make_run: Make) -> None:
    text = Elements(render(read(make_run()))).text
    # 18 problems became right and 2 wrong out of 20: (18 - 2) / 20 = 0.8; two-sided 2 * (C(20,0)+C(20,1)+C(20,2)) / 2^20
    assert "Better: " in text
    assert "18 became right, 2 became wrong" in text
    # = 422 / 1048576 = 0.0004025
    assert "or a stronger one is 0.0004 (exact McNemar test)" in text


@pytest.mark.parametrize(
    "planted", ["<script>alert(1)</script>", "</style><img src=x onerror=alert(1)>", '"><svg onload=x>']
)
def test_whatever_a_model_or_a_file_says_stays_text(make_run: Make, planted: str) -> None:
    run = make_run()
    run.write_json("eval/after.json", score([True] * 20, 20, text=planted) | {"checker": planted})
    run.write_json("data.json", {"source": planted, "rows": {planted: 3}, "notes": [planted]})
    run.write_json("env.json", {"packages": {planted: planted}, "git": {"commit": planted}})
    run.append_metrics({**line(21), f"rewards/{planted}/mean": 1.0})
    run.append_event("alert", step=3, name=planted, message=planted, severity="warning")
    run.append_event("resumed", step=3, checkpoint=planted, forced=True, changes=[planted])
    run.append_event(planted, step=3, detail=planted)
    run.write_status("failed", reason=planted)
    document = render(read(run))
    tags = {tag for tag, _ in Elements(document).found}
    assert "script" not in tags
    assert "img" not in tags
    assert not any(name.startswith("on") for _, attributes in Elements(document).found for name in attributes)
    assert planted in Elements(document).text


def test_secrets_stand_nowhere_in_a_report(make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_API_KEY", 'odd&<value>"1234')
    run = make_run(
        overrides=(
            "reward.params={api_key: plain-word, judge: {token: other-word}, url: 'https://me:pass-word@host/x'}",
            "data.system_prompt=use hf_abcdefghijklmnopqrstuvwx please",
        )
    )
    run.append_event("alert", step=1, name="x", message='401 for odd&<value>"1234', severity="warning")
    run.write_status("failed", reason="sk-proj-abcdefghijklmnop1234567890 was refused")
    document = render(read(run))
    for secret in (
        "plain-word", "other-word", "pass-word", "hf_abcdefghijklmnop", "sk-proj-abcdef",
        'odd&<value>"1234', "odd&amp;&lt;value&gt;", "1234567890 was",
    ):  # fmt: skip
        assert secret not in document, secret
    assert "max_completion_tokens" in document  # a number of tokens is not a secret
    assert "[hidden]" in document


def test_rows_of_the_data_and_the_home_folder_can_be_left_out(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = make_run()
    run.append_event("alert", step=1, name="x", message=f"see {tmp_path}/notes", severity="warning")
    full, path = render(read(run)), tmp_path / "index.html"
    command = ["report", run.id, "--no-completions", "-o", str(path), "--root", str(run.path.parent)]
    assert CliRunner().invoke(app, command).exit_code == 0
    public = path.read_text(encoding="utf-8")
    assert "2 + 2 =" in full
    assert "2 + 2 =" not in public
    assert "see ~/notes" in public
    assert str(tmp_path) not in public + full


def test_damaged_files_are_named_and_the_rest_is_shown(make_run: Make) -> None:
    run = make_run()
    lines = run.metrics_file.read_text().splitlines()
    run.metrics_file.write_text("\n".join([*lines[:5], "{half a li", *lines[6:]]) + "\n")
    run.data.write_text("{")
    (run.eval / "after.json").write_text("[1, 2]")
    run.config.write_text("a: [b")
    text = Elements(render(read(run))).text
    for words in ("line 6: not a JSON object", "data.json is damaged", "config.yaml is damaged", "Held-out scores"):
        assert words in text, words


@pytest.mark.parametrize(
    "odd", [None, "text", 3, [1], {"value": "x"}, {"value": 0.5}, [[None]], {"id": 1, "samples": 5}]
)
def test_files_of_odd_content_cost_their_own_section_at_most(make_run: Make, odd: Any) -> None:
    run = make_run()
    evaluation = json.loads((run.eval / "after.json").read_text())
    run.write_json("eval/after.json", dict.fromkeys(evaluation, odd))
    run.write_json(
        "data.json", {"source": odd, "rows": odd, "mapping": odd, "notes": odd, "bad_rows": odd, "task": odd}
    )
    run.write_json("env.json", dict.fromkeys(("packages", "git", "seeds", "backend", "gpu"), odd))
    run.append_event("alert", step=odd, name=odd, message=odd, severity=odd)
    run.append_event("best", step=odd, metric=odd, value=odd)
    run.append_metrics({"step": 21, "reward": odd, "kl": odd})
    text = Elements(render(read(run))).text
    for words in ("is finished", "Reward on training prompts", "Data and environment"):
        assert words in text, words


def test_alerts_and_events_are_told_in_words(make_run: Make) -> None:
    run = make_run()
    run.append_event("alert", step=5, name="reward_hacking", message="Reward up, held-out down", severity="warning")
    run.append_event("out_of_memory", step=6, micro_batch_size=4, reason="CUDA")
    run.append_event("resumed", step=10, checkpoint="checkpoint-10", forced=True, changes=["torch 2.12 -> 2.13"])
    run.append_event("resumed", step=0, checkpoint=None, forced=False, changes=["data: other rows"])
    run.append_event("best", step=10, metric="greedy_accuracy", value=0.75)
    run.append_event("early_stop", step=20, metric="greedy_accuracy", value=0.5, best_step=10)
    document = render(read(run))
    text = Elements(document).text
    for words in (
        "Step 5: Reward up, held-out down.", "micro-batches of 4", "Forced in spite of changes: torch 2.12 -> 2.13",
        "Best held-out score so far: greedy accuracy 0.75.", "no better than at step 10",
        "Started again from the beginning, because there was no checkpoint. Changed since the start: data: other rows.",
    ):  # fmt: skip
        assert words in text, words
    assert document.count('class="mark"') >= 4  # each chart has a line where the run was resumed, and so on


def test_ten_thousand_steps_are_a_small_file_and_quick(make_run: Make) -> None:
    run = make_run(steps=10_000)
    started = time.process_time()
    path = write_report(run)
    assert time.process_time() - started < 5
    assert path.stat().st_size < 2_000_000
    document = path.read_text(encoding="utf-8")
    longest = max(len(points.split()) for points in _attribute(document, "polyline", "points"))
    assert longest <= 500
    assert "highest 0.896" in document  # 0.5 + 0.4 * 100 / 101, which stands at single steps


def _attribute(document: str, tag: str, name: str) -> list[str]:
    return [attributes[name] or "" for tag_name, attributes in Elements(document).found if tag_name == tag]


def test_the_full_configuration_can_be_run_again(make_run: Make, tmp_path: Path) -> None:
    from kit.config import load_config

    run = make_run(overrides=("objective.clip={name: ppo_clip, eps_low: 0.1, eps_high: 0.3}",))
    blocks = _pre(render(read(run)))
    copied = next(block for block in blocks if block.startswith("model:"))
    (tmp_path / "config.yaml").write_text(copied)
    assert load_config(tmp_path / "config.yaml") == load_config(run.config)


def test_a_changed_loss_is_named_and_its_terms_have_curves(make_run: Make) -> None:
    run = make_run(overrides=("objective.regularizers=[{name: 'mine.py:tail', coef: 0.1}]",))
    lines = [{"step": step, "objective/tail": 0.5, "objective/clip": 0.1, "coef/tail": 0.1 / step} for step in (1, 2)]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    document = render(read(run))
    text = Elements(document).text
    assert "objective dapo with mine.py:tail" in text
    run.write_json("env.json", {"inputs": {"mine.py": "ab" * 32, "model weights a.safetensors": "cd" * 32}})
    assert "# in the folder of mine.py" in Elements(render(read(run))).text
    assert "objective.regularizers" in text.partition("Keys that differ from the defaults")[2].partition("model:")[0]
    for title in ("Regularizers", "Coefficients that change"):
        assert f"<title>{title}</title><desc>" in document


def _pre(document: str) -> list[str]:
    return [html.unescape(part.partition("</pre>")[0]) for part in document.split("<pre>")[1:]]


@pytest.mark.parametrize(("share", "is_flat"), [(1.0, True), (0.75, False)])
def test_a_run_without_differing_rewards_says_so_in_its_summary(make_run: Make, share: float, is_flat: bool) -> None:
    run = make_run()
    run.metrics_file.write_text("".join(json.dumps({"step": n, "groups/zero_spread": share}) + "\n" for n in (1, 2)))
    assert ("No group had different rewards" in Elements(render(read(run))).text) is is_flat
