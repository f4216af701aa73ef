"""Does the response follow the row's instructions?"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rewards.components.final_text import check_style, column, find_answer
from rewards.components.ifeval.constraints import CONSTRAINTS, follows
from rewards.errors import PresetError, nearest
from rewards.protocol import Context, ItemComponent, Sample, Score

__all__ = ["InstructionFollowing", "instructions_of", "loose_variants"]

MAX_INSTRUCTIONS = 32


@dataclass(frozen=True, kw_only=True)
class InstructionFollowing(ItemComponent):
    """The share of the row's instructions that the response follows; `ok` only when it follows all of them.

    With `credit="all"` anything less is 0. `loose` judges each instruction on eight versions of the response, too:
    without its first line, without its last line, without asterisks (Markdown emphasis), and all combinations. Blank
    responses follow nothing (`format`); unknown instructions and unusable arguments are `error`.
    """

    name: str = "accuracy"
    loose: bool = False
    credit: Literal["all", "share"] = "all"
    style: str = "text"

    def __post_init__(self) -> None:
        check_style(self.style)
        if self.credit not in ("all", "share"):
            raise PresetError(f"credit is {self.credit!r}. Use all or share.")

    def score_one(self, sample: Sample, ctx: Context) -> Score:
        try:
            instructions = instructions_of(column(sample, "instruction_id_list"), column(sample, "kwargs"))
        except ValueError as failure:
            return Score(None, "error", {"reason": str(failure)[:300]})
        found = find_answer(sample, self.style)
        if found.value is None:
            return Score(None, "format", {"reason": found.reason})
        versions = list(loose_variants(found.value)) if self.loose else [found.value]
        try:
            broken = [name for name, given in instructions if not any(follows(text, name, given) for text in versions)]
        except (TypeError, ValueError, KeyError) as failure:
            return Score(None, "error", {"reason": f"kwargs cannot be used: {failure}"[:300]})
        if not broken:
            return Score(self.high, "ok")
        share = 1.0 - len(broken) / len(instructions)
        return Score(share if self.credit == "share" else None, "wrong", {"reason": f"not {', '.join(broken)}"[:300]})


def instructions_of(ids: Any, kwargs: Any) -> list[tuple[str, dict[str, Any]]]:
    """Pairs of instruction and arguments; None among the arguments is Arrow's filling and is dropped.

    Raises:
        ValueError: not lists of the same length, none at all, or unknown instructions.
    """
    ids, kwargs = _from_json(ids), _from_json(kwargs)
    if isinstance(kwargs, Mapping) or kwargs is None:
        kwargs = [kwargs or {}] * (1 if isinstance(kwargs, Mapping) or not isinstance(ids, list) else len(ids))
    if not isinstance(ids, list | tuple) or not ids or len(ids) > MAX_INSTRUCTIONS:
        raise ValueError("no instructions: give a list of 1 to 32 names in column `instruction_id_list`")
    if not isinstance(kwargs, list | tuple) or len(kwargs) != len(ids):
        raise ValueError(f"column `kwargs` must hold one object for each of the {len(ids)} instructions")
    pairs = []
    for name, given in zip(ids, kwargs, strict=True):
        given = _from_json(given) or {}
        if name not in CONSTRAINTS:
            raise ValueError(f"unknown instruction {name!r}. {nearest(str(name), CONSTRAINTS)}")
        if not isinstance(given, Mapping):
            raise ValueError(f"arguments of {name} are no object: {given!r}")
        pairs.append((str(name), {str(key): value for key, value in given.items() if value is not None}))
    return pairs


def loose_variants(response: str) -> Iterator[str]:
    """The response with and without its first line, its last line and its asterisks; blank versions are left out."""
    first, last = response.find("\n"), response.rfind("\n")
    cuts = {(0, len(response)): None}
    if first >= 0:
        cuts |= {(first + 1, len(response)): None, (0, last): None}
        if last > first:
            cuts[first + 1, last] = None
    for begin, end in cuts:
        text = response[begin:end].strip()
        if text:
            yield text
        if "*" in text and (plain := text.replace("*", "").strip()):
            yield plain


def _from_json(value: Any) -> Any:
    """JSON text is parsed; a single name stands for a list of one."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.lstrip()[:1] in ("[", "{") else [value]
