"""The signal check: sample and score completions of the base model before a run, and decide whether it will learn.

`check` starts `python -m kit.planning.signal REQUEST`, a child process. Prompts are rendered, completions sampled and
rewards computed by the code of the held-out evaluation, with the run's generation settings. A request with `audit` also audits
the reward, for the page.

A group has a gradient only if its rewards differ: with equal rewards every advantage is 0. The share of groups with
different rewards decides the verdict, and properties of the other groups give the reason. If the 95 % interval of a share
contains its threshold, the check asks for more samples instead.
"""

from __future__ import annotations

import math
import random
import sys
import time
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kit.config import EvaluationConfig, RunConfig, load_config
from kit.errors import KitError
from kit.evaluation.heldout import Completion, HeldOut, Progress, evaluating, first_failure, scoring_context
from kit.evaluation.statistics import Estimate, bootstrap_mean, pass_at_k, wilson
from kit.generation.multi_turn import own_tokens
from kit.generation.prompts import lengths_of, question, thinking_note
from kit.models.failures import BatchSizeBackoff
from kit.models.loading import autocast_dtype
from kit.planning.workbench import audit, plain
from kit.runs.lock import held_gpu
from kit.runs.worker import call_for_result

if TYPE_CHECKING:
    from kit.runner.prepare import Parts
    from rewards import Evaluation

# --- the verdict ------------------------------------------------------------------------------------------------------

FAILING = 0.2
"""Share of completions without a score above which the verdict concerns the reward; the default of reward.max_failure_share."""
TRUNCATED = 0.3
"""Share of completions cut at the limit above which the verdict is `truncated`."""
NEVER = 0.1
"""Share of right answers among complete completions below which longer completions would not help."""
MALFORMED = 0.5
"""Share of completions with an unreadable format above which the verdict is `wrong format`."""
INFORMATIVE = 0.25
"""Share of groups with different rewards below which most of a step is wasted (DAPO, arXiv 2503.14476, drops the others)."""
EASY, HARD = 0.75, 0.25
"""pass@1 above which groups with equal rewards are mostly solved, and below which they are mostly failed."""
MOST_PROMPTS = 4096
SAMPLES = 3
"""Number of sampled answers to show, one per prompt."""


@dataclass(frozen=True)
class Signal:
    """Measurements of N groups; shares and rates have 95 % intervals over prompts."""

    prompts: int
    spread: Estimate  # share of groups whose rewards differ
    truncated: Estimate
    malformed: Estimate
    failures: Estimate
    pass_at_1: Estimate | None  # None without a checker
    constant: bool  # whether all rewards are equal
    reward: Estimate
    reward_seconds: float  # per generation batch
    rollout_seconds: float  # per generation batch, without rewards
    config: RunConfig
    failure: str | None = None
    rows: int | None = None  # number of training prompts; None: unknown
    room: int | None = None  # tokens of the context for a completion; None: unknown
    # Shares among completions that were not cut; None: unknown.
    ended_right: Estimate | None = None
    ended_malformed: Estimate | None = None
    lowest: float = 0.0  # the lowest possible reward


@dataclass(frozen=True)
class Verdict:
    """The verdict of a signal check, its reason, and the change to make.

    `verdict` is one of will learn, too easy, too hard, no signal, truncated, wrong format, reward fails, slow reward, sample
    more, borderline.
    """

    verdict: str
    because: str
    change: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(signal: Signal) -> Verdict:
    """The verdict, its reason, and the change to make (empty if none is needed)."""
    reason = f" ({signal.failure})" if signal.failure else ""
    limit = signal.config.generation.max_completion_tokens
    if signal.failures.value > FAILING:
        because = f"{_share(signal.failures)} of completions could not be scored"
        change = f"Correct the reward{reason}; test it with: grpo-kit reward test"
        if signal.failures.low <= FAILING:
            return _unsure(signal, because, "failure_share", FAILING, change)
        return Verdict("reward fails", because, change)
    spread, right = signal.spread, signal.pass_at_1
    cut = f"{_share(signal.truncated)} of completions are cut at {limit} tokens"
    right_share, malformed_share = signal.ended_right, signal.ended_malformed
    longer_helps = (right_share is None or right_share.high >= NEVER) and (
        malformed_share is None or malformed_share.low <= MALFORMED
    )
    is_cut = signal.truncated.value > TRUNCATED and longer_helps
    longer = longer_completions(signal.config, signal.room) if is_cut else ""
    because = f"rewards differ in {_share(spread)} of groups of {signal.config.generation.num_generations}"
    if spread.low > INFORMATIVE:  # then length and format are learned too
        because += f"; {cut}" if is_cut else ""
        if right is not None and right.value == 0:
            because += "; no sampled answer is right, so the rewards differ only in partial credit"
        if signal.reward_seconds > max(1.0, signal.rollout_seconds):
            because += (
                f"; rewards take {signal.reward_seconds:.1f} s per batch, completions {signal.rollout_seconds:.1f} s"
            )
            change = "Make the reward faster (batching, caching, a lower timeout): the run learns, but waits for it"
            return Verdict("slow reward", because, change)
        return Verdict("will learn", because, longer)
    # Equal rewards of all completions are the reward's, unless right answers or unreadable formats explain them.
    if signal.constant and signal.malformed.low <= MALFORMED and (right is None or 0 < right.value < 1):
        because, change = _of_equal_rewards(
            signal, f"; {cut}" if is_cut else "", f", or set {longer}" if is_cut else ""
        )
        if spread.high >= INFORMATIVE:
            return _unsure(signal, because, "spread_share", INFORMATIVE, change)
        return Verdict("no signal", because, change)
    if is_cut:
        if signal.truncated.low <= TRUNCATED:
            return _unsure(signal, cut, "truncated_share", TRUNCATED, longer)
        return Verdict("truncated", cut, longer)
    if signal.malformed.low > MALFORMED:
        because = f"{_share(signal.malformed)} of completions do not have the format that the reward reads"
        change = (
            "Describe the format of the answer in data.system_prompt, or choose a reward.preset that reads this one"
        )
        return Verdict("wrong format", because, change)
    if spread.high >= INFORMATIVE:
        return _unsure(signal, because, "spread_share", INFORMATIVE, larger_groups(signal.config))
    if right is not None:
        because += f"; pass@1 is {_share(right)}"
        problems = "problems (data.task_params, or another data.source)"
        if right.low > EASY:
            return Verdict("too easy", because, f"Use harder {problems}: these are already solved")
        if right.high < HARD:
            return Verdict("too hard", because, f"Use easier {problems}, or a model that solves some of them")
    return Verdict("no signal", because, larger_groups(signal.config))


def _of_equal_rewards(signal: Signal, cut: str, longer: str) -> tuple[str, str]:
    """The reason and the change if all completions got the same reward."""
    value, choose = signal.reward.value, "Choose a reward that distinguishes completions: grpo-kit reward list"
    if math.isnan(value):
        return "no completion got a reward", choose
    if value > signal.lowest:
        return f"every completion got {value:g}: the reward is constant", choose
    look = "Compare the samples with the format that the reward reads, and describe it in data.system_prompt"
    return f"every completion got the lowest value, {value:g}{cut}", f"{look}{longer}"


def larger_groups(config: RunConfig) -> str:
    """Overrides that double the group size, with the batch size if necessary; above 16, another advice."""
    group, batch = 2 * config.generation.num_generations, config.optimisation.batch_size
    multiple = math.lcm(group, config.optimisation.micro_batch_size or 1)
    groups = f"generation.num_generations={group}"
    if group < 32:
        for overrides in ([groups], [groups, f"optimisation.batch_size={multiple * math.ceil(batch / multiple)}"]):
            if _valid(config, overrides):
                return " ".join(f"-o {override}" for override in overrides)
    return "Add problems of other difficulty to data.source"


def longer_completions(config: RunConfig, room: int | None) -> str:
    """An override that doubles the completion length, up to the `room` in the context; another advice if there is none."""
    limit = config.generation.max_completion_tokens
    tokens = 2 * limit if room is None else min(2 * limit, room)
    override = f"generation.max_completion_tokens={tokens}"
    if tokens > limit and _valid(config, [override]):
        return f"-o {override}"
    return (
        "Lower data.max_prompt_tokens, ask for shorter answers, or use a model with a longer context: this one is full"
    )


def _valid(config: RunConfig, overrides: list[str]) -> bool:
    try:
        load_config(config, overrides)
    except KitError:
        return False
    return True


def _unsure(signal: Signal, because: str, figure: str, threshold: float, change: str) -> Verdict:
    """`sample more` if the figure's interval contains the threshold; `borderline` if no more prompts can be sampled."""
    within = f"{because}: the interval of {figure} contains {threshold:.0%}"
    most = MOST_PROMPTS if signal.rows is None else min(signal.rows, MOST_PROMPTS)
    if signal.prompts >= most:
        sampled = (
            f"all {signal.prompts} training rows" if signal.prompts == signal.rows else f"{signal.prompts} prompts"
        )
        return Verdict("borderline", f"{within}, with {sampled} sampled", change)
    more = min(most, 4 * signal.prompts)  # half as wide an interval
    return Verdict("sample more", f"{within}, so {signal.prompts} prompts are not enough", f"--prompts {more}")


def _share(estimate: Estimate) -> str:
    return f"{estimate.value:.0%} [{estimate.low:.0%}, {estimate.high:.0%}]"


# --- the check --------------------------------------------------------------------------------------------------------

MODULE = "kit.planning.signal"


@dataclass(frozen=True)
class Sampled:
    """Completions of N prompts, one group per prompt, and their scores."""

    completions: list[Completion]
    verdict: Evaluation
    correct: list[bool] | None
    generation_seconds: float
    reward_seconds: float


class BaseModel(HeldOut):
    """Samples training rows with the rendering, generation and scoring of the held-out evaluation."""

    def sample(self, model: Any, progress: Progress | None = None) -> Sampled:
        """Sample and score k completions of every prompt."""
        k = self.config.k
        repeated = [prompt for prompt in self.prompts for _ in range(k)]
        started = time.perf_counter()
        with evaluating(model, self.config.seed or 0):
            completions = self._complete(model, repeated, True, progress, 0, len(repeated))
        generated = time.perf_counter()
        samples = self._as_samples([row for row in self.rows for _ in range(k)], completions)
        context = scoring_context(self.config.seed or 0)
        verdict = self._verdict(samples, completions, context)
        scored = time.perf_counter()
        correct = self.checker.is_correct(samples, context) if self.checker_name is not None else None
        return Sampled(completions, verdict, correct, generated - started, scored - generated)


def check(config: RunConfig, *, prompts: int = 32, progress: bool = True) -> dict[str, Any]:
    """Sample a group of completions for each of `prompts` training prompts and decide whether the run will learn.

    Returns plain values: `verdict` {verdict, because, change}, `pass@1`, `pass@k`, `reward`, `spread_share` and other rates
    with intervals, and `seconds`. Raises `KitError` for user errors and `RunError` if the process crashes.
    """
    request = {"config": config.model_dump(mode="json"), "prompts": prompts}
    return call_for_result(MODULE, request, "The signal check was stopped before it finished.", quiet=not progress)


def measure(parts: Parts, model: Any, prompts: int, progress: Progress | None = None) -> dict[str, Any]:
    """Run the check on a loaded model; see `check`."""
    config, available, k = parts.config, len(parts.data.train), parts.config.generation.num_generations
    chosen = parts.data.train.select(draw(available, prompts, config.run.seed, config.data.seed))
    evaluation = EvaluationConfig(
        prompts=len(chosen),
        k=k,
        temperature=config.generation.temperature,
        seed=config.run.seed,
        batch_size=config.optimisation.batch_size,
    )
    arguments = (parts.preset, parts.files.tokenizer, evaluation, config.generation, parts.checker, BatchSizeBackoff())
    base = BaseModel(chosen.to_list(), *arguments, interaction=parts.interaction, processor=parts.files.processor)
    base.half = autocast_dtype(config.model, parts.files.backend)
    sampled = base.sample(model, progress)
    longest = config.data.max_prompt_tokens or max(lengths_of(parts.files.tokenizer, chosen, parts.interaction))
    room = None if parts.files.context is None else parts.files.context - longest
    lowest = sum(weight * component.floor for component, weight in parts.preset.components)
    result = describe(config, sampled, rows=available, room=room, lowest=lowest)
    result["samples"] = [show_sample(base, sampled, prompt * k) for prompt in range(min(SAMPLES, len(chosen)))]
    return result | {"thinking": thinking_note(parts.files) if config.data.chat else None}


STATUS_WORDS = {
    "ok": "accepts it",
    "wrong": "gives {value:g}",
    "format": "found no answer in the expected format",
    "not_applicable": "does not apply to this row",
    "timeout": "took too long",
    "error": "failed",
    "infra": "was not available",
}
"""Descriptions of the statuses of a reward."""


def show_sample(base: BaseModel, sampled: Sampled, number: int) -> dict[str, Any]:
    """Completion `number` with its prompt, reward and statuses, and a description of the statuses."""
    prompt, (ids, cut) = base.prompts[number // base.config.k], sampled.completions[number]
    statuses = {name: row[number] for name, row in sampled.verdict.statuses.items()}
    values = {name: row[number] for name, row in sampled.verdict.values.items()}
    verdict = "" if sampled.correct is None else "Right: " if sampled.correct[number] else "Not right: "
    parts = [f"{name} {STATUS_WORDS[status].format(value=values[name])}" for name, status in statuses.items()]
    return {
        "prompt": question(base.rows[number // base.config.k]["prompt"]),
        "completion": plain(base._completion(prompt, (ids, cut))),
        "reward": sampled.verdict.totals[number],
        "statuses": statuses,
        "why": f"{verdict}{'; '.join(parts)}{'; it was cut at the token limit' if cut else ''}.",
    }


def draw(available: int, prompts: int, *seeds: int) -> list[int]:
    """Draw `prompts` of `available` row numbers at random without replacement. A larger draw contains the smaller one.

    The first rows of a file would be no random sample, because files are often sorted by difficulty or source.
    """
    rows = list(range(available))
    random.Random(" ".join(map(str, seeds))).shuffle(rows)
    return rows[:prompts]


def describe(
    config: RunConfig, sampled: Sampled, *, rows: int | None = None, room: int | None = None, lowest: float = 0.0
) -> dict[str, Any]:
    """Rates with intervals over prompts, seconds per generation batch, and the verdict.

    `rows` is the number of training prompts, `room` the tokens of the context for a completion; None: unknown. `lowest` is
    the lowest possible reward.
    """
    from rewards.protocol import FAILURES

    verdict, count, k = sampled.verdict, len(sampled.completions), config.generation.num_generations
    groups = [slice(start, start + k) for start in range(0, count, k)]
    totals = verdict.totals
    cut = [float(cut) for _, cut in sampled.completions]
    ended = [right for right, is_cut in zip(sampled.correct or (), cut, strict=False) if not is_cut]
    malformed = [float("format" in row) for row in zip(*verdict.statuses.values(), strict=True)]
    ended_malformed = [value for value, is_cut in zip(malformed, cut, strict=True) if not is_cut]
    failing = [float(bool(FAILURES & set(row))) for row in zip(*verdict.statuses.values(), strict=True)]
    numbers = [total for total in totals if total is not None]
    batch = config.optimisation.batch_size
    rollout = sampled.generation_seconds / count * batch
    scoring = sampled.reward_seconds / count * batch
    tokens = [own_tokens(completion) for completion in sampled.completions]
    hits = None if sampled.correct is None else [sum(sampled.correct[group]) for group in groups]
    signal = Signal(
        prompts=len(groups),
        spread=wilson(sum(_differ(totals[group]) for group in groups), len(groups)),
        truncated=_over_prompts(cut, groups),
        malformed=_over_prompts(malformed, groups),
        failures=_over_prompts(failing, groups),
        pass_at_1=None if hits is None else bootstrap_mean([hit / k for hit in hits], shares=True),
        constant=len(set(numbers)) <= 1,
        reward=bootstrap_mean(
            [fmean(known) for group in groups if (known := [total for total in totals[group] if total is not None])]
        ),
        reward_seconds=scoring,
        rollout_seconds=rollout,
        config=config,
        failure=first_failure(verdict) if verdict.failure_share else None,
        rows=rows,
        room=room,
        ended_right=wilson(sum(ended), len(ended)) if ended else None,
        ended_malformed=wilson(round(sum(ended_malformed)), len(ended_malformed)) if ended_malformed else None,
        lowest=lowest,
    )
    passes = {}
    if hits is not None:
        for n in {1: 1, k: k}:
            passes[f"pass@{n}"] = bootstrap_mean([pass_at_k(k, hit, n) for hit in hits], shares=True)._asdict()
    return {
        "verdict": judge(signal).as_dict(),
        "prompts": signal.prompts,
        "k": k,
        **passes,
        "reward": signal.reward._asdict() if numbers else None,
        "spread_share": signal.spread._asdict(),
        "truncated_share": signal.truncated._asdict(),
        "wrong_format_share": signal.malformed._asdict(),
        "failure_share": signal.failures._asdict(),
        "failure": signal.failure,
        "completion_tokens_mean": sum(tokens) / count,
        "seconds": {"rollout": rollout, "reward": scoring},
    }


def _differ(totals: list[float | None]) -> bool:
    """Whether the rewards of a group differ by more than rounding. Completions without a score do not count."""
    known = [total for total in totals if total is not None]
    return bool(known) and max(known) - min(known) > 1e-6 * max(1.0, abs(max(known)))


def _over_prompts(values: list[float], groups: list[slice]) -> Estimate:
    """Mean share with an interval resampled over prompts, because completions of a prompt are not independent."""
    return bootstrap_mean([sum(values[group]) / len(values[group]) for group in groups], shares=True)


def job(request: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """The job of the process: prepare like a run, load the model and sample."""
    from kit.runner.console import LogCapture, Reporter

    reporter, logs = Reporter(quiet), LogCapture()
    with held_gpu("sampling the base model"), logs.collecting():
        from kit.models.backend import use_threads
        from kit.models.failures import explained
        from kit.models.libraries import load_libraries
        from kit.models.loading import load_model
        from kit.models.start import as_it_starts
        from kit.runner.prepare import prepare

        config = load_config(request["config"])
        use_threads(config.run.threads, config.model.name)
        load_libraries(config.model, training=False)

        from transformers import set_seed

        parts = prepare(config, fresh=False)
        set_seed(config.run.seed)
        audited = {"audit": audit(config, {})} if request.get("audit") else {}
        with explained(), reporter.bar("Sampling the base model") as bar:
            model = as_it_starts(load_model(parts.files, config.model).model, config.model)
            return measure(parts, model, request["prompts"], bar) | audited


if __name__ == "__main__":
    from kit.runs.worker import serve

    sys.exit(serve(job))
