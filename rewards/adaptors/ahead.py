"""Parts of a batch, scored in a thread while the trainer is still making the rest."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from rewards.evaluation import Evaluation
from rewards.preset import Preset
from rewards.protocol import Context, Sample, Score
from rewards.samples import same

__all__ = ["Ahead"]


@dataclass(frozen=True)
class _Part:
    samples: Sequence[Sample]
    ctx: Context
    scores: "Future[dict[str, list[Score]]]"


class Ahead:
    """Begins to score parts in their order, one after the other, and gives the whole batch's evaluation.

    The values are those of a batch scored at once, since every component looks at one completion at a time; where one does
    not, nothing is begun. (Limits of seconds for a batch hold for each part.)
    """

    def __init__(self, preset: Preset) -> None:
        self.preset = preset
        self._parts: list[_Part] = []
        self._thread = ThreadPoolExecutor(1, "rewards")  # begins with the first part

    def begin(self, samples: Sequence[Sample], ctx: Context) -> None:
        """Scores the next part of the batch that is being made. Does nothing for a preset that needs whole batches."""
        if not self.preset.itemwise or not samples:
            return
        if self._parts:
            last = self._parts[-1].samples[-1]
            group = last.group_id + (not same(last.prompt, samples[0].prompt))  # equal neighbours are one group
            samples = [
                replace(sample, index=last.index + 1 + place, group_id=group + sample.group_id)
                for place, sample in enumerate(samples)
            ]
        self._parts.append(_Part(samples, ctx, self._thread.submit(self.preset.scores, samples, ctx)))

    def take(self, samples: Sequence[Sample], ctx: Context) -> Evaluation | None:
        """The evaluation of the whole batch out of the parts begun, which are forgotten; waits for the last.

        None where they are not the parts of this very batch.
        """
        parts, self._parts = self._parts, []
        begun = [sample for part in parts for sample in part.samples]
        if not parts or not _are(begun, samples) or any(part.ctx != ctx for part in parts):
            for part in parts:
                part.scores.cancel()
            return None
        found = [part.scores.result() for part in parts]
        joined = {name: [score for scores in found for score in scores[name]] for name in found[0]}
        return self.preset.evaluation(joined, samples, ctx)


def _are(begun: Sequence[Sample], samples: Sequence[Sample]) -> bool:
    """Whether both are the same completions of the same rows."""
    return len(begun) == len(samples) and all(_alike(one, other) for one, other in zip(begun, samples, strict=True))


def _alike(one: Sample, other: Sample) -> bool:
    plainly = ("index", "group_id", "text", "finish_reason")
    if (
        any(getattr(one, name) != getattr(other, name) for name in plainly)
        or one.columns.keys() != other.columns.keys()
    ):
        return False
    pairs = [(one.prompt, other.prompt), (one.messages, other.messages), (one.reference, other.reference)]
    pairs += [(one.token_ids, other.token_ids), (one.prompt_ids, other.prompt_ids), (one.logps, other.logps)]
    pairs += [(value, other.columns[name]) for name, value in one.columns.items()]
    return all(left is right or same(left, right) for left, right in pairs)
