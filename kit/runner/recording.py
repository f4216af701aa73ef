"""Writes the files of a running training: metrics, heartbeat, events, and completions as Parquet."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from kit.errors import RewardError
from kit.evaluation.heldout import first_failure
from kit.generation.multi_turn import readable, unanswered
from kit.generation.prompts import question
from kit.runner.console import Advance
from kit.runner.distributed import is_first, world_size
from kit.runner.lifecycle import StopSignal
from kit.runs.files import disk_errors, read_json
from kit.runs.store import RunDir

if TYPE_CHECKING:
    from datasets import Dataset

    from kit.trainer.rollout import Rollout
    from rewards.adaptors import TrlRewards

log = logging.getLogger("kit")
PATIENCE = 5


def write_completions(folder: Path, rollout: Rollout) -> None:
    """Writes a rollout to `step-00001.parquet` and so on, one file per generation batch. Raises `RunError`."""
    write_parquet(folder / f"step-{rollout.step + 1:05d}.parquet", columns(rollout))


def write_parquet(path: Path, table: Mapping[str, list[Any]]) -> None:
    """Writes a file atomically. Raises `RunError` if the disk is full or not writable."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    partial = path.with_suffix(".partial")
    with disk_errors(path):
        path.parent.mkdir(exist_ok=True)
        with open(partial, "wb") as file:
            pq.write_table(pa.table(dict(table)), file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def columns(rollout: Rollout) -> dict[str, list[Any]]:
    """The columns as lists: prompt, completion, tokens, finish_reason, value and status of each component, advantage.

    With tools there are also the turns as JSON, the token ids, and a mask of the tool's tokens; `tokens` counts the policy's.
    If rows have ids, there is a column with them.
    """
    advantages = rollout.advantages if rollout.advantages.dim() == 1 else rollout.advantages.mean(dim=1)
    table: dict[str, list[Any]] = {
        "step": [rollout.step + 1] * len(rollout.rows),
        "prompt": [question(row["prompt"]) for row in rollout.rows],
        "reference": [_text(row.get("reference")) for row in rollout.rows],
        "completion": [readable(completion) for completion in rollout.completions],
        "tokens": [len(ids) for ids in rollout.completion_ids],
        "finish_reason": [
            "stop" if not cut else "tool_calls" if unanswered(completion) else "length"
            for cut, completion in zip(rollout.truncated, rollout.completions, strict=True)
        ],
        "advantage": advantages.tolist(),
    }
    if rollout.tool_mask is not None:
        table["tokens"] = [sum(mask) for mask in rollout.tool_mask]
        table["tool_tokens"] = [len(mask) - sum(mask) for mask in rollout.tool_mask]
        table["turns"] = [json.dumps(completion, ensure_ascii=False, default=str) for completion in rollout.completions]
        table["completion_ids"] = rollout.completion_ids
        table["tool_mask"] = rollout.tool_mask  # 0: a tool wrote the token
    for index, name in enumerate(rollout.reward_names):
        values = rollout.rewards[:, index].tolist()
        table[f"reward/{name}"] = [None if value != value else value for value in values]
    for name, values in rollout.extra.items():
        table[f"reward/{name}"] = [_text(value) for value in values]
    return table


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, default=str)


class FailureMonitor:
    """Warns at the first reward that fails, and ends a run if its rewards fail repeatedly.

    It is called with every rollout. Raises `RewardError` with the last reason if more than `limit` of the scores are errors
    or timeouts in 5 batches in a row, or in every batch of a run with fewer.
    """

    def __init__(
        self,
        rewards: TrlRewards,
        limit: float,
        on_message: Callable[[str], None] = log.warning,
        batches: int = PATIENCE,
    ) -> None:
        self.rewards, self.limit, self.on_message = rewards, limit, on_message
        self.patience = max(1, min(PATIENCE, batches))
        self.bad, self.warned = 0, False

    def state_dict(self) -> dict[str, Any]:
        """The number of failing batches in a row, and whether the first failure was reported."""
        return {"bad": self.bad, "told": self.warned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bad, self.warned = state["bad"], state["told"]

    def __call__(self, rollout: Rollout) -> None:
        evaluation = self.rewards.last_evaluation
        if evaluation is None:
            return
        share = evaluation.failure_share
        self.bad = self.bad + 1 if share > self.limit else 0
        if self.bad >= self.patience:
            raise RewardError(
                f"In each of the last {self.patience} batches, more than {self.limit:.0%} (reward.max_failure_share) of the "
                f"rewards failed: {first_failure(evaluation)}. Correct the reward. The result for every completion is in "
                "completions/*.parquet."
            )
        if share and not self.warned:
            self.warned = True
            self.on_message(
                f"Warning: {share:.0%} of the rewards of step {rollout.step + 1} failed and got the lowest value. "
                f"{first_failure(evaluation)}. Later failures are not printed; completions/*.parquet contains all."
            )


HEARTBEAT_SECONDS = 1.0


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Writes metrics, heartbeat and events, updates the progress bar, and passes requests to save or stop to the trainer."""

    def __init__(self, run: RunDir, stop: StopSignal, advance: Advance, *, scores_after: bool = False) -> None:
        self.run, self.stop, self.advance, self.scores_after = run, stop, advance, scores_after
        self.started = self.beat = time.monotonic()
        self.first_step = 0
        self.note = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started, self.first_step = time.monotonic(), state.global_step
        # The trainer state of a resumed run is the checkpoint's, but run.save_every may have changed.
        state.compute_steps(args, state.max_steps)
        self.run.write_status("running", step=state.global_step, total_steps=state.max_steps)
        self.advance(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "train_runtime" in logs:  # not for the closing summary of the trainer
            return
        self.run.append_metrics({"step": state.global_step, "time": time.time(), **logs})
        if logs.get("reward") is not None:  # absent in further iterations on the same completions
            self.note = f"reward {logs['reward']:.3f}  length {logs.get('completions/mean_length') or 0:.0f}"
            if logs.get("entropy") is not None:
                self.note += f"  entropy {logs['entropy']:.2f}"
        self.advance(state.global_step, state.max_steps, self.note)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stop.step = state.global_step
        now, done = time.monotonic(), state.global_step - self.first_step
        if now - self.beat >= HEARTBEAT_SECONDS or state.global_step >= state.max_steps:
            self.beat = now
            eta = (now - self.started) / max(done, 1) * (state.max_steps - state.global_step)
            if self.scores_after:  # the final held-out score takes as long as the one before training
                eta += float(read_json(self.run.eval / "before.json").get("seconds") or 0)
            self.run.write_status(
                "running", step=state.global_step, total_steps=state.max_steps, eta_seconds=round(eta, 1)
            )
        if (self.run.control / "save").exists():
            (self.run.control / "save").unlink(missing_ok=True)
            control.should_save = True
        if self.stop.is_requested():
            self.run.write_status("stopping", step=state.global_step)
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.append_event("checkpoint", step=state.global_step)


def save_heldout(run: RunDir, rows: Dataset) -> None:
    """Writes the held-out rows into the run directory, so that chat, scores and exports do not need the data."""
    if is_first():
        from datasets import disable_progress_bars

        disable_progress_bars()  # for one small file
        rows.to_parquet(run.heldout)


class SharedStop(TrainerCallback):  # type: ignore[misc]
    """Shares requests to save or stop, so that all processes follow at the same step. The last callback of each process."""

    def __init__(self, stop: StopSignal, run: RunDir) -> None:
        self.stop, self.run = stop, run

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if world_size() == 1:
            return
        request = self.stop.reason if self.stop.is_requested() else None
        requests = gather_object([(control.should_save, control.should_training_stop, request)])
        reasons = [reason for *_, reason in requests if reason is not None]
        control.should_save = any(save for save, *_ in requests) or bool(reasons)
        control.should_training_stop = any(ends for _, ends, _ in requests) or bool(reasons)
        if reasons:
            self.stop.reason = reasons[0]
            self.run.write_status("stopping", step=state.global_step)


def peak_memory() -> dict[str, int]:
    """Peak memory in bytes: resident memory of this process, and of torch's tensors on the GPU if there is one."""
    import resource

    import torch

    peak = {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    return peak | ({"peak_gpu_bytes": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {})
