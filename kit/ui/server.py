"""The server: checks its options, mounts the page behind the gate, and serves files of runs."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import ConfigError, EnvironmentUnsupported
from kit.runs.store import RUN_ID, RunStore
from kit.ui.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

REPORT = "report.html"


def servable(root: Path, run_id: str, name: str) -> Path | None:
    """Return the path of a run's report or of a file below its `export`. None for other files and links that lead out."""
    if not RUN_ID.fullmatch(run_id) or "\0" in name:
        return None
    run = RunStore(root).root / run_id
    inside = run if name == REPORT else run / "export"
    target = run / name
    try:
        # The run must be a folder of the root, not a link.
        base = root.resolve(strict=True) / run_id
        path = target.resolve(strict=True)
        allowed = base / REPORT if name == REPORT else base / "export"
        if run.is_symlink() or inside.is_symlink():
            return None
        fine = path == allowed if name == REPORT else path.is_relative_to(allowed) and path != allowed
    except (OSError, ValueError, RuntimeError):
        return None
    return path if fine and path.is_file() else None


def add_files(app: FastAPI, root: Path) -> None:
    """Add the routes of files, and /health."""
    from fastapi import HTTPException
    from fastapi.responses import FileResponse, PlainTextResponse

    def find(run_id: str, name: str) -> Path:
        path = servable(root, run_id, name)
        if path is None:
            raise HTTPException(404, "There is no such file.")
        return path

    @app.get("/health")
    def health() -> Any:
        return PlainTextResponse("ok")

    @app.get("/runs/{run_id}/report.html")
    def report(run_id: str) -> Any:
        return FileResponse(find(run_id, REPORT), media_type="text/html", headers={"cache-control": "no-store"})

    @app.get("/runs/{run_id}/export/{name:path}")
    def export(run_id: str, name: str) -> Any:
        path = find(run_id, f"export/{name}")
        return FileResponse(path, media_type="application/octet-stream", filename=path.name)


OFFLINE = {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_MCP_SERVER": "False", "GRADIO_SSR_MODE": "False"}


def serve(settings: Settings) -> None:
    """Serve until an interrupt. Raises `ConfigError` for refused options, `EnvironmentUnsupported` without Gradio."""
    settings.check()
    check_port(settings)
    import uvicorn

    print("grpo-kit: building the page …", flush=True)
    app = make_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        server_header=False,
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        ws="none",
    )
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"grpo-kit: the page is at http://{host}:{settings.port}    Ctrl-C ends it; runs continue.", flush=True)
    uvicorn.Server(config).run()


def check_port(settings: Settings) -> None:
    """Raise `ConfigError` if the port is not available."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host.strip("[]"), settings.port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{settings.host}:{settings.port} cannot be served: {getattr(error, 'strerror', None) or error}. The page may "
                f"run already; otherwise choose another port with --port."
            ) from None


def make_app(settings: Settings) -> Any:
    """Return the application behind its gate, as ASGI."""
    os.environ.update(OFFLINE)
    try:
        import gradio as gr
    except ImportError:
        raise EnvironmentUnsupported(
            "The page needs Gradio. Install it with: uv sync --inexact --extra ui   (or: pip install 'grpo-kit[ui]')"
        ) from None
    from fastapi import FastAPI

    from kit.ui import uploads
    from kit.ui.page import SCREENS, build, head, style, theme
    from kit.ui.security import Gate
    from kit.ui.site import Site

    site = Site(settings)
    # Before Gradio builds its application, which reads the variable once.
    os.environ["GRADIO_TEMP_DIR"] = str(uploads.arriving(settings.root).absolute())
    uploads.clear(settings.root)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        site.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    add_files(app, settings.root)
    blocks = build(site)
    blocks.queue(default_concurrency_limit=8, max_size=64, api_open=False)
    # An idle server then takes 0.5 % of a core instead of 4 %: Gradio polls for work every millisecond and has no option for it.
    blocks._queue.sleep_when_free, blocks._queue.progress_update_sleep_when_free = 0.05, 0.2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="SSR mode")  # Gradio warns even if it is off
        mounted = gr.mount_gradio_app(
            app,
            blocks,
            path="/",
            theme=theme(),
            css=style(),
            head=head(),
            footer_links=[],
            run_history=False,
            mcp_server=False,
            ssr_mode=False,
            pwa=False,
            enable_monitoring=False,
            show_error=False,
            max_file_size=uploads.LARGEST,
            allowed_paths=[],
            blocked_paths=["/"],
        )
    # Security: Gradio refuses to copy a file that a forged value names only once `launch` was called, which a mounted page never
    # does. The check is of https://github.com/gradio-app/gradio/pull/7465; a test forges such values.
    blocks.has_launched = True
    return Gate(mounted, settings, [path for _, path, _ in SCREENS])
