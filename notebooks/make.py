"""Writes the notebooks from notebooks/scripts/*.py (jupytext's percent format), which are what is edited.

python notebooks/make.py            write
python notebooks/make.py --check    write nothing; exit with 1 if a notebook is not what its script gives
python notebooks/make.py --source git+https://ADDRESS
                                    where the first cell of all notebooks installs the kit from, by default; then write

A cell `# %% file="NAME"` becomes one that writes NAME: in the script it is Python that editors and linters read.
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
    """Writes into all scripts where their first cell installs the kit from, unless its user says otherwise."""
    for script in scripts():
        text, found = re.subn(r'^GRPO_KIT = ".*?"  # @param', lambda _: f"GRPO_KIT = {json.dumps(source)}  # @param",
                              script.read_text(encoding="utf-8"), flags=re.MULTILINE)  # fmt: skip
        if found != 1:
            raise SystemExit(
                f'{script} has {found} lines `GRPO_KIT = "..."  # @param` in place of one; copy a first cell from another.'
            )
        script.write_text(text, encoding="utf-8")


def notebook(script: Path) -> str:
    """The notebook as text: no outputs, and cell ids made of the content, so that an edit changes only what was edited."""
    import jupytext
    import nbformat

    made = jupytext.read(script, fmt="py:percent")
    kept = {name: value for name, value in made.metadata.items() if name in ("accelerator", "colab")}
    made.metadata = nbformat.from_dict(kept | METADATA)
    seen: dict[str, int] = {}
    for cell in made.cells:
        if name := cell.metadata.pop("file", None):
            cell.source = f"%%writefile {name}\n{cell.source}"
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        _strip(cell)
    made.nbformat, made.nbformat_minor = 4, 5
    nbformat.validate(made)
    return nbformat.writes(made).rstrip("\n") + "\n"


def _strip(cell: Any) -> None:
    if cell.cell_type == "code":
        cell.outputs, cell.execution_count = [], None
        cell.metadata.pop("lines_to_next_cell", None)


def differences() -> list[Path]:
    """Notebooks that are not what their scripts give, and notebooks without a script."""
    made = {target(script): notebook(script) for script in scripts()}
    stale = [path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    return stale + [path for path in sorted(FOLDER.glob("*.ipynb")) if path not in made]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--source", help="a git address, a folder or a wheel")
    options = parser.parse_args()
    if options.source is not None:
        install_from(options.source)
    if options.check:
        stale = differences()
        for path in stale:
            print(f"{path} is not what its script gives; run: python notebooks/make.py", file=sys.stderr)
        return 1 if stale else 0
    for script in scripts():
        target(script).write_text(notebook(script), encoding="utf-8")
        print(target(script))
    return 0


if __name__ == "__main__":
    sys.exit(main())
