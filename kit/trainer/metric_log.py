"""Metrics in addition to TRL's: exact means over micro-batches and processes, quantiles, and seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from kit.objective import LossOutput, Objective
from kit.objective.batch import TokenBatch
from kit.objective.metrics import QUANTILES, RATIO_QUANTILES, Mean, Sums

GIB = 1024**3
SAMPLED = 1024
"""Approximate number of values of a micro-batch that are stored for quantiles."""
RATE = "tokens/per_second"
"""Metric: completion tokens of all processes per second of their steps, rollout included."""
SAVING = "seconds/saving"
"""Metric: seconds for writing checkpoints since the previous step; not included in `step_time`."""
PROCESS_MEMORY, GPU_MEMORY = "memory/process", "memory/gpu"
"""Metrics: GiB of this process at the end of a step, and the peak of torch's tensors on the GPU."""


class MetricLog:
    """Means, samples and seconds since the last log, separate for `train` and `eval`.

    Args: accelerator: for sums over processes. mode: the current one. metrics: TRL's lists of numbers, by mode and name.
    """

    def __init__(
        self, accelerator: Any, mode: Callable[[], str], metrics: Callable[[], dict[str, dict[str, list[float]]]]
    ) -> None:
        self.accelerator, self.mode, self._metrics = accelerator, mode, metrics
        self.means = {"train": Sums(), "eval": Sums()}
        self.samples: dict[str, dict[str, list[Tensor]]] = {"train": {}, "eval": {}}
        self.observed: dict[str, Mean] = {}  # means for controllers, of this optimiser step
        self.phases = StepPhases()
        self.generated = 0  # completion tokens of this process that `RATE` does not include yet
        self._spent = 0.0  # seconds of the steps since
        self._saving = 0.0  # seconds of checkpoints that are not logged yet

    def append(self, name: str, value: float) -> None:
        """Adds a number to a metric. TRL logs the mean."""
        self._metrics()[self.mode()][name].append(value)

    def add(self, means: Mapping[str, Any]) -> None:
        """Adds sums and counts. Their quotients over all micro-batches and processes are logged."""
        self.means[self.mode()].add(means)

    def record_loss(self, result: LossOutput) -> None:
        """Adds the metrics of a micro-batch and, in training, the means for controllers."""
        self.add(result.metrics)
        for name, sample in result.samples.items():
            self.samples[self.mode()].setdefault(name, []).append(sample)
        if self.mode() == "train":
            for part, mean in result.observed.items():
                self.observed[part] = self.observed[part] + mean if part in self.observed else mean

    def publish(self) -> None:
        """Passes the means and quantiles to TRL before it logs. Every process must call it."""
        totals = self.means[self.mode()].take()
        # A process without scored completions may lack a name, but the tensors below must have one length in all processes.
        names = sorted(set(gather_object(list(totals))) if self.accelerator.num_processes > 1 else totals)
        if names:
            nothing = torch.zeros(2, dtype=torch.float64)
            stacked = torch.stack([totals.get(name, nothing).to(self.accelerator.device) for name in names])
            summed = self.accelerator.reduce(stacked, reduction="sum")
            for name, (total, count) in zip(names, summed.tolist(), strict=True):
                if count:
                    self.append(name, total / count)
        self._publish_quantiles("log_ratio", "ratio", RATIO_QUANTILES)
        self._publish_quantiles("sampler_log_ratio", "sampler/ratio", QUANTILES)

    def sample(self, name: str, values: Tensor) -> None:
        """Stores values for quantiles; of many, an evenly spaced part."""
        stride = max(1, len(values) // SAMPLED)
        self.samples[self.mode()].setdefault(name, []).append(values[::stride])

    def _publish_quantiles(self, sampled: str, name: str, quantiles: Sequence[float]) -> None:
        """Quantiles of a ratio, from the sampled tokens of all micro-batches and processes since the last log."""
        parts = self.samples[self.mode()].pop(sampled, [])
        if not parts:
            return
        padded = self.accelerator.pad_across_processes(torch.cat(parts).float(), pad_index=torch.nan)
        sample = self.accelerator.gather(padded)
        sample = sample[~torch.isnan(sample)]
        if sample.numel():
            levels = torch.tensor(quantiles, dtype=sample.dtype, device=sample.device)
            values = torch.quantile(sample, levels).exp().tolist()
            for level, value in zip(quantiles, values, strict=True):
                self.append(f"{name}/p{100 * level:02.0f}", value)

    def record_step(self, objective: Objective, completions: int, *, last: bool = True) -> None:
        """Updates the objective's controllers after an optimiser step on `completions`, and logs its time and memory.

        last: the next step starts with a rollout.
        """
        if self.observed:
            parts, means = zip(*sorted(self.observed.items()), strict=True)
            sums = torch.stack([torch.stack([mean.total.double(), mean.count.double()]) for mean in means])
            sums = self.accelerator.reduce(sums, reduction="sum")
            objective.observe(
                {part: Mean(total, count) for part, (total, count) in zip(parts, sums, strict=True)}, completions
            )
            self.observed = {}
        took = self.phases.taken()
        for phase, seconds in took.items():
            self._metrics()["train"][f"seconds/{phase}"].append(seconds)
        held = {SAVING: self._saving, PROCESS_MEMORY: psutil.Process().memory_info().rss / GIB}
        if (device := self.accelerator.device).type == "cuda":  # the peak of torch's tensors
            held[GPU_MEMORY] = torch.cuda.max_memory_allocated(device) / GIB
        for name, value in held.items():
            self._metrics()["train"][name].append(value)
        self._saving = 0.0
        self._spent += sum(took.values())
        if last and self.generated:
            generated = float(self.generated * self.accelerator.num_processes)  # seconds are summed over processes too
            self.means["train"].add({RATE: Mean(torch.tensor(generated), torch.tensor(self._spent))})
            self.generated, self._spent = 0, 0.0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measures the writing of a checkpoint inside the block. The next step logs the seconds."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._saving += time.perf_counter() - began

    # --- for a micro-batch that is repeated ---------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """A copy of the state that a training micro-batch changes."""
        return {
            "means": self.means["train"].copy(),
            "samples": {name: list(parts) for name, parts in self.samples["train"].items()},
            "observed": dict(self.observed),
            "metrics": {name: list(values) for name, values in self._metrics()["train"].items()},
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restores a `snapshot()`, without changing it."""
        self.means["train"] = snapshot["means"].copy()
        self.samples["train"] = {name: list(parts) for name, parts in snapshot["samples"].items()}
        self.observed = dict(snapshot["observed"])
        metrics = self._metrics()["train"]
        metrics.clear()
        metrics.update({name: list(values) for name, values in snapshot["metrics"].items()})


# --- wall-clock time of the phases of a training step -----------------------------------------------------------------

PHASES = ("generation", "rewards", "scoring", "update", "other")
"""`generation`: completions, tools included. `rewards`: waiting for reward functions. `scoring`: log-probabilities of the
rollout. `update`: forward and backward passes. `other`: the rest of making a batch (tokenizing, advantages, selection)."""


class StepPhases:
    """Seconds of each phase since the last `taken`. Time counts once, for the innermost open phase.

    It does not synchronise a GPU: queued work counts for the phase that first needs its result.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Counts time inside the block for `phase`, except in nested blocks."""
        self._count()
        self._open.append(phase)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def taken(self) -> dict[str, float]:
        """Returns the seconds by phase, and resets them to 0."""
        self._count()
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds

    def _count(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now


# --- difference between the log-probabilities of engine and trainer ---------------------------------------------------


SAMPLER_DIFFERENCE = "sampler/logp_difference"
LOGP_LIMIT = 0.01
"""Nats: mean difference of the log-probabilities of trainer and engine in a step above which a run warns."""


@torch.no_grad()
def sampler_mismatch(batch: TokenBatch) -> tuple[dict[str, Mean], Tensor]:
    """The mean difference of a micro-batch in nats, and its log ratios (B T,) in nats, NaN if unknown."""
    assert batch.sampler_logps is not None
    gap = batch.old_logps - batch.sampler_logps
    known = batch.mask & ~torch.isnan(gap)
    gap = gap.masked_fill(~known, 0.0)
    mean = Mean(gap.abs().sum(), known.sum().to(gap.dtype))
    return {SAMPLER_DIFFERENCE: mean}, gap.masked_fill(~known, torch.nan).flatten()


class SamplerAlarm(TrainerCallback):  # type: ignore[misc]
    """Warns once if trainer and engine differ by more than `LOGP_LIMIT` nats on average, with the setting to change.

    corrected: the objective already weighs tokens by the ratio of the two. four_bit: the engine is vLLM with 4-bit weights.
    float16: the run can use `model.dtype: float16`.
    """

    def __init__(
        self,
        on_message: Callable[[str], None],
        *,
        corrected: bool = False,
        four_bit: bool = False,
        float16: bool = True,
    ) -> None:
        self.on_message, self.corrected, self.four_bit, self.float16 = on_message, corrected, four_bit, float16
        self.done = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        difference = (logs or {}).get(SAMPLER_DIFFERENCE)
        if self.done or difference is None or difference <= LOGP_LIMIT:
            return
        self.done = True
        change = " Set model.dtype to what the engine computes in."
        if self.four_bit:  # its plugin casts the inputs of these layers, whatever the dtype of the engine
            finer = " and model.dtype: float16" if self.float16 else ""
            change = f" Set model.load_in_4bit: false{finer}, because vLLM computes 4-bit weights in bfloat16."
        elif args.bf16:
            finer = " Set model.dtype to float16, for the engine too: it rounds eight times finer than bfloat16."
            change = finer if self.float16 else ""
        remedy = (
            "The objective corrects for it"
            if self.corrected
            else "Add the weight sampler_correction to objective.weights"
        )
        self.on_message(
            f"Step {state.global_step}: the engine's log-probabilities are {difference:.2g} nats off the trainer's on average "
            f"(more than {LOGP_LIMIT:g}). Rollouts are that far off-policy.{change} {remedy}."
        )
