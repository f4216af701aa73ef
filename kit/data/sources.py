"""Reads the records of `data.source`: a file (JSONL, JSON, CSV, Parquet), a folder, a hub id, or a generated task.

`read_source` chooses the reader. Images and audio are not decoded here.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config import DataConfig
from kit.data.rows import Fault, Mapping, Record, Rows, Source, collect_rows, map_columns, refuse_bad_rows
from kit.errors import DataError
from kit.registry import did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

TASK_PREFIX = "reasoning-gym:"


def read_source(config: DataConfig) -> Source:
    """The records of `config.source`. Raises `DataError` if it is missing or cannot be read."""
    if config.source.startswith(TASK_PREFIX):
        from kit.data.tasks import read_task

        return read_task(config.source.removeprefix(TASK_PREFIX), config)
    if config.source == SENTENCES:
        return read_sentences(config)
    path = Path(config.source).expanduser()
    try:
        if path.is_dir():
            return read_folder(path, config)
        if path.is_file():
            return read_file(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    return read_hub(config.source, config)


def read_valid_rows(config: DataConfig) -> tuple[Source, Mapping, Rows]:
    """The source, the roles of its columns, and its valid rows in source order. Raises as `load_data`."""
    source = read_source(config)
    if not source.columns:  # no row could be read, so there are no columns to map
        faults = [
            Fault(record.number, "the row has no columns") if isinstance(record, Record) else record
            for record in source.records
        ]
        refuse_bad_rows(Rows(faults=faults), Mapping("prompt", None, {}), config)
    mapping = map_columns(source.columns, config)
    result = collect_rows(source, mapping, config)
    refuse_bad_rows(result, mapping, config)
    return source, mapping, result


# --- files ------------------------------------------------------------------------------------------------------------


def read_file(path: Path) -> Source:
    """The records of a file. Raises `DataError` for an unknown format."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        kind = path.suffix or "no suffix"
        sheet = " Save a spreadsheet as CSV UTF-8." if kind in (".xlsx", ".xls", ".ods") else ""
        raise DataError(f"{path}: files of type '{kind}' are not supported. Types: {', '.join(READERS)}.{sheet}")
    source = reader(path)
    source.files = [path.name]
    return source


def read_jsonl(path: Path) -> Source:
    """Reads one JSON object per line and skips blank lines. Invalid lines are faults with their line numbers."""
    records: list[Record | Fault] = []
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(_as_record(json.loads(line.decode()), number))
        except UnicodeDecodeError:
            records.append(Fault(number, "the line is not UTF-8"))
        except json.JSONDecodeError as error:
            records.append(Fault(number, f"broken JSON: {error.msg} at column {error.colno}"))
        except (ValueError, RecursionError) as error:
            records.append(Fault(number, f"broken JSON: {error}"))
    return _listed(records)


def read_json(path: Path) -> Source:
    """Reads a list of JSON objects. Raises `DataError` for other content."""
    text = _read_text(path)
    if not text.strip():
        return _listed([])
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        lines = " It looks like JSON Lines: rename it to .jsonl." if text.lstrip().startswith("{") else ""
        raise DataError(f"{path} is not valid JSON: {error}.{lines}") from None
    if not isinstance(items, list):
        keys = f" with the keys {', '.join(items)}" if isinstance(items, dict) else ""
        raise DataError(f"{path} contains a {type(items).__name__}{keys}; expected a list of objects.")
    return _listed([_as_record(item, number) for number, item in enumerate(items, start=1)])


def read_csv(path: Path) -> Source:
    """Reads UTF-8 with a header line, separated by commas, or by semicolons or tabs if the header has no comma.

    Values are text; an empty one is None. Row 1 follows the header."""
    text = _read_text(path)
    first = text.partition("\n")[0]
    # Excel writes semicolons if the decimal separator is a comma.
    separator = "," if "," in first else next((sign for sign in ";\t" if sign in first), ",")
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    records: list[Record | Fault] = []
    header: list[str] = []
    begun = 1
    try:
        header = next(rows, [])
        begun = rows.line_num + 1
        for number, row in enumerate((row for row in rows if row), start=1):
            if len(row) == len(header):
                records.append(Record(number, {name: text or None for name, text in zip(header, row, strict=True)}))
            else:
                records.append(Fault(number, f"{len(row)} values, but the header has {len(header)} columns"))
            begun = rows.line_num + 1
    except csv.Error as error:
        reason = "a quote is opened there but not closed" if "unexpected end" in str(error) else str(error)
        raise DataError(
            f"{path} is not valid CSV near line {begun}: {reason}. A quote inside a quoted text is written twice; JSONL has no "
            "such rules."
        ) from None
    if len(set(header)) < len(header):
        raise DataError(f"{path} has two columns with the same name: {', '.join(header)}.")
    return Source(records, header, len(records))


def read_parquet(path: Path) -> Source:
    """Reads Parquet in batches. Column types of `datasets` are kept."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Features

    try:
        with pq.ParquetFile(path) as parquet:
            schema, total = parquet.schema_arrow, parquet.metadata.num_rows
    except pa.ArrowException as error:
        raise DataError(f"{path} is not valid Parquet: {error}.") from None
    try:
        features = dict(Features.from_arrow_schema(schema))
    except (TypeError, ValueError):  # an Arrow type without a `datasets` feature
        features = {}

    def batches() -> Iterator[Any]:
        try:
            with pq.ParquetFile(path) as parquet:
                yield from parquet.iter_batches(BATCH)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is damaged: {error}.") from None

    return Source(arrow_records(batches(), features), schema.names, total, storable(features))


READERS: dict[str, Callable[[Path], Source]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}


def _as_record(item: Any, number: int) -> Record | Fault:
    if isinstance(item, dict):
        return Record(number, item)
    return Fault(number, f"a JSON {type(item).__name__}; expected an object with named columns")


def _listed(records: list[Record | Fault]) -> Source:
    columns = dict.fromkeys(name for record in records if isinstance(record, Record) for name in record.values)
    return Source(records, list(columns), len(records))


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path} is not UTF-8 at byte {error.start}, in line {line}. Save the whole file as UTF-8."
        ) from None


# --- folders ----------------------------------------------------------------------------------------------------------


def read_folder(path: Path, config: DataConfig) -> Source:
    """The records of a folder: a saved dataset, or data files for `datasets`. Raises `DataError`."""
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        from datasets import DatasetDict, load_from_disk

        try:
            saved: Any = load_from_disk(str(path))
        except Exception as error:  # a damaged folder may raise any error
            raise DataError(f"{path} looks like a saved dataset, but cannot be loaded: {error}") from error
        if isinstance(saved, DatasetDict):
            if config.split not in saved:
                near = did_you_mean(config.split, saved)
                raise DataError(f"data.split: {path} has no split '{config.split}'.{near} Splits: {', '.join(saved)}.")
            saved = saved[config.split]
        return source_from_dataset(saved, [path.name])
    return read_hub(str(path.resolve()), config)


# --- hub layout -------------------------------------------------------------------------------------------------------


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


def read_hub(source: str, config: DataConfig) -> Source:
    """Loads one split of a dataset with `datasets.load_dataset`, which downloads it if necessary.

    source: a folder (absolute), or a hub id. Raises `DataError`, with similar names if the source is neither.
    """
    path = Path(source).expanduser()
    is_file = path.suffix.lower() in READERS or source.startswith((".", "~")) or "\\" in source or source.count("/") > 1
    if not path.is_dir() and (is_file or path.is_absolute()):
        folder, names = path.parent, _data_names(path.parent)
        if not folder.is_dir():
            raise DataError(f"data.source: there is no file {path}; its folder {folder} does not exist either.")
        files = [name for name in names if not (folder / name).is_dir()]
        listed = f" Data files in {folder}: {', '.join(files[:10])}." if files else ""
        relative = "" if path.is_absolute() else " The path is relative to the current folder."
        near = did_you_mean(path.name, names)
        raise DataError(f"data.source: there is no file or folder {path}.{relative}{near}{listed}")
    if not path.is_dir() and not HUB_ID.fullmatch(source):
        near = did_you_mean(source.partition(":")[0] + ":", [TASK_PREFIX]) if ":" in source else ""
        raise DataError(
            f"data.source: '{source}' is not a file, a folder or a hub id.{near} Expected "
            f"{TASK_PREFIX}TASK, a {', '.join(READERS)} file, a folder, or owner/name."
        )
    from datasets import Dataset, load_dataset

    try:
        dataset = load_dataset(source, config.subset, split=config.split, revision=config.revision)
    except Exception as error:  # parsers and the network may raise any error
        raise DataError(_explain(error, source, config)) from error
    if not isinstance(dataset, Dataset):
        raise DataError(f"data.split: '{config.split}' of {config.source} is not a single split; set one, e.g. train.")
    return source_from_dataset(dataset, [])


def _data_names(folder: Path) -> list[str]:
    """Names in a folder that could be a source; none if the folder does not exist."""
    if not folder.is_dir():
        return []
    children = [child for child in folder.iterdir() if not child.name.startswith(".")]
    return sorted(child.name for child in children if child.is_dir() or child.suffix.lower() in READERS)


def _explain(error: Exception, source: str, config: DataConfig) -> str:
    """A message about what was tried, what failed and what to do."""
    split = f"split '{config.split}'" + (f" of subset '{config.subset}'" if config.subset else "")
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if error.__cause__ is not None and type(error).__name__.startswith("DatasetGeneration"):
        reason += f" ({str(error.__cause__).strip().partition(chr(10))[0]})"
    if Path(source).is_absolute():
        return (
            f"{split} of the folder {config.source} could not be loaded as a dataset: {reason}\n"
            "Check data.split and data.subset, or use one of its files as data.source."
        )
    from kit.data.tasks import task_names

    near = did_you_mean(Path(source).name, _data_names(Path(source).parent))
    if "/" not in source and source in task_names():
        near += f" Did you mean '{TASK_PREFIX}{source}'?"
    failed = f"{split} of the hub dataset could not be loaded"
    remedy = "Check data.subset, data.split and data.revision on its page"
    if isinstance(error, ConnectionError):
        failed = "The hub is not reachable"
        remedy = "Check the connection (and HF_HUB_OFFLINE), or download it elsewhere and set data.source to its folder"
    elif type(error).__name__ == "DatasetNotFoundError":
        failed = "The hub has no dataset of that name, or it is private or gated"
        remedy = "Check the name; for a private one, log in with `hf auth login`"
    local = f"There is no file or folder '{source}' in {Path.cwd()}.{near} It was treated as a hub id."
    return f"{local} {failed}: {reason}\n{remedy}."


# --- Arrow ------------------------------------------------------------------------------------------------------------


BATCH = 1000


def source_from_dataset(dataset: Dataset, files: list[str]) -> Source:
    """The records of a `datasets.Dataset`. Class labels are converted to their names."""
    features = dict(dataset.features)
    batches = dataset.with_format("arrow").iter(BATCH)
    return Source(
        records=arrow_records(batches, features),
        columns=list(dataset.column_names),
        total=len(dataset),
        features=storable(features),
        files=files,
    )


def arrow_records(batches: Iterable[Any], features: dict[str, Any]) -> Iterator[Record]:
    """One record per row, numbered from 1. batches: `pyarrow` tables or record batches."""
    decoders = {name: decoder for name, feature in features.items() if (decoder := _decoder(feature))}
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            for name, decoder in decoders.items():
                values[name] = decoder(values[name])
            yield Record(number, values)


def storable(features: dict[str, Any]) -> dict[str, Any]:
    """The feature types that `arrow_records` does not decode."""
    return {name: feature for name, feature in features.items() if _decoder(feature) is None}


def _decoder(feature: Any) -> Callable[[Any], Any] | None:
    from datasets import ClassLabel, Features

    if isinstance(feature, ClassLabel):
        return lambda value: None if value is None or value < 0 else feature.int2str(value)
    # `datasets` stores objects of mixed shape as JSON text, possibly inside lists. Use its decoder.
    if "Json(" in repr(feature):
        column = Features({"column": feature})
        return lambda value: None if value is None else column.decode_example({"column": value})["column"]
    return None


# --- generated sentences ----------------------------------------------------------------------------------------------


SENTENCES = "kit:sentence-to-json"
TRAIN_ROWS = 2000
"""Number of training rows if `data.limit` is null."""
HELDOUT_SHARE = 4
"""One in this many names and cities occurs only in held-out rows."""
COLUMNS = ["prompt", "reference", "schema"]
PROMPT = "Write this as JSON with the keys name, age and city: {sentence}"
SCHEMA = json.dumps({
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
})  # fmt: skip
NAMES = """Ada Alan Amir Anna Arjun Astrid Bella Bruno Carla Cem Chloe Clara Daniel Dilara Diego Elif Elena Emil Erik Eva Farah
Felix Fiona Greta Hana Hugo Ida Imran Ines Ivan Jana Jonas Julia Kaito Karim Lars Laura Lena Leo Lina Luca Maja Marco Maria Mei
Mila Nadia Nina Noah Nora Olga Omar Oscar Paula Pedro Petra Rosa Samir Sara Sven Tara Theo Tom Vera Wei Yara Yusuf Zoe"""
CITIES = """Accra Athens Basel Berlin Bilbao Bogota Boston Bremen Cairo Chicago Dakar Delhi Denver Dublin Dubai Florence Geneva
Ghent Hamburg Hanoi Helsinki Istanbul Jakarta Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid Manila Miami Milan Munich Nairobi
Naples Nice Osaka Oslo Ottawa Paris Perth Porto Prague Quito Riga Rome Seattle Seoul Seville Sofia Split Sydney Tallinn Tokyo
Toronto Tunis Turin Utrecht Valencia Vienna Vilnius Warsaw York Zagreb Zurich"""
FORMS = (
    "{name}, who is {age}, lives in {city}.",
    "{name} is {age} years old and comes from {city}.",
    "{name} ({age}) works in {city}.",
    "In {city} lives {name}, aged {age}.",
    "I met {name} in {city}; {name} is {age}.",
    "The {age}-year-old {name} is visiting {city}.",
    "{name} from {city} turned {age} last week.",
    "At the age of {age}, {name} moved to {city}.",
)
HELDOUT_FORMS = (
    "Our neighbour {name} grew up in {city} and is now {age}.",
    "{city} is home to {name}, a {age}-year-old baker.",
)
"""Forms that only held-out rows have, every second one."""


def read_sentences(config: DataConfig) -> Source:
    """Training rows, then `config.heldout` rows with other names and cities, and every second one with another form.

    There are `config.limit` rows in total, or 2000 plus the held-out ones. The same seed gives the same rows.
    """
    chance = random.Random(f"sentences {config.seed}")
    names, cities = NAMES.split(), CITIES.split()
    chance.shuffle(names)
    chance.shuffle(cities)
    apart_names, apart_cities = len(names) // HELDOUT_SHARE, len(cities) // HELDOUT_SHARE
    total = config.limit or TRAIN_ROWS + config.heldout
    heldout = min(config.heldout, total // 2)
    train = _rows(chance, names[apart_names:], cities[apart_cities:], [FORMS], total - heldout)
    heldout_rows = _rows(chance, names[:apart_names], cities[:apart_cities], [FORMS, HELDOUT_FORMS], heldout)
    records = [Record(number, row) for number, row in enumerate([*train, *heldout_rows], start=1)]
    notes = [
        f"Held-out rows have names and cities that are not in the training rows; two of their {len(FORMS) + 2} forms are new."
    ]
    return Source(records, COLUMNS, len(records), notes=notes * bool(heldout), heldout=heldout)


def _rows(
    chance: random.Random, names: Sequence[str], cities: Sequence[str], forms: Sequence[Sequence[str]], count: int
) -> list[dict[str, str]]:
    """`count` different rows. The lists in `forms` are used in turn."""
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        person = {"name": chance.choice(names), "age": chance.randint(18, 90), "city": chance.choice(cities)}
        sentence = chance.choice(forms[len(rows) % len(forms)]).format(**person)
        rows[sentence] = {"prompt": PROMPT.format(sentence=sentence), "reference": json.dumps(person), "schema": SCHEMA}
    return list(rows.values())
