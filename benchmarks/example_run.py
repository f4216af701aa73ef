"""Makes the finished run that comes with the page: `python benchmarks/example_run.py [--run FOLDER]`.

Trains the quickstart (two to three minutes on a CPU), or takes a run of it, and packs what the screens show into
`kit/ui/example.zip`: configuration, metrics, events, completions, scores, report, and the adapter in float16. Checkpoints stay
out, and so does what is true of one machine only. The same run gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "kit" / "ui" / "example.zip"
KEPT = ("adapter", "completions", "eval")
FILES = ("best.json", "config.yaml", "data.json", "env.json", "events.jsonl", "log.txt", "metrics.jsonl", "report.html",
         "status.json")  # fmt: skip
NOT_KEPT = ("training_args.bin", "README.md")
OF_THE_MACHINE = ("boot", "create_time", "dir", "host", "pid", "supervisor")
LARGEST = 700_000


def main() -> None:
    """Packs, and says how large it is."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--run", type=Path, help="a finished run of the quickstart with the id 'example'")
    given = options.parse_args()
    if given.run is not None:
        pack(given.run)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kit.cli", "quickstart", "-o", "run.id=example"]
        subprocess.run(command, cwd=folder, check=True)
        pack(Path(folder, "runs", "example"))


def pack(run: Path) -> None:
    """Writes `TARGET`."""
    content: dict[str, bytes] = {name: (run / name).read_bytes() for name in FILES if (run / name).is_file()}
    for folder in KEPT:
        for path in sorted((run / folder).rglob("*")):
            if path.is_file() and path.name not in NOT_KEPT:
                content[path.relative_to(run).as_posix()] = path.read_bytes()
    content["status.json"] = _as_json(_without(json.loads(content["status.json"]), OF_THE_MACHINE))
    environment = json.loads(content["env.json"])
    environment |= {"platform": "Linux", "git": {"commit": None, "dirty": False}}
    content["env.json"] = _as_json(environment)
    adapter = json.loads(content["adapter/adapter_config.json"])
    content["adapter/adapter_config.json"] = _as_json(adapter | {"base_model_name_or_path": "embedded"})
    content["adapter/adapter_model.safetensors"] = _halved(content["adapter/adapter_model.safetensors"])
    with zipfile.ZipFile(TARGET, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted(content.items()):
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    size = TARGET.stat().st_size
    print(f"{TARGET.name}: {len(content)} files, {size / 1000:.0f} kB")
    if size > LARGEST:
        sys.exit(f"more than {LARGEST / 1000:.0f} kB: leave completions of some steps out")


def _without(tree: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name not in names}


def _as_json(tree: Any) -> bytes:
    return (json.dumps(tree, indent=2) + "\n").encode()


def _halved(weights: bytes) -> bytes:
    """The same tensors in float16."""
    from safetensors.torch import load, save

    return save({name: tensor.half() for name, tensor in load(weights).items()}, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
