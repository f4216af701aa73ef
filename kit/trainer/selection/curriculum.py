"""A curriculum from the pass-rate memory: prompts of middling difficulty are rolled out more often.

The spread of a reward of 0 or 1 is p(1 - p), and with it what a group can teach (arXiv 2504.03380). A prompt is drawn with
weight 4p(1 - p), at least `floor`; one that is not known has the weight of the mean pass rate.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kit.config.sections.selection import CurriculumConfig
from kit.trainer.selection.memory import PassRates


def weight(rate: float | None, floor: float) -> float:
    """4p(1-p) in [floor, 1]; 1 where nothing is known of any prompt."""
    return 1.0 if rate is None else max(floor, 4.0 * rate * (1.0 - rate))


def choose(
    memory: PassRates, keys: Sequence[str], count: int, config: CurriculumConfig, rng: random.Random
) -> list[int]:
    """Places, ascending, of `count` of the candidates `keys`, drawn without replacement by their weights.

    By the largest u^(1/weight) with u uniform (Efraimidis and Spirakis 2006).
    """
    rates = [memory.pass_rate(key) for key in keys]
    seen = [memory.rate(one.reward) for one in memory.known.values()]
    known = [rate for rate in seen if rate is not None]
    usual = sum(known) / len(known) if known else None
    scores = [rng.random() ** (1.0 / weight(usual if rate is None else rate, config.floor)) for rate in rates]
    return sorted(sorted(range(len(keys)), key=lambda place: (-scores[place], place))[:count])
