"""Parts of resuming: complete checkpoints, truncated files, refusals, and the contents of a checkpoint."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.trainer_utils import rotate_checkpoints

from kit.config import load_config
from kit.errors import RunError
from kit.objective import Objective
from kit.runner.prepare import build_objective, explicit
from kit.runner.resume import (
    PreviousRun,
    Resumption,
    check_resumable,
    differences,
    inputs,
    load_previous_run,
    packages,
    truncate_to_checkpoint,
)
from kit.runs.store import MANIFEST, RunDir, RunStore, complete_checkpoints, is_complete, numbered
from kit.trainer.checkpoint import CheckpointState, is_over
from kit.trainer.checkpoint_writer import STAGING, publish, rotate
from kit.trainer.policy_loss import RolloutMemory

from .rollouts import adapter

# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint(root: Path, step: int = 2, name: str | None = None) -> Path:
    """A checkpoint folder in transformers' layout."""
    folder = root / (name or f"checkpoint-{step}")
    folder.mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(b"moments")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


def published(root: Path, step: int) -> Path:
    publish(checkpoint(root / STAGING, step), root / f"checkpoint-{step}")
    return root / f"checkpoint-{step}"


def test_a_published_checkpoint_is_whole_and_notes_its_files(tmp_path: Path) -> None:
    folder = published(tmp_path, 2)
    assert is_complete(folder)
    assert json.loads((folder / MANIFEST).read_text()) == {"optimizer.pt": 7, "trainer_state.json": 18}


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "optimizer.pt").write_bytes(b"mom"),
        lambda folder: (folder / "trainer_state.json").unlink(),
        lambda folder: (folder / MANIFEST).write_text("{"),
    ],
    ids=["half an optimiser", "no state", "half a manifest"],
)
def test_a_damaged_checkpoint_is_not_gone_on_from(damage: Callable[[Path], None], tmp_path: Path) -> None:
    earlier, later = published(tmp_path, 2), published(tmp_path, 4)
    damage(later)
    assert complete_checkpoints(numbered(tmp_path)) == [earlier]


def test_all_content_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    staged, final, done = checkpoint(tmp_path / STAGING), tmp_path / "checkpoint-2", []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(handle: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def noted_rename(source: Path, target: Path) -> Path:
        done.append(f"-> {Path(target).name}")
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    publish(staged, final)
    placed = done.index("-> checkpoint-2")
    assert {"optimizer.pt", "trainer_state.json", "metrics.jsonl", "checkpoint-2"} <= set(done[:placed])
    assert any(MANIFEST in name for name in done[:placed])
    assert done[placed + 1 :] == [tmp_path.name], "then the folder that holds the name"


def test_a_disk_that_refuses_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, staged = published(tmp_path, 2), checkpoint(tmp_path / STAGING, 4)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        publish(staged, tmp_path / "checkpoint-4")
    assert numbered(tmp_path) == [old]


@pytest.mark.parametrize("seed", range(10))
def test_as_many_checkpoints_are_kept_as_transformers_would(seed: int, tmp_path: Path) -> None:
    lot = random.Random(seed)
    steps = sorted(lot.sample(range(1, 30), lot.randint(1, 6)))
    best, limit = lot.choice([None, 99, *steps]), lot.choice([None, 1, 2, 3, 5])
    for side in ("ours", "theirs"):
        for step in steps:
            checkpoint(tmp_path / side, step)
    rotate(numbered(tmp_path / "ours"), limit, f"/elsewhere/checkpoint-{best}" if best else None)
    named = f"{tmp_path / 'theirs'}/checkpoint-{best}" if best in steps else None  # the best one
    rotate_checkpoints(str(tmp_path / "theirs"), save_total_limit=limit, best_model_checkpoint=named)
    rotated, expected = ([path.name for path in numbered(tmp_path / side)] for side in ("ours", "theirs"))
    assert rotated == expected
    assert not (tmp_path / "ours" / STAGING).exists()


def test_a_run_resumed_at_its_end_removes_surplus_checkpoints(tmp_path: Path) -> None:
    """The run was killed between its last checkpoint and the removal of an older one."""
    for step in (2, 4, 6):
        published(tmp_path, step)
    last = checkpoint(tmp_path / STAGING, 8)
    state = {"global_step": 8, "best_model_checkpoint": "/elsewhere/checkpoint-4"}
    (last / "trainer_state.json").write_text(json.dumps(state))
    publish(last, tmp_path / "checkpoint-8")
    loaded: list[str] = []
    trainer = SimpleNamespace(args=SimpleNamespace(should_save=True, save_total_limit=2))
    trainer._load_from_checkpoint = loaded.append
    CheckpointState(trainer, stateful={}, memory=RolloutMemory()).load_weights(tmp_path / "checkpoint-8")
    assert loaded == [str(tmp_path / "checkpoint-8")]
    assert trainer.state.global_step == 8
    assert [path.name for path in numbered(tmp_path)] == ["checkpoint-4", "checkpoint-8"]


# --- the trainer ------------------------------------------------------------------------------------------------------


class Tally:
    """A component with state: the number of rollouts."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, rollout: Any) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("objective", ["grpo", None], ids=["hooks", "the loss of TRL"])
def test_a_trainer_goes_on_in_the_middle_of_its_completions_and_epochs(
    objective: str | None, new_trainer: Callable[..., Any], prompts: Any, tmp_path: Path
) -> None:
    """Two prompts and two steps on the completions of each, so that the checkpoint falls within the second epoch."""
    options = {
        "objective": objective, "max_steps": 7, "num_iterations": 2, "save_strategy": "steps", "save_steps": 5,
        "logging_steps": 1, "learning_rate": 0.01,
    }  # fmt: skip

    def one(folder: str) -> tuple[Any, list[Any], Tally]:
        rollouts: list[Any] = []
        tally, trainer = (
            Tally(),
            new_trainer(
                **options, output_dir=str(tmp_path / folder), extra={"train_dataset": prompts.select(range(2))}
            ),
        )
        trainer.rollout_sinks = (rollouts.append, tally)
        trainer.stateful["tally"] = tally
        return trainer, rollouts, tally

    uninterrupted, rollouts, _ = one("whole")
    uninterrupted.train()
    resumed, seen_after, tally = one("again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert [each.completion_ids for each in seen_after] == [rollouts[-1].completion_ids]
    assert tally.seen == len(rollouts)
    assert [log["loss"] for log in resumed.state.log_history if "loss" in log] == [
        log["loss"] for log in uninterrupted.state.log_history if "loss" in log
    ]
    for name, weight in adapter(uninterrupted).items():
        assert torch.equal(weight, adapter(resumed)[name]), name
    assert len(rollouts) == 4, "of 7 steps, two on each"


@pytest.mark.parametrize("iterations", [1, 2])
def test_smaller_micro_batches_and_another_optimiser_go_on(iterations: int, new_trainer: Any, tmp_path: Path) -> None:
    options = {
        "objective": "grpo",
        "max_steps": 5,
        "num_iterations": iterations,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    new_trainer(**options, output_dir=str(tmp_path)).train()
    torch.save({}, tmp_path / "checkpoint-3" / "scaler.pt")  # of a GPU without bfloat16
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "optim": "adafactor"}
    halves |= {"learning_rate": 1e-3, "lr_scheduler_type": "linear", "logging_steps": 1}
    steps: list[int] = []
    resumed = new_trainer(**options, **halves, output_dir=str(tmp_path / "again"))
    resumed.rollout_sinks = (lambda rollout: steps.append(resumed.state.global_step),)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert steps == [3, 4], "a step is computed on completions of an earlier policy"
    rates = [line["learning_rate"] for line in resumed.state.log_history if "learning_rate" in line]
    assert rates[-2:] == pytest.approx([1e-3 * (1 - step / 5) for step in (3, 4)]), (
        "not the rate and schedule that were set"
    )


# --- the run directory ------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of ten steps that was killed in the eighth, with checkpoints at steps 3 and 6."""
    run = RunStore(tmp_path / "runs").create("it")
    config = load_config({"optimisation": {"steps": 10}, "run": {"id": "it", "root": str(tmp_path / "runs")}})
    run.write_text("config.yaml", config.to_yaml())
    run.write_json("data.json", {"sha256": "a" * 64, "source": "here"})
    for step in range(1, 8):
        run.append_metrics({"step": step, "loss": step / 8})
        run.write_json(f"completions/step-{step:05d}.parquet", step)
    run.append_event("resumed", step=7)
    for step in (3, 6):
        published(run.path, step)
        run.append_event("checkpoint", step=step)
    run.append_event("evaluation", step=7)
    for name in ("before", "step-00005", "step-00007", "after", "again"):
        run.write_json(f"eval/{name}.json", {"name": name})
    run.write_json("best.json", {"step": 5})
    (run.completions / "step-00008.partial").touch()
    with open(run.metrics_file, "a") as file:
        file.write('{"step": 8, "lo')
    run.write_status("running", pid=2**22 + 1)
    return run


def past(run: RunDir, **changes: Any) -> PreviousRun:
    return replace(load_previous_run(load_config(run.config)), **changes)


def listing(run: RunDir) -> set[str]:
    return {path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()}


def test_resume_cuts_only_what_follows_the_checkpoint(run: RunDir) -> None:
    messages: list[str] = []
    run.write_json("adapter/adapter_config.json", {})  # of an earlier stop; later checkpoints have later weights
    before = listing(run)
    lines = run.metrics_file.read_bytes().splitlines(keepends=True)
    truncate_to_checkpoint(Resumption(past(run), [], forced=False), messages.append)
    assert run.metrics_file.read_bytes() == b"".join(lines[:6]), "byte for byte"
    assert before - listing(run) == {
        "completions/step-00007.parquet", "completions/step-00008.partial", "eval/step-00007.json", "eval/after.json",
        "adapter/adapter_config.json",
    }  # fmt: skip
    assert [(event["kind"], event["step"]) for event in run.events()] == [
        ("resumed", 7), ("checkpoint", 3), ("checkpoint", 6), ("resumed", 6),
    ]  # fmt: skip
    assert messages == ["Resuming from checkpoint-6; 1 later step had no checkpoint and will be repeated"]
    assert run.status()["step"] == 6


def test_weights_are_discarded_only_with_force(run: RunDir, parts: Any) -> None:
    (run.checkpoints[0] / "trainer_state.json").unlink()
    (run.checkpoints[1] / "optimizer.pt").write_bytes(b"mom")
    run.write_json("adapter/adapter_config.json", {})
    assert run.last_checkpoint is None
    with pytest.raises(
        RunError, match=r"weights in checkpoint-3, checkpoint-6, adapter\..*--force, which deletes those"
    ):
        check_resumable(past(run), parts(), force=False)
    resumption = check_resumable(past(run), parts(), force=True)
    assert (resumption.changes, resumption.forced) == ([], True)
    truncate_to_checkpoint(resumption, print)
    assert (run.checkpoints, run.adapter.exists()) == ([], False)
    run.write_status("interrupted")
    assert check_resumable(past(run), parts(), force=False).forced is False


@pytest.mark.parametrize("noted", [False, True], ids=["before its defaults were noted", "after"])
def test_a_run_that_starts_again_names_what_has_changed_and_is_not_refused(
    noted: bool, run: RunDir, parts: Any
) -> None:
    """The page and the command line save the configuration of the user, the training process one with explicit defaults."""
    for path in run.checkpoints:
        shutil.rmtree(path)
    config = load_config(run.config)
    as_trained = explicit(config, build_objective(config))
    assert as_trained.objective.advantage != config.objective.advantage
    run.write_text("config.yaml", (as_trained if noted else config).to_yaml())

    def now(*overrides: str, sha256: str = "a" * 64) -> Resumption:
        requested = load_config(run.config, overrides)
        made = parts(sha256=sha256)
        made.config = explicit(requested, build_objective(requested))
        return check_resumable(load_previous_run(requested), made, force=False)

    assert (now().changes, now().forced) == ([], False)
    changed = now("optimisation.learning_rate=0.5", "run.save_every=7", sha256="b" * 64)
    assert [line.split(":")[0] for line in changed.changes] == ["optimisation.learning_rate", "data"]
    messages: list[str] = []
    truncate_to_checkpoint(changed, messages.append)
    assert messages[1].startswith("Changed since the start: optimisation.learning_rate: ")
    assert messages[2].startswith("Changed since the start: data: the rows of here have changed")
    assert run.events()[-1]["changes"] == changed.changes


@pytest.mark.parametrize("content", ["5", '{"step": '])
def test_resume_repairs_files_damaged_by_a_full_disk(run: RunDir, content: str) -> None:
    for path in (run.eval / "before.json", run.path / "best.json"):
        path.write_text(content)
    lines = run.metrics_file.read_text().split("\n")
    run.metrics_file.write_text("\n".join([*lines[:2], "5", *lines[2:]]))
    resumption = Resumption(past(run), [], forced=False)
    truncate_to_checkpoint(resumption, print)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]
    assert not (run.path / "best.json").exists()
    assert set(run.evaluations()) == {"step-00005", "again"}


def test_a_run_that_ended_early_is_extended(run: RunDir) -> None:
    (run.path / "checkpoint-6" / "progress.json").write_text('{"over": true}')
    run.write_status("finished")
    longer = load_previous_run(load_config(run.config, ["optimisation.steps=12"]))
    assert longer.extended
    truncate_to_checkpoint(Resumption(longer, [], forced=False), print)
    assert not is_over(run.path / "checkpoint-6"), "a second resume would find the early end again"


def test_a_live_run_is_not_resumed(run: RunDir) -> None:
    run.write_status("running")
    with pytest.raises(RunError, match=f"'it' is running.*process {os.getpid()}.*grpo-kit stop it"):
        load_previous_run(load_config(run.config))


# --- changes between start and resume ---------------------------------------------------------------------------------


@pytest.fixture
def parts(run: RunDir, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a factory of the run's current parts, with overrides."""
    weights = tmp_path / "model"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(bytes(3_000_000))

    def made(*overrides: str, sha256: str = "a" * 64) -> Any:
        return SimpleNamespace(
            config=load_config(run.config, overrides),
            files=SimpleNamespace(source=str(weights), backend=SimpleNamespace(name="transformers", device="cpu")),
            data=SimpleNamespace(info={"sha256": sha256, "source": "here"}),
            objective=Objective.from_spec("grpo"),
        )

    return made


def changed(run: RunDir, parts: Any, env: Any = None) -> list[str]:
    return list(differences(past(run, env=env or {}, checkpoint=None, requested=parts.config), parts))


def test_nothing_changed_and_nothing_noted_is_no_difference(run: RunDir, parts: Any) -> None:
    assert changed(run, parts()) == []


@pytest.mark.parametrize(
    ("override", "matters"),
    [
        ("run.save_every=7", False),
        ("evaluation.alarm=off", False),
        ("optimisation.learning_rate=0.5", True),
        ("run.threads=3", True),
        ("evaluation.k=2", True),
    ],
)
def test_keys_that_change_no_step_may_change(override: str, matters: bool, run: RunDir, parts: Any) -> None:
    changes = changed(run, parts(override))
    assert bool(changes) == matters
    assert all(override.partition("=")[0] in line for line in changes)


def test_more_steps_matter_where_a_step_depends_on_how_many_there_are(run: RunDir, parts: Any) -> None:
    assert changed(run, parts("optimisation.steps=20")) == []
    run.write_text("config.yaml", parts("optimisation.schedule=linear").config.to_yaml())
    assert "the linear learning rate depends on it" in changed(run, parts("optimisation.steps=20"))[0]


def test_other_rows_packages_and_devices_are_named(run: RunDir, parts: Any) -> None:
    env = {
        "packages": packages() | {"trl": "0.1", "numpy": "0.1"},
        "backend": {"name": "transformers", "device": "cuda"},
    }
    changes = changed(run, parts(sha256="b" * 64), env)
    assert [line.split(":")[0] for line in changes] == ["data", "package trl", "device"]


def test_another_number_of_processes_is_named(run: RunDir, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = run.checkpoints[-1]
    for rank in range(2):
        (checkpoint / f"rng_state_{rank}.pth").touch()
    with pytest.raises(RunError, match="processes: 2 at the checkpoint, 1 now"):
        check_resumable(past(run), parts(), force=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check_resumable(past(run), parts(), force=False).changes == []


def test_local_files_and_weights_are_compared_by_content(
    run: RunDir, parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("hooks", "score"):
        Path(f"{name}.py").write_text("def f(): ...\n")
    own = ("objective.clip={name: 'hooks.py:f', width: 1}", "reward.functions=[{path: 'score.py:f'}]")
    now = parts(*own)
    env = {"inputs": inputs(now)}
    assert set(env["inputs"]) == {"hooks.py", "score.py", "model weights model.safetensors"}
    run.write_text("config.yaml", now.config.to_yaml())
    assert changed(run, now, env) == []
    (note,) = changed(run, now, env | {"trainer_arguments": {"bf16": True}})
    assert note.startswith("precision: bfloat16 at the start, float32 now")
    Path("hooks.py").write_text("def f(): return 1\n")
    with open(tmp_path / "model" / "model.safetensors", "r+b") as file:
        file.seek(1_500_000 - 50_000)
        file.write(bytes(range(1, 200)) * 1000)
    assert changed(run, now, env) == [
        "hooks.py: its content has changed",
        "model weights model.safetensors: its content has changed",
    ]
