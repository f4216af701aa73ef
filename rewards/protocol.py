"""Records shared by all parts of this library: samples, components and scores."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar, get_args, runtime_checkable

if TYPE_CHECKING:
    from random import Random


Status: TypeAlias = Literal["ok", "wrong", "format", "timeout", "error", "not_applicable", "infra"]
STATUSES: tuple[Status, ...] = get_args(Status)
# Statuses that say "the reward failed", not "the completion is bad".
FAILURES: frozenset[Status] = frozenset({"error", "timeout", "infra"})

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Sample:
    """One completion to score.

    `prompt` is what the trainer gave: a string, or a list of messages. `messages` holds the completion's messages when
    it is conversational, else None. `text` is the completion as plain text. `n_tokens` is the length of the completion
    in tokens, `token_ids` its ids, `logps` their log-probabilities (nats) under the policy that sampled them, and
    `prompt_ids` the ids of the prompt; each is None when it is not known. `finish_reason` says why generation ended,
    in the trainer's words. `columns` are the other dataset columns of this row. `thinking_opened` says whether the model
    was shown an open `<think>` before it wrote; None looks at the end of `prompt`, which does not tell of one that a chat
    template adds.
    """

    index: int
    group_id: int
    prompt: Any
    messages: list[dict[str, Any]] | None
    text: str
    token_ids: Sequence[int] | None = None
    n_tokens: int | None = None
    finish_reason: str | None = None
    reference: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: Sequence[int] | None = None
    logps: Sequence[float] | None = None
    thinking_opened: bool | None = None
    _memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def full_text(self) -> str:
        """The text, with the `<think>` that it was begun with put in front: what layouts and answers are looked for in."""
        opened = opens_thinking(self.prompt) if self.thinking_opened is None else self.thinking_opened
        return f"<think>{self.text}" if opened and "<think>" not in self.text else self.text

    def once(self, scanner: Callable[..., T], *args: Any) -> T:
        """`scanner(self.full_text, *args)`, computed once however many components ask for it."""
        key = (scanner, args)
        if key not in self._memo:
            self._memo[key] = scanner(self.full_text, *args)
        result: T = self._memo[key]
        return result


def opens_thinking(prompt: Any) -> bool:
    """Return whether the prompt, or its last message if that is the assistant's, ends with an open `<think>`."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict) and prompt[-1].get("role") == "assistant":
        prompt = prompt[-1].get("content")
    return isinstance(prompt, str) and prompt.rstrip().endswith("<think>")


@dataclass(frozen=True)
class Context:
    """The point of the run at which a batch is scored.

    `seed` is the run's seed, `step` and `total_steps` count optimizer steps. `extras` carries what a trainer passes
    beside dataset columns (`trainer_state`, `log_extra`, `log_metric`, ...), for functions that ask for it by name.
    """

    seed: int = 0
    step: int = 0
    total_steps: int = 0
    extras: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def rng(self, group_id: int, purpose: str = "") -> "Random":
        """Return random numbers that depend only on the run's seed, the step and the group, in any process."""
        from random import Random

        return Random(f"{self.seed}/{self.step}/{group_id}/{purpose}")


@dataclass(frozen=True)
class Score:
    """One component's verdict on one completion.

    `value` may be left None: the component's floor is then filled in for wrong, format, timeout and error. A value
    given with `wrong` or `format` is partial credit and is kept; with timeout and error the floor always wins; with
    not_applicable and infra the value is always None. `info` holds short plain values, by custom `reason` and
    `extracted`. `seconds` is the time this one item took, when the component measured it.

    `token_values` are process rewards: a number for each token of the completion, 0.0 where there is none. They are
    given beside `value` and do not replace it: a trainer adds them at their tokens and the value at the last one, so a
    component whose whole verdict is in its tokens has the value 0. Lists of another length, or with anything but
    finite numbers, make the score an `error`; they are dropped with timeout, error, not_applicable and infra.
    """

    value: float | None
    status: Status = "ok"
    info: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    token_values: Sequence[float] | None = None


@runtime_checkable
class Component(Protocol):
    """Scores completions in its own native range [low, high]; weights belong to presets."""

    @property
    def name(self) -> str: ...
    @property
    def floor(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def version(self) -> str: ...

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        """One score per sample, in order."""
        ...


@dataclass(frozen=True, kw_only=True)
class ItemComponent(ABC):
    """A component that looks at one completion at a time, times each, and keeps one failure from touching the rest."""

    itemwise: ClassVar[bool] = True
    """A completion's score does not depend on the others of the batch: parts of it may be scored by themselves."""

    name: str
    floor: float = 0.0
    low: float = 0.0
    high: float = 1.0
    version: str = "1"

    @abstractmethod
    def score_one(self, sample: Sample, ctx: Context) -> Score:
        """Score one completion; any exception becomes status `error`."""

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        scores = []
        for sample in samples:
            start = time.perf_counter()
            try:
                score = self.score_one(sample, ctx)
            except KeyboardInterrupt:
                raise
            except BaseException as failure:  # SystemExit and timeouts derived from BaseException must not end a run
                score = Score(None, "error", {"reason": failure_reason(failure)})
            if isinstance(score, Score):  # what is none is settled as an error, like all that a component gets wrong
                score = replace(score, seconds=time.perf_counter() - start)
            scores.append(score)
        return scores


def failure_reason(failure: BaseException) -> str:
    """Return `TypeName: message`, at most 300 characters; never raises, even if the exception's own str() does."""
    try:
        message = str(failure)
    except Exception:
        message = "(no message)"
    return f"{type(failure).__name__}: {message}"[:300]


def shown(value: object, limit: int = 200) -> str:
    """Return `repr`, cut to `limit` characters; never raises, even if the object's own does."""
    if isinstance(value, str | bytes):
        value = value[:limit]
    try:
        return repr(value)[:limit]
    except Exception:
        return f"<{type(value).__name__}>"
