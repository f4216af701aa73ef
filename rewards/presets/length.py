"""Completions of a wanted length."""

from rewards.components.lengths import LengthTarget
from rewards.preset import Preset, Weighted

__all__ = ["length_target"]


def length_target(*, target: int = 200, tolerance: int = 100) -> Preset:
    """Completions as long as asked, whatever they say: a first experiment, or shaping beside a reward of yours.

    Formula: max(0, 1 - |n - target| / tolerance), n in tokens when token ids are given (the end-of-sequence token
    included, as TRL passes it), else in white-space separated words. A blank completion scores 0.
    Range: [0, 1].
    Checker: length, `ok` while the value is above 0.
    Columns: none.
    Source: the triangular band is the plainest of length rewards; see also Kimi k1.5 (2501.12599).
    Hacks: any text of the right length, padding and loops included, earns all of it: nothing is done about that, so
    use it with a small weight beside a reward for the task. An empty completion earns nothing, whatever the target.

    Args:
        target: length that scores 1.
        tolerance: distance from the target at which the value reaches 0; at most `target`.

    >>> from rewards import build_samples, load
    >>> samples = build_samples(["Hi"] * 3, ["a b c d", "a b c", ""])
    >>> load("length-target", target=4, tolerance=2).score(samples).totals
    [1.0, 0.5, 0.0]
    """
    return Preset(
        [Weighted(LengthTarget(target=target, tolerance=tolerance), 1.0)], name="length-target", checker="length"
    )
