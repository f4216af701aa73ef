"""Does the answer mean what the reference means?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rewards.components.local_models import Loaded
from rewards.components.readable import adds_alternatives, numbers, readable, words
from rewards.components.text_model import Measured, TextModelComponent, reference_texts
from rewards.protocol import Sample, Score

__all__ = ["SemanticSimilarity"]

Question: TypeAlias = tuple[str, tuple[str, ...]]
_RATIO, _SPARE = 3, 10
_SHORT = 5  # words; behind so short a reference an enumeration is a list of guesses


@dataclass(frozen=True, kw_only=True)
class SemanticSimilarity(TextModelComponent[Question]):
    """max(0, cos(answer, reference)) of mean-pooled sentence embeddings; the best of several references.

    `ok` from `threshold` on, else `wrong` with the similarity as partial credit. With `guard`, answers that name a
    number the reference does not, keep alternatives open (`or`, `=`, `/`) or are over three times as long are `wrong`
    at the floor: embeddings hardly see those. A row without a reference is `not_applicable`.
    """

    name: str = "similarity"
    threshold: float = 0.8
    guard: bool = True

    def question(self, sample: Sample) -> Question | Score:
        references = reference_texts(sample.reference)
        if references is None:
            return Score(None, "not_applicable", {"reason": "no reference"})
        found = readable(sample.whole, min_words=0, prompt=sample.prompt)
        if found.text is None:
            return Score(None, "format", {"reason": found.reason})
        problems = {reference: _problem(found.text, reference) if self.guard else None for reference in references}
        fitting = tuple(reference for reference, problem in problems.items() if problem is None)
        if not fitting:
            return Score(None, "wrong", {"extracted": found.text[:200], "reason": problems[references[0]]})
        return found.text, fitting

    def measure(self, loaded: Loaded, questions: Sequence[Question]) -> list[Measured]:
        texts = list(dict.fromkeys(text for answer, references in questions for text in (answer, *references)))
        vectors, cut = self._embeddings(loaded, texts)
        return [
            Measured(
                max(sum(a * b for a, b in zip(vectors[answer], vectors[r], strict=True)) for r in references),
                {"truncated": True} if cut[answer] else {},
            )
            for answer, references in questions
        ]

    def verdict(self, sample: Sample, measured: Measured) -> Score:
        value = min(1.0, max(0.0, measured.value))
        return Score(value, "ok" if value >= self.threshold else "wrong", measured.info)

    def _embeddings(self, loaded: Loaded, texts: Sequence[str]) -> tuple[dict[str, list[float]], dict[str, bool]]:
        """Unit vectors by text: token means over all windows, as if the text were one; and which were cut short."""
        windows = loaded.windows(texts, max_windows=self.max_windows)
        rows = [row for window in windows for row in window.rows]
        sums = loaded.run(rows, None, self.batch_size, _token_sums)
        vectors, begin = {}, 0
        for text, window in zip(texts, windows, strict=True):
            pooled = sum(sums[begin + 1 : begin + len(window.rows)], sums[begin])
            begin += len(window.rows)
            vectors[text] = (pooled / max(float(pooled.norm()), 1e-12)).tolist()
        return vectors, {text: window.truncated for text, window in zip(texts, windows, strict=True)}


def _token_sums(outputs: Any, inputs: dict[str, Any]) -> list[Any]:
    """Sum of the last hidden states of the real tokens; the mean has the same direction."""
    hidden = outputs.last_hidden_state.double()  # (B, T, H)
    return list((hidden * inputs["attention_mask"].unsqueeze(-1)).sum(dim=1).cpu())  # B x (H,)


def _problem(answer: str, reference: str) -> str | None:
    added = sorted(numbers(answer) - numbers(reference))
    if added:
        return f"number not in the reference: {added[0][:20]}"
    alternative = adds_alternatives(answer, reference)
    if alternative is not None:
        return f"keeps alternatives open: {alternative}"
    short = len(words(reference)) <= _SHORT
    separator = next((sign for sign in ",;\n" if short and sign in answer and sign not in reference), None)
    if separator is not None:
        return f"keeps alternatives open: several separated by {separator!r}"
    if len(words(answer)) > _RATIO * len(words(reference)) + _SPARE:
        return "much longer than the reference"
    return None
