"""Build the example run of the page: `python benchmarks/example_run.py [--run FOLDER]`.

The command trains the quickstart (two to three minutes on a CPU), or reads the run in FOLDER, and packs the files that the
screens show into `kit/ui/example.zip`: configuration, metrics, events, completions, scores, report, and the adapter in
float16. It leaves out checkpoints and facts about the machine. The same run gives the same bytes.
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
FOLDERS = ("adapter", "completions", "eval")
FILES = ("best.json", "config.yaml", "data.json", "env.json", "events.jsonl", "log.txt", "metrics.jsonl", "report.html",
         "status.json")  # fmt: skip
EXCLUDED = ("training_args.bin", "README.md")
MACHINE_KEYS = ("boot", "create_time", "dir", "host", "pid", "supervisor")
MAX_BYTES = 700_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a finished run of the quickstart with the id 'example'")
    options = parser.parse_args()
    if options.run is not None:
        pack(options.run)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kit.cli", "quickstart", "-o", "run.id=example"]
        subprocess.run(command, cwd=folder, check=True)
        pack(Path(folder, "runs", "example"))


def pack(run: Path) -> None:
    """Write the files of a run to `TARGET` and print the size. Exit with an error above `MAX_BYTES`."""
    content: dict[str, bytes] = {name: (run / name).read_bytes() for name in FILES if (run / name).is_file()}
    for folder in FOLDERS:
        for path in sorted((run / folder).rglob("*")):
            if path.is_file() and path.name not in EXCLUDED:
                content[path.relative_to(run).as_posix()] = path.read_bytes()
    status = json.loads(content["status.json"])
    content["status.json"] = _as_json({key: value for key, value in status.items() if key not in MACHINE_KEYS})
    environment = json.loads(content["env.json"])
    environment |= {"platform": "Linux", "git": {"commit": None, "dirty": False}}
    content["env.json"] = _as_json(environment)
    adapter = json.loads(content["adapter/adapter_config.json"])
    content["adapter/adapter_config.json"] = _as_json(adapter | {"base_model_name_or_path": "embedded"})
    content["adapter/adapter_model.safetensors"] = _in_float16(content["adapter/adapter_model.safetensors"])
    with zipfile.ZipFile(TARGET, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted(content.items()):
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    size = TARGET.stat().st_size
    print(f"{TARGET.name}: {len(content)} files, {size / 1000:.0f} kB")
    if size > MAX_BYTES:
        sys.exit(f"more than {MAX_BYTES / 1000:.0f} kB: leave out the completions of some steps")


def _as_json(tree: Any) -> bytes:
    return (json.dumps(tree, indent=2) + "\n").encode()


def _in_float16(weights: bytes) -> bytes:
    """Convert the tensors of a safetensors file to float16."""
    from safetensors.torch import load, save

    return save({name: tensor.half() for name, tensor in load(weights).items()}, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
