"""From records to rows: the roles of columns, records that cannot be used and why, and rows as the trainer gets them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kit.config import DataConfig
from kit.data.images import CUSTOMARY, IMAGES, NONE, digest, folder_of, read_pictures
from kit.data.prompts import (
    check_text,
    dress,
    kind_of,
    prompt_key,
    read_prompt,
    reference_text,
)
from kit.errors import DataError
from kit.registry import did_you_mean

# --- columns ----------------------------------------------------------------------------------------------------------


PROMPTS = ("prompt", "question", "problem", "messages", "instruction", "input")
REFERENCES = ("reference", "answer", "solution", "target", "label", "gold")
# Keyword arguments that trl.GRPOTrainer itself gives to reward functions: a column of that name would break the call.
TAKEN_BY_TRAINER = frozenset(
    (
        "prompts",
        "prompt_ids",
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
    """Source columns by role. `extras` maps their name to ours; `other_prompts` could be the prompt, too."""

    prompt: str
    reference: str | None
    extras: dict[str, str]
    other_prompts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    images: str | None = None

    def prompt_of(self, values: dict[str, Any]) -> tuple[Any, str]:
        """The prompt of a row as text or messages, and its column; None where it has none.

        Of a source with both columns, a row without a `prompt` is asked for its `messages`.
        """
        instead = ["messages"] if self.prompt == "prompt" and "messages" in self.other_prompts else []
        for name in [self.prompt, *instead]:
            if values.get(name) is not None:
                return values[name], name
        return None, self.prompt

    def as_dict(self) -> dict[str, Any]:
        """For data.json: `{prompt, reference, rename}`."""
        return {
            "prompt": self.prompt,
            "reference": self.reference,
            "rename": {source_name: name for source_name, name in self.extras.items() if source_name != name},
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
    others = [name for name in PROMPTS if name in columns and name not in (prompt, reference)]
    return Mapping(prompt, reference, extras, [] if config.prompt_column else others, notes, images)


def _image_column(columns: Sequence[str], config: DataConfig) -> str | None:
    if config.image_column == NONE:
        return None
    if config.image_column is not None:
        _require(config.image_column, columns, "data.image_column")
        return config.image_column
    return next((name for name in CUSTOMARY if name in columns and name not in config.rename), None)


def _prompt_column(columns: Sequence[str], config: DataConfig) -> str:
    if config.prompt_column is not None:
        _require(config.prompt_column, columns, "data.prompt_column")
        return config.prompt_column
    for name in PROMPTS:
        if name in columns:
            return name
    near = next((hint for name in PROMPTS if (hint := did_you_mean(name, columns))), "")
    raise DataError(
        f"No column can be told to be the prompt.{near} Columns seen: {_listed(columns)}. Known names: "
        f"{', '.join(PROMPTS)}. Name yours with data.prompt_column."
    )


def _extra_columns(
    columns: Sequence[str], used: set[str | None], rename: dict[str, str]
) -> tuple[dict[str, str], list[str]]:
    for source_name in rename:
        _require(source_name, columns, "data.rename")
    extras: dict[str, str] = {}
    notes: list[str] = []
    for source_name in columns:
        if source_name not in rename and source_name in used:
            continue
        name = rename.get(source_name, source_name)
        if name in ("prompt", "reference") or name in TAKEN_BY_TRAINER:
            if source_name in rename:
                raise DataError(
                    f"data.rename: '{source_name}' cannot be called '{name}', that name is taken. "
                    "data.prompt_column and data.reference_column choose prompt and reference."
                )
            notes.append(f"Column '{source_name}' is left out: its name is taken. data.rename can give it another.")
            continue
        if name in extras.values():
            raise DataError(f"data.rename: two columns would be called '{name}'. Columns seen: {_listed(columns)}.")
        extras[source_name] = name
    return extras, notes


def _require(name: str, columns: Sequence[str], key: str) -> None:
    if name not in columns:
        raise DataError(
            f"{key}: there is no column '{name}'.{did_you_mean(name, columns)} Columns seen: {_listed(columns)}."
        )


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(columns) or "none"


# --- rows -------------------------------------------------------------------------------------------------------------


SHOWN_IN_ERROR = 10
SHOWN_IN_INFO = 20


@dataclass(frozen=True)
class Record:
    """One row as it was read. `number` is 1-based: the line of a JSONL file, the row of anything else."""

    number: int
    values: dict[str, Any]
    file: str | None = None


@dataclass(frozen=True)
class Fault:
    """One row that cannot be used, and why. `file` is set when the source has several."""

    number: int
    reason: str
    file: str | None = None

    def __str__(self) -> str:
        return f"row {self.number}{f' of {self.file}' if self.file else ''}: {self.reason}"

    def as_dict(self) -> dict[str, Any]:
        """`{row, reason}` and `file` where there are several, for data.json."""
        return {"row": self.number, "reason": self.reason} | ({"file": self.file} if self.file else {})


@dataclass
class Source:
    """The records of a data source. `records` may be a one-way stream; `features` are column types known to `datasets`."""

    records: Iterable[Record | Fault]
    columns: list[str]
    total: int
    features: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    heldout: int | None = None
    """The last so many records are the held-out side. None: the held-out rows are chosen by a hash."""


@dataclass
class Rows:
    """Usable rows in source order. `keys` identify the prompt, `contents` are the canonical JSON of the row."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def sha256(self) -> str:
        """Hex digest of the canonical content of all rows in order."""
        digest = hashlib.sha256()
        for content in self.contents:
            digest.update(content.encode() + b"\n")
        return digest.hexdigest()


def canonical_json(value: Any) -> str:
    """JSON that is equal for equal content: sorted keys, no spaces, bytes as their digest, other objects as text."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_json_value)


def collect_rows(source: Source, mapping: Mapping, config: DataConfig) -> Rows:
    """The first `config.limit` usable rows of a source, and the faults met on the way. Later rows are not looked at."""
    result, kinds = Rows(), dict[str, str]()
    for record in source.records:
        if config.limit is not None and len(result.rows) == config.limit:
            break
        if isinstance(record, Fault):
            result.faults.append(record)
            continue
        try:
            value, column = mapping.prompt_of(record.values)
            kind = kind_of(value, column)
            if kinds.get(column, kind) != kind:
                raise ValueError(f"'{column}' is {kind}, while the rows before it have {kinds[column]}")
            row, key, content = _make_row(record, mapping, config)
        except ValueError as error:
            result.faults.append(Fault(record.number, str(error), record.file))
            continue
        kinds[column] = kind
        result.rows.append(row)
        result.keys.append(key)
        result.contents.append(content)
    return result


def refuse_bad_rows(result: Rows, mapping: Mapping, config: DataConfig) -> None:
    """Raises `DataError` if no row is usable, or if some are not and `skip_bad_rows` is off."""
    faults, usable = result.faults, len(result.rows)
    if not faults and not usable:
        raise DataError(f"{config.source} has no rows. A run needs at least one.")
    if not faults or (usable and config.skip_bad_rows):
        return
    lines = [str(fault) for fault in faults[:SHOWN_IN_ERROR]]
    if len(faults) > SHOWN_IN_ERROR:
        lines.append(f"and {len(faults) - SHOWN_IN_ERROR} more")
    others = f" ({', '.join(mapping.other_prompts)} could be it, too)" if mapping.other_prompts else ""
    advice = (
        "Correct them, or leave them out with --skip-bad-rows (data.skip_bad_rows: true)."
        if usable
        else "No row is left to train on. Correct the file, or name the right column with data.prompt_column."
    )
    raise DataError(
        f"{config.source}: {len(faults)} of {len(faults) + usable} rows cannot be used:\n  "
        + "\n  ".join(lines)
        + f"\nThe prompt is read from column '{mapping.prompt}'{others}. {advice}"
    )


def _make_row(record: Record, mapping: Mapping, config: DataConfig) -> tuple[dict[str, Any], str, str]:
    """Row, prompt key, canonical content. Raises `ValueError` with the reason if the row cannot be used."""
    values = record.values
    text, column = mapping.prompt_of(values)
    prompt, answer = read_prompt(text, column)
    reference = answer if mapping.reference is None else reference_text(values.get(mapping.reference))
    if reference is not None:
        check_text(reference, mapping.reference or column)
    row: dict[str, Any] = {
        "prompt": dress(prompt, chat=config.chat, system_prompt=config.system_prompt),
        "reference": reference,
    }
    row |= {name: values.get(source_name) for source_name, name in mapping.extras.items()}
    content, image_key = canonical_json(row), ""
    if mapping.images is not None:
        row[IMAGES] = _pictures(values.get(mapping.images), mapping.images, config)
        image_key = digest(row[IMAGES])
        content += image_key
    _refuse_surrogates(content, row)
    return row, prompt_key(prompt, ignore_system=bool(config.system_prompt)) + image_key, content


def _pictures(value: Any, column: str, config: DataConfig) -> list[dict[str, Any]]:
    try:
        pictures = read_pictures(value, column, folder_of(config))
    except ValueError as error:
        if config.image_column is None:
            raise ValueError(f"{error} (data.image_column: none leaves '{column}' out)") from None
        raise
    if pictures and not config.chat:
        raise ValueError(f"'{column}' has pictures, and data.chat: false sends plain text; set data.chat: true")
    return pictures


def _refuse_surrogates(content: str, row: dict[str, Any]) -> None:
    try:
        content.encode()
    except UnicodeEncodeError:
        for name, value in row.items():
            check_text(canonical_json(value), name)
        raise ValueError("a column name holds a lone surrogate; it is not valid Unicode") from None


def _json_value(value: Any) -> str:
    if isinstance(value, bytes):
        return "sha256:" + hashlib.sha256(value).hexdigest()
    return str(value)
