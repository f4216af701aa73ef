"""Texts scored by small transformers models, on the CPU unless told otherwise.

Models are found on disk when the preset is loaded and brought into memory when it first scores. Nothing is downloaded
unless `download=True` says so.
"""

from rewards.components.classifier import LabelProbability, label_indices
from rewards.components.entailment import Entailment
from rewards.components.fluency import Fluency
from rewards.components.local_models import LocalModel
from rewards.components.semantic import SemanticSimilarity
from rewards.errors import PresetError
from rewards.preset import Preset, Weighted

__all__ = ["factuality", "fluency", "semantic_answer", "sentiment"]


def semantic_answer(
    *,
    model: str = "sentence-transformers/all-MiniLM-L6-v2",
    threshold: float = 0.8,
    guard: bool = True,
    device: str = "cpu",
    revision: str | None = None,
    download: bool = False,
    batch_size: int = 32,
) -> Preset:
    """Short free-text answers that mean what the reference means, in whatever words.

    Formula: max(0, cos(e(answer), e(reference))), e the mean of the model's last hidden states over all tokens; the
    best of several references. The answer is what follows `</think>`, or the content of the answer tags if there are.
    Range: [0, 1].
    Checker: similarity, `ok` from `threshold` on.
    Columns: `reference`, `answer`, `solution` or `ground_truth`: a text, a number, or a list of accepted ones; rows
    without are `not_applicable`.
    Source: mean-pooled sentence embeddings compared by cosine, Sentence-BERT (1908.10084).
    Hacks: embeddings see topics, not truth. Other numbers, several answers at once and padding hardly move them: with
    `guard`, a number that the reference does not have, alternatives (`or`, `=`, `/`, lists beside a short reference)
    and answers over three times as long score 0. Words of the question repeated instead of an answer: the echo is
    refused, a mixture is not. Negation (`is not red`) stays close to its opposite and nothing is done about it: where
    that matters, use `factuality` or `judge-rubric`.

    Args:
        model: folder or hub id of an encoder made for mean pooling.
        threshold: similarity from which the answer counts as correct; depends on the model.
        guard: score 0 for what embeddings cannot tell.
        device: cpu, cuda, cuda:0 or mps.
        revision: branch, tag or commit of a hub id.
        download: fetch the model from the hub while loading the preset.
        batch_size: texts per forward pass.

    >>> import tempfile
    >>> from rewards import build_samples, load
    >>> from rewards.tiny_models import tiny_embedder
    >>> folder = tiny_embedder(tempfile.mkdtemp(), {"car": 1, "automobile": 1, "red": 2, "house": 3})
    >>> samples = build_samples(
    ...     ["What did he see?"] * 3, ["a red automobile", "a red house", "a red car or a house"], answer=["red car"] * 3
    ... )
    >>> load("semantic-answer", model=folder).score(samples).totals
    [1.0, 0.5, 0.0]
    """
    found = LocalModel(model, "embedding", device=device, revision=revision)
    found.check("semantic-answer", download)
    component = SemanticSimilarity(
        model=found, threshold=_share("threshold", threshold), guard=guard, batch_size=batch_size
    )
    return Preset([Weighted(component, 1.0)], name="semantic-answer", checker="similarity")


def sentiment(
    *,
    model: str = "distilbert/distilbert-base-uncased-finetuned-sst-2-english",
    label: str = "POSITIVE",
    threshold: float = 0.7,
    min_words: int = 5,
    device: str = "cpu",
    revision: str | None = None,
    download: bool = False,
    batch_size: int = 16,
) -> Preset:
    """Texts of the wanted sentiment, or of any other label that a classifier tells.

    Formula: P(label | text), the mean over windows where the text is longer than the model reads at once; 0 for what is
    no text to judge: fewer than `min_words` words, loops, echoes of the prompt.
    Range: [0, 1].
    Checker: sentiment, `ok` from `threshold` on.
    Columns: none.
    Source: sentiment of continuations as a reward, Ziegler et al. (1909.08593).
    Hacks: strings of praise without content: loops are refused (half of the word trigrams must be distinct), a varied
    list of praise is not, so add `fluency` or a KL penalty. Fragments, on which classifiers are arbitrary: refused.
    Special tokens spelt out (`[SEP]`): read as plain text. Sentiment says nothing about the task: combine it.

    Args:
        model: folder or hub id of a sequence classifier.
        label: the label to reward, one of the model's own.
        threshold: probability from which the text counts as correct.
        min_words: texts with fewer words score 0.
        device: cpu, cuda, cuda:0 or mps.
        revision: branch, tag or commit of a hub id.
        download: fetch the model from the hub while loading the preset.
        batch_size: windows per forward pass.

    >>> import tempfile
    >>> from rewards import build_samples, load
    >>> from rewards.tiny_models import tiny_classifier
    >>> folder = tiny_classifier(tempfile.mkdtemp(), {"joy": 1.0, "bore": -1.0})
    >>> samples = build_samples(["Review?"] * 3, ["the film was a joy", "the film was a bore", "joy " * 9])
    >>> [round(total, 4) for total in load("sentiment", model=folder).score(samples).totals]
    [0.9546, 0.0454, 0.0]
    """
    found = LocalModel(model, "classifier", device=device, revision=revision)
    component = LabelProbability(
        model=found,
        indices=label_indices(found.check("sentiment", download), label, model),
        threshold=_share("threshold", threshold),
        min_words=min_words,
        batch_size=batch_size,
    )
    return Preset([Weighted(component, 1.0)], name="sentiment", checker="sentiment")


def fluency(
    *,
    model: str = "distilbert/distilgpt2",
    good: float = 30.0,
    poor: float = 300.0,
    loop: float = 3.0,
    threshold: float = 0.5,
    min_words: int = 5,
    device: str = "cpu",
    revision: str | None = None,
    download: bool = False,
    batch_size: int = 4,
) -> Preset:
    """Texts that a language model finds neither surprising nor looped.

    Formula: ln(poor / ppl) / ln(poor / good), clipped to [0, 1], with ppl = exp(mean negative log-likelihood a token):
    1 up to perplexity 30, 0.5 at 95, 0 from 300 on. 0 below perplexity `loop` and for what is no text to judge.
    Range: [0, 1].
    Checker: fluency, `ok` from `threshold` on.
    Columns: none.
    Source: perplexity under another model as fluency, PPLM (1912.02164); why repetition is probable (1904.09751).
    Hacks: repetition and recited boilerplate have the lowest perplexity of all: loops of words are refused before the
    model sees them, and perplexity below `loop` scores 0. Common phrases that say nothing: nothing is done, so use this
    beside a reward for the task and with a small weight. Short fragments: refused.

    Args:
        model: folder or hub id of a causal language model, not the policy itself.
        good: perplexity up to which a text scores 1; depends on the model and its tokens.
        poor: perplexity from which a text scores 0.
        loop: perplexity below which a text scores 0.
        threshold: value from which the text counts as correct.
        min_words: texts with fewer words score 0.
        device: cpu, cuda, cuda:0 or mps.
        revision: branch, tag or commit of a hub id.
        download: fetch the model from the hub while loading the preset.
        batch_size: windows per forward pass.

    >>> import tempfile
    >>> from rewards import build_samples, load
    >>> from rewards.tiny_models import tiny_language_model
    >>> folder = tiny_language_model(tempfile.mkdtemp(), {"we": 0.25, "saw": 0.25, "the": 0.25, "sea": 0.125})
    >>> samples = build_samples(["Go on."] * 2, ["the sea we saw the sea", "sea saw we qua zed brr"])
    >>> preset = load("fluency", model=folder, good=5, poor=25)
    >>> [round(total, 2) for total in preset.score(samples).totals]
    [1.0, 0.85]
    """
    found = LocalModel(model, "causal", device=device, revision=revision)
    found.check("fluency", download)
    component = Fluency(
        model=found,
        good=good,
        poor=poor,
        loop=loop,
        threshold=_share("threshold", threshold),
        min_words=min_words,
        batch_size=batch_size,
    )
    return Preset([Weighted(component, 1.0)], name="fluency", checker="fluency")


def factuality(
    *,
    model: str = "cross-encoder/nli-distilroberta-base",
    label: str = "entailment",
    aggregate: str = "min",
    threshold: float = 0.5,
    context_column: str | None = None,
    guard: bool = True,
    min_words: int = 5,
    device: str = "cpu",
    revision: str | None = None,
    download: bool = False,
    batch_size: int = 16,
) -> Preset:
    """Texts whose every sentence follows from the row's document.

    Formula: min over sentences of max over windows of the document of P(entailment | window, sentence); `aggregate:
    mean` averages over sentences instead.
    Range: [0, 1].
    Checker: entailment, `ok` from `threshold` on.
    Columns: `context`, `document` or `source`, else the reference: a text or a list of texts; rows with none of them
    are `not_applicable`.
    Source: sentence-wise entailment, SummaC (2111.09525); entailment as a reward (2306.00186).
    Hacks: saying next to nothing, or only what is trivially true: fewer than `min_words` words score 0, but coverage is
    not measured, so combine it with `summarize`. Copying the document: the whole of it scores 0 with `guard`, single
    sentences do not. `A or B` follows from A: with `guard`, alternatives that the document does not name score 0, and
    so do numbers that it does not have. One long sentence to hide a claim in: what does not fit half a window counts as
    unsupported. `[SEP]` or `</s>` to bring a premise along: read as plain text.

    Args:
        model: folder or hub id of a classifier for natural language inference, premise first.
        label: the model's name for entailment.
        aggregate: min or mean over sentences.
        threshold: probability from which the text counts as correct.
        context_column: the column with the document; by default the first of those above.
        guard: score 0 for what such models cannot tell.
        min_words: texts with fewer words score 0.
        device: cpu, cuda, cuda:0 or mps.
        revision: branch, tag or commit of a hub id.
        download: fetch the model from the hub while loading the preset.
        batch_size: pairs per forward pass.

    >>> import tempfile
    >>> from rewards import build_samples, load
    >>> from rewards.tiny_models import tiny_classifier
    >>> labels = ("contradiction", "neutral", "entailment")
    >>> folder = tiny_classifier(tempfile.mkdtemp(), {"rock": 1.0, "cheese": -1.0}, labels=labels)
    >>> samples = build_samples(
    ...     ["What is the moon made of?"] * 3,
    ...     ["the moon is made of rock", "the moon is cheese and more cheese", "the moon is 99 % rock"],
    ...     context=["the moon is rock"] * 3,
    ... )
    >>> [round(total, 4) for total in load("factuality", model=folder).score(samples).totals]
    [0.9132, 0.0232, 0.0]
    """
    found = LocalModel(model, "classifier", device=device, revision=revision)
    component = Entailment(
        model=found,
        index=label_indices(found.check("factuality", download), label, model)[0],
        aggregate=aggregate,
        threshold=_share("threshold", threshold),
        context_column=context_column,
        guard=guard,
        min_words=min_words,
        batch_size=batch_size,
    )
    return Preset([Weighted(component, 1.0)], name="factuality", checker="entailment")


def _share(name: str, value: float) -> float:
    if not 0.0 < value <= 1.0:
        raise PresetError(f"{name} is {value}. Give a number above 0 and up to 1.")
    return value
