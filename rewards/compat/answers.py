"""Functions of `rewards.compat` that compare answers or look at lengths, and what they share with the others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from rewards.components.lengths import cosine_between, length_share, overlong_penalty, repeated_share
from rewards.errors import RewardsError
from rewards.extract import MAX_CHARS
from rewards.isolation import Task, shared_pool
from rewards.samples import completion_text

__all__ = [
    "OURS",
    "Completions",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "len_reward",
    "within",
    "without_trl",
]

Completions: TypeAlias = Sequence[Any]
LogExtra: TypeAlias = Callable[[str, list[Any]], None]
F = TypeVar("F", bound=Callable[..., Any])

_SECONDS, _GRACE = 5.0, 0.5  # for one comparison, in a worker process
OURS: dict[str, Callable[..., Any]] = {}  # by name: what stands in for functions of TRL's where it is not installed


def without_trl(function: F) -> F:
    """Registers what stands in for TRL's function of this name, without the underscore."""
    function.__name__ = function.__qualname__ = function.__name__.lstrip("_")
    function.__module__ = "rewards.compat"  # where pickle finds it
    OURS[function.__name__] = function
    return function


def within(low: float, high: float) -> Callable[[F], F]:
    """Declares the range, which presets made of functions check their weights against."""

    def declare(function: F) -> F:
        function.low, function.high = low, high  # type: ignore[attr-defined]
        return function

    return declare


@without_trl
@within(0.0, 1.0)
def _accuracy_reward(
    completions: Completions, solution: Sequence[Any], log_extra: LogExtra | None = None, **kwargs: Any
) -> list[float | None]:
    r"""1.0 where the answer in `\boxed{…}`, or in `$…$` behind the word answer, equals the solution for math-verify, else 0.0
    (TRL, open-r1). None where math-verify cannot read the solution.

    >>> _accuracy_reward([r"\boxed{\frac{2}{6}}", r"The answer is $\frac{1}{2}$", r"\boxed{7}"], ["1/3", "1/3", "seven"])
    [1.0, 0.0, None]
    """
    found = _compared([completion_text(completion) for completion in completions], solution)
    _log_parsed(log_extra, solution, found)
    return [reward for reward, _, _ in found]


@without_trl
@within(0.0, 1.0)
def _reasoning_accuracy_reward(
    completions: Completions,
    solution: Sequence[Any],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""`accuracy_reward` of what follows the first of `reasoning_delimiters` that is there; 0.0 where none is (TRL).

    >>> good = r"<think>\boxed{2}</think>\boxed{3}"
    >>> _reasoning_accuracy_reward([good, r"\boxed{3}"], ["3", "3"])
    [1.0, 0.0]
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    texts = [completion_text(completion) for completion in completions]
    ends = [next((each for each in delimiters if each in text), None) for text in texts]
    tails = [text.rpartition(end)[2] if end else "" for text, end in zip(texts, ends, strict=True)]
    incomplete = (0.0, "[incomplete reasoning]", "[incomplete reasoning]")
    compared = _compared(tails, solution)
    found = [outcome if end else incomplete for outcome, end in zip(compared, ends, strict=True)]
    _log_parsed(log_extra, solution, found)
    return [reward for reward, _, _ in found]


def _log_parsed(log_extra: LogExtra | None, solution: Sequence[Any], found: "Sequence[Compared]") -> None:
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [gold for _, gold, _ in found])
        log_extra("answer_parsed", [answer for _, _, answer in found])


Compared: TypeAlias = tuple[float | None, str, str]  # the reward, what was read of the solution, and of the answer


def _compared(texts: Sequence[str], solution: Sequence[Any]) -> list[Compared]:
    """`compare` of each pair in worker processes: an answer that hangs SymPy costs itself, not the trainer."""
    from rewards.components.packages import require

    require("math-verify", "math_verify", "'math-verify>=0.9,<0.10'")
    golds = [gold if isinstance(gold, str) else "" for gold in solution]
    tasks = [
        Task(f"{__name__}:compare", (text[-MAX_CHARS:], gold), grace=_GRACE)
        for text, gold in zip(texts, golds, strict=True)
    ]
    outcomes = shared_pool().run(tasks, deadline=_SECONDS)
    return [tuple(o.value) if o.status == "ok" else (0.0, "[failed]", f"[{o.reason}]") for o in outcomes]


def compare(text: str, gold: str) -> Compared:
    """What math-verify says of one answer, with the settings of TRL and open-r1. Meant for a worker process."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    expected = parse(gold, parsing_timeout=None)
    if not expected:
        return None, "[unparseable]", "[skipped]"
    places = LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(units=True),
        try_extract_without_anchor=False,
    )
    given = parse(text, extraction_config=[places], extraction_mode="first_match", parsing_timeout=None)
    equal = bool(given) and verify(expected, given, timeout_seconds=None)
    return float(equal), str(expected)[:200], str(given)[:200] if given else "[unparseable]"


def warm_up() -> None:
    """Fills math-verify's tables in a worker, outside of any deadline."""
    compare(r"\boxed{\frac{1}{2}}", "1/2")


@within(-0.5, 0.5)
def len_reward(completions: Completions, solution: Sequence[Any], **kwargs: Any) -> list[float]:
    r"""Kimi k1.5's length reward (2501.12599, 2.3.3), from 0.5 for the shortest to -0.5 for the longest (open-r1).

    λ = 0.5 - (length - shortest) / (longest - shortest) for correct answers, min(0, λ) for wrong ones, 0.0 where all are
    of one length. Where math-verify cannot read the solution the answer counts as correct.

    Different from open-r1: lengths are compared within the completions of one prompt, as in the paper, where `prompts`
    are given (trainers do), not over the whole batch; lengths are tokens where `completion_ids` are given, else
    characters; plain numbers and fractions (`63/400`) are solutions that can be read.

    >>> len_reward([r"\boxed{3}", r"It is \boxed{3}", r"Well, it is \boxed{4}"], ["3", "3", "3"])
    [0.5, 0.0, -0.5]
    """
    correct = [reward != 0.0 for reward, _, _ in _compared([completion_text(c) for c in completions], solution)]
    sizes = _lengths(completions, kwargs.get("completion_ids"))
    prompts = kwargs.get("prompts") or [""] * len(completions)
    rewards: list[float] = []
    start = 0
    for end in range(1, len(completions) + 1):
        if end < len(completions) and prompts[end] == prompts[start]:
            continue
        shares = [length_share(size, min(sizes[start:end]), max(sizes[start:end])) for size in sizes[start:end]]
        rewards += [share if correct[at] else min(0.0, share) for at, share in enumerate(shares, start)]
        start = end
    return rewards


def get_cosine_scaled_reward(
    max_len: int = 1000,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> "CosineScaledReward":
    r"""Correctness scaled by length along half a cosine (2502.03373, C.1): shorter is better when correct, worse when wrong.

    low + (high - low) / 2 · (1 + cos(π · length / max_len)); (low, high) is (min_value_correct, max_value_correct), or
    (max_value_wrong, min_value_wrong). None where math-verify cannot read the solution.

    Equal to TRL where `completion_ids` are given; without them lengths are characters, as in open-r1. Different from
    open-r1: beyond `max_len` the value stays that of `max_len`, where the cosine would climb again; an unreadable solution is
    None and not 1.0; `max_len` is the first argument, as in TRL: call it by keyword.

    Raises:
        RewardsError: `max_len` is not positive, as when open-r1's order of arguments was used.

    >>> reward = get_cosine_scaled_reward(max_len=100)
    >>> reward([r"\boxed{3}", r"\boxed{4}"], ["3", "3"], completion_ids=[[1] * 50, [1] * 500])
    [0.75, -0.5]
    """
    if not max_len > 0:
        raise RewardsError(f"max_len is {max_len}. Give the length in tokens by keyword: max_len=1000.")
    return CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


@dataclass(frozen=True)
class CosineScaledReward:
    """See `get_cosine_scaled_reward`."""

    max_len: float
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float
    __name__ = "cosine_scaled_reward"

    @property
    def low(self) -> float:
        return min(self.min_value_wrong, self.max_value_wrong, self.min_value_correct, self.max_value_correct)

    @property
    def high(self) -> float:
        return max(self.min_value_wrong, self.max_value_wrong, self.min_value_correct, self.max_value_correct)

    def __call__(
        self,
        completions: Completions,
        solution: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """The scaled value of each completion."""
        compared = _compared([completion_text(completion) for completion in completions], solution)
        sizes = _lengths(completions, completion_ids)
        return [
            None if right is None else self._value(bool(right), length)
            for (right, _, _), length in zip(compared, sizes, strict=True)
        ]

    def _value(self, right: bool, length: int) -> float:
        low, high = (
            (self.min_value_correct, self.max_value_correct) if right else (self.max_value_wrong, self.min_value_wrong)
        )
        return cosine_between(length, self.max_len, at_zero=high, at_max=low)


def get_repetition_penalty_reward(
    ngram_size: int = 3, max_penalty: float = -1.0, language: str = "en"
) -> "RepetitionPenaltyReward":
    r"""max_penalty · (1 - distinct n-grams / n-grams) (2502.03373, C.2); 0.0 where there are fewer than n items.

    Of tokens where `completion_ids` are given (TRL), else of lower-case words (open-r1). The function returned takes
    either as its first argument, too.

    Different from open-r1: tokens are preferred. Without them `language` says how words are found: "en" at white space,
    "zh" with the package jieba.

    Raises:
        RewardsError: a positive penalty, n-grams of no items, another language, or no jieba for "zh".

    >>> reward = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    >>> reward(completion_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5]]), reward(["so it is so it is"])
    ([0.0, -0.75], [-0.4])
    """
    if max_penalty > 0:
        raise RewardsError(
            f"max_penalty {max_penalty} should not be positive: it would reward repetition. Give 0 or less."
        )
    if ngram_size < 1:
        raise RewardsError(f"ngram_size is {ngram_size}. Give 1 or more.")
    if language not in ("en", "zh"):
        raise RewardsError(f"language is {language!r}. Use 'en' or 'zh', and pass completion_ids for other languages.")
    if language == "zh":
        from rewards.components.packages import require

        require("repetition penalty in Chinese", "jieba", "jieba")
    return RepetitionPenaltyReward(ngram_size, max_penalty, language)


@dataclass(frozen=True)
class RepetitionPenaltyReward:
    """See `get_repetition_penalty_reward`."""

    ngram_size: int
    max_penalty: float
    language: str = "en"
    high = 0.0
    __name__ = "repetition_penalty_reward"

    @property
    def low(self) -> float:
        return float(self.max_penalty)

    def __call__(
        self,
        given: Completions | None = None,
        /,
        completions: Completions | None = None,
        completion_ids: Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """The penalty of each completion, 0 or below; `given` is completions, as in open-r1, or token ids, as in TRL."""
        if given is not None and all(_is_ids(each) for each in given):
            completion_ids = given
        completions = completions if given is None else given
        if completion_ids is None and completions is not None and all(_is_ids(each) for each in completions):
            completion_ids = completions
        if completion_ids is not None:
            return [self._value(ids) for ids in completion_ids]
        return [self._value(self._words(completion_text(each)[:MAX_CHARS])) for each in completions or ()]

    def _words(self, text: str) -> list[str]:
        if self.language == "zh":
            import jieba

            return list(jieba.cut(text))
        return text.lower().split()

    def _value(self, items: Sequence[Any]) -> float:
        share = repeated_share(items, self.ngram_size)
        return share * self.max_penalty if share else 0.0


@without_trl
def _get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> "SoftOverlongPunishment":
    r"""0 up to max_completion_len - soft_punish_cache tokens, then falling to -1 at max_completion_len.

    DAPO's soft overlong punishment (2503.14476, eq. 13; TRL, open-r1).

    >>> _get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)(completion_ids=[[1] * 90, [1] * 101])
    [-0.5, -1.0]
    """
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """See `get_soft_overlong_punishment`."""

    max_completion_len: int
    soft_punish_cache: int
    low = -1.0
    high = 0.0
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        """The punishment of each completion."""
        return [overlong_penalty(len(ids), self.max_completion_len, self.soft_punish_cache) for ids in completion_ids]


def _lengths(completions: Completions, completion_ids: Sequence[Sequence[int]] | None) -> list[int]:
    """In tokens where they are known, else in characters."""
    return (
        [len(completion_text(each)) for each in completions]
        if completion_ids is None
        else list(map(len, completion_ids))
    )


def _is_ids(value: Any) -> bool:
    """Whether this is a completion's token ids, not its messages or text."""
    return not isinstance(value, str) and hasattr(value, "__len__") and all(isinstance(item, int) for item in value)
