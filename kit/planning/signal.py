"""The signal check: completions of the base model, scored as in training, before a run is paid for; and whether it will learn.

`python -m kit.planning.signal REQUEST` does it in a process of its own; `check` is the face. Prompts are rendered,
completions sampled and rewards asked by the same code as held-out evaluation, with the run's generation settings. A request
with `audit` asks for the audit of the reward, too, for the page.

A group learns something only where its rewards differ: with equal rewards every advantage is 0. So the share of groups
with spread decides, and what kind the others are says why. A verdict is given only where the 95 % interval of the share
that it rests on lies on one side of its threshold; else more samples are asked for.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kit.config import EvaluationConfig, RunConfig, load_config
from kit.errors import KitError
from kit.evaluation.heldout import Completion, HeldOut, Progress, evaluating, first_failure, scoring_context
from kit.evaluation.statistics import Estimate, bootstrap_mean, pass_at_k, wilson
from kit.generation.multi_turn import own_tokens
from kit.generation.prompts import lengths_of, thinking_note
from kit.models.loading import autocast_dtype
from kit.planning.workbench import audit, plain
from kit.runs.lock import held_gpu
from kit.runs.worker import call_for_result

if TYPE_CHECKING:
    from kit.evaluation.heldout import Progress
    from kit.runner.prepare import Parts
    from rewards import Evaluation

# --- the verdict ------------------------------------------------------------------------------------------------------

FAILING = 0.2
"""Share of completions that a reward fails on, above which the verdict is about the reward. run.max_failure_share's default."""
TRUNCATED = 0.3
"""Share of completions cut at the limit: these earn nothing for answers that they had no room for."""
NEVER = 0.1
"""Share of right answers among completions that ended, below which longer completions would not help either."""
MALFORMED = 0.5
"""Share of completions whose format keeps a reward from reading them."""
INFORMATIVE = 0.25
"""Share of groups with spread below which most of the work of a step is wasted (DAPO, arXiv 2503.14476, drops the others)."""
EASY, HARD = 0.75, 0.25
"""pass@1 above which groups without spread are mostly solved ones, and below which they are mostly failed ones."""
MOST_PROMPTS = 4096
SAMPLES = 3
"""Sampled answers that are shown, of as many prompts."""


@dataclass(frozen=True)
class Signal:
    """What was measured of N groups as training has them; shares and rates with 95 % intervals over prompts."""

    prompts: int
    spread: Estimate  # share of groups whose rewards differ
    truncated: Estimate
    malformed: Estimate
    failures: Estimate
    pass_at_1: Estimate | None  # None: nothing says what is right
    constant: bool  # every reward is the same number
    reward: Estimate
    reward_seconds: float  # per generation batch
    rollout_seconds: float  # likewise, without rewards
    config: RunConfig
    failure: str | None = None
    rows: int | None = None  # prompts that there are; None: not known
    room: int | None = None  # tokens that the context leaves to a completion; None: not known
    # Shares among completions that ended by themselves; None: not known.
    ended_right: Estimate | None = None
    ended_malformed: Estimate | None = None


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
    """The verdict, its reason, and the one change to make (empty where none is needed)."""
    reason = f" ({signal.failure})" if signal.failure else ""
    limit = signal.config.generation.max_completion_tokens
    if signal.failures.value > FAILING:
        because = f"{_share(signal.failures)} of completions could not be scored"
        change = f"Mend the reward{reason}; try it with: grpo-kit reward test"
        if signal.failures.low <= FAILING:
            return _unsure(signal, because, FAILING, change)
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
    if spread.low > INFORMATIVE:  # then the length and the format of answers are learned, too
        because += f"; {cut}" if is_cut else ""
        if right is not None and right.value == 0:
            because += "; no sampled answer is right, so what is learned first is what else the reward pays"
        if signal.reward_seconds > max(1.0, signal.rollout_seconds):
            because += (
                f"; rewards take {signal.reward_seconds:.1f} s a batch, completions {signal.rollout_seconds:.1f} s"
            )
            change = (
                "Make the reward faster (batch it, cache it, lower its timeout): the run will learn, but waits for it"
            )
            return Verdict("slow reward", because, change)
        return Verdict("will learn", because, longer)
    if is_cut:
        if signal.truncated.low <= TRUNCATED:
            return _unsure(signal, cut, TRUNCATED, longer)
        return Verdict("truncated", cut, longer)
    if signal.malformed.low > MALFORMED:
        because = f"{_share(signal.malformed)} of completions do not have the format that the reward reads"
        change = (
            "Say in data.system_prompt which format the answer must have, or choose a reward.preset that reads this one"
        )
        return Verdict("wrong format", because, change)
    if spread.high >= INFORMATIVE:
        return _unsure(signal, because, INFORMATIVE, larger_groups(signal.config))
    if right is not None:
        because += f"; pass@1 is {_share(right)}"
        problems = "problems (data.task_params, or another data.source)"
        if right.low > EASY:
            return Verdict("too easy", because, f"Take harder {problems}: these are solved already")
        if right.high < HARD:
            return Verdict("too hard", because, f"Take easier {problems}, or a model that solves some of them")
    if signal.constant:
        known = not math.isnan(signal.reward.value)
        because += f"; every completion got the reward {signal.reward.value:g}" if known else "; none got a reward"
        return Verdict("no signal", because, "Choose a reward that tells completions apart: grpo-kit reward list")
    return Verdict("no signal", because, larger_groups(signal.config))


def larger_groups(config: RunConfig) -> str:
    """Twice the group size as overrides that `load_config` takes, with the batch where it must change; from 16 on words."""
    group, batch = 2 * config.generation.num_generations, config.optimisation.batch_size
    multiple = math.lcm(group, config.optimisation.micro_batch_size or 1)
    groups = f"generation.num_generations={group}"
    if group < 32:
        for overrides in ([groups], [groups, f"optimisation.batch_size={multiple * math.ceil(batch / multiple)}"]):
            if _valid(config, overrides):
                return " ".join(f"-o {override}" for override in overrides)
    return "Mix problems of other difficulty into data.source"


def longer_completions(config: RunConfig, room: int | None) -> str:
    """Twice the completion length as an override, at most the `room` in the context; words where that is no longer."""
    limit = config.generation.max_completion_tokens
    tokens = 2 * limit if room is None else min(2 * limit, room)
    override = f"generation.max_completion_tokens={tokens}"
    if tokens > limit and _valid(config, [override]):
        return f"-o {override}"
    return (
        "Lower data.max_prompt_tokens, ask for shorter answers, or take a model with a longer context: this one is full"
    )


def _valid(config: RunConfig, overrides: list[str]) -> bool:
    try:
        load_config(config, overrides)
    except KitError:
        return False
    return True


def _unsure(signal: Signal, because: str, threshold: float, change: str) -> Verdict:
    """`sample more` for an interval that the threshold lies in; `borderline` where no more prompts can be sampled."""
    within = f"{because}: {threshold:.0%} lies within the interval"
    most = MOST_PROMPTS if signal.rows is None else min(signal.rows, MOST_PROMPTS)
    if signal.prompts >= most:
        there = f"all {signal.prompts} training rows" if signal.prompts == signal.rows else f"{signal.prompts} prompts"
        return Verdict("borderline", f"{within}, with {there} sampled", change)
    more = min(most, 4 * signal.prompts)  # half as wide an interval
    return Verdict("sample more", f"{within}, so {signal.prompts} prompts do not decide", f"--prompts {more}")


def _share(estimate: Estimate) -> str:
    return f"{estimate.value:.0%} [{estimate.low:.0%}, {estimate.high:.0%}]"


# --- the check --------------------------------------------------------------------------------------------------------

MODULE = "kit.planning.signal"


@dataclass(frozen=True)
class Sampled:
    """Completions of N prompts, a group each, and their scores."""

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
    """Samples a group of completions for `prompts` training prompts and says whether the run will learn.

    Returns plain numbers: `verdict` {verdict, because, change}, `pass@1`, `pass@k`, `reward`, `spread` and the other rates
    with intervals, `seconds`. Raises `KitError` for a mistake of the user's, `RunError` when the process crashes.
    """
    request = {"config": config.model_dump(mode="json"), "prompts": prompts}
    return call_for_result(MODULE, request, "The signal check was stopped before it had a result.", quiet=not progress)


def measure(parts: Parts, model: Any, prompts: int, progress: Progress | None = None) -> dict[str, Any]:
    """The check on a loaded model; see `check`."""
    config, available, k = parts.config, len(parts.data.train), parts.config.generation.num_generations
    chosen = parts.data.train.select(draw(available, prompts, config.run.seed, config.data.seed))
    evaluation = EvaluationConfig(
        prompts=len(chosen),
        k=k,
        temperature=config.generation.temperature,
        seed=config.run.seed,
        batch_size=config.optimisation.batch_size,
    )
    who = (parts.preset, parts.files.tokenizer, evaluation, config.generation, parts.checker)
    base = BaseModel(chosen.to_list(), *who, interaction=parts.interaction, processor=parts.files.processor)
    base.half = autocast_dtype(config.model, parts.files.backend)
    sampled = base.sample(model, progress)
    context = getattr(parts.files.config.get_text_config(), "max_position_embeddings", None)
    longest = config.data.max_prompt_tokens or max(
        lengths_of(parts.files.tokenizer, chosen, parts.interaction.all_tools())
    )
    room = None if context is None else context - longest
    measured = describe(config, sampled, rows=available, room=room)
    measured["samples"] = [show_sample(base, sampled, prompt * k) for prompt in range(min(SAMPLES, len(chosen)))]
    return measured | {"thinking": thinking_note(parts.files) if config.data.chat else None}


STATUS_WORDS = {
    "ok": "found what it looks for",
    "wrong": "could read the answer, and it is not right",
    "format": "found no answer in the format that it reads",
    "not_applicable": "does not apply to this row",
    "timeout": "took too long",
    "error": "failed",
    "infra": "could not be asked",
}
"""What a reward's status says of a completion."""


def show_sample(base: BaseModel, sampled: Sampled, number: int) -> dict[str, Any]:
    """Completion `number` with its prompt, reward and statuses, and in words what became of it."""
    prompt, (ids, cut) = base.prompts[number // base.config.k], sampled.completions[number]
    statuses = {name: row[number] for name, row in sampled.verdict.statuses.items()}
    verdict = "" if sampled.correct is None else "Right: " if sampled.correct[number] else "Not right: "
    parts = [f"{name} {STATUS_WORDS.get(status, f'says {status}')}" for name, status in statuses.items()]
    return {
        "prompt": plain(prompt),
        "completion": plain(base._completion(prompt, (ids, cut))),
        "reward": sampled.verdict.totals[number],
        "statuses": statuses,
        "why": f"{verdict}{'; '.join(parts)}{'; it was cut at the token limit' if cut else ''}.",
    }


def draw(available: int, prompts: int, *seeds: int) -> list[int]:
    """Places of `prompts` of `available` rows, at random without replacement; more prompts are the same ones and others.

    The first rows of a file are no sample of it: files are often sorted by difficulty or source.
    """
    places = list(range(available))
    random.Random(" ".join(map(str, seeds))).shuffle(places)
    return places[:prompts]


def describe(
    config: RunConfig, sampled: Sampled, *, rows: int | None = None, room: int | None = None
) -> dict[str, Any]:
    """Rates with intervals over prompts, seconds per generation batch, and the verdict.

    `rows` is how many prompts there are to sample, `room` the tokens that the context leaves to a completion; None: unknown.
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
        reward=bootstrap_mean([mean for group in groups if (mean := _mean(totals[group])) is not None]),
        reward_seconds=scoring,
        rollout_seconds=rollout,
        config=config,
        failure=first_failure(verdict) if verdict.failure_share else None,
        rows=rows,
        room=room,
        ended_right=wilson(sum(ended), len(ended)) if ended else None,
        ended_malformed=wilson(round(sum(ended_malformed)), len(ended_malformed)) if ended_malformed else None,
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
    """Whether a group's rewards differ by more than rounding. A completion that was not scored is no part of it."""
    known = [total for total in totals if total is not None]
    return bool(known) and max(known) - min(known) > 1e-6 * max(1.0, abs(max(known)))


def _over_prompts(values: list[float], groups: list[slice]) -> Estimate:
    """Mean share with an interval resampled over prompts: completions of one prompt are not independent."""
    return bootstrap_mean([sum(values[group]) / len(values[group]) for group in groups], shares=True)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def job(request: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """The process: prepares as a run does, loads the model and samples."""
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
