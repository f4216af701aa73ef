"""A run's report as something to show: a folder for any static host, or a Space or dataset repository of the Hugging Face Hub.

What is published is put together first (`Publication`), so that one can be told what leaves before it does. Completions hold
rows of the data: they are left out unless they are asked for.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from kit.errors import ConfigError, RunError
from kit.report.record import Record, read
from kit.report.run_report import WITH_ROWS, render, subtitle
from kit.runs.files import disk_errors, human_size
from kit.runs.secrets import redact
from kit.runs.store import RunDir

MARKER = "grpo-kit-run.json"
"""By this file a folder or repository is known to hold a shared run, and may be written over by the next."""
Kind = Literal["space", "dataset"]


@dataclass(frozen=True)
class Publication:
    """The files that would be published, by name, and what is in them."""

    run: RunDir
    files: dict[str, str]
    completions: bool

    @property
    def told(self) -> list[str]:
        """What leaves this machine, and what does not, one line each."""
        size = human_size(sum(len(text.encode()) for text in self.files.values()))
        rows = (
            "INCLUDED: sampled completions with the prompts and references of the data. Publish them only if you may publish the "
            "data"
            if self.completions
            else "left out: completions, prompts and references, as they hold rows of the data (--completions includes samples)"
        )
        return [
            f"{len(self.files)} files, {size}: {', '.join(self.files)}",
            "scores, curves, events, configuration, packages and hardware of the run",
            rows,
            "never: weights, logs, keys and tokens ([hidden] where one stood), and the path of your home folder",
        ]

    def write(self, folder: Path) -> None:
        """Writes the files into a folder that is new, empty, or holds an earlier publication. Raises `RunError`."""
        check_free(folder)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in self.files.items():
                (folder / name).write_text(text, encoding="utf-8")


def publication(run: RunDir, *, completions: bool = False, kind: Kind | None = None) -> Publication:
    """What would be published of a run. Raises `RunError` for one without a configuration.

    completions: with the report's sections that hold rows of the data. kind: of the repository, which its README says.
    """
    if not run.config.is_file():
        raise RunError(f"Run '{run.id}' has no config.yaml, so there is nothing to show.")
    record = read(run)
    marker = {"run": run.id, "state": record.status.get("state"), "step": record.status.get("step"),
              "published": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "completions": completions}  # fmt: skip
    files = {
        "index.html": render(record, leave_out=() if completions else WITH_ROWS),
        "metrics.jsonl": "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in record.metrics),
        MARKER: json.dumps(marker, indent=1) + "\n",
        "README.md": readme(record, kind),
    }
    return Publication(run, {name: cleaned(text) for name, text in files.items()}, completions)


def cleaned(text: str) -> str:
    """The text without keys, and without the path of this user's home folder."""
    home = str(Path.home())
    return redact(text.replace(home, "~") if len(home) > 1 else text)


def readme(record: Record, kind: Kind | None) -> str:
    """What the hub shows beside the files; the front matter makes a Space serve the report."""
    front: dict[str, Any] = {"title": f"{record.id}, a GRPO run", "tags": ["grpo", "grpo-kit"]}
    if kind == "space":
        front |= {"sdk": "static", "app_file": "index.html", "pinned": False}
    if kind == "dataset":
        front["configs"] = [{"config_name": "metrics", "data_files": "metrics.jsonl"}]
    lines = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {record.id}",
        subtitle(record),
        "`index.html` is the report of the run, one file that loads nothing; `metrics.jsonl` has its numbers by step.",
        "Made with grpo-kit; no license is stated, and the terms of the model and the data apply.",
    ]
    return "\n\n".join(line for line in lines if line) + "\n"


def check_free(folder: Path) -> None:
    """Raises `RunError` where the folder is something else than free or an earlier publication."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; --to takes a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise RunError(
            f"{folder} holds something else than a shared run (it has no {MARKER}), and nothing of it is replaced. "
            "Give a new folder."
        )


def to_hub(
    content: Publication, repo: str, kind: Kind, *, public: bool = False, say: Callable[[str], None] = print
) -> str:
    """Pushes it in one commit and returns the address. A new repository is private unless `public`.

    Raises `ConfigError` for a name that is none and without a token, `RunError` for what the hub refuses, and where the
    repository holds something else than a shared run.
    """
    from kit.export.hub import push  # with torch, which the page, that tells what would leave, does without
    from kit.export.request import check_push

    token = check_push(repo)
    holder = Path(tempfile.mkdtemp(prefix="grpo-kit-share-"))
    try:
        content.write(holder / "files")
        done = push(
            holder / "files",
            repo,
            token,
            private=not public,
            message=f"Run {content.run.id}",
            say=say,
            kind=kind,
            check=lambda names, made: check_repository(repo, names, made),
        )
    finally:
        shutil.rmtree(holder, ignore_errors=True)
    return str(done["url"])


def check_repository(repo: str, names: list[str], made: bool) -> None:
    """Raises `RunError` where a repository with these files is no place for a shared run.

    made: by this call, so that what is in it is the hub's own. In any other, a README.md or index.html may be somebody's work.
    """
    strange = sorted(name for name in names if name != ".gitattributes")
    if strange and not made and MARKER not in names:
        raise RunError(
            f"{repo} exists and holds something else than a shared run ({', '.join(strange[:3])}, and no {MARKER}); nothing was "
            "pushed. Give another OWNER/NAME: one is made where there is none. If nothing in it is to be kept, delete it in its "
            "settings on the hub, and give the command again."
        )


def destination(to: Path | None, space: str | None, dataset: str | None) -> tuple[Kind | None, str]:
    """(kind of repository or None for a folder, its name). Raises `ConfigError` unless exactly one is given."""
    options = [("--to", to), ("--space", space), ("--dataset", dataset)]
    named = [(option, str(value)) for option, value in options if value is not None]
    if len(named) != 1:
        raise ConfigError(
            f"share: {' and '.join(option for option, _ in named) or 'no place'} given; expected one of --to FOLDER (for any "
            "static host), --space OWNER/NAME (a page on the Hugging Face Hub) or --dataset OWNER/NAME (files there)."
        )
    kinds: dict[str, Kind | None] = {"--to": None, "--space": "space", "--dataset": "dataset"}
    return kinds[named[0][0]], named[0][1]
