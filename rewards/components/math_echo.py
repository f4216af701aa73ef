r"""Is the answer a copy of what the prompt says? Then the question was boxed, not answered.

>>> is_copied(r"2^{10}", "1024", "What is $2^{10}$?"), is_copied("1024", "1024", "Is 1024 a power of two? Say which number.")
(True, False)
"""

import re
from functools import lru_cache

from rewards.components.math_names import same_text
from rewards.components.math_numbers import decimals, same_number
from rewards.components.math_text import MAX_MATH_CHARS, bare, match_form, plain, split, without_layout

__all__ = ["is_copied"]

_BEFORE, _AFTER = re.compile(r"[A-Za-z0-9\\_.^]$"), re.compile(r"[A-Za-z0-9_^]|\.\d")


def is_copied(answer: str, reference: str, prompt: str) -> bool:
    """Whether `answer` stands in `prompt` and is written otherwise than `reference`.

    Spaces, layout, units, names (`x =`), the order within lists and trailing zeros make no other writing; a fraction in
    the place of a decimal does.
    """
    if not prompt or len(answer) > MAX_MATH_CHARS or _same_writing(plain(reference), plain(answer, letters=True)):
        return False
    return any(_stands_in(text, _squeezed(prompt)) for text in {_squeezed(answer), bare(plain(answer))} if text)


def _same_writing(expected: str, given: str) -> bool:
    one, other = split(expected).parts, split(given).parts
    if sorted(map(match_form, one)) == sorted(map(match_form, other)) or same_text(expected, given):
        return True
    return len(one) == len(other) == 1 and bool(
        same_number(expected, given) and decimals(expected) is not None and decimals(given) is not None
    )


@lru_cache(maxsize=256)
def _squeezed(text: str) -> str:
    return bare(without_layout(text))


def _stands_in(needle: str, text: str) -> bool:
    """As a whole: not `1+2` within `11+2` or `1+23`."""
    at = text.find(needle)
    while at >= 0:
        before, after = text[max(0, at - 1) : at], text[at + len(needle) :][:2]
        if not (needle[0].isalnum() and _BEFORE.match(before)) and not (needle[-1].isalnum() and _AFTER.match(after)):
            return True
        at = text.find(needle, at + 1)
    return False
