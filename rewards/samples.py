"""Build samples from a trainer's batch."""

from collections.abc import Mapping, Sequence
from typing import Any

from rewards.errors import RewardsError
from rewards.protocol import Sample

# Columns that may hold the prompt and the reference, in the order of preference.
PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "instruction", "query", "input")
REFERENCE_COLUMNS = ("reference", "answer", "solution", "ground_truth", "target", "label", "gold")


def build_samples(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    reference_column: str | None = None,
    prompt_ids: Sequence[Sequence[int] | None] | None = None,
    logps: Sequence[Sequence[float] | None] | None = None,
    **columns: Sequence[Any],
) -> list[Sample]:
    """Build samples for a batch of B completions.

    Args:
        prompts: B prompts, strings or lists of messages. Consecutive equal prompts form a group.
        completions: B completions, strings or lists of messages.
        completion_ids: B lists of token ids, or None if they are not known.
        reference_column: column that holds the reference; by default the first of `REFERENCE_COLUMNS` in `columns`.
        prompt_ids: B lists of the prompts' token ids, or None if they are not known.
        logps: B lists of the sampling log-probabilities of `completion_ids` (nats), or None if they are not known.
        columns: dataset columns, each of length B; `finish_reason` is taken from the column of that name.

    Raises:
        RewardsError: lengths differ, or `reference_column` is not among the columns.
    """
    size = len(prompts)
    lengths = {"completions": len(completions)} | {name: len(column) for name, column in columns.items()}
    tokens: dict[str, Sequence[Any] | None] = {
        "completion_ids": completion_ids,
        "prompt_ids": prompt_ids,
        "logps": logps,
    }
    lengths |= {name: len(column) for name, column in tokens.items() if column is not None}
    uneven = {name: length for name, length in lengths.items() if length != size}
    if uneven:
        raise RewardsError(f"{size} prompts, but {uneven}. Pass one value per completion in every column.")
    if reference_column is None:
        reference_column = next((name for name in REFERENCE_COLUMNS if name in columns), None)
    elif reference_column not in columns:
        listed = ", ".join(columns) or "none"
        raise RewardsError(f"No column {reference_column!r} to take the reference from. Columns: {listed}.")
    samples: list[Sample] = []
    group = -1
    known_tokens = {name: column for name, column in tokens.items() if column is not None}
    previous: Any = None
    for index, prompt in enumerate(prompts):
        group += index == 0 or not (prompt is previous or same(prompt, previous))
        previous = prompt
        row = {name: column[index] for name, column in columns.items()}
        reference = row[reference_column] if reference_column else None
        token_columns: dict[str, Any] = {name: column[index] for name, column in known_tokens.items()}
        samples.append(make_sample(prompt, completions[index], reference, row, index, group, **token_columns))
    return samples


def make_sample(
    prompt: Any,
    completion: Any,
    reference: Any,
    columns: Mapping[str, Any],
    index: int = 0,
    group_id: int = 0,
    *,
    completion_ids: Sequence[int] | None = None,
    prompt_ids: Sequence[int] | None = None,
    logps: Sequence[float] | None = None,
    n_tokens: int | None = None,
) -> Sample:
    """Build one sample.

    Trainers that know the length of the completion but not its ids pass `n_tokens`. Arrays and numpy numbers in reference and
    columns, which come from Parquet files, become lists and Python numbers.
    """
    reference, columns = plain(reference), {name: plain(value) for name, value in columns.items()}
    return Sample(
        index=index,
        group_id=group_id,
        prompt=prompt,
        messages=completion if isinstance(completion, list) else None,
        text=completion_text(completion),
        token_ids=completion_ids,
        n_tokens=len(completion_ids) if completion_ids is not None else n_tokens,
        finish_reason=columns.get("finish_reason"),
        reference=reference,
        columns=columns,
        prompt_ids=prompt_ids,
        logps=logps,
        thinking_opened=columns.get("thinking_opened"),
    )


def plain(value: Any) -> Any:
    """Return the value with arrays and numpy scalars, at any depth, replaced by lists and Python numbers."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if callable(to_list := getattr(value, "tolist", None)) and not isinstance(value, Mapping):
        try:
            return plain(to_list())
        except Exception:  # another class with a method `tolist`
            return value
    if type(value) is dict:
        items = {key: plain(item) for key, item in value.items()}
        return items if any(items[key] is not item for key, item in value.items()) else value
    if type(value) in (list, tuple):
        entries = [plain(item) for item in value]
        return type(value)(entries) if any(new is not old for new, old in zip(entries, value, strict=True)) else value
    return value


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal; compares identities if `==` gives no single truth value, as for arrays."""
    try:
        return bool(left == right)
    except Exception:
        return left is right


def is_column(value: Any, size: int) -> bool:
    """Return whether `value` has `size` entries, one per completion, and is not a text or mapping."""
    return hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping) and len(value) == size


def completion_text(completion: Any) -> str:
    """Return the text to score: the last assistant message, with `reasoning_content` in front as `<think>…</think>`.

    Tool results and earlier turns are not part of the answer. None and values of other types give "".
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list):
        return ""
    turns = [m for m in completion if isinstance(m, Mapping) and m.get("role", "assistant") == "assistant"]
    if not turns:
        return ""
    content = _content_text(turns[-1].get("content"))
    reasoning = turns[-1].get("reasoning_content")
    return f"<think>{reasoning}</think>{content}" if isinstance(reasoning, str) and reasoning else content


def prompt_text(prompt: Any) -> str:
    """Return the text of a prompt: the string, or the contents of its messages, one below the other."""
    if isinstance(prompt, str):
        return prompt
    messages = [message for message in prompt if isinstance(message, Mapping)] if isinstance(prompt, list) else []
    return "\n".join(_content_text(message.get("content")) for message in messages)


def _content_text(content: Any) -> str:
    """Return the text of a message's content: the string, or the text blocks of a list of typed blocks."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [block.get("text") for block in content if isinstance(block, Mapping)]
        return "".join(text for text in texts if isinstance(text, str))
    return ""
