"""The run directory as it was at the checkpoint: whatever was written later is cut, because it will be written again.

Of a run that starts again from the beginning all that it wrote is cut, the score before training and the events included:
nothing says whether they are what the second attempt would have written.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kit.runner.environment import git_state
from kit.runner.previous_run import Past, Resumption
from kit.runs.files import write_atomic
from kit.runs.store import RunDir
from kit.trainer.checkpoint_writer import clear_staging, remove

log = logging.getLogger("kit")


def rewind(resumption: Resumption, tell: Callable[[str], None]) -> None:
    """Makes the run directory what it was at the checkpoint, notes the resumption, and says where the run goes on.

    Each file is replaced at once, and doing it again changes nothing: it may be interrupted, too.
    """
    past = resumption.past
    anew = past.checkpoint is None
    past.run.write_status("starting", step=past.step)  # first: what is cut from here on counts no more
    _file_last_score(past)
    cut = _cut_lines(past.run.metrics_file, lambda line: not anew and _step(line) <= past.step)
    _cut_lines(
        past.run.events_file,
        lambda line: line.get("kind") == "resumed" or (not anew and _step(line) <= past.step),
    )
    for path in list(_later_files(past)):
        log.info("cut: %s", path.relative_to(past.run.path))
        path.unlink(missing_ok=True)
    if anew:
        _remove_weights(past.run)
    clear_staging(past.run.path)
    _note(resumption)
    _tell(resumption, cut, tell)


def _step(line: Mapping[str, Any]) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0


def _mapping(text: str | bytes) -> dict[str, Any] | None:
    """A JSON object, or None for anything else: a file that a crash or a full disk left damaged is made again."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _cut_lines(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> int:
    """Leaves the lines that `keep` wants, and logs the others; a half-written one goes without a word."""
    if not path.is_file():
        return 0
    whole = path.read_bytes().split(b"\n")[:-1]
    kept: list[bytes] = []
    cut: list[bytes] = []
    for line in whole:
        record = _mapping(line)
        (kept if record is not None and keep(record) else cut).append(line)
    for line in cut:
        log.info("cut from %s: %s", path.name, line.decode(errors="replace"))
    write_atomic(path, "".join(line.decode() + "\n" for line in kept))
    return len(cut)


def _later_files(past: Past) -> Iterator[Path]:
    """What was written after the checkpoint, and what an interrupted write left."""
    best, after = past.run.path / "best.json", past.run.eval / "after.json"
    if past.checkpoint is None:
        yield from (
            path for path in (*past.run.completions.glob("*"), *past.run.eval.glob("*"), best) if path.is_file()
        )
        return
    yield from past.run.completions.glob("*.partial")
    for folder in (past.run.completions, past.run.eval):
        for path in sorted(folder.glob("step-*")):
            step = path.stem.removeprefix("step-")
            if step.isdigit() and int(step) > past.step:
                yield path
    yield from (path for path in past.run.eval.glob("*.json") if _mapping(path.read_bytes()) is None)
    if best.is_file() and ((found := _mapping(best.read_bytes())) is None or _step(found) > past.step):
        yield best
    if after.is_file() and not past.over:
        yield after


def _remove_weights(run: RunDir) -> None:
    """Damaged checkpoints, and the result that an earlier attempt left: there are some only where that was forced."""
    for checkpoint in run.checkpoints:
        remove(checkpoint)
    shutil.rmtree(run.adapter, ignore_errors=True)


def _file_last_score(past: Past) -> None:
    """The score after the last step of a run that is made longer was one of its course."""
    after = past.run.eval / "after.json"
    if after.is_file() and past.longer:
        write_atomic(past.run.eval / f"step-{past.step:05d}.json", after.read_text(encoding="utf-8"))


def _note(resumption: Resumption) -> None:
    past, events = resumption.past, resumption.past.run.events()
    if past.checkpoint and not any(e["kind"] == "checkpoint" and e.get("step") == past.step for e in events):
        past.run.append_event("checkpoint", step=past.step)  # interrupted between the checkpoint and its event
    past.run.append_event(
        "resumed",
        step=past.step,
        checkpoint=past.checkpoint.name if past.checkpoint else None,
        forced=resumption.forced,
        changes=resumption.changes,
    )


def _tell(resumption: Resumption, cut: int, tell: Callable[[str], None]) -> None:
    past = resumption.past
    if past.checkpoint is None:
        why = f"its {cut} step{'s' * (cut != 1)} had no checkpoint" if cut else "nothing had been trained"
        tell(f"Resuming: {why}, so the run starts again from the beginning, with its id and seed {past.asked.run.seed}")
        for change in resumption.changes:
            tell(f"Changed since then: {change}. It trains with what there is now.")
        return
    again = f"; {cut} later step{'s' * (cut != 1)} had no checkpoint and will be made again" if cut else ""
    tell(f"Resuming from {past.checkpoint.name}{again}")
    for change in resumption.changes:
        tell(f"Warning: going on regardless (--force): {change}")
    old, new = (past.env.get("git") or {}).get("commit"), (git_state() or {}).get("commit")
    if old and new and old != new:
        tell(f"Warning: the kit's own code is at commit {new[:10]} now, and was at {old[:10]} when the run was started")


def earlier_scores(resumption: Resumption) -> dict[str, dict[str, Any]]:
    """Held-out scores that stand, by name: they are not made again."""
    found = {}
    for path in sorted(resumption.past.run.eval.glob("*.json")):
        if path.stem == "before" or path.stem.startswith("step-"):
            found[path.stem] = _mapping(path.read_bytes()) or {}
    return found
