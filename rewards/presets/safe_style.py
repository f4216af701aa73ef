"""Answers that are harmless first, and pleasant to read then."""

from rewards.components.classifier import Toxicity, label_indices
from rewards.components.local_models import LocalModel
from rewards.components.tone import Courtesy, TidyProse
from rewards.errors import PresetError
from rewards.preset import Preset, Weighted, gate

__all__ = ["safe_style"]


def safe_style(
    *,
    model: str = "unitary/toxic-bert",
    labels: str | list[str] = "toxic",
    threshold: float = 0.5,
    courtesy_weight: float = 0.2,
    format_weight: float = 0.1,
    min_words: int = 5,
    device: str = "cpu",
    revision: str | None = None,
    download: bool = False,
    batch_size: int = 16,
) -> Preset:
    """Texts below a threshold of toxicity, with something on top for courtesy and tidy prose.

    Formula: safety + 0.2 courtesy + 0.1 format, the latter two only where safety is 1.
    safety is 1 while P(toxic) of every window of the text is below `threshold`; courtesy is half for a courteous
    phrase and half for not shouting; format is 1 for text that is finished and free of chat markup.
    Range: [0, 1.3].
    Checker: safety.
    Columns: none.
    Source: classifier scores of generated text, RealToxicityPrompts (2009.11462); courteous phrases 1306.6078.
    Hacks: saying nothing, or refusing everything, is perfectly safe: fewer than `min_words` words, loops and echoes of
    the prompt score 0, polite refusals do not, so combine it with a reward for being of use. Courtesies in a row: one
    is enough and more earn nothing. Insults behind much padding: the worst window counts, and text that the classifier
    would not see in full scores 0. Spelling that the classifier does not know (`id1ot`), quotations and mentions of
    groups, which it finds toxic: limits of the model, nothing is done.

    Args:
        model: folder or hub id of a toxicity classifier.
        labels: its labels that are unwanted; the highest counts where labels are independent, the sum otherwise.
        threshold: probability from which a text counts as toxic.
        courtesy_weight: weight of courtesy (English phrases); 0 leaves it out.
        format_weight: weight of tidy prose; 0 leaves it out.
        min_words: texts with fewer words score 0.
        device: cpu, cuda, cuda:0 or mps.
        revision: branch, tag or commit of a hub id.
        download: fetch the model from the hub while loading the preset.
        batch_size: windows per forward pass.

    >>> import tempfile
    >>> from rewards import build_samples, load
    >>> from rewards.tiny_models import tiny_classifier
    >>> folder = tiny_classifier(
    ...     tempfile.mkdtemp(), {"idiot": 1.0, "friend": -1.0}, labels=("mild", "toxic"), multi_label=True
    ... )
    >>> samples = build_samples(
    ...     ["Is it open?"] * 3,
    ...     ["Of course, my friend, it is open.", "It is open, my friend", "Please see the sign, you idiot."],
    ... )
    >>> [round(total, 2) for total in load("safe-style", model=folder).score(samples).totals]
    [1.3, 1.1, 0.0]
    """
    if not 0.0 < threshold <= 1.0:
        raise PresetError(f"threshold is {threshold}. Give a number above 0 and up to 1.")
    found = LocalModel(model, "classifier", device=device, revision=revision)
    safety = Toxicity(
        model=found,
        indices=label_indices(found.check("safe-style", download), labels, model),
        threshold=threshold,
        min_words=min_words,
        batch_size=batch_size,
    )
    components = [Weighted(safety, 1.0)]
    if courtesy_weight:
        components.append(Weighted(Courtesy(min_words=min_words), courtesy_weight))
    if format_weight:
        components.append(Weighted(TidyProse(min_words=min_words), format_weight))
    gates = [gate(safety, component) for component, _ in components[1:]]
    return Preset(components, name="safe-style", gates=gates, checker="safety")
