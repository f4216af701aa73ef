"""A run's report as something to show: a folder for any static host, or to upload to a Space of the Hugging Face Hub.

Completions hold rows of the data: they are left out unless they are asked for.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from kit.errors import RunError
from kit.report.record import Record, read
from kit.report.run_report import WITH_ROWS, render, subtitle
from kit.runs.files import disk_errors, human_size
from kit.runs.secrets import redact
from kit.runs.store import RunDir

MARKER = "grpo-kit-run.json"
"""File that marks a folder as a shared run, which the next one may overwrite."""


@dataclass(frozen=True)
class Publication:
    """The files that would be published, by name, and what is in them."""

    run: RunDir
    files: dict[str, str]
    completions: bool

    @property
    def contents(self) -> list[str]:
        """Lists what the files hold and what they leave out, a line each."""
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
        if folder.exists() and not folder.is_dir():
            raise RunError(f"{folder} is a file; --to takes a folder.")
        if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
            raise RunError(
                f"{folder} holds something else than a shared run (it has no {MARKER}), and nothing of it is replaced. "
                "Give a new folder."
            )
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in self.files.items():
                (folder / name).write_text(text, encoding="utf-8")


def publication(run: RunDir, *, completions: bool = False) -> Publication:
    """What would be published of a run. Raises `RunError` for one without a configuration.

    completions: with the report's sections that hold rows of the data.
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
        "README.md": readme(record),
    }
    home = str(Path.home())
    texts = {name: redact(text.replace(home, "~") if len(home) > 1 else text) for name, text in files.items()}
    return Publication(run, texts, completions)


def readme(record: Record) -> str:
    """What the hub shows beside the files; the front matter makes a Space serve the report."""
    front = {
        "title": f"{record.id}, a GRPO run", "tags": ["grpo", "grpo-kit"], "sdk": "static", "app_file": "index.html",
        "pinned": False,
    }  # fmt: skip
    lines = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {record.id}",
        subtitle(record),
        "`index.html` is the report of the run, one file that loads nothing; `metrics.jsonl` has its numbers by step.",
        "Made with grpo-kit; no license is stated, and the terms of the model and the data apply.",
    ]
    return "\n\n".join(line for line in lines if line) + "\n"
