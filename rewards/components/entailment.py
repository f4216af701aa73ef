"""Is everything the completion says supported by the row's context?"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rewards.components.classifier import probabilities
from rewards.components.local_models import Loaded
from rewards.components.readable import adds_alternatives, numbers, readable, words
from rewards.components.text_model import Measured, TextModelComponent, reference_texts
from rewards.errors import PresetError
from rewards.protocol import Sample, Score

__all__ = ["AGGREGATES", "CONTEXT_COLUMNS", "Entailment", "sentences"]

# Where the premise is looked for, in this order; then the reference.
CONTEXT_COLUMNS = ("context", "document", "source")
MAX_SENTENCES = 32

Question: TypeAlias = tuple[str, tuple[str, ...]]
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|\n+")
_DOCUMENT = 200  # characters; a shorter context is an answer that may well be given word for word
_FRAGMENT = 3  # words; `Dr.` or `1.` is no claim of its own


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "mean": _mean}


@dataclass(frozen=True, kw_only=True)
class Entailment(TextModelComponent[Question]):
    """P(entailment) of the completion's sentences by the context: best window of the context, worst sentence.

    `aggregate` joins the sentences: `min` or `mean`. `ok` from `threshold` on, else `wrong` with the probability as
    partial credit. With `guard`, a number that the context does not have, `or` and `maybe` where it has none, and the
    whole document said again are `wrong` without asking the model. `index` is the place of the entailment label. A row
    with neither context nor reference is `not_applicable`. A context longer than `max_windows` windows is cut, which
    `truncated` in the info says.
    """

    name: str = "entailment"
    index: int
    aggregate: str = "min"
    context_column: str | None = None
    min_words: int = 5
    guard: bool = True

    def __post_init__(self) -> None:
        if self.aggregate not in AGGREGATES:
            raise PresetError(f"aggregate is {self.aggregate!r}. Use one of: {', '.join(AGGREGATES)}.")

    def question(self, sample: Sample) -> Question | Score:
        context = self._context(sample)
        if context is None:
            return Score(None, "not_applicable", {"reason": "no context and no reference"})
        found = readable(sample.whole, min_words=self.min_words, prompt=sample.prompt)
        if found.text is None:
            return Score(None, "format", {"reason": found.reason})
        problem = _problem(found.text, context) if self.guard else None
        if problem is not None:
            return Score(None, "wrong", {"reason": problem})
        claims = sentences(found.text)
        if len(claims) > MAX_SENTENCES:
            return Score(None, "format", {"reason": f"more than {MAX_SENTENCES} sentences"})
        return context, tuple(claims)

    def measure(self, loaded: Loaded, questions: Sequence[Question]) -> list[Measured]:
        pairs = list(dict.fromkeys((context, claim) for context, claims in questions for claim in claims))
        fits = loaded.n_tokens([claim for _, claim in pairs])
        readable_pairs = [pair for pair, n in zip(pairs, fits, strict=True) if n <= loaded.max_tokens // 2]
        chances, cut = self._chances(loaded, readable_pairs)
        results = []
        for context, claims in questions:
            values = [chances.get((context, claim), 0.0) for claim in claims]
            worst = min(range(len(values)), key=values.__getitem__)
            info: dict[str, Any] = {"sentences": len(claims), "least supported": claims[worst][:200]}
            if any(cut.get((context, claim)) for claim in claims):
                info["truncated"] = True
            results.append(Measured(AGGREGATES[self.aggregate](values), info))
        return results

    def verdict(self, sample: Sample, measured: Measured) -> Score:
        return Score(measured.value, "ok" if measured.value >= self.threshold else "wrong", measured.info)

    def _chances(
        self, loaded: Loaded, pairs: Sequence[tuple[str, str]]
    ) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], bool]]:
        """Best P(entailment) over the windows of the context, and whether some of it was not read."""
        if not pairs:
            return {}, {}
        contexts, claims = [context for context, _ in pairs], [claim for _, claim in pairs]
        windows = loaded.windows(contexts, claims, self.max_windows, stride=loaded.max_tokens // 8)
        values = loaded.run(
            [row for window in windows for row in window.rows],
            [types for window in windows for types in window.types],
            self.batch_size,
            probabilities(loaded, (self.index,)),
        )
        chances, begin = {}, 0
        for pair, window in zip(pairs, windows, strict=True):
            chances[pair] = max(values[begin : begin + len(window.rows)])
            begin += len(window.rows)
        return chances, {pair: window.truncated for pair, window in zip(pairs, windows, strict=True)}

    def _context(self, sample: Sample) -> str | None:
        asked = (self.context_column,) if self.context_column else CONTEXT_COLUMNS
        given = next((sample.columns[name] for name in asked if sample.columns.get(name) is not None), None)
        if given is None and self.context_column is None:
            given = sample.reference
        texts = reference_texts(given)
        return None if texts is None else "\n".join(texts)


def _problem(text: str, context: str) -> str | None:
    added = sorted(numbers(text) - numbers(context))
    if added:
        return f"number not in the context: {added[0][:20]}"
    alternative = adds_alternatives(text, context)
    if alternative is not None:
        return f"keeps alternatives open: {alternative}"
    return "copies the context" if len(context) >= _DOCUMENT and context in text else None


def sentences(text: str) -> list[str]:
    """Sentences and lines of a text; fragments of fewer than three words go with what follows.

    >>> sentences("Dr. Ada wrote it. It was short.\\nNobody minded that.")
    ['Dr. Ada wrote it.', 'It was short.', 'Nobody minded that.']
    """
    found: list[str] = []
    carried = ""
    for part in _SENTENCE_END.split(text):
        carried = f"{carried} {part}".strip()
        if len(words(carried)) >= _FRAGMENT:
            found.append(carried)
            carried = ""
    if carried and found:
        found[-1] = f"{found[-1]} {carried}"
    elif carried:
        found.append(carried)
    return found
