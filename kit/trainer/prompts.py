"""The prompt half of a rollout: rows that carry ids are given to the model as they are, and rewards see all ids.

TRL renders and tokenises every prompt. A row with `prompt_ids` (a list of ints) goes past that: its ids are generated
from and scored, also where its text would be tokenised otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kit.data.images import IMAGES
from kit.data.rows import IDS
from kit.errors import DataError

_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is


class PromptSide(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, just before TRL's class."""

    _rows: Sequence[dict[str, Any]] = ()  # those whose completions are being made
    _prompt_ids: list[list[int]] | None = None  # of the last completions that were made
    _tool_mask: list[list[int]] | None = None  # likewise: 1 for the policy's tokens, 0 for those of a tool

    @contextmanager
    def _generating_for(self, rows: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Inside, prompts are those of `rows`, in this order."""
        before, self._rows = self._rows, rows
        try:
            yield
        finally:
            self._rows = before

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with self._generating_for(inputs):
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return output

    def _generate(self, prompts: list[Any]) -> Any:
        result = super()._generate(prompts)
        self._prompt_ids, self._tool_mask = [list(ids) for ids in result[0]], result[2]
        return result

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], Any, dict[str, Any]]:
        rendered, images, fields = super()._tokenize_prompts(prompts)
        given = [row.get(IDS) for row in self._rows]
        if len(given) != len(prompts) or all(ids is None for ids in given):
            return rendered, images, fields
        if any(row.get(IDS) is not None and row.get(IMAGES) for row in self._rows):
            raise DataError(
                f"A row has both '{IDS}' and '{IMAGES}': where an image stands among the ids is not known. Give it messages and "
                "images, and let the processor make the ids."
            )
        if images is not None or any(not isinstance(values, list) for values in fields.values()):
            raise DataError(
                f"Rows with '{IDS}' and rows with '{IMAGES}' came into one batch, which TRL scores by the rendered text of "
                "every prompt. Train on the two kinds in runs of their own."
            )
        ids = [list(own) if own is not None else list(made) for own, made in zip(given, rendered, strict=True)]
        for prompt, row, own in zip(prompts, self._rows, given, strict=True):
            if own is not None and prompt != row["prompt"]:
                raise DataError(
                    f"The environment's reset() adds to the prompt of a row with '{IDS}', and ids cannot be added to. Return "
                    "None from reset() for such rows, or give them a text prompt."
                )
        per_token = {
            name: [kept if own is None else [0] * len(own) for kept, own in zip(values, given, strict=True)]
            for name, values in fields.items()
        }
        return ids, None, per_token

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Rewards see `prompt_ids` beside `completion_ids`: the ids that the model was given, for every row."""
        seen = self._prompt_ids
        if seen is not None and len(seen) == len(inputs):
            inputs = [{**row, IDS: ids} for row, ids in zip(inputs, seen, strict=True)]
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
