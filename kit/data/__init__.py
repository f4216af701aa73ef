"""Datasets: from a name or file to checked rows `{prompt, reference, ...}`, split without a leak.

    load.py      load_data: the whole way, read this first; the split by a hash of the prompt, rows -> datasets.Dataset
    sources.py   source -> records: files, folders, saved `datasets` folders, hub layout
    tasks.py     reasoning-gym:TASK
    rows.py      which column is the prompt, which the reference; records -> checked rows
    prompts.py   texts, conversations and token ids, checked and dressed with the system prompt
    images.py    pictures beside a prompt

Importing this package is light: `datasets`, `pyarrow` and `reasoning_gym` are imported by the functions that use them.
"""

from kit.data.load import DataSplit, filter_by_length, load_data, preview

__all__ = ["DataSplit", "filter_by_length", "load_data", "preview"]
