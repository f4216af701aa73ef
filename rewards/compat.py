r"""The reward functions that people copy between projects, under their own names: open-r1's, TRL's, the notebooks'.

They take the arguments of the originals and return what those return on ordinary input: `list[float | None]`, one per
completion, None where the row cannot be judged. Each docstring names the differences; these hold for all of them:

- completions may be strings, lists of messages or None; of several messages the last of the assistant counts;
- nothing that a completion or a reference holds raises or hangs: what cannot be judged scores the lowest value, an
  unusable reference gives None (open-r1 gave 1.0), and a judgement that takes over two seconds counts as wrong;
- format checks scan the text once; the originals backtrack for seconds on some texts of a few kilobytes;
- factories return objects that can be pickled, with the `__name__` under which trainers log.

Not here: `ioi_code_reward` and `cf_code_reward` of open-r1. Both need a Piston server with the problem packages of
their contests on it. For problems with inputs and expected outputs there is the preset `code-contest`.

>>> think_format_reward([[{"role": "assistant", "content": "<think>6 x 12</think>72"}], "72"])
[1.0, 0.0]
"""

from rewards._compat.answers import accuracy_reward, get_cosine_scaled_reward, len_reward, reasoning_accuracy_reward
from rewards._compat.code import binary_code_reward, code_reward
from rewards._compat.layouts import (
    format_reward,
    get_code_format_reward,
    reasoning_steps_reward,
    tag_count_reward,
    think_format_reward,
)
from rewards._compat.lengths import get_repetition_penalty_reward, get_soft_overlong_punishment
from rewards._compat.notebooks import (
    correctness_reward_func,
    int_reward_func,
    soft_format_reward_func,
    strict_format_reward_func,
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
