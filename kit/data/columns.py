"""Which column is the prompt, which the reference, and under which names the others reach the reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kit.config import DataConfig
from kit.data.images import CUSTOMARY, NONE
from kit.errors import DataError
from kit.registry import did_you_mean

IDS = "prompt_ids"
"""The column whose ids are the prompt, whatever its text; another one by data.rename."""
PROMPTS = ("prompt", "question", "problem", "messages", "instruction", "input")
REFERENCES = ("reference", "answer", "solution", "target", "label", "gold")
# Keyword arguments that trl.GRPOTrainer itself gives to reward functions: a column of that name would break the call.
TAKEN_BY_TRAINER = frozenset(
    (
        "prompts",
        "completion",
        "completions",
        "completion_ids",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
    )
)


@dataclass(frozen=True)
class Mapping:
    """Source columns by role. `extras` maps their name to ours; `other_prompts` could be the prompt, too.

    `ids` holds token ids; with it there may be no prompt.
    """

    prompt: str | None
    reference: str | None
    extras: dict[str, str]
    other_prompts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ids: str | None = None
    images: str | None = None

    def prompt_of(self, values: dict[str, Any]) -> tuple[Any, str]:
        """The prompt of a row as text or messages, and its column; None where it has none.

        Of a source with both columns, a row without a `prompt` is asked for its `messages`.
        """
        instead = ["messages"] if self.prompt == "prompt" and "messages" in self.other_prompts else []
        for name in [self.prompt, *instead]:
            if name is not None and values.get(name) is not None:
                return values[name], name
        return None, str(self.prompt)

    def as_dict(self) -> dict[str, Any]:
        """For data.json: `{prompt, reference, rename}`."""
        return {
            "prompt": self.prompt,
            "reference": self.reference,
            "rename": {theirs: ours for theirs, ours in self.extras.items() if theirs != ours},
            **({"prompt_ids": self.ids} if self.ids is not None else {}),
            **({"images": self.images} if self.images is not None else {}),
        }


def map_columns(columns: Sequence[str], config: DataConfig) -> Mapping:
    """The mapping for a source with these columns.

    Raises `DataError` for a column that is not there, if none can be the prompt, or if two columns would get one name.
    """
    prompt = _prompt_column(columns, config)
    reference = config.reference_column
    if reference is None:
        reference = next((name for name in REFERENCES if name in columns and name != prompt), None)
    else:
        _require(reference, columns, "data.reference_column")
        if reference == prompt:
            raise DataError(
                f"Column '{prompt}' cannot be both prompt and reference: the model would be shown the answer."
            )
    images = _image_column(columns, config)
    named = [name for name in CUSTOMARY if name in columns and name not in config.rename]
    extras, notes = _extra_columns(columns, {prompt, reference, images, *named}, config.rename)
    if left := [name for name in named if name != images]:
        notes.append(f"Column '{left[0]}' is left out: its name means pictures. data.rename can give it another.")
    ids = next((theirs for theirs, ours in extras.items() if ours == IDS), None)
    if ids is not None:
        del extras[ids]
    others = [name for name in PROMPTS if name in columns and name not in (prompt, reference)]
    return Mapping(prompt, reference, extras, [] if config.prompt_column else others, notes, ids, images)


def _image_column(columns: Sequence[str], config: DataConfig) -> str | None:
    if config.image_column == NONE:
        return None
    if config.image_column is not None:
        _require(config.image_column, columns, "data.image_column")
        return config.image_column
    return next((name for name in CUSTOMARY if name in columns and name not in config.rename), None)


def _prompt_column(columns: Sequence[str], config: DataConfig) -> str | None:
    if config.prompt_column is not None:
        _require(config.prompt_column, columns, "data.prompt_column")
        return config.prompt_column
    for name in PROMPTS:
        if name in columns:
            return name
    if IDS in columns or IDS in config.rename.values():
        return None
    near = next((hint for name in PROMPTS if (hint := did_you_mean(name, columns))), "")
    raise DataError(
        f"No column can be told to be the prompt.{near} Columns seen: {_listed(columns)}. Known names: "
        f"{', '.join(PROMPTS)}. Name yours with data.prompt_column."
    )


def _extra_columns(
    columns: Sequence[str], used: set[str | None], rename: dict[str, str]
) -> tuple[dict[str, str], list[str]]:
    for theirs in rename:
        _require(theirs, columns, "data.rename")
    extras: dict[str, str] = {}
    notes: list[str] = []
    for theirs in columns:
        if theirs not in rename and theirs in used:
            continue
        ours = rename.get(theirs, theirs)
        if ours in ("prompt", "reference") or ours in TAKEN_BY_TRAINER:
            if theirs in rename:
                raise DataError(
                    f"data.rename: '{theirs}' cannot be called '{ours}', that name is taken. "
                    "data.prompt_column and data.reference_column choose prompt and reference."
                )
            notes.append(f"Column '{theirs}' is left out: its name is taken. data.rename can give it another.")
            continue
        if ours in extras.values():
            raise DataError(f"data.rename: two columns would be called '{ours}'. Columns seen: {_listed(columns)}.")
        extras[theirs] = ours
    return extras, notes


def _require(name: str, columns: Sequence[str], key: str) -> None:
    if name not in columns:
        raise DataError(
            f"{key}: there is no column '{name}'.{did_you_mean(name, columns)} Columns seen: {_listed(columns)}."
        )


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(columns) or "none"
