"""Presets for text: similarity to a reference, lengths, instructions, facts, and labels from a fixed set."""

from collections.abc import Sequence

from rewards.components.answers import LabelAccuracy, LabelFormat, ShortAnswer
from rewards.components.ifeval import InstructionFollowing
from rewards.components.lengths import LengthTarget
from rewards.components.overlap import TextOverlap
from rewards.components.tags import TagsFormat
from rewards.preset import Preset, weighted


def text_overlap(*, correct_at: float = 0.5, max_ratio: float = 1.6, style: str = "text") -> Preset:
    """A text that is similar to a reference: a summary, a translation, a long answer.

    Formula: chrF / 100, the F-score over character n-grams of one to six, the best over the references; 0 for more than
    `max_ratio` times the characters of the longest reference.
    Range: [0, 1].
    Checker: overlap, `ok` if the value is at least `correct_at`.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: a text, or a list of them.
    Source: chrF (Popović 2015, aclanthology W15-3049), by the sacrebleu library (1804.08771). Works for any script.
    Attacks: words of the reference without its meaning, and sentences copied from the prompt: they raise the overlap and are
    not detected, so add a judge or a reward model if meaning counts. Several answers in one text, or the prompt itself: 0
    above the length limit. A single word, or random letters: they share few long n-grams.

    Args:
        correct_at: smallest overlap of a correct text.
        max_ratio: length limit, as a multiple of the characters of the longest reference.
        style: place of the text: `text` (all text after the thinking), or `answer` (tags).

    Raises:
        PresetError: sacrebleu is not installed, or a parameter is out of its range.

    >>> from rewards import build_samples, load
    >>> reference = "The council closed the old bridge after the flood."
    >>> texts = [reference, "The old bridge is closed after the flood.", "A flood."]
    >>> evaluation = load("text-overlap").score(build_samples(["Summarise: ..."] * 3, texts, reference=[reference] * 3))
    >>> [round(total, 2) for total in evaluation.totals], evaluation.statuses["overlap"]
    ([1.0, 0.63, 0.11], ['ok', 'ok', 'wrong'])
    """
    component = TextOverlap(correct_at=correct_at, max_ratio=max_ratio, answer_in=style)
    return Preset([(component, 1.0)], checker="overlap")


def length_target(*, target: int = 200, tolerance: int = 100) -> Preset:
    """Completions near a target length, with any content: for a first experiment, or as shaping of another reward.

    Formula: max(0, 1 - |n - target| / tolerance), n in tokens if token ids are known (including the end-of-sequence
    token, as TRL passes it), else in white-space separated words. A blank completion scores 0.
    Range: [0, 1].
    Checker: length, `ok` if the value is above 0.
    Columns: none.
    Source: a triangular function, the simplest length reward; see also Kimi k1.5 (2501.12599).
    Attacks: any text of the right length, including padding and loops: paid, so give it a small weight next to a reward
    for the task. An empty completion: 0 for every target.

    Args:
        target: length that scores 1.
        tolerance: distance from the target at which the value is 0; at most `target`.

    >>> from rewards import build_samples, load
    >>> samples = build_samples(["Hi"] * 3, ["a b c d", "a b c", ""])
    >>> load("length-target", target=4, tolerance=2).score(samples).totals
    [1.0, 0.5, 0.0]
    """
    return Preset([(LengthTarget(target=target, tolerance=tolerance), 1.0)], checker="length")


def ifeval(*, style: str = "text") -> Preset:
    """Verifiable instructions: lengths, keywords, formats, letter case, languages, beginnings and ends.

    Formula: accuracy is 1 if the response follows all instructions of the row, else 0.
    Range: [0, 1].
    Checker: accuracy.
    Columns: `instruction_id_list`: names such as `punctuation:no_comma`, and `kwargs`: an object of arguments for each name,
    as in the dataset google/IFEval; lists, or JSON text of them.
    Source: IFEval (2311.07911), all of its 25 kinds of instructions; as a training reward in Tulu 3 (2411.15124).
    Attacks: text that follows the instructions and does not answer the question: not detected, so combine the preset with a
    judge or a reward model. Blank responses, blank sections, titles, bullets and placeholders, all of the fixed answers at
    once, and the prompt alone if it must be repeated: 0. Think and answer tags in the response: no answer with
    `style="text"`.

    Args:
        style: place of the response: `text` (all text after the thinking), or `answer` (tags).

    Raises:
        PresetError: py3langid, which identifies languages, is not installed.

    >>> from rewards import build_samples, load
    >>> row = {
    ...     "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
    ...     "kwargs": [{}, {"keywords": ["apple", "pear"]}],
    ... }
    >>> texts = ["An apple and a pear.", "An apple, a pear.", "<think>apple pear</think>Fruit."]
    >>> samples = build_samples(["Name fruit."] * 3, texts, **{name: [value] * 3 for name, value in row.items()})
    >>> load("ifeval").score(samples).totals
    [1.0, 0.0, 0.0]
    """
    return Preset([(InstructionFollowing(answer_in=style), 1.0)], checker="accuracy")


def qa_short(
    *, f1_weight: float = 0.3, format_weight: float = 0.1, style: str = "answer", no_answer: str | None = None
) -> Preset:
    """A short factual answer that equals one of the accepted answers.

    Formula: accuracy + 0.3 f1 + 0.1 format. accuracy is SQuAD's exact match (lower case, without punctuation and the
    articles a, an, the), f1 its overlap of words, each the best over the accepted answers; format is 1 for one think
    block and one answer block.
    Range: [0, 1.4].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: text, a number, a list of accepted answers (JSON text
    too), SQuAD's {"text": [...]}, or TriviaQA's {"value", "aliases"}.
    Source: SQuAD (1606.05250) and its evaluation script; F1 as a reward as in R1-Searcher (2503.05592).
    Attacks: several answers at once ("Paris or London", lists, slashes, text over three times as long as the accepted
    answer): no exact match, and F1 is 0. An empty answer block: no answer. Other numbers that normalisation would make
    equal (-72, 7.2 and 72): if the accepted answer is a number, only the same number is accepted. The right words in
    another order: F1 is below 1, and accuracy 0.

    Args:
        f1_weight: weight of the overlap of words; 0 removes the component.
        format_weight: weight of the think and answer blocks; 0 or a style other than `answer` removes the component.
        style: place of the answer: `answer` (tags), `boxed`, `hash`, or `text` (all text after the thinking).
        no_answer: expected answer if the list of accepted answers is empty, as in SQuAD 2.0.

    >>> from rewards import build_samples, load
    >>> texts = [f"<think>?</think><answer>{answer}</answer>" for answer in ("The Eiffel Tower!", "Tower", "A or B")]
    >>> samples = build_samples(["Which tower?"] * 3, texts, reference=[["Eiffel Tower", "La tour Eiffel"]] * 3)
    >>> evaluation = load("qa-short").score(samples)
    >>> [round(total, 6) for total in evaluation.totals], evaluation.statuses["accuracy"]
    ([1.4, 0.3, 0.1], ['ok', 'wrong', 'wrong'])
    """
    accuracy = ShortAnswer(answer_in=style, no_answer=no_answer)
    f1 = ShortAnswer(metric="f1", name="f1", answer_in=style, no_answer=no_answer)
    layout_weight = format_weight if style == "answer" else 0.0
    parts = weighted((accuracy, 1.0), (f1, f1_weight), (TagsFormat(), layout_weight))
    return Preset(parts, checker="accuracy")


def classification_label(*, labels: Sequence[str] = (), label_weight: float = 0.1, style: str = "answer") -> Preset:
    """One label of a fixed set.

    Formula: accuracy + 0.1 format. accuracy is 1 if the complete answer is the right label; format is 1 if it is one of
    the labels.
    Range: [0, 1.1].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: the label's name, or its index into the labels;
    `labels` or `choices`: the labels of the row, a list or JSON text, which replace the parameter.
    Source: exact match over a closed set of answers, the simplest verifiable reward (DeepSeek-R1, 2501.12948, 2.2.2).
    Attacks: several labels, or a text that contains the label: the complete answer must be one label. The most frequent
    label for every row: not detected, so balance the labels of the data. An answer outside the set: no answer, if the
    labels are known.

    Args:
        labels: the labels, for rows without a column of labels.
        label_weight: weight of an answer with any of the labels; 0 removes the component.
        style: place of the answer: `answer` (tags), `boxed`, `hash`, or `text` (all text after the thinking).

    Raises:
        PresetError: a label is blank, or two labels are equal without case and punctuation.

    >>> from rewards import build_samples, load
    >>> texts = [f"<answer>{answer}</answer>" for answer in ("Positive.", "negative", "positive or negative")]
    >>> samples = build_samples(["How does it sound?"] * 3, texts, reference=["positive"] * 3)
    >>> evaluation = load("classification-label", labels=["positive", "negative"]).score(samples)
    >>> evaluation.totals, evaluation.statuses["accuracy"]
    ([1.1, 0.1, 0.0], ['ok', 'wrong', 'format'])
    """
    accuracy = LabelAccuracy(labels=tuple(labels), answer_in=style)
    layout = LabelFormat(labels=tuple(labels), answer_in=style)
    return Preset(weighted((accuracy, 1.0), (layout, label_weight)), checker="accuracy")
