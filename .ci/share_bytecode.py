"""`share_bytecode.py FROM TO`: files that two environments both have from uv's cache are compiled in one of them only.

Python looks at a source file's time and size before it takes what was compiled of it, and puts the file's own path in: where
FROM has bytecode of the very file (a hard link) that TO has, TO gets a link to that as well. The verl stage's tests take 20 s
of CPU time so, and 35 s where they compile everything themselves.
"""

import os
import sys
from pathlib import Path


def main(source: Path, target: Path) -> None:
    (mine,), (others,) = source.glob("lib/python*/site-packages"), target.glob("lib/python*/site-packages")
    for folder, folders, names in os.walk(mine):
        there = others / Path(folder).relative_to(mine)
        if not there.is_dir():
            folders.clear()
        elif "__pycache__" in folders:
            folders.remove("__pycache__")
            compiled = os.listdir(f"{folder}/__pycache__")
            for name in compiled:
                code = f"{name.partition('.')[0]}.py"
                twin = there / "__pycache__" / name
                if code in names and (there / code).is_file() and os.path.samefile(f"{folder}/{code}", there / code):
                    twin.parent.mkdir(exist_ok=True)
                    if not twin.exists():
                        os.link(f"{folder}/__pycache__/{name}", twin)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
