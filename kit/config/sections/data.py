"""`data:` prompts and references."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from kit.config.sections.base import Section


class DataConfig(Section):
    """Prompts and references."""

    source: str = "reasoning-gym:chain_sum"
    """`reasoning-gym:TASK`, a .jsonl/.json/.csv/.parquet file, a folder of them, a saved `datasets` folder, or a
    hub id."""
    subset: str | None = None
    """Configuration of a hub dataset, e.g. `main` for openai/gsm8k."""
    split: str = "train"
    """Split of a hub dataset that rows are taken from."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""
    task_params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of a reasoning-gym task, e.g. {min_terms: 2, max_terms: 3}."""
    prompt_column: str | None = None
    """Column with the prompt: a text, or a list of chat messages. Null: prompt, question, problem,
    messages, instruction or input."""
    reference_column: str | None = None
    """Column with the reference answer. Null: reference, answer, solution, target, label or gold;
    a dataset may have none."""
    image_column: str | None = None
    """Column with the pictures of a prompt: a path (from the source's folder), bytes, or a list of these. Null: images or
    image; `none`: such a column is left out."""
    rename: dict[str, str] = Field(default_factory=dict)
    """Further columns to hand to the reward under another name: {theirs: ours}."""
    system_prompt: str | None = None
    """Put before every conversation. Null: none is added."""
    chat: bool = True
    """Wrap text prompts as a user message, so that the chat template applies. False sends the text as it is."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Rows to use at most, train and held-out together, after reading."""
    heldout: Annotated[int, Field(ge=0)] = 200
    """Rows set apart for evaluation, chosen by a hash of their content: the same row never stands on both sides."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = 512
    """Prompts longer than this many tokens are left out, and counted. Null: no filter."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be used instead of refusing to start; how many is reported."""
    seed: int = 0
    """Seed of generated tasks and of the order of rows, apart from the run's seed: arms of a comparison share rows."""
