"""Writes the notebooks from notebooks/scripts/*.py (jupytext's percent format). Edit the scripts, not the notebooks.

python notebooks/make.py            write
python notebooks/make.py --check    write nothing; exit with 1 if a notebook differs from its script
python notebooks/make.py --source git+https://ADDRESS
                                    set the default source of the kit in all first cells, then write

A cell `# %% file="NAME"` becomes a cell that writes NAME. In the script, editors and linters read it as Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def scripts() -> list[Path]:
    """The sources, in order."""
    return sorted((FOLDER / "scripts").glob("[0-9][0-9]_*.py"))


def target(script: Path) -> Path:
    """The notebook of a script."""
    return FOLDER / f"{script.stem}.ipynb"


def install_from(source: str) -> None:
    """Sets the default source of the kit in the first cell of all scripts."""
    for script in scripts():
        text, count = re.subn(r'^GRPO_KIT = ".*?"  # @param', lambda _: f"GRPO_KIT = {json.dumps(source)}  # @param",
                              script.read_text(encoding="utf-8"), flags=re.MULTILINE)  # fmt: skip
        if count != 1:
            raise SystemExit(
                f'{script} has {count} lines `GRPO_KIT = "..."  # @param` instead of one; copy the first cell of another script.'
            )
        script.write_text(text, encoding="utf-8")


def notebook(script: Path) -> str:
    """The notebook as text, without outputs. Cell ids are hashes of the content, so that an edit changes few lines."""
    import jupytext
    import nbformat

    document = jupytext.read(script, fmt="py:percent")
    metadata = {name: value for name, value in document.metadata.items() if name in ("accelerator", "colab")}
    document.metadata = nbformat.from_dict(metadata | METADATA)
    counts: dict[str, int] = {}
    for cell in document.cells:
        if name := cell.metadata.pop("file", None):
            cell.source = f"%%writefile {name}\n{cell.source}"
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        counts[digest] = counts.get(digest, 0) + 1
        cell.id = digest if counts[digest] == 1 else f"{digest}-{counts[digest]}"
        _strip(cell)
    document.nbformat, document.nbformat_minor = 4, 5
    nbformat.validate(document)
    return nbformat.writes(document).rstrip("\n") + "\n"


def _strip(cell: Any) -> None:
    if cell.cell_type == "code":
        cell.outputs, cell.execution_count = [], None
        cell.metadata.pop("lines_to_next_cell", None)


def differences() -> list[Path]:
    """Notebooks that differ from their scripts or have none."""
    texts = {target(script): notebook(script) for script in scripts()}
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    return stale + [path for path in sorted(FOLDER.glob("*.ipynb")) if path not in texts]


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--source", help="a git address, a folder or a wheel")
    options = parser.parse_args()
    if options.source is not None:
        install_from(options.source)
    if options.check:
        stale = differences()
        for path in stale:
            print(f"{path} differs from its script; run: python notebooks/make.py", file=sys.stderr)
        return 1 if stale else 0
    for script in scripts():
        target(script).write_text(notebook(script), encoding="utf-8")
        print(target(script))
    return 0


if __name__ == "__main__":
    sys.exit(main())
