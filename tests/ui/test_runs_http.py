"""Run, Compare, Chat and Export, attacked from outside: raw requests with whatever values."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from made_runs import make

from kit.chat.client import check_sampling
from kit.errors import ConfigError
from kit.ui.chat import question_of
from kit.ui.export import checkpoint_of, wish_of
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
    return dict(page.config())


def named(config: dict[str, Any]) -> dict[int, str]:
    return {one["id"]: str(one["props"].get("elem_id") or "") for one in config["components"]}


def events(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Events that a part of these screens triggers, takes or fills."""
    names = named(config)
    return [
        one
        for one in config["dependencies"]
        if one.get("backend_fn")
        and any(
            names.get(at, "").startswith(OURS)
            for at in [*one["inputs"], *one["outputs"], *(t[0] for t in one["targets"])]
        )
    ]


def of(config: dict[str, Any], elem_id: str, kind: str = "click") -> dict[str, Any]:
    names = named(config)
    return next(
        one for one in config["dependencies"]
        if one.get("backend_fn") and any(names.get(at) == elem_id and what == kind for at, what in one["targets"])
    )  # fmt: skip


def filling(config: dict[str, Any], elem_id: str) -> dict[str, Any]:
    """The event that fills this part."""
    names = named(config)
    return next(
        one
        for one in config["dependencies"]
        if elem_id in {names.get(at) for at in one["outputs"]} and len(one["inputs"]) > 1
    )


def call(page: Any, event: dict[str, Any], data: list[Any]) -> str:
    """What the page says to an event, queued or not."""
    if event.get("queue") is False:
        answer = page.predict(event["id"], data)
        assert answer.status in (200, 422, 500), answer.text
        return str(answer.text)
    return json.dumps(page.queued(event["id"], data))


def fresh(page: Any, event: dict[str, Any], data: list[Any]) -> Any:
    """An event as a browser that has seen nothing yet calls it; states are the server's, at their first value."""
    body = {"fn_index": event["id"], "data": data, "session_hash": f"fresh{time.monotonic_ns()}", "trigger_id": None}
    return page.ask("POST", "/gradio_api/run/predict", body)


def harmless(page: Any, said: str, before: list[str]) -> None:
    assert "Traceback" not in said
    assert "s3cr3t" not in said
    assert "root:x:" not in said
    assert sorted(path.relative_to(page.folder).as_posix() for path in page.folder.rglob("*")) == before


def listing(page: Any) -> list[str]:
    return sorted(path.relative_to(page.folder).as_posix() for path in page.folder.rglob("*"))


@pytest.mark.parametrize("value", FOREIGN, ids=lambda value: str(value)[:20])
def test_a_foreign_id_does_nothing_anywhere(page: Any, config: dict[str, Any], value: Any) -> None:
    before = listing(page)
    quick = [one for one in events(config) if one.get("queue") is False]
    assert len(quick) > 20
    for event in quick:
        harmless(page, call(page, event, [value] * len(event["inputs"])), before)


@pytest.mark.parametrize("button", ["run-now", "run-delete", "run-resume", "export-start", "chat-ask", "chat-load"])
@pytest.mark.parametrize("value", ["../one", {"id": "one"}, "two\0"], ids=str)
def test_no_button_takes_a_path(page: Any, config: dict[str, Any], button: str, value: Any) -> None:
    before = listing(page)
    names = named(config)
    found = [
        one for one in config["dependencies"]
        if one.get("backend_fn") and any(names.get(at) == button for at, _ in one["targets"])
    ]  # fmt: skip
    assert found, "no such button: nothing would be tried"
    chained = [one for one in config["dependencies"] if one.get("trigger_after") in {each["id"] for each in found}]
    for event in [*found, *chained]:
        if event.get("backend_fn") and event["inputs"]:
            said = call(page, event, [value] * len(event["inputs"]))
            harmless(page, said, before)


def test_the_true_id_is_answered(page: Any, config: dict[str, Any]) -> None:
    """Else the tests above could not fail."""
    said = fresh(page, filling(config, "run-head"), ["one", None, None]).text
    assert "Reward on training prompts" in said
    assert "jumped away from the reference" in said
    told = page.predict(of(config, "run-stop")["id"], ["one"]).text
    assert "has ended already" in told


def test_a_finished_run_is_not_resumed(page: Any, config: dict[str, Any]) -> None:
    said = call(page, of(config, "run-resume"), ["one"])
    assert "there is nothing to resume" in said
    assert json.loads((page.root / "one" / "status.json").read_text())["state"] == "finished"


@pytest.mark.parametrize(
    "ids", [["one", "../two"], "one", {"a": 1}, ["one"] * 50, [f"r{n}" for n in range(40)], [["one"]], None]
)
def test_compared_are_runs_only(page: Any, config: dict[str, Any], ids: Any) -> None:
    before = listing(page)
    said = call(page, of(config, "compare-judge"), [ids])
    harmless(page, said, before)
    assert "fail" in said or "error" in said


@pytest.mark.parametrize(
    "values",
    [
        ("../adapter", None, "q4_k_m"),
        ({"format": "adapter"}, None, "q4_k_m"),
        ("adapter", "../../checkpoint-1", "q4_k_m"),
        ("adapter", "step 1/../..", "q4_k_m"),
        ("gguf", None, "q4_k_m; rm -rf /"),
        ("gguf", None, ["q8_0"]),
        ("hub", None, "q4_k_m"),
    ],
    ids=str,
)
def test_an_export_asked_for_with_forged_values_is_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises((ConfigError, TypeError)) as refused:
        wish_of(*values)
    assert refused.type is ConfigError or isinstance(values[0], dict) or isinstance(values[2], list)


def test_an_export_names_no_folder_program_or_model_of_its_own() -> None:
    found = wish_of("gguf", "last checkpoint", "q8_0")
    assert found == {"format": "gguf", "checkpoint": "last", "force": True, "quantization": "q8_0"}
    assert checkpoint_of("step 12") == "12"


def test_exports_start_nothing_for_a_run_without_weights(page: Any, config: dict[str, Any]) -> None:
    before = listing(page)
    said = call(
        page, of(config, "export-start"), ["one", "adapter", "the run's result", "q4_k_m", "", True, "adapter", False]
    )
    assert "has no weights yet" in said
    assert listing(page) == before


@pytest.mark.parametrize(
    "name", ["../config.yaml", "..%2fconfig.yaml", "adapter/../../log.txt", "/etc/passwd", "export/../../one/log.txt"]
)
def test_downloads_stay_within_export(page: Any, name: str) -> None:
    folder = page.root / "one" / "export" / "adapter"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights.safetensors").write_bytes(b"weights")
    assert page.ask("GET", "/runs/one/export/adapter/weights.safetensors").body == b"weights"
    answer = page.ask("GET", f"/runs/one/export/{name}")
    assert answer.status in (400, 403, 404)
    assert b"optimisation" not in answer.body


def test_questions_have_limits() -> None:
    with pytest.raises(ConfigError, match="at most"):
        question_of("x" * 30_000, None, None)
    with pytest.raises(ConfigError, match="at most"):
        question_of("x", None, "y" * 5_000)
    with pytest.raises(ConfigError, match="Write a prompt"):
        question_of("  ", "../../1", None)
    assert question_of("", "12", None) == {"heldout": 12}


def test_what_is_left_empty_is_as_in_training_and_what_is_no_number_is_said() -> None:
    assert check_sampling({"seed": 0, "temperature": " ", "max_tokens": None}) == {"seed": 0}
    texts = {"seed": "7", "temperature": "0", "max_tokens": "12"}
    assert check_sampling(texts) == {"seed": 7, "temperature": 0.0, "max_tokens": 12}
    for name, value in (
        ("seed", "seed"), ("seed", "1.5"), ("seed", -1), ("temperature", "warm"), ("temperature", []), ("temperature", True),
        ("temperature", "nan"), ("max_tokens", "inf"), ("max_tokens", 10**9), ("max_tokens", {}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{name}: '.*expected a .*number from"):
            check_sampling({name: value})


@pytest.mark.parametrize("elem_id", ["chat-heat", "chat-most", "chat-seed"])
def test_a_box_that_may_be_empty_is_no_number_box(config: dict[str, Any], elem_id: str) -> None:
    """A browser sends 0 for an empty number box of Gradio's, which is greedy, or a bound of nothing."""
    (box,) = [one for one in config["components"] if one["props"].get("elem_id") == elem_id]
    assert box["type"] == "textbox"


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
