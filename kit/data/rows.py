"""Converts records to rows: roles of columns, faults of records, and rows for the trainer."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kit.config import DataConfig
from kit.data.images import CUSTOMARY, IMAGES, NONE, digest, folder_of, read_pictures
from kit.errors import DataError
from kit.registry import did_you_mean
from rewards.samples import PROMPT_COLUMNS, REFERENCE_COLUMNS

# --- columns ----------------------------------------------------------------------------------------------------------


# Keyword arguments that trl.GRPOTrainer passes to reward functions. A column of that name would conflict.
TAKEN_BY_TRAINER = frozenset({
    "prompts", "prompt_ids", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
    "environments",
})  # fmt: skip


@dataclass(frozen=True)
class Mapping:
    """Source columns by role. `extras` maps names of the source to names of rows."""

    prompt: str
    reference: str | None
    extras: dict[str, str]
    notes: list[str] = field(default_factory=list)
    images: str | None = None


def map_columns(columns: Sequence[str], config: DataConfig) -> Mapping:
    """The mapping for a source with these columns.

    Raises `DataError` if a column is missing, no column is the prompt, or two columns would have the same name.
    """
    listed, rename = ", ".join(columns) or "none", config.rename
    named = {f"data.{key}": getattr(config, key) for key in ("prompt_column", "reference_column", "image_column")}
    if config.image_column == NONE:
        del named["data.image_column"]
    for key, name in [*named.items(), *(("data.rename", name) for name in rename)]:
        if name is not None and name not in columns:
            raise DataError(f"{key}: there is no column '{name}'.{did_you_mean(name, columns)} Columns seen: {listed}.")
    prompt = config.prompt_column or next((name for name in PROMPT_COLUMNS if name in columns), None)
    if prompt is None:
        near = next((hint for name in PROMPT_COLUMNS if (hint := did_you_mean(name, columns))), "")
        raise DataError(
            f"Which column is the prompt?{near} Columns: {listed}. Known names: {', '.join(PROMPT_COLUMNS)}. Choose a "
            "column with data.prompt_column."
        )
    if config.reference_column == prompt:
        raise DataError(
            f"Column '{prompt}' cannot be both prompt and reference, because the model would see the answer."
        )
    known = (name for name in REFERENCE_COLUMNS if name in columns and name != prompt)
    reference = config.reference_column or next(known, None)
    pictures = [name for name in CUSTOMARY if name in columns and name not in rename]
    images = config.image_column or next(iter(pictures), None)
    images = None if images == NONE else images
    notes = []
    extras: dict[str, str] = {}
    for source_name in columns:
        if source_name not in rename and source_name in (prompt, reference, images, *pictures):
            continue
        name = rename.get(source_name, source_name)
        if name in ("prompt", "reference") or name in TAKEN_BY_TRAINER:
            if source_name in rename:
                raise DataError(
                    f"data.rename: '{source_name}' cannot be renamed to '{name}', because the name is taken. "
                    "To choose prompt and reference, set data.prompt_column and data.reference_column."
                )
            notes.append(f"Column '{source_name}' is not used, because its name is taken. Rename it with data.rename.")
            continue
        if name in extras.values():
            raise DataError(f"data.rename: two columns would have the name '{name}'. Columns: {listed}.")
        extras[source_name] = name
    if unused := [name for name in pictures if name != images]:
        notes.append(
            f"Column '{unused[0]}' is not used, because its name is reserved for pictures. Rename it with data.rename."
        )
    return Mapping(prompt, reference, extras, notes, images)


# --- rows -------------------------------------------------------------------------------------------------------------


SHOWN_IN_ERROR = 10
SHOWN_IN_INFO = 20
UNREADABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that tokenizers and Arrow do not accept: NUL and lone surrogates."""


@dataclass(frozen=True)
class Record:
    """A row of the source. `number` is 1-based: the line of a JSONL file, or the row of other sources."""

    number: int
    values: dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """A row that cannot be used, and the reason."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"row {self.number}: {self.reason}"


@dataclass
class Source:
    """The records of a data source. `records` may be an iterator; `features` are column types of `datasets`."""

    records: Iterable[Record | Fault]
    columns: list[str]
    total: int
    features: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    heldout: int | None = None
    """Number of last records that are held out. None: held-out rows are chosen by a hash."""


@dataclass
class Rows:
    """Valid rows in source order. `keys` identify the prompts, `contents` are the canonical JSON of the rows."""

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

    def text(value: Any) -> str:
        return f"sha256:{hashlib.sha256(value).hexdigest()}" if isinstance(value, bytes) else str(value)

    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=text)


def collect_rows(source: Source, mapping: Mapping, config: DataConfig) -> Rows:
    """The first `config.limit` valid rows of a source, and the faults before them. Later rows are not read."""
    result, known = Rows(), None
    types: dict[str, int] = {}  # types of references and the first row of each
    for record in source.records:
        if config.limit is not None and len(result.rows) == config.limit:
            break
        if isinstance(record, Fault):
            result.faults.append(record)
            continue
        try:
            kind = kind_of(record.values.get(mapping.prompt), mapping.prompt)
            if known not in (kind, None):
                raise ValueError(f"'{mapping.prompt}' is {kind}, while the rows before it have {known}")
            row, key, content = _make_row(record.values, mapping, config)
        except ValueError as error:
            result.faults.append(Fault(record.number, str(error)))
            continue
        known = kind
        if (value := record.values.get(mapping.reference or "")) is not None:
            types.setdefault("number" if type(value) in (int, float) else type(value).__name__, record.number)
        prompt = record.values[mapping.prompt]
        for column, value in ((mapping.reference, row["reference"]), (mapping.prompt, prompt)):
            taken = column in ("prompt", "reference", *mapping.extras.values(), *TAKEN_BY_TRAINER)
            if column is not None and not taken and (value is None or isinstance(value, str)):
                row[column] = value  # reward functions for TRL have parameters with the names of the columns
        result.rows.append(row)
        result.keys.append(key)
        result.contents.append(content)
    if len(types) > 1:
        mixed = ", ".join(f"{name} (first in row {number})" for name, number in types.items())
        mapping.notes.append(
            f"Column '{mapping.reference}' has values of type {mixed}; the reward gets text in all rows."
        )
    return result


def refuse_bad_rows(result: Rows, mapping: Mapping, config: DataConfig) -> None:
    """Raises `DataError` if no row is valid, or if some are invalid and `skip_bad_rows` is off."""
    faults, usable = result.faults, len(result.rows)
    if not faults and not usable:
        raise DataError(f"{config.source} has no rows. A run needs at least one.")
    if not faults or (usable and config.skip_bad_rows):
        return
    lines = [str(fault) for fault in faults[:SHOWN_IN_ERROR]]
    if len(faults) > SHOWN_IN_ERROR:
        lines.append(f"and {len(faults) - SHOWN_IN_ERROR} more")
    advice = (
        "Correct them, or skip them with data.skip_bad_rows: true."
        if usable
        else "No valid row remains. Correct the file, or set the right column with data.prompt_column."
    )
    raise DataError(
        f"{config.source}: {len(faults)} of {len(faults) + usable} rows cannot be used:\n  "
        + "\n  ".join(lines)
        + f"\nThe prompt is read from column '{mapping.prompt}'. {advice}"
    )


def _make_row(values: dict[str, Any], mapping: Mapping, config: DataConfig) -> tuple[dict[str, Any], str, str]:
    """Row, prompt key, canonical content. Raises `ValueError` with the reason if the row cannot be used."""
    prompt, answer = read_prompt(values.get(mapping.prompt), mapping.prompt)
    reference = answer if mapping.reference is None else reference_text(values.get(mapping.reference))
    row: dict[str, Any] = {
        "prompt": dress(prompt, chat=config.chat, system_prompt=config.system_prompt),
        "reference": reference,
    }
    row |= {name: values.get(source_name) for source_name, name in mapping.extras.items()}
    content, image_key = canonical_json(row), ""
    if (column := mapping.images) is not None:
        try:
            row[IMAGES] = read_pictures(values.get(column), column, folder_of(config))
        except ValueError as error:
            advice = f" (data.image_column: none ignores '{column}')" if config.image_column is None else ""
            raise ValueError(f"{error}{advice}") from None
        if row[IMAGES] and not config.chat:
            raise ValueError(f"'{column}' has pictures, but data.chat: false sends plain text; set data.chat: true")
        image_key = digest(row[IMAGES])
        content += image_key
    require_readable(reference or "", mapping.reference or mapping.prompt)
    require_readable(content, "the row")
    return row, prompt_key(prompt, ignore_system=bool(config.system_prompt)) + image_key, content


def require_readable(text: str, column: str) -> None:
    """Raises `ValueError` for characters that tokenizers and Arrow do not accept: NUL and lone surrogates."""
    if match := UNREADABLE.search(text):
        kind = "NUL character" if match[0] == "\0" else "lone surrogate; it is not valid Unicode"
        raise ValueError(f"'{column}' contains a {kind}")


# --- prompts: texts and conversations, checked one by one -------------------------------------------------------------


Message = dict[str, str]
Prompt = str | list[Message]

TEXT, MESSAGES = "text", "a list of messages"
ROLES = ("system", "user", "assistant", "tool")


def kind_of(value: Any, column: str) -> str:
    """`TEXT` or `MESSAGES`. Raises `ValueError` for anything else."""
    if value is None:
        raise ValueError(f"'{column}' is missing or empty")
    if isinstance(value, str):
        return TEXT
    if isinstance(value, list):
        return MESSAGES
    raise ValueError(f"'{column}' is of type {type(value).__name__}; expected text or a list of messages")


def read_prompt(value: Any, column: str) -> tuple[Prompt, str | None]:
    """The checked prompt without a trailing assistant message, and the content of that message or None.

    Messages are reduced to `{"role", "content"}`. Raises `ValueError` with the reason.
    """
    if kind_of(value, column) == TEXT:
        if not value.strip():
            raise ValueError(f"'{column}' is empty")
        require_readable(value, column)
        return value, None
    if not value:
        raise ValueError(f"'{column}' has no messages")
    messages: list[Message] = []
    for place, message in enumerate(value, start=1):
        where = f"message {place} of '{column}'"
        if not isinstance(message, dict):
            raise ValueError(f"{where} is of type {type(message).__name__}; expected an object with role and content")
        for key in ("role", "content"):
            if message.get(key) is None:
                raise ValueError(f"{where} has no {key}")
            if not isinstance(message[key], str):
                raise ValueError(f"{where} has {key} of type {type(message[key]).__name__}; expected text")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ValueError(f"{where} has the role '{role}'; known: {', '.join(ROLES)}")
        if role == "system" and place > 1:
            raise ValueError(f"{where} is a system message; only the first message may be one")
        if role == "user" and not content.strip():
            raise ValueError(f"{where} is empty")
        require_readable(content, column)
        messages.append({"role": role, "content": content})
    answer = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    if not any(message["role"] == "user" for message in messages):
        raise ValueError(f"'{column}' has no user message")
    if messages[-1]["role"] not in ("user", "tool"):
        raise ValueError(
            f"'{column}' ends with two assistant messages"
            if answer is not None
            else f"'{column}' ends with a {messages[-1]['role']} message; a user message should come last"
        )
    return messages, answer


def dress(prompt: Prompt, *, chat: bool, system_prompt: str | None) -> Prompt:
    """The prompt for the model.

    A text becomes a user message; with `chat` off it stays a text. The system prompt is added as the first message, or
    before the text with a blank line. In a conversation, `system_prompt` replaces its system message if it is set. Raises
    `ValueError` for a conversation with `chat` off.
    """
    if not chat:
        if not isinstance(prompt, str):
            raise ValueError("the prompt is a conversation, but data.chat: false sends plain text; set data.chat: true")
        return f"{system_prompt}\n\n{prompt}" if system_prompt else prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not system_prompt:
        return messages
    return [{"role": "system", "content": system_prompt}, *_without_system(messages)]


def prompt_key(prompt: Prompt, *, ignore_system: bool) -> str:
    """A hex digest that is equal for equal prompts.

    A text equals its user message. Space around a message and the Unicode normal form are ignored. `ignore_system`: ignore
    system messages too, because the configured one replaces them.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if ignore_system:
        messages = _without_system(messages)
    plain = [[message["role"], unicodedata.normalize("NFC", message["content"]).strip()] for message in messages]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def reference_text(value: Any) -> str | None:
    """A reference as text: numbers as written in Python, true/false, lists and objects as JSON, None stays None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (bool, list, dict)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _without_system(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message["role"] != "system"]
