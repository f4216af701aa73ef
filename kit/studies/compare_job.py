"""A comparison in a process of its own, for faces that must not wait: `python -m kit.studies.compare_job REQUEST`.

The request is {runs: [[ids of an arm], ...] or [ids], root, metric, effect, evaluation, result}; the result file gets what
`compare_runs` returns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kit.runs.files import to_json
from kit.studies.compare import compare_runs


def job(request: dict[str, Any], quiet: bool) -> None:
    """Compares, and writes the result file. Raises `KitError` for runs that cannot be compared."""
    how = {key: request.get(key) for key in ("metric", "effect", "evaluation")}
    found = compare_runs(request["runs"], request["root"], **how)
    Path(request["result"]).write_text(to_json(found), encoding="utf-8")


if __name__ == "__main__":
    from kit.runs.child import serve

    sys.exit(serve(job))
