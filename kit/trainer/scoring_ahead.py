"""Overlap: the rewards of one part of a generation batch are computed while the next part is generated.

With `chunks` above 1 a batch is generated in that many parts, each of whole groups. As soon as a part is there, a thread
begins to score it; TRL asks for the rewards of the whole batch afterwards, as ever, and gets them from what was begun. So
what rewards cost (programs that are run, judges that are asked) is hidden behind generation, except for the last part.
Rewards are the same numbers; sampling, however, draws its random numbers part by part, so another number of parts makes
other completions.

In parts are generated: plain text, by transformers' generate. Scored ahead: presets whose components each look at one
completion at a time. Everything else goes on as without parts, or waits for the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kit.data.rows import IDS

_Trainer: Any = object  # what it is mixed into: `trl.GRPOTrainer`, whichever class that is
NOT_COLUMNS = (
    "prompt",
    "completion",
    "completion_ids",
)  # of a row: passed to reward functions under names of their own


class ScoringAheadSide(_Trainer):  # type: ignore[misc]
    """Mixed into `HookedGRPOTrainer`, before what generates."""

    chunks: int = 1
    """Parts of a generation batch in training."""
    _rows: Sequence[dict[str, Any]]

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *rest: Any, **keywords: Any
    ) -> tuple[Any, Any]:
        make = super()._generate_single_turn
        groups = len(prompt_ids) // num_generations
        whole_groups = groups * num_generations == len(prompt_ids)  # two processes may share one
        parts = min(self.chunks, groups) if whole_groups else 1
        if parts < 2 or not self.model.training or not self._may_be_in_parts(prompt_ids, images, multimodal_fields):
            whole: tuple[Any, Any] = make(prompt_ids, images, multimodal_fields, num_generations, *rest, **keywords)
            return whole
        made: list[Any] = []
        for part in range(parts):
            rows = slice(part * groups // parts * num_generations, (part + 1) * groups // parts * num_generations)
            ids, _ = make(prompt_ids[rows], images, multimodal_fields, num_generations, *rest, **keywords)
            self._begin_scoring(self._rows[rows], prompt_ids[rows], ids)
            made += ids
        return made, None

    def _may_be_in_parts(self, prompt_ids: Any, images: Any, multimodal_fields: Any) -> bool:
        """Whether this batch is one of plain text, in the order of its rows, that transformers' generate completes."""
        plain = images is None and not multimodal_fields and self.environments is None and not self.tools
        return plain and len(self._rows) == len(prompt_ids) and not self.use_vllm and self.rollout_func is None

    def _begin_scoring(self, rows: Sequence[dict[str, Any]], prompt_ids: Any, completion_ids: Any) -> None:
        """Hands completions to the reward functions that can begin before the batch is whole, as TRL will hand them over."""
        if getattr(self._tokenizer, "response_template", None) or getattr(self._tokenizer, "response_schema", None):
            return  # what TRL makes of such answers is known only afterwards
        texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        spoken = isinstance(rows[0]["prompt"], list)
        completions = [[{"role": "assistant", "content": text}] for text in texts] if spoken else texts
        given = {name: [row[name] for row in rows] for name in rows[0] if name not in NOT_COLUMNS}
        given |= {IDS: [list(ids) for ids in prompt_ids], "trainer_state": self.state}
        given |= {"log_extra": self._log_completion_extra, "log_metric": self._log_metric}
        for evaluator in {id(one): one for one in map(_evaluator, self.reward_funcs) if one is not None}.values():
            evaluator.begin([row["prompt"] for row in rows], completions, completion_ids, given)


def _evaluator(function: Any) -> Any:
    """What scores a preset's batches, of a reward function that belongs to one."""
    return getattr(function, "_evaluator", None)
