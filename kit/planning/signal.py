"""The signal check: completions of the base model, scored as in training, before a run is paid for.

`python -m kit.planning.signal REQUEST` does it in a process of its own; `check` is the face. Prompts are rendered,
completions sampled and rewards asked by the same code as held-out evaluation, with the run's generation settings.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import EvaluationConfig, RunConfig, load_config
from kit.errors import RunError
from kit.evaluation.heldout import (
    Completion,
    HeldOut,
    Progress,
    evaluating,
    first_failure,
    lengths_of,
    scoring_context,
)
from kit.evaluation.statistics import Estimate, bootstrap_mean, pass_at_k, wilson
from kit.generation.multi_turn import own_tokens
from kit.planning.gpus import estimate_update
from kit.planning.verdict import Signal, judge
from kit.runs.worker import STOPPED, call

if TYPE_CHECKING:
    from kit.runner.prepare import Parts
    from rewards import Evaluation

MODULE = "kit.planning.signal"


@dataclass(frozen=True)
class Sampled:
    """Completions of N prompts, k each, and their scores."""

    completions: list[Completion]
    verdict: Evaluation
    correct: list[bool] | None
    generation_seconds: float
    reward_seconds: float


class BaseModel(HeldOut):
    """Training rows, sampled as in training; held-out evaluation's own rendering, generation and scoring."""

    def sample(self, model: Any, progress: Progress | None = None) -> Sampled:
        """k completions of every prompt, and what the rewards say of them."""
        k = self.config.k
        repeated = [prompt for prompt in self.prompts for _ in range(k)]
        started = time.perf_counter()
        with evaluating(model, self.config.seed):
            completions = self._complete(model, repeated, True, progress, 0, len(repeated))
        generated = time.perf_counter()
        samples = self._as_samples([row for row in self.rows for _ in range(k)], completions)
        context = scoring_context(self.config.seed)
        verdict = self._verdict(samples, completions, context)
        scored = time.perf_counter()
        correct = self.checker.is_correct(samples, context) if self.checker_name is not None else None
        return Sampled(completions, verdict, correct, generated - started, scored - generated)


def check(config: RunConfig, *, prompts: int = 32, k: int | None = None, progress: bool = True) -> dict[str, Any]:
    """Samples `prompts` training prompts `k` times (default: the group size) and says whether the run will learn.

    Returns plain numbers: `verdict` {verdict, because, change}, `pass@1`, `pass@k`, `reward`, `spread` and the other rates
    with intervals, `seconds`, `hours`. Raises `KitError` for a mistake of the user's, `RunError` when the process crashes.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-kit-") as folder:
        result = Path(folder, "signal.json")
        request = {
            "config": config.model_dump(mode="json"),
            "prompts": prompts,
            "k": k or config.generation.num_generations,
            "result": str(result),
        }
        outcome = call(MODULE, request, quiet=not progress)
        if outcome.error is not None:
            raise outcome.error
        if outcome.code == STOPPED or not result.is_file():
            raise RunError("The signal check was stopped before it had a result.")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def measure(parts: Parts, model: Any, prompts: int, k: int, progress: Progress | None = None) -> dict[str, Any]:
    """The check on a loaded model; see `check`."""
    config, generation = parts.config, parts.config.generation
    asked = EvaluationConfig(
        prompts=prompts,
        k=k,
        temperature=generation.temperature,
        seed=config.run.seed,
        batch_size=config.optimisation.batch_size,
    )
    available = len(parts.data.train)
    chosen = parts.data.train.select(draw(available, prompts, config.run.seed, config.data.seed))
    who = (parts.preset, parts.files.tokenizer, asked, generation, parts.checker)
    base = BaseModel(chosen.to_list(), *who, interaction=parts.interaction, processor=parts.files.processor)
    sampled = base.sample(model, progress)
    lengths = lengths_of(parts.files.tokenizer, chosen, parts.interaction.all_tools())
    prompt = _mean([float(length) for length in lengths])
    completion = _mean([float(len(ids)) for ids, _ in sampled.completions])  # those of tools are scored, too
    context = getattr(parts.files.config.get_text_config(), "max_position_embeddings", None)
    room = None if context is None else context - (config.data.max_prompt_tokens or max(lengths, default=0))
    update = estimate_update(parts, math.ceil(prompt or 1), math.ceil(completion or 1))
    return describe(config, sampled, k, update, rows=available, room=room)


def draw(available: int, prompts: int, *seeds: int) -> list[int]:
    """Places of `prompts` of `available` rows, at random without replacement; more prompts are the same ones and others.

    The first rows of a file are no sample of it: files are often sorted by difficulty or source.
    """
    places = list(range(available))
    random.Random(" ".join(map(str, seeds))).shuffle(places)
    return places[:prompts]


def describe(
    config: RunConfig, sampled: Sampled, k: int, update: float, *, rows: int | None = None, room: int | None = None
) -> dict[str, Any]:
    """Rates with intervals over prompts, seconds a step, and the verdict. `update` are the seconds of learning a step.

    `rows` is how many prompts there are to sample, `room` the tokens that the context leaves to a completion; None: unknown.
    """
    from rewards.protocol import FAILURES

    verdict, count = sampled.verdict, len(sampled.completions)
    groups = [slice(start, start + k) for start in range(0, count, k)]
    totals = verdict.totals
    group_size = config.generation.num_generations
    size = min(k, group_size)
    spread = bootstrap_mean([chance_of_spread(totals[group], size) for group in groups], shares=True)
    if size == k:
        spread = wilson(sum(_differ(totals[group]) for group in groups), len(groups))
    cut = [float(cut) for _, cut in sampled.completions]
    malformed = [float("format" in row) for row in zip(*verdict.statuses.values(), strict=True)]
    failing = [float(bool(FAILURES & set(row))) for row in zip(*verdict.statuses.values(), strict=True)]
    numbers = [total for total in totals if total is not None]
    batch = config.optimisation.batch_size
    rollout = sampled.generation_seconds / count * batch
    scoring = sampled.reward_seconds / count * batch
    step = (rollout + scoring) / config.optimisation.iterations + update
    tokens = [own_tokens(completion) for completion in sampled.completions]
    hits = None if sampled.correct is None else [sum(sampled.correct[group]) for group in groups]
    signal = Signal(
        prompts=len(groups),
        k=k,
        spread=spread,
        truncated=_over_prompts(cut, groups),
        malformed=_over_prompts(malformed, groups),
        failures=_over_prompts(failing, groups),
        pass_at_1=None if hits is None else bootstrap_mean([hit / k for hit in hits], shares=True),
        constant=len(set(numbers)) <= 1,
        reward=bootstrap_mean([mean for group in groups if (mean := _mean(totals[group])) is not None]),
        reward_seconds=scoring,
        step_seconds=step,
        config=config,
        failure=first_failure(verdict) if verdict.failure_share else None,
        rows=rows,
        room=room,
    )
    latencies = sorted(map(sum, zip(*verdict.latencies.values(), strict=True)))
    return {
        "verdict": judge(signal).as_dict(),
        "prompts": signal.prompts,
        "k": k,
        **_passes(hits, k),
        "reward": signal.reward._asdict() if numbers else None,
        "reward_spread_mean": _mean([_deviation(totals[group]) for group in groups]),
        "spread_share": signal.spread._asdict(),
        "zero_spread_share": Estimate(1 - spread.value, 1 - spread.high, 1 - spread.low)._asdict(),
        "note": _group_note(k, group_size),
        "truncated_share": signal.truncated._asdict(),
        "format_share": signal.malformed._asdict(),
        "failure_share": signal.failures._asdict(),
        "failure": signal.failure,
        "completion_tokens_mean": sum(tokens) / count,
        "tokens_per_second": sum(tokens) / max(sampled.generation_seconds, 1e-9),
        "reward_latency_ms": {"p50": 1e3 * _quantile(latencies, 0.5), "p95": 1e3 * _quantile(latencies, 0.95)},
        "seconds": {"rollout": rollout, "reward": scoring, "update": update, "step": step},
        "hours": step * config.optimisation.steps / 3600,
        "estimated": ["seconds.update", "seconds.step", "hours"],
    }


def _passes(hits: list[int] | None, k: int) -> dict[str, Any]:
    if hits is None:
        return {}
    return {
        f"pass@{n}": bootstrap_mean([pass_at_k(k, hit, n) for hit in hits], shares=True)._asdict() for n in {1: 1, k: k}
    }


def _differ(totals: list[float | None]) -> bool:
    """Whether a group's rewards differ by more than rounding. A completion that was not scored is no part of it."""
    known = [total for total in totals if total is not None]
    return bool(known) and max(known) - min(known) > 1e-6 * max(1.0, abs(max(known)))


def chance_of_spread(totals: list[float | None], size: int) -> float:
    """Probability that `size` of these k rewards, drawn without replacement, differ: unbiased for groups of `size` <= k.

    1 less the share of draws without spread: those of rewards of one value, and of completions that were not scored.
    """
    known = sorted(total for total in totals if total is not None)
    missing, equal = len(totals) - len(known), list[int]()
    start = -math.inf
    for value in known:
        if _differ([start, value]):
            start = value
            equal.append(0)
        equal[-1] += 1
    unscored = math.comb(missing, size)  # counted with every value, and once is right
    alike = unscored + sum(math.comb(count + missing, size) - unscored for count in equal)
    return 1.0 - alike / math.comb(len(totals), size)


def _group_note(k: int, group: int) -> str | None:
    """What to know of the spread where k is not the group size of training."""
    if k == group:
        return None
    if k > group:
        return f"spread is that of training's groups of {group}, estimated from {k} completions a prompt"
    return f"spread is that of groups of {k}; training has groups of {group}, in which rewards differ at least as often"


def _over_prompts(values: list[float], groups: list[slice]) -> Estimate:
    """Mean share, resampled over prompts: completions of one prompt are no independent draws."""
    return bootstrap_mean([sum(values[group]) / len(values[group]) for group in groups], shares=True)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _deviation(values: list[float | None]) -> float | None:
    known, mean = [value for value in values if value is not None], _mean(values)
    return None if mean is None else (sum((value - mean) ** 2 for value in known) / len(known)) ** 0.5


def _quantile(ordered: Sequence[float], level: float) -> float:
    """The nearest-rank quantile; 0 of nothing."""
    return ordered[min(len(ordered) - 1, int(level * len(ordered)))] if ordered else 0.0


def job(request: dict[str, Any], quiet: bool) -> None:
    """The process: prepares as a run does, loads the model, samples, and writes the result file."""
    from kit.runner.console import LogCapture, Reporter

    reporter, logs = Reporter(quiet), LogCapture()
    with logs.collecting():
        from transformers import set_seed

        from kit.models.backend import use_threads
        from kit.models.failures import explained
        from kit.models.loading import load_model
        from kit.runner.prepare import prepare

        config = load_config(request["config"])
        use_threads(config.run.threads, config.model.name)
        parts = prepare(config, fresh=False)
        set_seed(config.run.seed)
        with explained(), reporter.bar("Sampling the base model") as bar:
            model = load_model(parts.files, config.model).model
            found = measure(parts, model, request["prompts"], request["k"], bar)
    Path(request["result"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    from kit.runs.worker import serve

    sys.exit(serve(job))
