"""Security rules of the page with raw requests to the real server."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PASSWORD = "correct horse battery"
WRONG_SECONDS = 0.05


@pytest.fixture(scope="module")
def page(serve_here: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page with a run that has a report and an export, and files beside it that must not be served."""
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
def locked(serve_here: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page with an account and a short delay after a wrong password."""
    from kit.ui import security

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(security, "WRONG_PASSWORD_SECONDS", WRONG_SECONDS)
        yield serve_here(tmp_path_factory.mktemp("locked"), accounts={"ada": PASSWORD})


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


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


# Origins and hosts


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


def test_a_forwarded_host_is_believed_behind_a_proxy_only(serve_here: Any, page: Any, tmp_path: Path) -> None:
    forged = {"Origin": "http://evil.example", "X_Forwarded_Host": "evil.example"}
    assert page.ask("POST", "/gradio_api/queue/join", {"data": []}, **forged).status == 403
    behind = serve_here(tmp_path, proxy=True)
    assert behind.ask("GET", "/config", **forged).status == 200


def test_a_heartbeat_ends_at_once(page: Any) -> None:
    """A heartbeat that stays open in each tab takes one of the six connections that a browser has per host."""
    start = time.monotonic()
    assert page.ask("GET", "/gradio_api/heartbeat/abc").status == 204
    assert time.monotonic() - start < 1.0


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
            break  # one wrong password per route, because each takes half a second


def test_the_right_password_gives_access_and_others_do_not(locked: Any) -> None:
    for target in ("queue/join", "run/predict", "upload", "cancel"):
        assert locked.ask("POST", f"/gradio_api/{target}", {"fn_index": 0, "data": []}).status == 401
    assert locked.ask("GET", "/config", Authorization=basic(f"ada:{PASSWORD}")).status == 200
    assert locked.ask("GET", "/", Authorization=basic(f"ada:{PASSWORD}"), Host="any.example").status == 200
    for wrong in (f"Ada:{PASSWORD}", f":{PASSWORD}", "ada:", f"ada:{PASSWORD}x", "nobody:\0"):
        start = time.monotonic()
        assert locked.ask("GET", "/config", Authorization=basic(wrong)).status == 401, wrong
        assert time.monotonic() - start >= WRONG_SECONDS
    forged = locked.ask(
        "POST",
        "/gradio_api/run/predict",
        {"data": []},
        Authorization=basic(f"ada:{PASSWORD}"),
        Origin="http://evil.example",
    )
    assert forged.status == 403


# Sizes


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
        status = 413  # the server closed the connection while the body was sent
    assert status in (400, 413)
    assert page.ask("GET", "/health").status == 200


# Headers and metadata of the page


def test_gradio_keeps_no_history_speaks_no_mcp_and_sends_no_statistics(page: Any) -> None:
    config = page.described
    assert not config.get("mcp_server")
    assert config.get("analytics_enabled") is False
    assert not config.get("run_history")
    assert page.ask("GET", "/gradio_api/info").json()["named_endpoints"] == {}
