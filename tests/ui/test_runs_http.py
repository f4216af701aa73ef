"""Run, Compare, Chat and Export with forged raw requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from made_runs import make

from kit.chat.client import check_sampling
from kit.errors import ConfigError
from kit.ui.chat import question_of
from kit.ui.export import checkpoint_of, export_options
from kit.ui.run import TABS, View
from kit.ui.settings import Settings
from kit.ui.site import Site

SECRET = "hf_" + "s3cr3t" * 5
FOREIGN: list[Any] = [
    "../one", "/etc", "one/../..", "..", "one\0", "x" * 5000, "ONE", "", None, 3, True, ["one"], {"id": "one"}, "%2e%2e",
    "one/../../secret.txt", "file:///etc/passwd",
]  # fmt: skip
OURS = ("run-chosen", "run-head", "run-stop", "run-now", "run-save", "completions-", "compare-", "chat-", "export-")

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(serve_here: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("runs-page")
    make(folder / "runs", "one")
    make(folder / "runs", "two", share=0.2, overrides=("optimisation.learning_rate=0.001",))
    (folder / "secret.txt").write_text("s3cr3t")
    (folder / "log.txt").write_text("s3cr3t")
    (folder / "config.yaml").write_text("s3cr3t: true")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        yield serve_here(folder)


@pytest.fixture(scope="module")
def config(page: Any) -> dict[str, Any]:
    return dict(page.described)


def named(config: dict[str, Any]) -> dict[int, str]:
    return {part["id"]: str(part["props"].get("elem_id") or "") for part in config["components"]}


def events(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The events that these screens trigger, read or fill."""
    names = named(config)
    return [
        event
        for event in config["dependencies"]
        if event.get("backend_fn")
        and any(
            names.get(at, "").startswith(OURS)
            for at in [*event["inputs"], *event["outputs"], *(t[0] for t in event["targets"])]
        )
    ]


def call(page: Any, event: dict[str, Any], data: list[Any]) -> str:
    """The page's answer to an event, queued or not."""
    if event.get("queue") is False:
        answer = page.predict(event["id"], data)
        assert answer.status in (200, 422, 500), answer.text
        return str(answer.text)
    return json.dumps(page.queued(event["id"], data))


def harmless(page: Any, answer: str, before: list[str]) -> None:
    assert not [text for text in ("Traceback", "s3cr3t", "root:x:") if text in answer]
    assert listing(page) == before


def listing(page: Any) -> list[str]:
    return sorted(path.relative_to(page.folder).as_posix() for path in page.folder.rglob("*"))


@pytest.mark.parametrize("value", FOREIGN, ids=lambda value: str(value)[:20])
def test_a_foreign_id_does_nothing_anywhere(page: Any, config: dict[str, Any], value: Any) -> None:
    before = listing(page)
    quick = [event for event in events(config) if event.get("queue") is False]
    assert len(quick) > 20
    for event in quick:
        harmless(page, call(page, event, [value] * len(event["inputs"])), before)


@pytest.mark.parametrize("value", ["../one", {"id": "one"}, "two\0"], ids=str)
def test_no_slow_event_takes_a_path(page: Any, config: dict[str, Any], value: Any) -> None:
    before = listing(page)
    slow = [event for event in events(config) if event.get("queue") is not False and event["inputs"]]
    assert len(slow) > 3
    for event in slow:
        harmless(page, call(page, event, [value] * len(event["inputs"])), before)


@pytest.mark.parametrize(
    "ids", [["one", "../two"], "one", {"a": 1}, ["one"] * 50, [f"r{n}" for n in range(40)], [["one"]], None]
)
def test_compared_are_runs_only(page: Any, config: dict[str, Any], ids: Any) -> None:
    before = listing(page)
    answer = call(page, page.event("compare-judge"), [ids])
    harmless(page, answer, before)
    assert "fail" in answer or "error" in answer


def test_an_export_names_no_folder_program_or_model_of_its_own() -> None:
    options = export_options("gguf", "last checkpoint", "q8_0")
    assert options == {"format": "gguf", "checkpoint": "last", "force": True, "quantization": "q8_0"}
    assert checkpoint_of("step 12") == "12"
    for forged in (
        ("../adapter", None, ""),
        ("adapter", "step 1/../..", ""),
        ("gguf", None, "q4_k_m; rm"),
        ("onnx", None, ""),
    ):
        with pytest.raises(ConfigError):
            export_options(*forged)


def test_settings_of_sampling_that_are_empty_are_as_in_training_and_others_are_numbers() -> None:
    texts = {"seed": "7", "temperature": "0", "max_tokens": None}
    assert check_sampling(texts) == {"seed": 7, "temperature": 0.0}
    wrong = (("seed", "1.5"), ("seed", -1), ("temperature", []), ("temperature", "nan"), ("max_tokens", 10**9))
    for name, value in wrong:
        with pytest.raises(ConfigError, match=f"{name} is '.*expected a .*number from"):
            check_sampling({name: value})


def test_questions_have_limits() -> None:
    with pytest.raises(ConfigError, match="at most"):
        question_of("x" * 30_000, None, None)
    with pytest.raises(ConfigError, match="at most"):
        question_of("x", None, "y" * 5_000)
    with pytest.raises(ConfigError, match="Write a prompt"):
        question_of("  ", "../../1", None)
    assert question_of("", "12", None) == {"heldout": 12}


def test_the_token_is_shown_nowhere(page: Any, config: dict[str, Any]) -> None:
    from kit.ui import run as run_screen

    run = make(page.root, "told")
    run.log.write_text(f"a line with {SECRET} in it\n")
    run.write_text("config.yaml", run.config.read_text() + f"# {SECRET}\n")
    run.write_json("env.json", {"variable": SECRET})
    for text in (
        run_screen.log_tail(run),
        *run_screen.configuration(run),
        json.dumps(config),
        page.ask("GET", "/run").text,
    ):
        assert "s3cr3t" not in text
    assert "a line with [hidden] in it" in run_screen.log_tail(run)


def test_what_a_log_and_an_alert_hold_is_text(page: Any) -> None:
    hack = "<script>alert(1)</script>"
    run = make(page.root, "evil")
    run.log.write_text(hack)
    run.append_event("alert", step=1, name=hack, severity="error", message=hack)
    run.write_status("failed", reason=hack)
    (run.path / "env.json").write_text(json.dumps({hack: hack}))
    view = View(Site(Settings(root=page.root, folder=page.folder)))
    for tab in TABS:
        parts = dict(zip(View.parts, view.look("evil", tab, {})[1:], strict=False))
        for name, value in parts.items():
            if isinstance(value, str):
                assert "<script" not in value, name
    assert "&lt;script&gt;" in str(view.look("evil", "log", {}))
