"""How sure is a text classifier of a label?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewards.components.local_models import Loaded
from rewards.components.readable import readable
from rewards.components.text_model import Measured, TextModelComponent
from rewards.errors import PresetError, nearest
from rewards.protocol import Sample, Score

__all__ = ["LabelProbability", "Toxicity", "label_indices", "probabilities"]


@dataclass(frozen=True, kw_only=True)
class LabelProbability(TextModelComponent[str]):
    """P(label) of the final text, in [0, 1]; a long text is judged in windows, of which the mean counts.

    `ok` from `threshold` on, else `wrong` with the probability as partial credit. `indices` are the label's places
    among the model's outputs: see `label_indices`. What is no text to judge is `format`; text beyond `max_windows`
    windows is left out, which `truncated` in the info says.
    """

    name: str = "sentiment"
    indices: tuple[int, ...]
    min_words: int = 5

    def question(self, sample: Sample) -> str | Score:
        found = readable(sample.whole, min_words=self.min_words, prompt=sample.prompt)
        return Score(None, "format", {"reason": found.reason}) if found.text is None else found.text

    def measure(self, loaded: Loaded, questions: Sequence[str]) -> list[Measured]:
        windows = loaded.windows(questions, max_windows=self.max_windows)
        chances = loaded.run(
            [row for window in windows for row in window.rows],
            None,
            self.batch_size,
            probabilities(loaded, self.indices),
        )
        results, begin = [], 0
        for window in windows:
            share = chances[begin : begin + len(window.rows)]
            begin += len(window.rows)
            results.append(Measured(self.pooled(share), {"truncated": True} if window.truncated else {}))
        return results

    def pooled(self, chances: Sequence[float]) -> float:
        """One probability for a text out of those of its windows."""
        return sum(chances) / len(chances)

    def verdict(self, sample: Sample, measured: Measured) -> Score:
        return Score(measured.value, "ok" if measured.value >= self.threshold else "wrong", measured.info)


@dataclass(frozen=True, kw_only=True)
class Toxicity(LabelProbability):
    """1 while P(toxic) of every window stays below `threshold`, else 0.

    The worst window counts, and text that the model would not see in full is `format`: neither padding nor length
    hides an insult.
    """

    name: str = "safety"

    def pooled(self, chances: Sequence[float]) -> float:
        return max(chances)

    def verdict(self, sample: Sample, measured: Measured) -> Score:
        info = {**measured.info, "toxicity": measured.value}
        if measured.info.get("truncated"):
            return Score(None, "format", {**info, "reason": "longer than the classifier reads"})
        return Score(self.high, "ok", info) if measured.value < self.threshold else Score(None, "wrong", info)


def label_indices(config: Mapping[str, Any], labels: str | Sequence[str], model: str) -> tuple[int, ...]:
    """Places of `labels` (any case) among a classifier's outputs.

    Raises:
        PresetError: the model's configuration has no such label.
    """
    listed = config.get("id2label") or {}
    known = {str(label).casefold(): int(index) for index, label in listed.items()}
    asked = [labels] if isinstance(labels, str) else list(labels)
    for label in asked:
        if label.casefold() not in known:
            hint = nearest(label, map(str, listed.values()))
            raise PresetError(f"Model {model!r} has no label {label!r}. {hint}")
    if not asked:
        raise PresetError(f"Give at least one label of model {model!r}: {', '.join(map(str, listed.values()))}.")
    return tuple(known[label.casefold()] for label in asked)


def probabilities(loaded: Loaded, indices: Sequence[int]) -> Callable[[Any, dict[str, Any]], list[float]]:
    """P of `indices` per row: their sum under softmax; the highest where each label is a yes-or-no of its own."""
    config = loaded.model.config
    independent = config.problem_type == "multi_label_classification" or config.num_labels == 1

    def reduce(outputs: Any, inputs: dict[str, Any]) -> list[float]:
        logits = outputs.logits.double()  # (B, labels)
        if independent:
            return [float(value) for value in logits.sigmoid()[:, list(indices)].amax(dim=-1)]
        return [float(value) for value in logits.softmax(dim=-1)[:, list(indices)].sum(dim=-1)]

    return reduce
