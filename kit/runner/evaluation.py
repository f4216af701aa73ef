"""Held-out scores during and after training, the best checkpoint, and early stopping."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from kit.config import EvaluationConfig
from kit.evaluation.alarms import Alert, AlertMonitor, Decision, decide
from kit.evaluation.heldout import HeldOut
from kit.evaluation.results import BEST_FILE, Mark, course, read_best
from kit.models.loading import autocast_dtype
from kit.runner.lifecycle import Stopped, StopSignal
from kit.runner.recording import HEARTBEAT_SECONDS
from kit.runs.store import RunDir, step_of

if TYPE_CHECKING:
    from kit.models.failures import BatchSizeBackoff
    from kit.runner.build import Job
    from kit.trainer.trainer import HookedGRPOTrainer


Score = Callable[[Any, str, int], dict[str, Any]]  # (model, name of the evaluation, its step) -> the written result


class HeldOutScores:
    """The held-out scores of a run by name, including those of earlier starts. Calling it makes and writes a score.

    memory: generates in smaller batches after running out of memory.
    """

    def __init__(self, job: Job, memory: BatchSizeBackoff) -> None:
        self.job, parts = job, job.parts
        scores = job.folder.evaluations() if job.resumption else {}
        self.known = {name: scores[name] for name in scores if name == "before" or name.startswith("step-")}
        self.heldout = HeldOut(
            parts.data.heldout.to_list(),
            parts.preset,
            parts.files.tokenizer,
            parts.config.evaluation,
            parts.config.generation,
            parts.checker,
            memory,
            parts.interaction,
            processor=parts.files.processor,
        )
        self.heldout.half = autocast_dtype(parts.config.model, parts.files.backend)

    def __call__(self, model: Any, name: str, step: int) -> dict[str, Any]:
        """Scores the model after `step` and writes the result to `eval/NAME.json`. Raises `Stopped`."""
        job = self.job
        again = name == "before" and job.config.evaluation.after  # the same problems, after training
        # Seconds of the steps to come; None: unknown.
        rest = 0.0 if name in ("before", "after") else job.folder.record().get("eta_seconds")
        started = beat = time.monotonic()
        with job.folder.phase("held-out score"), job.reporter.bar(f"Held-out score, {name}") as advance:

            def progress(done: int, total: int) -> None:
                nonlocal beat
                job.stop.check()
                advance(done, total)
                if done and time.monotonic() - beat >= HEARTBEAT_SECONDS:
                    beat = time.monotonic()
                    left = (beat - started) / done * (total - done + total * again)
                    eta = None if rest is None else round(left + rest, 1)
                    fields = {"phase_done": done, "phase_total": total, "eta_seconds": eta}
                    job.folder.change_status(lambda _: fields, durable=False)

            result = self.known[name] = self.heldout.score(model, progress, step=step)
        job.folder.write_json(f"eval/{name}.json", result)
        return result


class Evaluator(TrainerCallback):  # type: ignore[misc]
    """Scores the held-out problems every `evaluation.every` steps, and handles best checkpoint, alerts and early stopping.

    Decisions depend only on the evaluations on disk, so that a resumed run decides like an uninterrupted one.

    Args: key: the score named by `evaluation.metric`. score: makes and writes an evaluation.
    """

    def __init__(
        self,
        run: RunDir,
        config: EvaluationConfig,
        key: str,
        score: Score,
        stop: StopSignal,
        on_message: Callable[[str], None],
    ) -> None:
        self.run, self.config, self.key = run, config, key
        self.score, self.stop, self.on_message = score, stop, on_message
        self.monitor = AlertMonitor()

    def decision(self, until: int | None = None) -> Decision:
        """The decision after the evaluations up to that step."""
        results = course(self.run, until)
        return decide(results, self.run.metrics() if len(results) > 2 else (), self.config, self.key)

    def alert(self, alert: Alert) -> None:
        """Records an alert as an event and prints it."""
        self.run.append_event("alert", step=alert.step, name=alert.name, message=alert.message, severity=alert.severity)
        self.on_message(f"Alert at step {alert.step}: {alert.message}")

    def file_best(self, best: Mark | None) -> None:
        """Writes best.json if the checkpoint is on disk."""
        if not self.config.every or best is None or not (self.run.path / f"checkpoint-{best.step}").is_dir():
            return
        noted = {"step": best.step, "metric": self.key, "value": best.value, "checkpoint": f"checkpoint-{best.step}"}
        if read_best(self.run) != noted:
            self.run.write_json(BEST_FILE, noted)
            self.run.append_event("best", step=best.step, metric=self.key, value=best.value)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Restores alerts and best score of a resumed run from its files, and makes an evaluation that a stop interrupted."""
        step, self.monitor = state.global_step, AlertMonitor()
        if not step:
            return
        for line in self.run.metrics():
            if int(line.get("step") or 0) <= step:
                self.monitor.see(line)
        if self._is_due(step, state) and not (self.run.eval / f"step-{step:05d}.json").exists():
            self._evaluate(model, state, control)
        self._mark_best(state, self.decision(step))
        self.file_best(self.decision(step).standing.best_trained)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Records the alerts of a line of metrics, each once per episode."""
        if logs and "train_runtime" not in logs:  # not for the closing summary of the trainer
            for alert in self.monitor.see({"step": state.global_step, **logs}):
                if alert.name == "plateau":
                    alert = replace(alert, message=alert.message + wrong_answer(self.run))
                self.alert(alert)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Evaluates if an evaluation is due, before the step is saved."""
        if self._is_due(state.global_step, state):
            self._evaluate(model, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.file_best(self.decision(state.global_step).standing.best_trained)

    def _is_due(self, step: int, state: Any) -> bool:
        return bool(self.config.every) and step > 0 and step % self.config.every == 0 and step < state.max_steps

    def _evaluate(self, model: Any, state: Any, control: Any) -> None:
        step = state.global_step
        try:
            result = self.score(model, f"step-{step:05d}", step)
        except Stopped:  # the score is abandoned, the trained weights are saved
            self.run.write_status("stopping", step=step)
            control.should_save = control.should_training_stop = True
            return
        self.run.append_event("evaluation", step=step, seconds=result["seconds"])
        decision = self.decision(step)
        if alert := decision.alert():
            self.alert(alert)
        self._mark_best(state, decision)
        if decision.new_best:
            control.should_save = True
        if decision.cause is not None:
            best, last, reason = decision.standing.best, decision.standing.last, decision.reason()
            assert best is not None
            assert last is not None
            score = {"metric": self.key, "value": last.value, "best_step": best.step}
            self.run.append_event("early_stop", step=last.step, **score, cause=decision.cause, reason=reason)
            self.on_message(f"Training ends early at step {last.step}: {reason}")
            self.stop.ended = reason
            self.run.write_status("running", step=step)
            control.should_save = control.should_training_stop = True

    def _mark_best(self, state: Any, decision: Decision) -> None:
        """Tells the trainer which checkpoint is the best, so that it does not remove it."""
        best = decision.standing.best_trained
        if best is not None and self.config.every:  # without evaluations, the last checkpoint is the only one to keep
            # Do not set best_global_step: the trainer of this process would wait for the others, which do not have it.
            state.best_metric = best.value
            state.best_model_checkpoint = str(self.run.path / f"checkpoint-{best.step}")

    def conclude(self, trainer: HookedGRPOTrainer) -> None:
        """Ends training: saves the result to adapter/ and scores it, unless the run was stopped."""
        step = trainer.state.global_step or max((step_of(path) for path in self.run.checkpoints), default=0)
        trainer.save_model(str(self.run.adapter))
        if self.stop.is_requested():
            return
        decision = self.decision(step)
        if decision.standing.last is not None and decision.standing.last.step == step:
            self.stop.ended = decision.reason()  # reported already, unless this is a resumed run
        if not self.config.after:
            return
        result = next((result for result in course(self.run) if result["step"] == step), None)
        if result is not None:  # the score exists under another name
            self.run.write_json("eval/after.json", result)
            return
        self.score(trainer.model, "after", step)
        final = self.decision()
        if alert := final.alert():
            self.alert(alert)
        self.file_best(final.standing.best_trained)


def wrong_answer(run: RunDir) -> str:
    """The most frequent reason for wrong completions in the newest step, with an example; empty if none is saved."""
    import pyarrow.parquet as pq

    files = sorted(run.path.glob("completions/step-*.parquet"))
    table = pq.read_table(files[-1]).to_pydict() if files else {}
    rows = [
        (reason, number)
        for name in table
        if name.endswith("/reason")
        for number, (reason, status) in enumerate(
            zip(table[name], table[name.replace("/reason", "/status")], strict=True)
        )
        if reason and status == "wrong"
    ]
    if not rows:
        return ""
    (reason, count), *_ = Counter(reason for reason, _ in rows).most_common(1)
    number = dict(rows)[reason]
    return (
        f" Most frequent reason ({count} of {len(table['step'])} in step {table['step'][0]}): {reason}. Example: "
        f"{table['completion'][number][:300]!r}, expected {table['reference'][number]!r}."
    )
