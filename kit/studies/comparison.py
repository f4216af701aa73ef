"""Which is better, or is it luck? `grpo-kit compare` for Python and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """Arms compared on the same held-out problems and seeds. A notebook shows verdicts, scores and curves."""

    result: Mapping[str, Any]
    """What stands in comparison.json."""
    page: Path
    """The whole of it as one HTML file."""

    @property
    def verdicts(self) -> list[str]:
        """Each arm against the first, in a sentence."""
        return [str(each["text"]) for each in self.result["comparisons"]]

    def __repr__(self) -> str:
        return "\n".join(["<Comparison", *(f"  {text}" for text in self.verdicts), f"  in {self.page.parent}>"])

    def _repr_html_(self) -> str:
        from kit.report.card import around
        from kit.studies.compare_page import at_a_glance

        names = [arm["name"] for arm in self.result["arms"]]
        return around(" vs ".join(names), [at_a_glance(self.result)])


def compare(
    config: str | Path,
    changes: Sequence[str],
    *,
    seeds: str | int = 3,
    steps: int | None = None,
    overrides: Sequence[str] = (),
    root: str | Path | None = None,
    name: str | None = None,
    metric: str | None = None,
    effect: float | None = None,
    tell: Callable[[str], None] = print,
) -> Comparison:
    """Trains `config` and its changed copies with the same seeds, interleaved, and says which is better, or cannot be told.

    Runs that are finished already are kept: the same call again goes on where it was.

    Args:
        config: a YAML file or a preset's name; with `overrides` it is the arm that others are compared with.
        changes: one an arm: `[NAME:]section.key=value[,section.key=value...]`.
        seeds: how many, or which (`"0,1,7"`).
        steps: optimiser steps of every arm.
        root: folder of the runs; None is the configuration's.
        name: of the comparison; None is made of the configuration's name and a hash of what is compared.
        metric: the score that decides, e.g. `pass@1`; None is evaluation.metric.
        effect: the difference that matters, for the number of seeds that could tell.
        tell: hears of each run.

    Raises:
        KitError: a mistake of the user's, or no two arms have a finished run.
        KeyboardInterrupt: stopped; the run in progress has saved a checkpoint.
    """
    from kit.studies.compare_arms import carry_out, make_plan
    from kit.studies.compare_text import file_page

    plan = make_plan(
        config, changes, seeds=seeds, steps=steps, overrides=overrides, root=root, name=name, metric=metric
    )
    result = carry_out(plan, tell, quiet=True, metric=metric, effect=effect)
    return Comparison(result, file_page(result, plan.folder))
