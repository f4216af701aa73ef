"""The rules of the page, broken from outside: raw requests against the real server, with whatever values."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.errors import ConfigError
from kit.ui.settings import Settings, read_accounts

ROOT = Path(__file__).parents[2]
PASSWORD = "correct horse battery"


@pytest.fixture(scope="module")
def page(serve_here: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page with a run that has a report and an export, and things beside it that must not be had."""
    folder = tmp_path_factory.mktemp("served")
    run = folder / "runs" / "good"
    (run / "export").mkdir(parents=True)
    (run / "report.html").write_text("<h1>report</h1>")
    (run / "export" / "adapter.safetensors").write_bytes(b"weights")
    (run / "config.yaml").write_text("secret: config")
    (run / "export" / "leads-out").symlink_to("/etc")
    (run / "export" / "passwd").symlink_to("/etc/passwd")
    (folder / "secret.txt").write_text("secret")
    (folder / "runs" / "linked").symlink_to(folder)
    (folder / "report.html").write_text("secret")
    (folder / "export").mkdir()
    (folder / "export" / "x").write_text("secret")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_" + "s3cr3t" * 5)
        yield serve_here(folder)


@pytest.fixture(scope="module")
def locked(serve_here: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A page with an account."""
    return serve_here(tmp_path_factory.mktemp("locked"), accounts={"ada": PASSWORD})


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


def event(page: Any, *, queue: bool | None = None, target: str) -> dict[str, Any]:
    """The event that is triggered by the component with this elem_id or button text."""
    config = page.config()
    wanted = {
        one["id"] for one in config["components"] if target in (one["props"].get("elem_id"), one["props"].get("value"))
    }
    found = [
        one for one in config["dependencies"] if one.get("backend_fn") and any(at in wanted for at, _ in one["targets"])
    ]
    assert found, f"no event of {target}"
    return found[0]


# Files


def test_a_report_and_an_export_are_served(page: Any) -> None:
    assert page.ask("GET", "/runs/good/report.html").text == "<h1>report</h1>"
    sent = page.ask("GET", "/runs/good/export/adapter.safetensors")
    assert sent.body == b"weights"
    assert sent.headers["content-type"] == "application/octet-stream"
    assert "sandbox" in page.ask("GET", "/runs/good/report.html").headers["content-security-policy"]


@pytest.mark.parametrize(
    "target",
    [
        "/runs/good/config.yaml",
        "/runs/good/status.json",
        "/runs/good/export/../config.yaml",
        "/runs/good/export/%2e%2e/config.yaml",
        "/runs/good/export/..%2fconfig.yaml",
        "/runs/good/export/%252e%252e/config.yaml",
        "/runs/good/export//etc/passwd",
        "/runs/good/export/%2fetc%2fpasswd",
        "/runs/good/export/..%5cconfig.yaml",
        "/runs/good/export/passwd",
        "/runs/good/export/leads-out/passwd",
        "/runs/good/export/",
        "/runs/good/export/x%00y",
        "/runs/linked/report.html",
        "/runs/linked/export/x",
        "/runs/../report.html",
        "/runs/%2e%2e/report.html",
        "/runs/..%2f..%2fetc/report.html",
        "/runs/GOOD/report.html",
        "/runs/./report.html",
        "/runs//report.html",
        "/secret.txt",
        "/gradio_api/file=secret.txt",
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file/secret.txt",
        "/file=/etc/passwd",
        "/static/../../../../etc/passwd",
        "/assets/%2e%2e/%2e%2e/__init__.py",
        "/gradio_api/proxy=http://127.0.0.1:22",
        "/gradio_api/custom_component/1/client/component/../../x",
        "/monitoring",
        "/gradio_api/openapi.json",
        "/gradio_api/mcp/sse",
        "/gradio_api/runs",
        "/gradio_api/run-history/records",
        "/gradio_api/vibe-code/",
        "/gradio_api/deep_link",
        "/gradio_api/upload_progress",
        "/docs",
        "/openapi.json",
        "/svelte/x",
    ],
)
def test_nothing_else_is(page: Any, target: str) -> None:
    answer = page.ask("GET", target)
    assert answer.status in (400, 404, 405), f"{answer.status}: {answer.text[:200]}"
    assert "secret" not in answer.text
    assert "root:x:" not in answer.text


@pytest.mark.parametrize(
    "target",
    [
        "/gradio_api/upload",
        "/gradio_api/process_recording",
        "/gradio_api/vibe-edit/",
        "/gradio_api/component_server",
        "/gradio_api/stream/x",
        "/gradio_api/run-history/connect",
        "/gradio_api/call/look",
        "/gradio_api/api/predict",
        "/login",
        "/runs/good/report.html",
        "/",
    ],
)
def test_nothing_is_taken_but_the_events_of_the_page(page: Any, target: str) -> None:
    assert page.ask("POST", target, {"data": []}).status in (404, 405)


def test_other_methods_are_refused(page: Any) -> None:
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert page.ask(method, "/").status == 405


# Who asks


def test_a_foreign_name_for_this_machine_is_refused(page: Any) -> None:
    assert page.ask("GET", "/", Host="evil.example:7860").status == 403
    assert page.ask("GET", "/config", Host="127.0.0.1.evil.example").status == 403
    assert page.ask("GET", "/", Host=f"localhost:{page.port}").status == 200
    assert page.ask("GET", "/", Host=None).status in (400, 403)


def test_scripts_of_other_sites_are_refused(page: Any) -> None:
    body = {"fn_index": 0, "data": [], "session_hash": "x"}
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}):
        assert page.ask("POST", "/gradio_api/run/predict", body, **headers).status == 403
    answer = page.ask("GET", "/config", Origin="http://evil.example")
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers
    same = page.ask("GET", "/config", Origin=page.url)
    assert same.status == 200


@pytest.mark.parametrize(
    "target",
    ["/", "/new", "/run", "/config", "/health", "/gradio_api/info", "/gradio_api/queue/data?session_hash=a", "/theme.css",
     "/runs/good/report.html", "/assets/x.js", "/static/x", "/gradio_api/heartbeat/abc", "/no/such/thing", "/gradio_api/app_id"],
)  # fmt: skip
def test_without_the_password_nothing_is_read(locked: Any, target: str) -> None:
    for header in (None, "Basic", basic("ada"), basic("ada:wrong"), "Bearer abc", "Basic !!!"):
        answer = locked.ask("GET", target, Authorization=header)
        assert answer.status == 401, target
        assert answer.headers["www-authenticate"].startswith("Basic")
        if header is not None:
            break  # one wrong password a route: each takes half a second


@pytest.mark.parametrize(
    "target", ["/gradio_api/queue/join", "/gradio_api/run/predict", "/gradio_api/upload", "/gradio_api/cancel"]
)
def test_without_the_password_nothing_is_done(locked: Any, target: str) -> None:
    assert locked.ask("POST", target, {"fn_index": 0, "data": []}).status == 401


def test_with_it_all_works_and_other_names_do_not(locked: Any) -> None:
    assert locked.ask("GET", "/config", Authorization=basic(f"ada:{PASSWORD}")).status == 200
    assert locked.ask("GET", "/", Authorization=basic(f"ada:{PASSWORD}"), Host="any.example").status == 200
    for wrong in (f"Ada:{PASSWORD}", f":{PASSWORD}", "ada:", f"ada:{PASSWORD}x", "nobody:\0"):
        assert locked.ask("GET", "/config", Authorization=basic(wrong)).status == 401, wrong
    forged = locked.ask(
        "POST",
        "/gradio_api/run/predict",
        {"data": []},
        Authorization=basic(f"ada:{PASSWORD}"),
        Origin="http://evil.example",
    )
    assert forged.status == 403


# How much


def test_fifty_megabytes_are_refused_before_they_are_read(page: Any) -> None:
    answer = page.ask("POST", "/gradio_api/queue/join", b"x" * 1000, Content_Length=str(50 * 1024 * 1024))
    assert answer.status == 413
    assert (
        page.ask(
            "POST", "/gradio_api/run/predict", b"[" + b"1," * (25 * 1024 * 1024), Content_Type="application/json"
        ).status
        == 413
    )
    for length in ("-1", "ten", "1e3"):
        assert page.ask("POST", "/gradio_api/run/predict", b"", Content_Length=length).status in (400, 413)
    assert page.ask("GET", "/health").status == 200


def test_a_body_that_does_not_say_its_length_is_cut(page: Any) -> None:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    chunks = (b"x" * 65536 for _ in range(50 * 16))
    try:
        connection.request(
            "POST",
            "/gradio_api/run/predict",
            body=chunks,
            encode_chunked=True,
            headers={"Transfer-Encoding": "chunked"},
        )
        status = connection.getresponse().status
    except (BrokenPipeError, ConnectionResetError):
        status = 413  # the server hung up in the middle
    assert status in (400, 413)
    assert page.ask("GET", "/health").status == 200


def test_addresses_have_a_limit(page: Any) -> None:
    assert page.ask("GET", "/?" + "x" * 20000).status in (400, 414)


# Forged values


def new_run_event(page: Any, target: str, values: list[Any]) -> Any:
    """Calls the event of a button of New run with forged values in its inputs."""
    found = event(page, target=target)
    return page.predict(found["id"], values) if found.get("queue") is False else page.queued(found["id"], values)


def text_of(answer: Any) -> str:
    return json.dumps(answer) if isinstance(answer, dict) else answer.text


FORGED: list[Any] = [
    {"preset": "../../etc/passwd"},
    {"preset": ["quickstart"]},
    {"preset": "quickstart", "changes": {"run.root": "/tmp/elsewhere"}},
    {"preset": "quickstart", "changes": {"run.id": "../../escaped"}},
    {"preset": "quickstart", "changes": {"run.id": "/etc"}},
    {"preset": "quickstart", "changes": {"reward": {"functions": [{"path": "os:system"}]}}},
    {"preset": "quickstart", "changes": {"reward.functions": [{"path": "evil.py:reward"}]}},
    {"preset": "quickstart", "changes": {"objective.clip": "evil.py:clip"}},
    {"preset": "quickstart", "changes": {"objective.regularizers": [{"name": "os.path:join"}]}},
    {"preset": "quickstart", "changes": {"generation.rollout": "evil.py:rollout"}},
    {"preset": "quickstart", "changes": {"generation.tools": ["subprocess:run"]}},
    {"preset": "quickstart", "changes": {"model.name": "/etc"}},
    {"preset": "quickstart", "changes": {"model.name": "../.."}},
    {"preset": "quickstart", "changes": {"model.chat_template": "/etc/passwd"}},
    {"preset": "quickstart", "changes": {"model.trust_remote_code": True, "model.name": "some/model"}},
    {"preset": "quickstart", "changes": {"data.source": "/etc/passwd"}},
    {"preset": "quickstart", "changes": {"data.source": "../secret.jsonl"}},
    {"preset": "quickstart", "changes": {"reward.params": {"base_url": "http://evil.example", "model": "m"}}},
    {"preset": "quickstart", "changes": {"reward.preset": "code-stdio", "reward.params": {"allow_unsafe": True}}},
    {"preset": "quickstart", "changes": {"reward.preset": "sql-exec", "reward.params": {"root": "/"}}},
    {"preset": "quickstart", "changes": {"reward.preset": "no-such-preset"}},
    {"preset": "quickstart", "changes": {"__class__": 1}},
    {"preset": "quickstart", "changes": {"model.name": "x" * 30000}},
    {"preset": "quickstart", "changes": {f"model.k{number}": 1 for number in range(300)}},
    {"preset": "quickstart", "changes": {"data.task_params": json.loads("[" * 60 + "]" * 60)}},
    {"preset": "quickstart", "changes": {"optimisation.steps": "; rm -rf /"}},
    {"preset": "quickstart", "changes": "nonsense"},
    "nonsense",
    17,
    [],
]  # fmt: skip


@pytest.mark.parametrize("draft", FORGED, ids=lambda draft: json.dumps(draft)[:70])
def test_a_forged_draft_starts_nothing(page: Any, draft: Any) -> None:
    before = sorted(path.name for path in page.root.iterdir())
    answer = new_run_event(page, "start", [draft])
    said = text_of(answer)
    assert "note fail" in said, said[:500]
    assert "Traceback" not in said
    assert "root:x:" not in said
    assert sorted(path.name for path in page.root.iterdir()) == before
    assert not Path("/tmp/elsewhere").exists()


def test_forged_values_of_a_list_are_refused(page: Any) -> None:
    found = event(page, target="preset")
    for value in ("../../etc/passwd", ["quickstart"], {"a": 1}, 7, None):
        answer = page.predict(found["id"], [None, value])
        assert answer.status in (200, 422, 500)
        assert "Traceback" not in answer.text
        if answer.status == 200:
            assert answer.json()["data"][0].get("__type__") == "update", answer.text[:300]  # skipped: nothing changed


@pytest.mark.parametrize(
    "run_id", ["../good", "/etc", "good/../..", "x" * 5000, {"a": 1}, ["good"], 3, None, "..", "good\0"]
)
def test_stop_takes_ids_of_live_runs_only(page: Any, run_id: Any) -> None:
    found = event(page, target="home-stop")
    answer = page.predict(found["id"], [run_id])
    assert answer.status == 500 or "note" in answer.text
    assert "Traceback" not in answer.text
    assert not list(page.folder.rglob("control"))


def test_unknown_events_are_refused(page: Any) -> None:
    for number in (10_000, -1, "look", None):
        answer = page.predict(number, [])
        assert answer.status in (400, 404, 422, 500)
        assert "Traceback" not in answer.text


def test_secrets_are_nowhere(page: Any) -> None:
    for target in ("/", "/new", "/config", "/gradio_api/info", "/gradio_api/startup-events"):
        assert "s3cr3t" not in page.ask("GET", target).text


def test_nothing_points_outside(page: Any) -> None:
    """No address of another host that a browser would load: scripts, fonts, styles."""
    import re

    for target in ("/", "/new"):
        html = page.ask("GET", target)
        loaded = re.findall(r"""(?:src|href)=["'](https?://[^"']+)""", html.text.split("window.gradio_config")[0])
        assert not [one for one in loaded if "127.0.0.1" not in one]
        assert "default-src 'self'" in html.headers["content-security-policy"]
    assert "http" not in page.ask("GET", "/theme.css").text.replace("http://www.w3.org", "")


def test_gradio_keeps_no_history_speaks_no_mcp_and_sends_no_statistics(page: Any) -> None:
    config = page.config()
    assert not config.get("mcp_server")
    assert config.get("analytics_enabled") is False
    assert not config.get("run_history")
    assert page.ask("GET", "/gradio_api/info").json()["named_endpoints"] == {}


# Refused at the start


def test_the_program_refuses_other_machines_without_accounts() -> None:
    command = [sys.executable, str(ROOT / "app.py"), "--port", "1", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "opens the page to other machines" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "options", [{"host": "0.0.0.0"}, {"host": "::"}, {"host": "192.168.1.5"}, {"share": True}, {"host": "example.org"}]
)
def test_so_do_the_settings(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--auth"):
        Settings(**options).check()
    Settings(**options, accounts={"ada": PASSWORD}).check()


def test_this_machine_needs_none() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.2"):
        Settings(host=host).check()


def test_accounts_are_read_from_files_and_variables_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tmp_path / "accounts"
    good.write_text(f"ada:{PASSWORD}\n\nbob:with:colon:s\n")
    assert read_accounts(str(good)) == {"ada": PASSWORD, "bob": "with:colon:s"}
    monkeypatch.setenv("KIT_ACCOUNTS", "ada:tooshor")
    with pytest.raises(ConfigError, match="at least 8") as weak:
        read_accounts("KIT_ACCOUNTS")
    assert "tooshor" not in str(weak.value)
    monkeypatch.setenv("KIT_ACCOUNTS", "  ")
    with pytest.raises(ConfigError, match="names no account"):
        read_accounts("KIT_ACCOUNTS")
    with pytest.raises(ConfigError, match="no such file") as typed:
        read_accounts("ada:my-own-password")
    assert "my-own-password" not in str(typed.value)


def test_hooks_are_files_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--hooks"):
        Settings(hooks=(tmp_path / "none.py",)).check()
