"""The only files that the page serves: a run's report, and what lies in its export folder."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse, PlainTextResponse

from kit.runs.store import RUN_ID, RunStore

REPORT = "report.html"


def servable(root: Path, run_id: str, name: str) -> Path | None:
    """The file that may be sent, or None: below the run's own `export`, or its report; links that lead out are none."""
    if not RUN_ID.fullmatch(run_id) or "\0" in name:
        return None
    run = RunStore(root).root / run_id
    inside = run if name == REPORT else run / "export"
    wanted = run / name
    try:
        # The run itself must be a folder of the root, and no link to elsewhere either.
        base = root.resolve(strict=True) / run_id
        path = wanted.resolve(strict=True)
        allowed = base / REPORT if name == REPORT else base / "export"
        if run.is_symlink() or inside.is_symlink():
            return None
        fine = path == allowed if name == REPORT else path.is_relative_to(allowed) and path != allowed
    except (OSError, ValueError, RuntimeError):
        return None
    return path if fine and path.is_file() else None


def add_files(app: FastAPI, root: Path) -> None:
    """Adds the routes of files, and one that says that the server is up."""

    @app.get("/health")
    def health() -> PlainTextResponse:
        return PlainTextResponse("ok")

    @app.get("/runs/{run_id}/report.html")
    def report(run_id: str) -> FileResponse:
        return _send(root, run_id, REPORT, inline=True)

    @app.get("/runs/{run_id}/export/{name:path}")
    def export(run_id: str, name: str) -> FileResponse:
        return _send(root, run_id, f"export/{name}", inline=False)


def _send(root: Path, run_id: str, name: str, *, inline: bool) -> FileResponse:
    path = servable(root, run_id, name)
    if path is None:
        raise HTTPException(404, "There is no such file.")
    if inline:
        return FileResponse(path, media_type="text/html", headers={"cache-control": "no-store"})
    return FileResponse(path, media_type="application/octet-stream", filename=path.name)
