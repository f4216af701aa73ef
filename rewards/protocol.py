"""Types that all modules of the library share: samples, components and scores."""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar, get_args, runtime_checkable

if TYPE_CHECKING:
    from random import Random


Status: TypeAlias = Literal["ok", "wrong", "format", "timeout", "error", "not_applicable", "infra"]
STATUSES: tuple[Status, ...] = get_args(Status)
# Statuses of a reward that failed, as opposed to a bad completion.
FAILURES: frozenset[Status] = frozenset({"error", "timeout", "infra"})
_LIBRARY = str(Path(__file__).parent)

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Sample:
    """One completion to score.

    `prompt` is the trainer's prompt: a string, or a list of messages. `messages` is the list of messages of a conversational
    completion, else None. `text` is the completion as plain text. `n_tokens` is the length of the completion in tokens,
    `token_ids` its ids, `logps` their log-probabilities (nats) under the policy that sampled them, and `prompt_ids` the ids
    of the prompt; each is None if it is not known. `finish_reason` is the trainer's reason why generation ended. `columns`
    are the other dataset columns of this row. `thinking_opened` says whether the prompt that the model read ended with an
    open `<think>`. None checks the end of `prompt`, which does not contain the text that a chat template adds.
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
        """`text` with the `<think>` of the prompt in front. Checks of format and answer read this text."""
        is_open = opens_thinking(self.prompt) if self.thinking_opened is None else self.thinking_opened
        return f"<think>{self.text}" if is_open and "<think>" not in self.text else self.text

    def once(self, scanner: Callable[..., T], *args: Any) -> T:
        """Return `scanner(self.full_text, *args)`, computed once for all components."""
        key = (scanner, args)
        if key not in self._memo:
            self._memo[key] = scanner(self.full_text, *args)
        result: T = self._memo[key]
        return result


def opens_thinking(prompt: Any) -> bool:
    """Return whether the prompt, or a last message of the assistant in it, ends with an open `<think>`."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict) and prompt[-1].get("role") == "assistant":
        prompt = prompt[-1].get("content")
    return isinstance(prompt, str) and prompt.rstrip().endswith("<think>")


@dataclass(frozen=True)
class Context:
    """The point of the run at which a batch is scored.

    `seed` is the run's seed, `step` and `total_steps` count optimizer steps. `extras` contains arguments of the trainer that
    are not dataset columns (`trainer_state`, `log_extra`, `log_metric`, ...), for functions whose signature names them.
    """

    seed: int = 0
    step: int = 0
    total_steps: int = 0
    extras: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def rng(self, group_id: int, purpose: str = "") -> "Random":
        """Return a generator that depends only on the run's seed, the step, the group and `purpose`, in any process."""
        from random import Random

        return Random(f"{self.seed}/{self.step}/{group_id}/{purpose}")


@dataclass(frozen=True)
class Score:
    """One component's score of one completion.

    If `value` is None, it becomes the component's floor for wrong, format, timeout and error. A value with `wrong` or
    `format` is partial credit and stays. With timeout and error the value always becomes the floor, with not_applicable and
    infra always None. `info` holds short plain values, by convention `reason` and `extracted`. `seconds` is the time for
    this completion, if the component measures it.

    `token_values` are process rewards: one number per token of the completion, 0.0 for tokens without a reward. They do not
    replace `value`: a trainer adds them at their tokens and the value at the last token, so a component that rewards only
    tokens has the value 0. A list of another length, or with anything but finite numbers, makes the score an `error`. They
    are dropped with timeout, error, not_applicable and infra.
    """

    value: float | None
    status: Status = "ok"
    info: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    token_values: Sequence[float] | None = None


@runtime_checkable
class Component(Protocol):
    """Scores completions in a native range [low, high]. The preset holds the weight."""

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
        """Return one score per sample, in order."""
        ...


@dataclass(frozen=True, kw_only=True)
class ItemComponent(ABC):
    """Base of components that score each completion alone. It measures times and isolates failures."""

    itemwise: ClassVar[bool] = True
    """Whether scores do not depend on other completions of the batch, so that it may be scored in parts."""

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
            score = guarded(self.score_one, sample, ctx)
            if isinstance(score, Score):  # `settle` makes other objects an error
                score = replace(score, seconds=time.perf_counter() - start)
            scores.append(score)
        return scores


def guarded(step: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call, or a score with the status `error` and the reason if it raises."""
    try:
        return step(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # SystemExit and timeouts derived from BaseException must not end a run
        return Score(None, "error", {"reason": failure_reason(failure)})


def failure_reason(failure: BaseException) -> str:
    """Return `TypeName: message (file.py, line N)`; never raises, even if `str()` of the exception raises.

    The message has at most 300 characters. The place is the last line outside this library and installed packages, if any.
    """
    try:
        message = str(failure)
    except Exception:
        message = "(no message)"
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(failure.__traceback__)]
    own = [place for place in places if not place[0].startswith((_LIBRARY, "<")) and "/lib/python3" not in place[0]]
    at = f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""
    return f"{type(failure).__name__}: {message}"[:300] + at


def shown(value: object, limit: int = 200) -> str:
    """Return `repr` of any object, cut to `limit` characters; never raises, even if `repr` raises."""
    if isinstance(value, str | bytes):
        value = value[:limit]
    try:
        return repr(value)[:limit]
    except Exception:
        return f"<{type(value).__name__}>"
