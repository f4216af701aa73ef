"""Short answers: facts, and labels from a fixed set."""

from collections.abc import Sequence

from rewards.components.answers import LabelAccuracy, LabelFormat, ShortAnswer
from rewards.components.tags import ThinkAnswerFormat
from rewards.preset import Preset, Weighted

__all__ = ["classification_label", "qa_short"]


def qa_short(
    *, f1_weight: float = 0.3, format_weight: float = 0.1, style: str = "answer", no_answer: str | None = None
) -> Preset:
    """A short factual answer, right when it equals one of the accepted ones.

    Formula: accuracy + 0.3 f1 + 0.1 format. accuracy is SQuAD's exact match (lower case, without punctuation and the
    articles a, an, the), f1 its overlap of words, each the best over the accepted answers; format is 1 for one think
    and one answer block.
    Range: [0, 1.4].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: text, a number, a list of accepted answers (JSON text
    too), SQuAD's {"text": [...]}, or TriviaQA's {"value", "aliases"}.
    Source: SQuAD (1606.05250) and its evaluation script; F1 as a reward as in R1-Searcher (2503.05592).
    Hacks: several answers at once ("Paris or London", lists, slashes, text over three times as long as the accepted
    answer): exact match fails, and F1 is 0. An empty answer block: no answer. Other numbers that normalisation would
    make equal (-72, 7.2 and 72): where the accepted answer is a number, only the same number counts. The right words
    in another order: F1 stays below 1, accuracy 0.

    Args:
        f1_weight: weight of the overlap of words; 0 leaves it out.
        format_weight: weight of the think and answer blocks; 0 leaves it out, and so does a style other than answer.
        style: where the answer stands: `answer` (tags), `boxed`, `hash`, or `text`, all that follows the thinking.
        no_answer: what to say where the list of accepted answers is empty, as in SQuAD 2.0.

    >>> from rewards import build_samples, load
    >>> texts = [f"<think>?</think><answer>{answer}</answer>" for answer in ("The Eiffel Tower!", "Tower", "A or B")]
    >>> samples = build_samples(["Which tower?"] * 3, texts, reference=[["Eiffel Tower", "La tour Eiffel"]] * 3)
    >>> evaluation = load("qa-short").score(samples)
    >>> [round(total, 6) for total in evaluation.totals], evaluation.statuses["accuracy"]
    ([1.4, 0.3, 0.1], ['ok', 'wrong', 'wrong'])
    """
    components = [Weighted(ShortAnswer(style=style, no_answer=no_answer), 1.0)]
    if f1_weight:
        components.append(Weighted(ShortAnswer(metric="f1", name="f1", style=style, no_answer=no_answer), f1_weight))
    if format_weight and style == "answer":
        components.append(Weighted(ThinkAnswerFormat(), format_weight))
    return Preset(components, name="qa-short", checker="accuracy")


def classification_label(*, labels: Sequence[str] = (), label_weight: float = 0.1, style: str = "answer") -> Preset:
    """One label out of a fixed set.

    Formula: accuracy + 0.1 format. accuracy is 1 when the whole answer is the right label, format is 1 when it is any
    of the labels.
    Range: [0, 1.1].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: the label's name, or its index into the labels;
    `labels` or `choices`: the labels of this row, a list or JSON text, if not given as a parameter.
    Source: exact match over a closed set of answers, the plainest verifiable reward (DeepSeek-R1, 2501.12948, 2.2.2).
    Hacks: naming several labels, or a text that contains the label: the whole answer must be one label. Always the most
    frequent label: nothing in the answer tells, so balance the labels of the data. An answer outside the set: no
    answer, when the labels are known.

    Args:
        labels: the labels, for rows that do not bring their own.
        label_weight: weight of answering with any of the labels; 0 leaves it out.
        style: where the answer stands: `answer` (tags), `boxed`, `hash`, or `text`, all that follows the thinking.

    Raises:
        PresetError: labels that are blank or equal but for case and punctuation.

    >>> from rewards import build_samples, load
    >>> texts = [f"<answer>{answer}</answer>" for answer in ("Positive.", "negative", "positive or negative")]
    >>> samples = build_samples(["How does it sound?"] * 3, texts, reference=["positive"] * 3)
    >>> evaluation = load("classification-label", labels=["positive", "negative"]).score(samples)
    >>> evaluation.totals, evaluation.statuses["accuracy"]
    ([1.1, 0.1, 0.0], ['ok', 'wrong', 'format'])
    """
    components = [Weighted(LabelAccuracy(labels=tuple(labels), style=style), 1.0)]
    if label_weight:
        components.append(Weighted(LabelFormat(labels=tuple(labels), style=style), label_weight))
    return Preset(components, name="classification-label", checker="accuracy")
