"""From a dataset's name or file to checked rows `{prompt, reference, ...}`, split without a leak.

    load.py      load_data: the whole way, read this first
    formats.py   source -> records; JSONL, JSON, CSV, Parquet
    folders.py   folders of files, saved `datasets` folders, hub layout, hub ids
    tasks.py     reasoning-gym:TASK
    columns.py   which column is the prompt, which the reference, what is renamed
    prompts.py   texts and conversations, checked and dressed with the system prompt
    ids.py       prompts given as token ids
    images.py    pictures beside a prompt
    rows.py      records and faults; records -> rows
    split.py     train and held-out by a hash of the prompt
    table.py     rows -> datasets.Dataset
    vocabulary.py  ids held against the model's tokenizer
    length.py    prompts that are too long

Importing this package is light: `datasets`, `pyarrow` and `reasoning_gym` are imported by the functions that use them.
"""

from kit.data.length import filter_by_length
from kit.data.load import DataSplit, load_data, preview

__all__ = ["DataSplit", "filter_by_length", "load_data", "preview"]
