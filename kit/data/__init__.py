"""Datasets: loads checked rows `{prompt, reference, ...}` from a name or file, and splits off held-out rows.

    load.py      load_data (read this first); the split by a hash of the prompt; rows -> datasets.Dataset
    sources.py   source -> records: files, folders, saved `datasets` folders, hub layout
    tasks.py     reasoning-gym:TASK
    rows.py      roles of columns; records -> checked rows
    prompts.py   texts, conversations and token ids, checked and dressed with the system prompt
    images.py    pictures of a prompt

Importing this package is fast: `datasets`, `pyarrow` and `reasoning_gym` are imported by the functions that use them.
"""

from kit.data.load import DataSplit, filter_by_length, load_data, preview

__all__ = ["DataSplit", "filter_by_length", "load_data", "preview"]
