"""Where the answer of a free-text preset stands: in tags, in a box, behind hashes, or as all that follows the thinking.

>>> final_text("<think>hm</think> Paris. ")
FinalText(value='Paris.', reason=None)
>>> plain_answer("<answer>Paris</answer>").reason
'stray_tag'
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from rewards.errors import PresetError, nearest
from rewards.extract import MAX_CHARS, Extracted, boxed_answer, hash_answer, tagged_answer
from rewards.protocol import Sample

_INVISIBLE = "\x00\u200b\u200c\u200d\u2060\ufeff"
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class FinalText(NamedTuple):
    """The text, stripped and not blank, or None with the reason why there is none."""

    value: str | None
    reason: str | None = None


def final_text(text: str, max_chars: int = MAX_CHARS) -> FinalText:
    """All that follows the last `</think>`, stripped; not blank, and no thinking block left open."""
    if len(text) > max_chars:
        return FinalText(None, "too_long")
    closed = text.rfind("</think>")
    if text.rfind("<think>") > closed:
        return FinalText(None, "unterminated_think")
    rest = text[closed + len("</think>") if closed >= 0 else 0 :].strip().strip(_INVISIBLE).strip()
    return FinalText(rest) if rest else FinalText(None, "blank")


def plain_answer(text: str, max_chars: int = MAX_CHARS) -> FinalText:
    """`final_text` that holds no think or answer tag: a model that writes tags where none were asked has not answered."""
    found = final_text(text, max_chars)
    if found.value is not None and any(tag in found.value for tag in _TAGS):
        return FinalText(None, "stray_tag")
    return found


STYLES: Mapping[str, Callable[..., Extracted | FinalText]] = MappingProxyType(
    {"answer": tagged_answer, "boxed": boxed_answer, "hash": hash_answer, "text": plain_answer}
)


def check_style(style: str) -> None:
    """
    Raises:
        PresetError: no such style.
    """
    if style not in STYLES:
        raise PresetError(f"style is {style!r}. {nearest(style, STYLES)}")


def find_answer(sample: Sample, style: str) -> Extracted | FinalText:
    """The completion's answer in one of `STYLES`, scanned once however many components ask."""
    return sample.once(STYLES[style])


def column(sample: Sample, *names: str) -> Any:
    """The first of these dataset columns that holds something, or None."""
    return next((value for name in names if (value := sample.columns.get(name)) is not None), None)
