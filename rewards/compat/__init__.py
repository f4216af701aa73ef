r"""The reward functions that people copy between projects, under their own names: TRL's, open-r1's, the notebooks'.

They take the arguments of the originals and return what those return: `list[float | None]`, one per completion, None where
the row cannot be judged. `accuracy_reward`, `reasoning_accuracy_reward`, `think_format_reward` and
`get_soft_overlong_punishment` are TRL's own objects where TRL is installed, and the same computations where it is not. To
train on, the presets are better: they refuse what these pay for (`8=7` for 7, an answer copied from the prompt).

Of the functions that are written here each docstring names the differences from its original; for all of them:

- completions may be strings, lists of messages or None; of several messages the last of the assistant counts;
- nothing that a completion or a reference holds raises or hangs: what cannot be judged scores the lowest value, and a
  comparison that takes over five seconds counts as wrong;
- format checks scan the text once; the originals backtrack for seconds on some texts of a few kilobytes;
- factories return objects that can be pickled, with the `__name__` under which trainers log.

Not here: `ioi_code_reward` and `cf_code_reward` of open-r1. Both need a Piston server with the problem packages of
their contests on it. For problems with inputs and expected outputs there is the preset `code-contest`.

>>> think_format_reward = __getattr__("think_format_reward")  # from rewards.compat import think_format_reward
>>> think_format_reward([[{"role": "assistant", "content": "<think>6 x 12</think>72"}]])
[1.0]
"""

import contextlib
from collections.abc import Callable
from typing import Any

from rewards.compat.answers import OURS, get_cosine_scaled_reward, get_repetition_penalty_reward, len_reward
from rewards.compat.formats import (
    binary_code_reward,
    code_reward,
    correctness_reward_func,
    format_reward,
    get_code_format_reward,
    int_reward_func,
    reasoning_steps_reward,
    soft_format_reward_func,
    strict_format_reward_func,
    tag_count_reward,
    xmlcount_reward_func,
)

__all__ = [
    "accuracy_reward",
    "binary_code_reward",
    "code_reward",
    "correctness_reward_func",
    "format_reward",
    "get_code_format_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "int_reward_func",
    "len_reward",
    "reasoning_accuracy_reward",
    "reasoning_steps_reward",
    "soft_format_reward_func",
    "strict_format_reward_func",
    "tag_count_reward",
    "think_format_reward",
    "xmlcount_reward_func",
]

# TRL's, see __getattr__.
accuracy_reward: Callable[..., list[float | None]]
reasoning_accuracy_reward: Callable[..., list[float | None]]
think_format_reward: Callable[..., list[float]]
get_soft_overlong_punishment: Callable[..., Any]


def __getattr__(name: str) -> Any:
    """TRL's own functions, looked up when they are first asked for: importing this module imports neither TRL nor SymPy."""
    if name not in OURS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with contextlib.suppress(ImportError, AttributeError):
        return getattr(_trl(), name)
    return OURS[name]


def _trl() -> Any:
    from trl import rewards

    return rewards
