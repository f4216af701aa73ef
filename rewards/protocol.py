"""The records that cross every boundary of this library: what is scored, by what, and what comes out."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, get_args, runtime_checkable

__all__ = [
    "FAILURES",
    "STATUSES",
    "Component",
    "Context",
    "ItemComponent",
    "Sample",
    "Score",
    "Status",
    "failure_reason",
]

Status: TypeAlias = Literal["ok", "wrong", "format", "timeout", "error", "not_applicable", "infra"]
STATUSES: tuple[Status, ...] = get_args(Status)
# Statuses that say "the reward failed", not "the completion is bad".
FAILURES: frozenset[Status] = frozenset({"error", "timeout", "infra"})

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Sample:
    """One completion to score.

    `prompt` is what the trainer gave: a string, or a list of messages. `messages` holds the completion's messages when
    it is conversational, else None. `text` is the completion as plain text. `n_tokens` counts `token_ids`, and is None
    when they are not known. `columns` are the other dataset columns of this row.
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
    _memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, scanner: Callable[..., T], *args: Any) -> T:
        """`scanner(self.text, *args)`, computed once however many components ask for it."""
        key = (scanner, args)
        if key not in self._memo:
            self._memo[key] = scanner(self.text, *args)
        result: T = self._memo[key]
        return result


@dataclass(frozen=True)
class Context:
    """Where in the run a batch is scored.

    `seed` is the run's seed, `step` and `total_steps` count optimizer steps. `extras` carries what a trainer passes
    beside dataset columns (`trainer_state`, `log_extra`, `log_metric`, ...), for functions that ask for it by name.
    """

    seed: int = 0
    step: int = 0
    total_steps: int = 0
    extras: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Score:
    """One component's verdict on one completion.

    `value` may be left None: the component's floor is then filled in for wrong, format, timeout and error. A value
    given with `wrong` or `format` is partial credit and is kept; with timeout and error the floor always wins; with
    not_applicable and infra the value is always None. `info` holds short plain values, by custom `reason` and
    `extracted`. `seconds` is the time this one item took, when the component measured it.
    """

    value: float | None
    status: Status = "ok"
    info: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None


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

    name: str
    floor: float = 0.0
    low: float = 0.0
    high: float = 1.0
    version: str = "1"

    @abstractmethod
    def score_one(self, sample: Sample, ctx: Context) -> Score:
        """The verdict on one completion; whatever it raises becomes status `error`."""

    def score(self, samples: Sequence[Sample], ctx: Context) -> list[Score]:
        return [self._timed(sample, ctx) for sample in samples]

    def _timed(self, sample: Sample, ctx: Context) -> Score:
        start = time.perf_counter()
        try:
            score = self.score_one(sample, ctx)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:  # SystemExit and timeouts derived from BaseException must not end a run
            score = Score(None, "error", {"reason": failure_reason(failure)})
        return replace(score, seconds=time.perf_counter() - start)


def failure_reason(failure: BaseException) -> str:
    """`TypeName: message`, at most 300 characters, never raising even when the exception's own str() does."""
    try:
        message = str(failure)
    except Exception:
        message = "(no message)"
    return f"{type(failure).__name__}: {message}"[:300]
