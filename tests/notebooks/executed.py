"""Check executed notebooks: `python tests/notebooks/executed.py FOLDER` after `pytest --nbmake --overwrite FOLDER`.

A kernel does not report a failed `!command`, a missing plot, or a run that ended early.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUNS = re.compile(r"\bkit\.train\(|\.watch\(\)|\bkit\.start\(")
TABLE = re.compile(r"\b(pd|metrics|history|answered|first|last)\b[.(\[]")
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def faults(path: Path) -> Iterator[str]:
    """Yield a sentence for each defect in the outputs of a notebook."""
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        if "if REAL:" in source and not cell["outputs"]:  # these cells take minutes and are run by the reader
            continue
        for fault in _of_cell(source, cell["outputs"]):
            yield f"{path.name}, cell {number} ({source.splitlines()[0][:50]!r}): {fault}"


def _of_cell(source: str, outputs: list[dict[str, Any]]) -> Iterator[str]:
    printed = COLOURS.sub("", "".join("".join(output.get("text", "")) for output in outputs))
    shown = [output.get("data", {}) for output in outputs]
    kinds = {kind for data in shown for kind in data}
    lines = source.strip().splitlines()
    may_fail = any(line.startswith("!") and "||" in line for line in lines) or "except" in source
    for line in lines:
        if line.startswith("!"):
            program = line[1:].split()[0]
            if f"{program}: not found" in printed or "command not found" in printed:
                yield f"{program} was not found"
    if not printed and not shown and any(line.startswith("!") for line in lines):
        yield "the command printed nothing"
    if any(output["output_type"] == "error" for output in outputs):
        yield "it raised"
    if not may_fail and re.search(r"^(error|Error|Traceback)\b", printed, re.MULTILINE):
        yield f"it printed an error: {printed.strip().splitlines()[-1]}"
    if lines and lines[-1].endswith(".plot()") and "image/svg+xml" not in kinds:
        yield "there is no picture"
    if lines and TABLE.match(lines[-1]) and "text/html" not in kinds:
        yield "there is no table"
    page = "".join("".join(data.get("text/html", "")) for data in shown)
    if RUNS.search(source) and not may_fail and ".status" not in lines[-1] and "is finished" not in page:
        yield "no card says that the run came to its end"


def main(folder: Path) -> int:
    """Print the defects of a folder's notebooks; return 1 if there are any or if a notebook was not executed."""
    problems = [fault for path in sorted(folder.glob("*.ipynb")) for fault in faults(path)]
    for path in sorted(folder.glob("*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
        if not cells or any(cell["execution_count"] is None for cell in cells):
            problems.append(f"{path.name}: not all of its cells were executed")
    print("\n".join(problems) or f"{folder}: every cell shows what it should")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
