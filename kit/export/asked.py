"""An export for faces that must not wait: `python -m kit.export.asked REQUEST`, with the result in a file.

The request is {run_dir, wish: keys of `kit.export.face.Wish`, result}. What it prints on the way is the export's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kit.export.face import Wish, export
from kit.runs.store import RunDir


def job(request: dict[str, Any], quiet: bool) -> None:
    """Exports, and writes the result file. Raises `KitError`, `NotVerified` among them."""
    found = export(RunDir(Path(request["run_dir"])), Wish(**request["wish"]), progress=not quiet)
    Path(request["result"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    from kit.runs.worker import serve

    sys.exit(serve(job))
