"""The rule-based reward of DeepSeek-R1."""

from rewards.components.languages import LanguageConsistency
from rewards.components.math_verify import MathVerify
from rewards.components.packages import require
from rewards.components.tags import ThinkAnswerFormat
from rewards.preset import Preset, Weighted

__all__ = ["r1_zero"]


def r1_zero(
    *,
    format_weight: float = 0.2,
    language_weight: float = 0.1,
    language: str = "en",
    final_form: bool | None = None,
    lenient: bool = False,
    deadline: float = 2.0,
) -> Preset:
    r"""Accuracy, layout and language of completions `<think>…</think><answer>…</answer>`, for training from a base model.

    Formula: accuracy + 0.2 format + 0.1 language. accuracy is that of `math-verify`, on the last `<answer>` after
    `</think>` (a box within it counts for it); format is 1 for one think block and one answer block, both filled, and
    nothing else; language is the share of letters that are of the script of `language`.
    Range: [0, 1.3].
    Checker: accuracy.
    Columns: `reference`, `answer`, `solution` or `ground_truth`, as for `math-verify`.
    Source: DeepSeek-R1 (2501.12948), 2.2.2 and 2.3.2. The paper gives no weights and adds its terms up; R1-Zero itself
    has no language term.
    Hacks: tags without content, blocks twice, text after `</answer>`: no format, and no answer. Long prose in the right
    script earns at most 0.1. Languages that share a script are not told apart. Otherwise as for `math-verify`.

    Args:
        format_weight: weight of the layout; 0 leaves it out.
        language_weight: weight of the language; 0 leaves it out, as for R1-Zero.
        language: ISO 639-1 code of the language that the reasoning should be in.
        final_form: refuse an answer that is not worked out as far as the reference; None for True unless `lenient`.
        lenient: the last answer tag counts of several, and text may follow it; where there is none, an answer is looked for
            elsewhere.
        deadline: seconds that one comparison may take.

    Raises:
        PresetError: math-verify is not installed, the language's script is not known, or shaping could outweigh accuracy.

    >>> from rewards import build_samples, load
    >>> texts = ["<think>six times twelve</think><answer>72</answer>", "<think>шесть на двенадцать</think><answer>70</answer>"]
    >>> evaluation = load("r1-zero").score(build_samples(["?"] * 2, texts, answer=["72"] * 2))
    >>> [round(total, 6) for total in evaluation.totals]
    [1.3, 0.2]
    """
    require("r1-zero", "math_verify", "math-verify")
    components = [Weighted(MathVerify(answer_in="tag", final_form=final_form, lenient=lenient, deadline=deadline), 1.0)]
    if format_weight:
        components.append(Weighted(ThinkAnswerFormat(), format_weight))
    if language_weight:
        components.append(Weighted(LanguageConsistency(language=language), language_weight))
    return Preset(components, name="r1-zero", checker="accuracy")
